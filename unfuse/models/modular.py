"""Model families whose stages run the blocks of diffusers' modular pipelines.

A block declares its components, inputs and outputs. Encoding, denoising and decoding are blocks, and each of them is a
stage with one step. So denoising has no previews, and a request is cancelled only after its block. The declarations are
repeated here as data, because model specs are made without diffusers. A class is listed here only if its images were
equal to those of its DiffusionPipeline, bit for bit. Checked against diffusers 0.42.

Guidance is a component of the blocks, the guider. Each request gets a new guider with its scale. A distilled model has
no guider.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import prod, sqrt
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
from unfuse.models.components import FAST_TOKENIZERS, PictureEncoder, PictureFamily, PictureShape
from unfuse.models.declared import call_defaults
from unfuse.models.text_encoders import disable_kv_cache
from unfuse.models.undivided_family import component
from unfuse.parallel.parallel_plan import ParallelPlan, SequenceDim, TensorParallelLayers
from unfuse.stages.base import NEGATIVE, OneStepState, Stage, StageInput, StageOutput, need
from unfuse.stages.specs import DENOISE, IMAGE_ENCODE, TEXT_ENCODE, VAE_DECODE
from unfuse.weights.folder import ModelFolder

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

#: The block that a stage kind runs.
BLOCKS = {
    TEXT_ENCODE.kind: "text_encoder",
    IMAGE_ENCODE.kind: "vae_encoder",
    DENOISE.kind: "denoise",
    VAE_DECODE.kind: "decode",
}

#: The latents of all reference images, (1, channels, latents of all images), and their sizes, (1, images, 2).
REFERENCE_INPUTS, SIZES = "image_latents", "image_sizes"

#: Pixels of the largest reference image. Larger ones are made smaller before they are encoded.
MAX_PIXELS = 1024 * 1024

SCALE = "guidance_scale"

#: The parameters of blocks, with their types. The negative prompt may be None.
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


#: Pixels above which diffusers reduces a reference image.
MAX_AREA = 1024 * 1024

#: The name of the images that the block of VAE decoding makes.
IMAGES = "images"


class BlockStage(Stage):
    """A stage that runs one block, for one task at a time."""

    def __init__(self, spec: StageSpec, family: Modular, loader: Loader, distilled: bool) -> None:
        self.kind, self._spec = spec.kind, spec
        self.encodes = spec.kind == VAE_DECODE.kind
        self._unguided = family.unguided
        self._device, self._draws_on_device = loader.device, loader.runtime.options.noise_device != "cpu"
        self._block = _load_block(spec, family.blocks[distilled], loader)
        from unfuse.stages.vae_memory import VaeModes

        vae = self._block.vae if spec.kind == VAE_DECODE.kind else None
        self._modes = VaeModes.create(vae, loader.runtime.options, None if loader.runtime.group else loader.device)
        self._shape = PictureShape.of_vae(loader.folder)
        self._guider = None if distilled or spec.kind == VAE_DECODE.kind else self._block.get_component_spec("guider")
        self._reads = [name for name in TYPES if name in {i.name for i in self._block.blocks.inputs}]
        self._needs = [
            *self._reads,
            *([SCALE] if self._guider else []),
            *(["seed"] if spec.kind == DENOISE.kind else []),
        ]

    def verify(self, task: StageInput) -> None:
        """Raise PermanentError if a parameter or tensor that the block needs is missing."""
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
        """Return all parameters that the block reads. Tasks are computed one by one anyway."""
        return tuple(task.params.get(name) for name in self._needs)

    @override
    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        return [self.finish(OneStepState(task, self._output(task))) for task in batch]

    @override
    def step(self, batch: Sequence[OneStepState]) -> list[StageOutput]:
        return [self._output(state.task) for state in batch]

    @override
    def finish(self, state: OneStepState) -> StageOutput:
        """Return the block's outputs for later stages, or for VAE decoding the encoded images."""
        assert state.output
        if not self.encodes:
            return state.output
        from unfuse.stages.media import encode, remedy, to_bytes

        images: Any = state.output.tensors[IMAGES]
        advice = remedy("the model's decoder", self._block.vae.dtype)
        media = encode(to_bytes(images, "decoder", advice), state.task.params)
        return StageOutput(media=media, vae=state.output.vae)

    @override
    def reduce_memory(self, state: OneStepState) -> OneStepState | None:
        size = self._shape.latents(state.task.params)
        return state if self._modes.reduce(size, self._modes.mode(size)) else None

    def _values(self, task: StageInput) -> dict[str, Any]:
        """Run the block. Returns all its values by name: inputs, intermediates and outputs."""
        import torch

        params = task.params
        inputs: dict[str, Any] = {name: params[name] for name in self._reads if params.get(name) is not None}
        inputs |= {name: tensor.to(self._device) for name, tensor in task.tensors.items() if tensor is not None}
        if SIZES in inputs:
            sizes = inputs.pop(SIZES)[0].tolist()
            parts = inputs[REFERENCE_INPUTS].split([height * width for height, width in sizes], 2)
            inputs[REFERENCE_INPUTS] = [part.unflatten(2, size) for part, size in zip(parts, sizes, strict=True)]

        if self.kind == DENOISE.kind:
            generator = torch.Generator(self._device if self._draws_on_device else "cpu")
            inputs["generator"] = generator.manual_seed(need(params, "seed", int))
        if self.kind == VAE_DECODE.kind:
            inputs["output_type"] = "np"
        if self._guider is not None:
            # The guider omits guidance only at exactly this scale, but the pipeline also below it.
            scale = max(need(params, SCALE, float), self._unguided)
            self._block.update_components(guider=self._guider.create(guidance_scale=scale))

        values: dict[str, Any] = self._block(**inputs).values
        return values

    def _output(self, task: StageInput) -> StageOutput:
        """Run the block. Returns its outputs for later stages.

        Those of VAE decoding are the images as arrays.
        """
        import torch

        from unfuse.stages.vae_memory import AS_CONFIGURED

        mode = self._modes.mode(self._shape.latents(task.params)) if self.encodes else AS_CONFIGURED
        with torch.no_grad(), self._modes.use(mode):
            values = self._values(task)
        return StageOutput({name: values.get(name) for name in self._spec.outputs or (IMAGES,)}, vae=mode.vae)


