"""What families share: sizes that follow from configurations, text encoders, denoisers, VAEs, redrawing a picture.

Redrawing, whole or where a mask says: the stages do what diffusers' pipelines for image to image and inpainting do with
the components of a folder that text to picture has. A request without a picture has one stage less. The picture is
encoded where the VAE is anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from typing_extensions import override

from unfuse.core.errors import ConfigError, Unsuitable
from unfuse.core.modalities import MASK, UPLOAD, MediaLimits, OutputSize
from unfuse.core.model_spec import AcceptedInput, ModelSpec
from unfuse.core.object_ref import ALIGNMENT, DTYPES
from unfuse.core.plan import Params, Pipeline, StageSpec
from unfuse.models.base import READ_ERRORS, DiffusersFamily, Loader
from unfuse.models.declared import call_defaults, frame_rate
from unfuse.stages.base import NEGATIVE, Stage, guidance_scale, need
from unfuse.stages.specs import DENOISE, REDRAW_ENCODE, TEXT_ENCODE, VAE_DECODE
from unfuse.weights.folder import ModelFolder

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import Tensor

    from unfuse.stages.denoise import NoiseScheduler
    from unfuse.stages.image_encode import Redraw


FAST_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")  # what any tokenizer may be saved as
T5_TOKENIZERS = ("T5TokenizerFast", "T5Tokenizer", *FAST_TOKENIZERS)
CLIP_TOKENIZERS = ("CLIPTokenizer", "CLIPTokenizerFast")


def text_stage(sizes: Mapping[str, int], scale: str = "true_cfg_scale", end: str = "") -> StageSpec:
    """Encoding of prompt and negative prompt; `sizes` are the most bytes of each output, `scale` is that of guidance.

    `end` is what ends the names of a model's second text encoder and its tokenizer.
    """
    return replace(
        TEXT_ENCODE,
        name=TEXT_ENCODE.name + end,
        kind=TEXT_ENCODE.kind + end,
        components=(f"text_encoder{end}", f"tokenizer{end}"),
        outputs=(*sizes, *(NEGATIVE + name for name in sizes)),
        room=OutputSize(2 * sum(size + ALIGNMENT for size in sizes.values())),
        reads=("prompt", "negative_prompt", scale, "max_sequence_length"),
        shares=True,
    )


def true_cfg_scale(params: Params) -> float:
    """How much further than the negative prompt's a prediction goes; 1 without a negative prompt."""
    return 1.0 if params.get("negative_prompt") is None else need(params, "true_cfg_scale", float)


class GuidedTextEncoder:
    """A tokenizer and its text encoder, of a model that a negative prompt guides; `end` is what ends their names.

    It guides by the true guidance scale, of models that were not distilled with one, unless another is given.
    """

    def __init__(self, loader: Loader, end: str = "", guidance: Callable[[Params], float] = true_cfg_scale) -> None:
        self._tokenizer, self._encoder = loader.plain(f"tokenizer{end}"), loader.model(f"text_encoder{end}")
        self._device, self.guidance = loader.device, guidance

    def exact_batch_key(self, text: str, length: int) -> Hashable:
        """Nothing, as long as the encoder sees padding as it sees other tokens."""
        return ()

    def _tokens(self, texts: Sequence[str], length: int, padding: str = "max_length") -> Any:
        """Ids and attention mask of the texts, cut or padded to so many tokens."""
        how = {"padding": padding, "max_length": length, "truncation": True, "return_tensors": "pt"}
        return self._tokenizer(list(texts), return_attention_mask=True, **how).to(self._device)


class MaskedTextEncoder(GuidedTextEncoder):
    """One that does not see padding. `_tokens` may put texts into a template first."""

    @override
    def exact_batch_key(self, text: str, length: int) -> bool:
        """Whether there is padding: without, no mask is computed with."""
        return bool(self._tokens([text], length).attention_mask.all())


