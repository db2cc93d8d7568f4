"""Where encoders of text and pictures, and language models, may be cut, by their classes: the families share them."""

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

SPEAKS = TensorParallelLayers(
    outputs=("*layers.*.self_attn.[qkv]_proj", "*layers.*.mlp.gate_proj", "*layers.*.mlp.up_proj"),
    inputs=("*layers.*.self_attn.o_proj", "*layers.*.mlp.down_proj"),
    divided=("num_attention_heads", "num_key_value_heads", "intermediate_size", "hidden_size"),
)
"""A language model; of one that sees, the language. The words it reads may be those it speaks, which stay whole."""

EXPERTS = replace(SPEAKS, experts=("*layers.*.mlp.experts",), divided=(*SPEAKS.divided, "moe_intermediate_size"))
"""A language model with a mixture of experts in some layers, or in all."""

SEES = TensorParallelLayers(
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
"""What sees for a language model."""

READS = replace(SPEAKS, gathered=("*embed_tokens",))  # one that does not speak

ENCODERS = {
    "T5EncoderModel": T5,
    "UMT5EncoderModel": T5,
    "CLIPTextModel": CLIP,
    "CLIPTextModelWithProjection": CLIP,
    "CLIPVisionModel": CLIP,
    "CLIPVisionModelWithProjection": CLIP,
    "LlamaModel": READS,
    "LlamaForCausalLM": SPEAKS,
    "Qwen2ForCausalLM": SPEAKS,
    "Qwen2_5_VLForConditionalGeneration": SPEAKS,
    "Qwen3ForCausalLM": SPEAKS,
    "Qwen3Model": READS,
    "Qwen3MoeForCausalLM": EXPERTS,
    "Qwen3VLModel": READS,
    "Qwen3VLForConditionalGeneration": SPEAKS,
    "Qwen3VLMoeForConditionalGeneration": EXPERTS,
}


def encoder_spreads(folder: ModelFolder, components: Mapping[str, tuple[str, str]]) -> dict[str, dict[str, int]]:
    """By stage kind, the kinds by which encoding may be spread over ranks, of a model with these components."""
    ways = {}
    for component, (_, kind) in components.items():
        if kind in ENCODERS:
            with folder.reading(component):
                way = {"tensor": ENCODERS[kind].common(folder.config(component))}
                ways[component.replace("encoder", "encode")] = {} if folder.is_quantized(component) else way
    return ways


def cut_of(component: str, kind: str, transformers: ParallelPlan | None) -> ParallelPlan | TensorParallelLayers | None:
    """Where a component of that class may be cut, of a model whose `transformers` may be cut so."""
    if component == VISION:
        return SEES
    return transformers if component.startswith("transformer") else ENCODERS.get(kind)


def shared_of(component: str, kind: str, transformers: ParallelPlan | None, tensors: Mapping[str, int]) -> int:
    """Elements of which ranks have a share each with `tensor`, by those of the tensors in the component's files."""
    cut = cut_of(component, kind, transformers)
    matrices = cut.matrices if isinstance(cut, ParallelPlan) else cut
    return matrices.shared(tensors) if matrices else 0