class References(PictureEncoder):
    """The block that encodes reference images, as an ImageEncoder."""

    one_by_one = True  # reference images have sizes of their own
    extra_uploads: Sequence[str] = IMAGE_UPLOADS[1:]

    def __init__(self, block: Any, multiple: int) -> None:
        from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor

        block.update_components(image_processor=Flux2ImageProcessor(vae_scale_factor=multiple))
        self._block, self.vae = block, block.vae

    @override
    def size(self, pictures: Mapping[str, Sequence[Image]], params: Params) -> tuple[int, int]:
        """Return height and width of the largest image, above MAX_AREA reduced to that."""
        sizes = [image.size for row in pictures.values() for image in row]
        scaled = [
            (height * scale, width * scale)
            for width, height in sizes
            for scale in (min(1.0, sqrt(MAX_AREA / (width * height))),)
        ]
        height, width = max(scaled, key=max)
        return int(height), int(width)

    def encode(self, pictures: Mapping[str, Sequence[Image]], params: Params) -> dict[str, Tensor]:
        """Return REFERENCE_INPUTS and SIZES of one request.

        Raises UnsupportedRequest for images that the block does not accept.
        """
        import torch

        try:
            latents = self._block(image=[image for row in pictures.values() for image in row]).values[REFERENCE_INPUTS]
        except ValueError as error:
            raise UnsupportedRequest(f"the pipeline does not accept a picture: {error}") from error

        sizes = torch.tensor([[grid.shape[-2:] for grid in latents]])
        return {REFERENCE_INPUTS: torch.cat([grid.flatten(2) for grid in latents], 2), SIZES: sizes}