class T5TextEncoder(GuidedTextEncoder):
    """T5; a TextEncoder."""

    name = "prompt_embeds"

    def encode(self, texts: Sequence[str], length: int) -> dict[str, Tensor]:
        """By its name (texts, length, text dim); it attends to the padding too."""
        hidden = self._encoder(self._tokens(texts, length).input_ids, output_hidden_states=False)[0]
        return {self.name: hidden.to(self._encoder.dtype)}


class ClipTextEncoder(GuidedTextEncoder):
    """CLIP; a TextEncoder."""

    def encode(self, texts: Sequence[str], length: int) -> dict[str, Tensor]:
        """`pooled_prompt_embeds` (texts, pooled dim) of as many tokens as CLIP has, whatever the length."""
        tokens = self._tokens(texts, self._tokenizer.model_max_length)
        pooled = self._encoder(tokens.input_ids, output_hidden_states=False).pooler_output
        return {"pooled_prompt_embeds": pooled.to(self._encoder.dtype)}


Shapes = Mapping[str, tuple[int | None, ...]]

PATCH = 2  # side of the square of latents that the transformer sees as one
USUAL_LATENTS = 128  # side of a picture in latents, where pipelines have that as their default


@dataclass(frozen=True)
class PictureShape:
    """Channels of latents, how many pixels one stands for along a side, and the sides in pixels that may be asked for.

    A transformer sees the latents as a grid, or packed as patches (rows, patches, channels of a patch).
    """

    channels: int
    scale: int
    multiple: int  # what sides must divide by
    usual: int  # the side that nobody has to ask for
    longest: int  # the longest side that the transformer knows

    @classmethod
    def of_vae(cls, folder: ModelFolder) -> PictureShape:
        """Read the VAE's configuration; sizes are those of a transformer that sees patches. Raises ConfigError."""
        vae = folder.config("vae")
        with folder.reading("vae"):
            halvings = len(vae["temperal_downsample"]) if "z_dim" in vae else len(vae["block_out_channels"]) - 1
            channels, scale = int(vae["z_dim" if "z_dim" in vae else "latent_channels"]), 2**halvings
        return PictureShape(channels, scale, PATCH * scale, USUAL_LATENTS * scale, MediaLimits().max_size)

    def room(self, width: int) -> OutputSize:
        """The bytes of latents whose numbers take `width` bytes each."""
        return OutputSize(ALIGNMENT, self.channels * width / self.scale**2)

    def latents(self, params: Params) -> tuple[int, ...]:
        """(1, channels, height, width) of a request's latents."""
        sides = (need(params, side, int) // self.scale for side in ("height", "width"))
        return (1, self.channels, *sides)

    def packable(self, params: Params) -> tuple[int, ...]:
        """(1, channels, height, width) of a request's latents where patches fill these."""
        rows, columns = self.patches(params)
        return 1, self.channels, PATCH * rows, PATCH * columns

    def patches(self, params: Params) -> tuple[int, int]:
        """Rows and columns of patches."""
        side = self.scale * PATCH
        return need(params, "height", int) // side, need(params, "width", int) // side

    def pack(self, grid: Tensor) -> Tensor:
        """Latents (rows, channels, height, width) as patches."""
        count, channels, rows, columns = grid.shape
        tiled = grid.view(count, channels, rows // PATCH, PATCH, columns // PATCH, PATCH).permute(0, 2, 4, 1, 3, 5)
        return tiled.flatten(3).flatten(1, 2)

    def unpack(self, latents: Tensor, params: Params) -> Tensor:
        """Patches put side by side, as a video of one frame."""
        rows, columns = self.patches(params)
        grid = latents.view(1, rows, columns, -1, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5)
        return grid.reshape(1, -1, 1, PATCH * rows, PATCH * columns)


@dataclass(frozen=True)
class VideoShape:
    """Channels of latents, and how many pixels along a side and frames one stands for."""

    channels: int
    spatial: int
    temporal: int

    @property
    def multiple(self) -> int:
        """What sides in pixels must divide by, as far as the configurations say."""
        return self.spatial

    def room(self, width: int) -> OutputSize:
        """The bytes of latents whose numbers take `width` bytes each."""
        return OutputSize(ALIGNMENT, self.channels * width / self.spatial**2, self.temporal)

    def grid(self, params: Params) -> tuple[int, int, int]:
        """Frames, height and width of a request's latents."""
        frames = (need(params, "num_frames", int) - 1) // self.temporal + 1
        return frames, need(params, "height", int) // self.spatial, need(params, "width", int) // self.spatial

    def latents(self, params: Params) -> tuple[int, ...]:
        """(1, channels, frames, height, width) of a request's latents."""
        return (1, self.channels, *self.grid(params))

    def bounds(self, multiple: int, defaults: Params) -> MediaLimits:
        """What can be asked for, sides being multiples: twice the default length of a video at most."""
        return MediaLimits(
            size_multiple=multiple,
            min_size=multiple,
            max_frames=2 * need(defaults, "num_frames", int) - 1,
            frame_multiple=self.temporal,
            max_sequence_length=need(defaults, "max_sequence_length", int),
        )


def need_channels(folder: ModelFolder, fit: int, found: int) -> None:
    """Raise ConfigError when the transformer's channels are not those that its VAE makes."""
    if fit != found:
        reason = f"by its VAE the transformer has {fit} channels, by its configuration {found}"
        raise ConfigError(f"model {folder.path}: {reason}")


def norm(vae: Any, grid: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of each channel and 1/std, like the grid: dividing by 1/std rounds other than multiplying by std."""
    import torch

    mean, deviation = (
        torch.tensor(values).view(1, -1, 1, 1, 1).to(grid)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, 1.0 / deviation


def shift(config: Mapping[str, Any], patches: int) -> float:
    """How far a noise scheduler of that configuration is to be shifted for so many patches."""
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    low_shift, high_shift = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (high_shift - low_shift) / (high - low)
    found: float = patches * slope + (low_shift - slope * low)
    return found


class FlowDenoiser:
    """Transformer and the configuration of its noise scheduler, guided by a negative prompt; `sizes` are its latents'.

    The rest of a Denoiser is for its family to say.
    """

    dtype: torch.dtype
    embeds: Shapes
    masks: Shapes = {}
    conditions: Shapes = {}
    transformers: tuple[Any, ...]
    first = ""
    guidance = staticmethod(true_cfg_scale)
    """What guides: the true guidance scale, of models that were not distilled with one."""
    reads: Mapping[str, Any] = {}
    """Types of parameters that it reads beside a size."""
    sets_begin = True
    """Whether the pipeline calls `set_begin_index(0)`. Without it the noise scheduler looks its first timestep up, and
    takes the second of two equal ones."""

    def __init__(
        self, loader: Loader, sizes: Callable[[Params], tuple[int, ...]], component: str = "transformer"
    ) -> None:
        self._sizes = sizes
        self._scheduler, self._transformer = loader.noise_scheduler(), loader.model(component)
        self.device, self.dtype, self.transformers = loader.device, self._transformer.dtype, (self._transformer,)

    def verify(self, params: Params) -> None:
        """Raise PermanentError for a size that does not fit, and unless there is what it reads."""
        self._sizes(params)
        for name, kind in self.reads.items():
            need(params, name, kind)

    def noise_dtype(self, params: Params) -> torch.dtype | None:
        """The dtype in which noise is drawn; None for float32."""
        return None

    def draw(self, params: Params, generator: torch.Generator) -> Tensor:
        """Noise of these sizes."""
        import torch

        dtype = self.noise_dtype(params)
        return torch.randn(self._sizes(params), generator=generator, device=generator.device, dtype=dtype)

    def constants(self, params: Params) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def noise_scheduler(self, params: Params, latents: Tensor) -> NoiseScheduler:
        """Timesteps as the configuration spaces them."""
        return self._fresh(latents, num_inference_steps=need(params, "num_inference_steps", int))

    def combine(self, towards: Tensor, away: Tensor, scale: float, timestep: Tensor, params: Params) -> Tensor:
        """So many times the way from the one to the other."""
        return away + scale * (towards - away)

    def phase(self, timestep: Tensor) -> Hashable:
        """All timesteps alike."""
        return ()

    def parts(self, latents: Tensor) -> int:
        """None."""
        return 1

    def settle(self, latents: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """As they are."""
        return latents

    def _fresh(self, latents: Tensor, **given: Any) -> NoiseScheduler:
        """Return a new noise scheduler of the same configuration with these timesteps. Raises Unsuitable."""
        fresh = type(self._scheduler).from_config(self._scheduler.config)
        try:
            fresh.set_timesteps(device=latents.device, **given)
        except READ_ERRORS as error:
            raise Unsuitable(f"the model's noise scheduler does not accept these steps: {error}") from error
        if self.sets_begin:
            fresh.set_begin_index(0)
        found: NoiseScheduler = fresh
        return found

    def shifted(self, params: Params, latents: Tensor) -> NoiseScheduler:
        """One of latents (rows, patches, …): the more patches, the longer it stays at high noise."""
        import numpy as np

        steps, mu = need(params, "num_inference_steps", int), shift(self._scheduler.config, latents.shape[1])
        return self._fresh(latents, sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)

    def _predicted(self, *args: Any, **given: Any) -> Tensor:
        """What the transformer makes of this."""
        predicted: Tensor = self._transformer(*args, **given, return_dict=False)[0]
        return predicted


class PictureEncoder:
    """What ImageEncoders have in common."""

    each = False
    """Whether pictures are encoded one by one, in sizes of their own, whatever size is asked for."""
    beside: Sequence[str] = ()
    """Uploads that a request may bring beside `image`; what its pipeline says it reads."""

    def verify(self, params: Params) -> None:
        """It reads none."""


class GridVae:
    """A VAE whose latents come as a grid, and were normalised per channel; a VaeDecoder."""

    def __init__(self, loader: Loader, channels: str = "z_dim") -> None:
        self.vae, self.device = loader.vae(), loader.device
        self.latents: tuple[int | None, ...] = (1, int(self.vae.config[channels]), None, None, None)

    def unpack(self, latents: Tensor, params: Params) -> Tensor:
        """As they are."""
        return latents.to(self.device, self.vae.dtype)

    def decode(self, grid: Tensor) -> Tensor:
        """Pixels (rows, 3, frames, height, width)."""
        mean, scale = norm(self.vae, grid)
        return self._decoded(grid / scale + mean)

    def _decoded(self, grid: Tensor) -> Tensor:
        """What the VAE makes of this."""
        pixels: Tensor = self.vae.decode(grid, return_dict=False)[0]
        return pixels


NAMED = {"image": "Img2Img", "mask": "Inpaint"}  # diffusers' words for what a request brings


class OneVae(Loader):
    """Loads as another does, but the VAE once for all stages of a process: it remembers nothing between calls."""

    def __init__(self, other: Loader) -> None:
        super().__init__(other.folder, other._classes, other.runtime, other._report, other._cut)
        self._other = other

    @override
    def vae(self) -> Any:
        runtime = self.runtime
        key = "vae", self.folder.path, runtime.dtypes["vae"], runtime.mesh is None
        if key not in runtime.shared:
            runtime.shared[key] = self._other.vae()
        return runtime.shared[key]


def forces_upcast(vae: Any) -> bool:
    """Return whether a VAE's configuration asks for float32. False if its weights are not on this device (meta)."""
    return bool(vae.config.get("force_upcast")) and not any(weight.is_meta for weight in vae.parameters())


@contextmanager
def computing_in(vae: Any, dtype: torch.dtype) -> Iterator[None]:
    """Cast a VAE to another dtype for the duration of the block."""
    before = vae.dtype
    if before == dtype:
        yield
        return
    vae.to(dtype)
    try:
        yield
    finally:
        vae.to(before)


class PictureVae(PictureEncoder):
    """The VAE as an ImageEncoder. Pictures are stretched to the requested size.

    With `upcasts` it encodes in float32 if its configuration has `force_upcast`.
    """

    beside: Sequence[str] = (MASK,)

    def __init__(self, loader: Loader, upcasts: bool = False) -> None:
        self._vae, self._device = loader.vae(), loader.device
        self._upcasts = upcasts and forces_upcast(self._vae)

    @override
    def verify(self, params: Params) -> None:
        """It reads a size."""
        need(params, "height", int), need(params, "width", int)

    def encode(self, pictures: Mapping[str, Sequence[Image]], params: Params) -> dict[str, Tensor]:
        """The `moments` of the distribution from which latents are drawn, each a row a picture."""
        from diffusers.image_processor import VaeImageProcessor

        size = {side: need(params, side, int) for side in ("height", "width")}
        pixels = VaeImageProcessor(vae_scale_factor=1).preprocess(list(pictures[UPLOAD]), **size)
        dtype = self._vae.dtype
        pixels = pixels.to(self._device, dtype)
        if "z_dim" in self._vae.config:
            pixels = pixels.unsqueeze(2)
        if self._upcasts:
            pixels = pixels.float()
        with computing_in(self._vae, pixels.dtype):
            moments = self._vae.encode(pixels).latent_dist.parameters
        return {"moments": moments.reshape(*moments.shape[:2], *moments.shape[-2:])}


class PictureFamily(DiffusersFamily):
    """Pictures only. There is no negative prompt unless one is given, not even an empty one."""

    starts: Sequence[str] = ()
    """What such a request may bring; in diffusers each has a pipeline of its own, whose strength is usual for it."""
    packs = False  # whether the transformer sees latents as patches
    whole_steps = False  # whether a step that the strength spares in part is not made
    upcasts = False  # whether the pipeline encodes in float32 if the VAE's configuration has force_upcast
    repeats = False  # whether the pipeline for inpainting repeats the picture's latents for each of a prompt's pictures

    @override
    def standard(self, folder: ModelFolder) -> Params:
        side = self.shape(folder).usual
        return {"width": side, "height": side, "num_frames": 1, "negative_prompt": None}

    @override
    def limits(self, folder: ModelFolder, defaults: Params) -> MediaLimits:
        shape, length = self.shape(folder), need(defaults, "max_sequence_length", int)
        return MediaLimits(
            size_multiple=shape.multiple,
            min_size=shape.multiple,
            max_size=min(MediaLimits().max_size, shape.longest),
            frame_multiple=1,
            max_sequence_length=length,
        )

    @override
    def card(self, name: str, folder: Path, dtype: str = "auto") -> ModelSpec:
        card = super().card(name, folder, dtype)
        if not self.starts:
            return card
        shape = PictureShape.of_vae(ModelFolder(folder))
        width = DTYPES["float32" if self.upcasts else card.dtypes["vae"]]
        room = (2 * shape.channels * width + DTYPES["float32"]) / shape.scale**2
        encode = replace(REDRAW_ENCODE, room=OutputSize(2 * ALIGNMENT, room))

        def behind(stage: StageSpec) -> StageSpec:
            given = (*stage.inputs, *encode.outputs) if stage.kind == DENOISE.kind else stage.inputs
            return replace(stage, inputs=given)

        return replace(
            card,
            pipeline=Pipeline((encode, *map(behind, card.pipeline.stages))),
            accepts=tuple(AcceptedInput(what, "redraw", strength=self._usual_strength(what)) for what in self.starts),
        )

    def _usual_strength(self, upload: str) -> float:
        """The default of the pipeline that redraws with this upload: its file and class are named after this one's."""
        (file, name), how = self.source, NAMED[upload]
        call = call_defaults(file.replace(".py", f"_{how.lower()}.py"), name.replace("Pipeline", f"{how}Pipeline"))
        return float(call["strength"] or 0)

    @override
    def redraw(self, loader: Loader, dtype: torch.dtype) -> Redraw | None:
        if not self.starts:
            return None
        from unfuse.stages.image_encode import Redraw

        shape, config = PictureShape.of_vae(loader.folder), loader.folder.config("vae")
        pack = shape.pack if self.packs else None
        return Redraw(config, shape.channels, dtype, pack, self.whole_steps, self.repeats)

    @override
    def stage(self, kind: str, loader: Loader) -> Stage:
        from unfuse.stages.image_encode import RedrawEncode

        if kind in (REDRAW_ENCODE.kind, VAE_DECODE.kind):
            loader = OneVae(loader)
        if kind == REDRAW_ENCODE.kind:
            return RedrawEncode(PictureVae(loader, self.upcasts))
        return super().stage(kind, loader)


class ProjectedClipTextEncoder(GuidedTextEncoder):
    """CLIP's last hidden states but one, `names[0]` (texts, tokens, width), and where there is a second name what it
    projects of all (texts, projected). Texts have as many tokens as CLIP has, whatever the length. A TextEncoder.
    """

    def __init__(self, loader: Loader, names: Sequence[str], end: str = "") -> None:
        super().__init__(loader, end, guidance_scale)
        self._names = names

    def encode(self, texts: Sequence[str], length: int) -> dict[str, Tensor]:
        """Both, by these names."""
        tokens = self._tokens(texts, self._tokenizer.model_max_length)
        made = self._encoder(tokens.input_ids, output_hidden_states=True)
        return dict(zip(self._names, (made.hidden_states[-2], made[0]), strict=False))


class GridDenoiser(FlowDenoiser):
    """A FlowDenoiser guided by `guidance_scale`, whose latents are a picture in the transformer's dtype."""

    guidance = staticmethod(guidance_scale)

    @override
    def noise_dtype(self, params: Params) -> torch.dtype | None:
        return self.dtype


class GridPictureVae:
    """An AutoencoderKL; a VaeDecoder. Latents are scaled in the dtype they come in, or `first` in the VAE's."""

    def __init__(self, loader: Loader, cast_first: bool = False) -> None:
        self._vae, self._device, self._cast_first = loader.vae(), loader.device, cast_first
        self.latents: tuple[int | None, ...] = (1, int(self._vae.config.latent_channels), None, None)

    def unpack(self, latents: Tensor, params: Params) -> Tensor:
        """As a video of one frame."""
        config, dtype = self._vae.config, self.dtype
        grid = latents.to(self._device, dtype if self._cast_first else None) / config.scaling_factor
        shifted: Tensor = grid if config.shift_factor is None else grid + config.shift_factor
        return shifted.to(dtype).unsqueeze(2)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the VAE decodes."""
        found: torch.dtype = self._vae.dtype
        return found

    def decode(self, grid: Tensor) -> Tensor:
        """Pixels of the one frame of each."""
        pixels: Tensor = self._vae.decode(grid.squeeze(2), return_dict=False)[0]
        return pixels.unsqueeze(2)


class PackedDenoiser(FlowDenoiser):
    """A FlowDenoiser of packed latents; `predict` is for its family to say."""

    def __init__(self, loader: Loader, shape: PictureShape) -> None:
        super().__init__(loader, shape.packable)
        self._shape = shape

    @override
    def noise_dtype(self, params: Params) -> torch.dtype | None:
        """The transformer's dtype, which in an undivided pipeline is the prompt embeddings' too."""
        return self.dtype

    @override
    def draw(self, params: Params, generator: torch.Generator) -> Tensor:
        return self._shape.pack(super().draw(params, generator))

    noise_scheduler = FlowDenoiser.shifted


class VideoFamily(DiffusersFamily):
    """Videos, whose frame rate is that of the pipeline's class. There is no negative prompt unless one is given."""

    pixel_multiple: int  # what the pipeline refuses other sizes than multiples of, whatever the VAE
    float32_latents = True

    @override
    def standard(self, folder: ModelFolder) -> Params:
        self.shape(folder)
        return {"fps": frame_rate(folder.kind, folder.index(), {}), "negative_prompt": None}

    @override
    def limits(self, folder: ModelFolder, defaults: Params) -> MediaLimits:
        shape: VideoShape = self.shape(folder)
        return shape.bounds(lcm(self.pixel_multiple, shape.multiple), defaults)
