"""The tensor parallel layers of encoders and language models, by class.

The encoders are those of text and pictures. All model families share these definitions.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from unfuse.parallel.parallel_plan import ParallelPlan, TensorParallelLayers
from unfuse.weights.folder import VISION, ModelFolder

T5 = TensorParallelLayers(
    outputs=("*.SelfAttention.[qkv]", "*.relative_attention_bias", "*.DenseReluDense.wi*"),
    inputs=("*.SelfAttention.o", "*.DenseReluDense.wo"),
    gathered=("encoder.embed_tokens",),
    heads=("*.SelfAttention.n_heads",),
    stored=("shared",),
    divided=("num_heads", "d_ff", "d_model"),
)

CLIP = TensorParallelLayers(
    outputs=("*.self_attn.[qkv]_proj", "*.mlp.fc1"),
    inputs=("*.self_attn.out_proj", "*.mlp.fc2"),
    divided=("num_attention_heads", "intermediate_size"),
)

#: A language model, or the language part of a vision-language model. The token embeddings are whole on every rank,
#: because they may be the output layer, too.
CAUSAL_LM = TensorParallelLayers(
    outputs=("*layers.*.self_attn.[qkv]_proj", "*layers.*.mlp.gate_proj", "*layers.*.mlp.up_proj"),
    inputs=("*layers.*.self_attn.o_proj", "*layers.*.mlp.down_proj"),
    divided=("num_attention_heads", "num_key_value_heads", "intermediate_size", "hidden_size"),
)

#: A language model with a mixture of experts in some layers, or in all.
EXPERTS = replace(CAUSAL_LM, experts=("*layers.*.mlp.experts",), divided=(*CAUSAL_LM.divided, "moe_intermediate_size"))

#: The vision encoder of a vision-language model.
VISION_MODEL = TensorParallelLayers(
    outputs=(
        "*visual.*.attn.qkv",
        "*visual.*.gate_proj",
        "*visual.*.up_proj",
        "*visual.*.linear_fc1",
        "*visual.merger.mlp.0",
    ),
    inputs=("*visual.*.attn.proj", "*visual.*.down_proj", "*visual.*.linear_fc2", "*visual.merger.mlp.2"),
    packed={"*.qkv": (0, 3)},
    heads=("*visual.*.attn.num_heads",),
    divided=("num_heads", "intermediate_size"),
)

#: A language model without an output layer, as a text encoder.
TEXT_MODEL = replace(CAUSAL_LM, gathered=("*embed_tokens",))

#: The layers by class of the component.
ENCODERS = {
    "T5EncoderModel": T5,
    "UMT5EncoderModel": T5,
    "CLIPTextModel": CLIP,
    "CLIPTextModelWithProjection": CLIP,
    "CLIPVisionModel": CLIP,
    "CLIPVisionModelWithProjection": CLIP,
    "LlamaModel": TEXT_MODEL,
    "LlamaForCausalLM": CAUSAL_LM,
    "Qwen2ForCausalLM": CAUSAL_LM,
    "Qwen2_5_VLForConditionalGeneration": CAUSAL_LM,
    "Qwen3ForCausalLM": CAUSAL_LM,
    "Qwen3Model": TEXT_MODEL,
    "Qwen3MoeForCausalLM": EXPERTS,
    "Qwen3VLModel": TEXT_MODEL,
    "Qwen3VLForConditionalGeneration": CAUSAL_LM,
    "Qwen3VLMoeForConditionalGeneration": EXPERTS,
}


def encoder_parallelism(folder: ModelFolder, components: Mapping[str, tuple[str, str]]) -> dict[str, dict[str, int]]:
    """Return the kinds of parallelism that each encoding stage supports, by stage kind.

    Each kind of parallelism has the number that its degree must divide. A quantized encoder supports none.

    `components`: library and class of each component of the model.
    """
    parallelism = {}
    for component, (_, kind) in components.items():
        if kind in ENCODERS:
            with folder.reading(component):
                tensor = {"tensor": ENCODERS[kind].common(folder.config(component))}
                parallelism[component.replace("encoder", "encode")] = {} if folder.is_quantized(component) else tensor
    return parallelism


def component_parallel_plan(
    component: str, kind: str, transformers: ParallelPlan | None
) -> ParallelPlan | TensorParallelLayers | None:
    """Return the parallel plan, or the tensor parallel layers, of a component.

    Returns None if the component cannot be parallelized.

    `kind`: the component's class.
    `transformers`: the parallel plan of the model's transformers.
    """
    if component == VISION:
        return VISION_MODEL
    return transformers if component.startswith("transformer") else ENCODERS.get(kind)


def sharded_elements(component: str, kind: str, transformers: ParallelPlan | None, tensors: Mapping[str, int]) -> int:
    """Return how many elements of a component tensor parallelism shards; or 0.

    `kind`, `transformers`: as in `component_parallel_plan`.
    `tensors`: elements of each tensor in the component's files, by name.
    """
    plan = component_parallel_plan(component, kind, transformers)
    matrices = plan.matrices if isinstance(plan, ParallelPlan) else plan
    return matrices.sharded_elements(tensors) if matrices else 0