class Modular(PictureFamily):
    """A family whose stages run the blocks of one modular pipeline class."""

    shape = PictureShape.of_vae
    float32_latents = True
    takes_lora = False
    #: The classes of its blocks: for a model with guidance, and for a distilled model, which has none.
    blocks: tuple[str, str]
    #: The outputs of the text encoder. For each, the entries of the transformer's configuration whose product is the
    #: elements of a token.
    embeds: Mapping[str, tuple[str, ...]]
    #: The largest guidance scale without guidance, in the pipeline and in its guider.
    unguided: float
    #: Whether guidance uses the request's negative prompt, not only an empty one.
    negative = False
    #: The most reference images of a request; 0 if the model has none.
    references = 0
    #: Settings of model_index.json that the blocks do not read, with the values that they assume.
    fixed: Mapping[str, object] = MappingProxyType({})

    @override
    def model_spec(self, name: str, folder: Path, dtype: str = "auto") -> ModelSpec:
        uploads = (AcceptedInput(UPLOAD, "reference", max=self.references),) if self.references else ()
        return replace(super().model_spec(name, folder, dtype), accepts=uploads)

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
        """Return the kinds of parallelism that each stage kind supports.

        Not CFG parallel, because both halves of guidance are computed within the block.
        """
        supported = super().parallelism(folder)
        return {stage: {kind: n for kind, n in kinds.items() if kind != "cfg"} for stage, kinds in supported.items()}

    @override
    def standard(self, folder: ModelFolder) -> Params:
        """Return defaults for parameters that the pipeline's call lacks."""
        call = call_defaults(*self.source)
        return {name: value for name, value in super().standard(folder).items() if name not in call}

    @override
    def encoders(self, folder: ModelFolder, limits: MediaLimits, widths: Mapping[str, int]) -> Sequence[StageSpec]:
        transformer, shape = folder.config("transformer"), PictureShape.of_vae(folder)
        distilled = bool(folder.index().get("is_distilled"))
        with folder.reading("transformer"):
            elements = sum(prod(int(transformer[key]) for key in keys) for keys in self.embeds.values())

        size = limits.max_sequence_length * elements * widths["text_encoder"] + ALIGNMENT * len(self.embeds)
        outputs = (*self.embeds, *(() if distilled else (NEGATIVE + name for name in self.embeds)))
        params = ["prompt", "max_sequence_length", *(("negative_prompt",) if self.negative and not distilled else ())]
        text_stage = replace(
            TEXT_ENCODE,
            components=("text_encoder", "tokenizer"),
            outputs=outputs,
            depends_on_params=tuple(params if distilled else [*params, SCALE]),
            output_size=OutputSize(size * len(outputs) // len(self.embeds)),
        )

        reference_bytes = shape.channels * MAX_PIXELS // shape.scale**2 * widths["vae"] + 2 * DTYPES["int64"]
        image_stage = replace(
            IMAGE_ENCODE,
            components=("vae",),
            outputs=(REFERENCE_INPUTS, SIZES),
            depends_on_params=IMAGE_UPLOADS,
            role=VAE_DECODE.role,
            output_size=OutputSize(2 * ALIGNMENT + self.references * reference_bytes),
            parallelism={"tiles": 0},
            only_with=UPLOAD,
        )
        return (text_stage, image_stage) if self.references else (text_stage,)

    @override
    def load(self, spec: StageSpec, folder: Path, runtime: RuntimeOptions, report: Report | None = None) -> Stage:
        from unfuse.stages.image_encode import ImageEncode

        model = ModelFolder(folder)
        loader = Loader(model, self.components(model), runtime, report, self.parallel_plans)
        if spec.kind == IMAGE_ENCODE.kind:
            block = _load_block(spec, self.blocks[0], loader)
            device = None if runtime.group else loader.device
            return ImageEncode(References(block, PictureShape.of_vae(model).multiple), runtime.options, device)
        return BlockStage(spec, self, loader, bool(model.index().get("is_distilled")))


def _load_block(spec: StageSpec, blocks: str, loader: Loader) -> Any:
    """Return a modular pipeline of one block, that of a stage, with its components.

    The block of denoising gets a VAE without weights, because it reads only the VAE's scale factors.
    """
    import diffusers
    import torch

    # It warns at every new guider, so at every request, that the interface may change.
    diffusers.utils.logging.get_logger("diffusers.guiders.guider_utils").setLevel("ERROR")
    block = getattr(diffusers, blocks)().sub_blocks[BLOCKS[spec.kind]]
    _disable_progress_bars(block)

    pipeline = block.init_pipeline()
    components = {
        name: loader.noise_scheduler() if name == "scheduler" else component(name, loader) for name in spec.components
    }
    for name in components:
        if name.startswith("text_encoder"):
            disable_kv_cache(components[name])
    pipeline.update_components(**components)
    if spec.kind == DENOISE.kind:
        with torch.device("meta"):
            pipeline.vae = getattr(diffusers, loader.class_of("vae")).from_config(loader.folder.config("vae"))
    return pipeline


def _disable_progress_bars(block: Any) -> None:
    """Disable the progress bars of a block, and of all blocks in it."""
    if hasattr(block, "set_progress_bar_config"):
        block.set_progress_bar_config(disable=True)
    for sub_block in block.sub_blocks.values():
        _disable_progress_bars(sub_block)


_SCHEDULER = ("diffusers", ("FlowMatchEulerDiscreteScheduler",))
_QWEN_TOKENIZER = ("transformers", ("Qwen2Tokenizer", "Qwen2TokenizerFast", *FAST_TOKENIZERS))


class Klein(Modular):
    """FLUX.2 klein. Its guidance has no negative prompt, and uses an empty one."""

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

    The difference to the negative prompt's prediction, times the scale, is added to the prompt's prediction.
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
