"""Model families whose stages run the blocks of diffusers' modular pipelines.

Their models have no stages of their own here. A block declares its components, inputs and outputs; encoding, denoising
and decoding are three of them, and each is a stage that runs whole: denoising in one go, without previews, and
cancelled only when it is done. What is declared stands here as data, since a card is made without diffusers. Only
classes are listed whose pictures were compared with those of their DiffusionPipeline, bit for bit. Checked against
diffusers 0.42.

Guidance is a component there, which each request gets anew with its scale. A distilled model has none.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from typing_extensions import override

from unfuse.core.errors import ConfigError, PermanentError, UnsupportedRequest
from unfuse.core.modalities import IMAGE_UPLOADS, UPLOAD, MediaLimits, OutputSize
from unfuse.core.model_spec import AcceptedInput, ModelSpec
from unfuse.core.object_ref import ALIGNMENT, DTYPES
from unfuse.core.plan import Params, StageSpec
from unfuse.models.base import Loader, Report, RuntimeOptions
from unfuse.models.components import FAST_TOKENIZERS, OneVae, PictureEncoder, PictureFamily, PictureShape
from unfuse.models.declared import call_defaults
from unfuse.models.undivided_family import component
from unfuse.parallel.parallel_plan import ParallelPlan, SequenceDim, TensorParallelLayers
from unfuse.stages.base import NEGATIVE, Stage, StageInput, StageOutput, need
from unfuse.stages.specs import DENOISE, IMAGE_ENCODE, TEXT_ENCODE, VAE_DECODE
from unfuse.weights.folder import ModelFolder

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

BLOCKS = {
    TEXT_ENCODE.kind: "text_encoder",
    IMAGE_ENCODE.kind: "vae_encoder",
    DENOISE.kind: "denoise",
    VAE_DECODE.kind: "decode",
}
"""The block that a stage kind runs."""

REFERENCE_INPUTS, SIZES = "image_latents", "image_sizes"
"""Latents of all pictures that are seen (1, channels, all places), and the height and width of each."""

MAX_PIXELS = 1024 * 1024  # larger pictures are made smaller before they are seen

SCALE = "guidance_scale"
TYPES: dict[str, Any] = {
    "prompt": str,
    "negative_prompt": str,
    "max_sequence_length": int,
    SCALE: float,
    "height": int,
    "width": int,
    "num_inference_steps": int,
    "seed": int,
}
"""The parameters that blocks are given; a prompt to steer away from may be None."""


class BlockStage(Stage):
    """One block, which takes tasks one by one."""

    def __init__(self, spec: StageSpec, family: Modular, loader: Loader, distilled: bool) -> None:
        self.kind, self._spec, self._unguided = spec.kind, spec, family.unguided
        self._device, self._draws = loader.device, loader.runtime.options.noise_device != "cpu"
        self._part = _part(spec, family.blocks[distilled], loader)
        self._guider = None if distilled or spec.kind == VAE_DECODE.kind else self._part.get_component_spec("guider")
        self._reads = [name for name in TYPES if name in {i.name for i in self._part.blocks.inputs}]
        self._needs = [
            *self._reads,
            *([SCALE] if self._guider else []),
            *(["seed"] if spec.kind == DENOISE.kind else []),
        ]

    def verify(self, task: StageInput) -> None:
        """Raise PermanentError unless the parameters and tensors are there that the block is given."""
        for name in self._needs:
            if name != "negative_prompt" or task.params.get(name) is not None:
                need(task.params, name, TYPES[name])
        for name in self._spec.inputs:
            optional = (
                name.startswith(NEGATIVE)
                or name in (REFERENCE_INPUTS, SIZES)
                and UPLOAD not in task.derived.image_hashes
            )
            if task.tensors.get(name) is None and not optional:
                raise PermanentError(f"input {name} is missing")

    def batch_key(self, task: StageInput) -> Hashable:
        """All that it is given: tasks that differ gain nothing from waiting for each other."""
        return tuple(task.params.get(name) for name in self._needs)

    @override
    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        import torch

        with torch.no_grad():
            return [self._output(self._values(task), task.params) for task in batch]

    def _values(self, task: StageInput) -> dict[str, Any]:
        """All that the block has made when it is done."""
        import torch

        params = task.params
        given: dict[str, Any] = {name: params[name] for name in self._reads if params.get(name) is not None}
        given |= {name: tensor.to(self._device) for name, tensor in task.tensors.items() if tensor is not None}
        if SIZES in given:
            sizes = given.pop(SIZES)[0].tolist()
            parts = given[REFERENCE_INPUTS].split([height * width for height, width in sizes], 2)
            given[REFERENCE_INPUTS] = [part.unflatten(2, size) for part, size in zip(parts, sizes, strict=True)]
        if self.kind == DENOISE.kind:
            generator = torch.Generator(self._device if self._draws else "cpu")
            given["generator"] = generator.manual_seed(need(params, "seed", int))
        if self.kind == VAE_DECODE.kind:
            given["output_type"] = "np"
        if self._guider is not None:
            scale = max(need(params, SCALE, float), self._unguided)
            self._part.update_components(guider=self._guider.create(guidance_scale=scale))
        values: dict[str, Any] = self._part(**given).values
        return values

    def _output(self, values: Mapping[str, Any], params: Params) -> StageOutput:
        """What the block made; the pictures of the last one are encoded as files."""
        if self.kind != VAE_DECODE.kind:
            return StageOutput({name: values.get(name) for name in self._spec.outputs})
        from unfuse.stages.media import encode, remedy, to_bytes

        advice = remedy("the model's decoder", self._part.vae.dtype)
        return StageOutput(media=encode(to_bytes(values["images"], "decoder", advice), params))


class References(PictureEncoder):
    """The block that encodes pictures for others to see; an ImageEncoder."""

    one_by_one = True
    extra_uploads: Sequence[str] = IMAGE_UPLOADS[1:]

    def __init__(self, part: Any, side: int) -> None:
        from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor

        part.update_components(image_processor=Flux2ImageProcessor(vae_scale_factor=side))
        self._part = part

    def encode(self, pictures: Mapping[str, Sequence[Image]], params: Params) -> dict[str, Tensor]:
        """REFERENCE_INPUTS and SIZES. Raises UnsupportedRequest for pictures that the block refuses."""
        import torch

        try:
            seen = self._part(image=[one for of in pictures.values() for one in of]).values[REFERENCE_INPUTS]
        except ValueError as error:
            raise UnsupportedRequest(f"the pipeline does not accept a picture: {error}") from error
        sizes = torch.tensor([[one.shape[-2:] for one in seen]])
        return {REFERENCE_INPUTS: torch.cat([one.flatten(2) for one in seen], 2), SIZES: sizes}


class Modular(PictureFamily):
    """The stages of a folder of a pipeline class, as diffusers declares it."""

    shape = PictureShape.of_vae
    float32_latents = True
    takes_lora = False
    blocks: tuple[str, str]  # classes of its blocks: of a model that is guided, and of one that was distilled not to be
    embeds: Mapping[str, tuple[str, ...]]
    """Outputs of the text encoder; entries of the transformer's configuration whose product are the numbers a token."""
    unguided: float  # the guidance scale up to which the pipeline has no second half, and so its guider
    negative = False  # whether guidance goes away from a negative prompt, not only from an empty one
    references = 0  # how many pictures it sees beside the prompt, if there are any
    fixed: Mapping[str, object] = MappingProxyType({})
    """Settings of model_index.json that the blocks do not read, and what they go by."""

    @override
    def model_spec(self, name: str, folder: Path, dtype: str = "auto") -> ModelSpec:
        seen = (AcceptedInput(UPLOAD, "reference", max=self.references),) if self.references else ()
        return replace(super().model_spec(name, folder, dtype), accepts=seen)

    @override
    def components(self, folder: ModelFolder) -> dict[str, tuple[str, str]]:
        index = folder.index()
        for name, value in self.fixed.items():
            if index.get(name, value) != value:
                raise ConfigError(f"model {folder.path}: {name} is {index[name]}, but only {value} is supported")
        return super().components(folder)

    @override
    def settings(self, index: Mapping[str, Any]) -> dict[str, str]:
        return dict.fromkeys(("text_encoder", "transformer"), "distilled") if index.get("is_distilled") else {}

    @override
    def parallelism(self, folder: ModelFolder) -> dict[str, dict[str, int]]:
        """Halves of guidance are the blocks' own affair."""
        ways = super().parallelism(folder)
        return {kind: {by: most for by, most in way.items() if by != "cfg"} for kind, way in ways.items()}

    @override
    def standard(self, folder: ModelFolder) -> Params:
        """What the call has is left as it is."""
        call = call_defaults(*self.source)
        return {name: value for name, value in super().standard(folder).items() if name not in call}

    @override
    def encoders(self, folder: ModelFolder, limits: MediaLimits, widths: Mapping[str, int]) -> Sequence[StageSpec]:
        transformer, shape = folder.config("transformer"), PictureShape.of_vae(folder)
        distilled = bool(folder.index().get("is_distilled"))
        with folder.reading("transformer"):
            numbers = sum(prod(int(transformer[key]) for key in keys) for keys in self.embeds.values())
        size = limits.max_sequence_length * numbers * widths["text_encoder"] + ALIGNMENT * len(self.embeds)
        made = (*self.embeds, *(() if distilled else (NEGATIVE + name for name in self.embeds)))
        reads = ["prompt", "max_sequence_length", *(("negative_prompt",) if self.negative and not distilled else ())]
        text = replace(
            TEXT_ENCODE,
            components=("text_encoder", "tokenizer"),
            outputs=made,
            depends_on_params=tuple(reads if distilled else [*reads, SCALE]),
            output_size=OutputSize(size * len(made) // len(self.embeds)),
        )
        each = shape.channels * MAX_PIXELS // shape.scale**2 * widths["vae"] + 2 * DTYPES["int64"]
        picture = replace(
            IMAGE_ENCODE,
            components=("vae",),
            outputs=(REFERENCE_INPUTS, SIZES),
            depends_on_params=IMAGE_UPLOADS,
            role=VAE_DECODE.role,
            output_size=OutputSize(2 * ALIGNMENT + self.references * each),
            parallelism={"tiles": 0},
            only_with=UPLOAD,
        )
        return (text, picture) if self.references else (text,)

    @override
    def load(self, spec: StageSpec, folder: Path, runtime: RuntimeOptions, report: Report | None = None) -> Stage:
        """Raises ConfigError with --offload, which a block's choice of device would not follow."""
        from unfuse.stages.image_encode import ImageEncode

        if runtime.options.offload != "none":
            raise ConfigError(f"--offload cannot be used with a {self.source[1]}: leave it out")
        model = ModelFolder(folder)
        loader = Loader(model, self.components(model), runtime, report, self.parallel_plans)
        if spec.components == ("vae",):
            loader = OneVae(loader)
        if spec.kind == IMAGE_ENCODE.kind:
            part = _part(spec, self.blocks[0], loader)
            return ImageEncode(References(part, PictureShape.of_vae(model).multiple))
        return BlockStage(spec, self, loader, bool(model.index().get("is_distilled")))


def _part(spec: StageSpec, blocks: str, loader: Loader) -> Any:
    """Return the block of a stage with its components.

    The block of denoising gets a VAE without weights, because it reads only the VAE's scale factors.
    """
    import diffusers
    import torch

    diffusers.utils.logging.get_logger("diffusers.guiders.guider_utils").setLevel("ERROR")  # that guiders may change
    block = getattr(diffusers, blocks)().sub_blocks[BLOCKS[spec.kind]]
    _quiet(block)
    part = block.init_pipeline()
    parts = {
        name: loader.noise_scheduler() if name == "scheduler" else component(name, loader) for name in spec.components
    }
    part.update_components(**parts)
    if spec.kind == DENOISE.kind:
        with torch.device("meta"):
            part.vae = getattr(diffusers, loader.class_of("vae")).from_config(loader.folder.config("vae"))
    return part


def _quiet(block: Any) -> None:
    """No progress bars, at any depth."""
    if hasattr(block, "set_progress_bar_config"):
        block.set_progress_bar_config(disable=True)
    for inner in block.sub_blocks.values():
        _quiet(inner)


_SCHEDULER = ("diffusers", ("FlowMatchEulerDiscreteScheduler",))
_QWEN_TOKENIZER = ("transformers", ("Qwen2Tokenizer", "Qwen2TokenizerFast", *FAST_TOKENIZERS))


class Klein(Modular):
    """FLUX.2 klein. There is no negative prompt: guidance goes away from an empty one."""

    name = "modular Flux2KleinPipeline"
    source = ("pipelines/flux2/pipeline_flux2_klein.py", "Flux2KleinPipeline")
    blocks = ("Flux2KleinBaseAutoBlocks", "Flux2KleinAutoBlocks")
    classes = {
        "tokenizer": _QWEN_TOKENIZER,
        "text_encoder": ("transformers", ("Qwen3ForCausalLM",)),
        "transformer": ("diffusers", ("Flux2Transformer2DModel",)),
        "scheduler": _SCHEDULER,
        "vae": ("diffusers", ("AutoencoderKLFlux2",)),
    }
    embeds = {"prompt_embeds": ("joint_attention_dim",)}
    parallel_plans = ParallelPlan(
        blocks=("transformer_blocks", "single_transformer_blocks"),
        attention="attn",
        order=("text", "image"),
        block_inputs={"hidden_states": SequenceDim(1, ("image",)), "encoder_hidden_states": SequenceDim(1, ("text",))},
        follow={"image_rotary_emb": (SequenceDim(0, ("text", "image")),)},
        block_outputs=(SequenceDim(1, ("text", "image")),),
        matrices=TensorParallelLayers(
            outputs=("*.to_[qkv]", "*.add_[qkv]_proj", "*.linear_in", "*.to_qkv_mlp_proj"),
            inputs=("transformer_*.to_out.0", "*.to_add_out", "*.linear_out", "single_*.to_out"),
            packed={"*.linear_in": (0, 2), "*.to_qkv_mlp_proj": (3, 2), "single_*.to_out": (1, 1)},
            divided=("num_attention_heads",),
        ),
        updated_inputs=("encoder_hidden_states", "hidden_states"),
    )
    unguided = 1.0
    references = len(IMAGE_UPLOADS)


KLEIN = Klein()


class Krea(Modular):
    """Krea 2, in which guidance applies at any scale above 0.

    The guidance is added to the prompt's own prediction.
    """

    name = "modular Krea2Pipeline"
    source = ("pipelines/krea2/pipeline_krea2.py", "Krea2Pipeline")
    blocks = ("Krea2AutoBlocks", "Krea2TurboAutoBlocks")
    classes = {
        "tokenizer": _QWEN_TOKENIZER,
        "text_encoder": ("transformers", ("Qwen3VLModel",)),
        "transformer": ("diffusers", ("Krea2Transformer2DModel",)),
        "scheduler": _SCHEDULER,
        "vae": ("diffusers", ("AutoencoderKLQwenImage",)),
    }
    embeds = {"prompt_embeds": ("num_text_layers", "text_hidden_dim"), "prompt_embeds_mask": ()}
    parallel_plans = ParallelPlan(
        blocks=("transformer_blocks",),
        attention="attn",
        order=("tokens",),
        block_inputs={"hidden_states": SequenceDim(1, ("tokens",))},
        follow={"image_rotary_emb": (SequenceDim(0, ("tokens",)),)},
        block_outputs=(SequenceDim(1, ("tokens",)),),
        matrices=TensorParallelLayers(
            outputs=("transformer_*.to_[qkv]", "transformer_*.to_gate", "transformer_*.gate", "transformer_*.up"),
            inputs=("transformer_*.to_out.0", "transformer_*.down"),
            heads=("transformer_*.attn.num_heads", "transformer_*.attn.num_kv_heads"),
            divided=("num_attention_heads", "num_key_value_heads", "intermediate_size"),
        ),
    )
    unguided = 0.0
    negative = True
    fixed = {"text_encoder_select_layers": [*range(2, 36, 3)], "patch_size": 2}


KREA = Krea()
