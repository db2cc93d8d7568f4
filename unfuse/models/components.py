"""Components that families share: shapes, denoisers, VAEs, image-to-image and inpainting.

Image-to-image and inpainting ("redraw") do what diffusers' pipelines for these do, with the components of a text-to-
image folder. A request without an image has one stage less. The image is encoded by a worker that has the VAE anyway.
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

from unfuse.core.errors import ConfigError, UnsupportedRequest
from unfuse.core.modalities import MASK, UPLOAD, MediaLimits, OutputSize
from unfuse.core.model_spec import AcceptedInput, ModelSpec
from unfuse.core.object_ref import ALIGNMENT, DTYPES
from unfuse.core.plan import Params, Pipeline, StageSpec
from unfuse.models.base import READ_ERRORS, DiffusersFamily, Loader
from unfuse.models.declared import call_defaults, frame_rate
from unfuse.stages.base import NEGATIVE, Stage, guidance_scale, need
from unfuse.stages.noise import draw_noise
from unfuse.stages.specs import DENOISE, REDRAW_ENCODE, TEXT_ENCODE
from unfuse.weights.folder import ModelFolder

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import Tensor

    from unfuse.stages.denoise import NoiseScheduler
    from unfuse.stages.image_encode import Redraw


FAST_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")  # classes as which any tokenizer may be saved
T5_TOKENIZERS = ("T5TokenizerFast", "T5Tokenizer", *FAST_TOKENIZERS)
CLIP_TOKENIZERS = ("CLIPTokenizer", "CLIPTokenizerFast")


def text_stage(sizes: Mapping[str, int], guidance_param: str = "true_cfg_scale", suffix: str = "") -> StageSpec:
    """Return the stage that encodes prompt and negative prompt with one text encoder.

    `sizes`: the most bytes of each output. `suffix`: of the names of stage and components, such as "_2".
    """
    return replace(
        TEXT_ENCODE,
        name=TEXT_ENCODE.name + suffix,
        kind=TEXT_ENCODE.kind + suffix,
        components=(f"text_encoder{suffix}", f"tokenizer{suffix}"),
        outputs=(*sizes, *(NEGATIVE + name for name in sizes)),
        output_size=OutputSize(2 * sum(size + ALIGNMENT for size in sizes.values())),
        depends_on_params=("prompt", "negative_prompt", guidance_param, "max_sequence_length"),
        batch_invariant=True,
    )


def true_cfg_scale(params: Params) -> float:
    """Return the classifier-free guidance (CFG) scale; 1 without a negative prompt."""
    return 1.0 if params.get("negative_prompt") is None else need(params, "true_cfg_scale", float)


Shapes = Mapping[str, tuple[int | None, ...]]

PATCH = 2  # side of the square of latents that is one token of the transformer
USUAL_LATENTS = 128  # default side of an image in latents


@dataclass(frozen=True)
class PictureShape:
    """The sizes of an image's latents, as a grid or packed as patches."""

    channels: int  # of latents
    scale: int  # pixels per latent along a side
    multiple: int  # sides in pixels must be multiples of it
    usual: int  # default side in pixels
    longest: int  # longest side in pixels that the transformer supports

    @classmethod
    def of_vae(cls, folder: ModelFolder) -> PictureShape:
        """Read the VAE's configuration, for a transformer with patches. Raises ConfigError."""
        vae = folder.config("vae")
        with folder.reading("vae"):
            halvings = len(vae["temperal_downsample"]) if "z_dim" in vae else len(vae["block_out_channels"]) - 1
            channels, scale = int(vae["z_dim" if "z_dim" in vae else "latent_channels"]), 2**halvings
        return PictureShape(channels, scale, PATCH * scale, USUAL_LATENTS * scale, MediaLimits().max_size)

    def latent_size(self, width: int) -> OutputSize:
        """Return the size of latents in bytes, with `width` bytes per number."""
        return OutputSize(ALIGNMENT, self.channels * width / self.scale**2)

    def latents(self, params: Params) -> tuple[int, ...]:
        """Return a request's shape of latents, (1, channels, height, width)."""
        sides = (need(params, side, int) // self.scale for side in ("height", "width"))
        return (1, self.channels, *sides)

    def packable(self, params: Params) -> tuple[int, ...]:
        """Return that shape, (1, channels, height, width), rounded to whole patches."""
        rows, columns = self.patches(params)
        return 1, self.channels, PATCH * rows, PATCH * columns

    def patches(self, params: Params) -> tuple[int, int]:
        """Return the rows and columns of patches."""
        side = self.scale * PATCH
        return need(params, "height", int) // side, need(params, "width", int) // side

    def pack(self, grid: Tensor) -> Tensor:
        """Return latents (rows, channels, height, width) as (rows, patches, channels of a patch)."""
        count, channels, rows, columns = grid.shape
        tiled = grid.view(count, channels, rows // PATCH, PATCH, columns // PATCH, PATCH).permute(0, 2, 4, 1, 3, 5)
        return tiled.flatten(3).flatten(1, 2)

    def unpack(self, latents: Tensor, params: Params) -> Tensor:
        """Return patches as a video of one frame, (1, channels, 1, height, width)."""
        rows, columns = self.patches(params)
        grid = latents.view(1, rows, columns, -1, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5)
        return grid.reshape(1, -1, 1, PATCH * rows, PATCH * columns)


@dataclass(frozen=True)
class VideoShape:
    """The sizes of a video's latents, as a grid."""

    #: Channels of latents.
    channels: int
    #: Pixels per latent along a side.
    spatial: int
    #: Frames per latent along time. The first frame has a latent of its own.
    temporal: int

    @property
    def multiple(self) -> int:
        """Width and height in pixels must be multiples of this number, by the configurations."""
        return self.spatial

    def latent_size(self, width: int) -> OutputSize:
        """Return the size of latents in bytes, with `width` bytes per number."""
        return OutputSize(ALIGNMENT, self.channels * width / self.spatial**2, self.temporal)

    def grid(self, params: Params) -> tuple[int, int, int]:
        """Return the frames, height and width of a request's latents."""
        frames = (need(params, "num_frames", int) - 1) // self.temporal + 1
        return frames, need(params, "height", int) // self.spatial, need(params, "width", int) // self.spatial

    def latents(self, params: Params) -> tuple[int, ...]:
        """Return a request's shape of latents, (1, channels, frames, height, width)."""
        return (1, self.channels, *self.grid(params))

    def bounds(self, multiple: int, defaults: Params) -> MediaLimits:
        """Return the limits of requests: sides by `multiple`, at most twice the default length."""
        return MediaLimits(
            size_multiple=multiple,
            min_size=multiple,
            max_frames=2 * need(defaults, "num_frames", int) - 1,
            frame_multiple=self.temporal,
            max_sequence_length=need(defaults, "max_sequence_length", int),
        )


def need_channels(folder: ModelFolder, required: int, actual: int) -> None:
    """Raise ConfigError if the transformer's channels are not those that its VAE requires."""
    if required != actual:
        reason = f"the transformer's configuration has {actual} channels, but its VAE requires {required}"
        raise ConfigError(f"model {folder.path}: {reason}")


def norm(vae: Any, grid: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and 1/std of a video VAE's latents, each (1, channels, 1, 1, 1).

    Callers divide by 1/std, as pipelines do, because multiplying by std rounds differently.
    """
    import torch

    mean, deviation = (
        torch.tensor(values).view(1, -1, 1, 1, 1).to(grid)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, 1.0 / deviation


def shift(config: Mapping[str, Any], patches: int) -> float:
    """Return the timestep shift (mu) of a noise scheduler, linear in the number of patches."""
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    low_shift, high_shift = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (high_shift - low_shift) / (high - low)
    mu: float = patches * slope + (low_shift - slope * low)
    return mu


#: Schedulers that copy their noise levels (sigmas) to the device in each step. Theirs are moved once instead.
DEVICE_SIGMAS = ("UniPCMultistepScheduler",)


class FlowDenoiser:
    """A flow-matching denoiser: a transformer and its noise scheduler, with CFG by a negative prompt.

    `sizes` returns the shape of a request's latents. Families add the rest of the Denoiser interface.
    """

    dtype: torch.dtype
    embeds: Shapes
    masks: Shapes = {}
    conditions: Shapes = {}
    transformers: tuple[Any, ...]
    first = ""
    #: Returns the guidance scale.
    guidance = staticmethod(true_cfg_scale)
    #: The types of required parameters, beside the size.
    required_params: Mapping[str, Any] = {}
    #: Whether the pipeline calls `set_begin_index(0)`. Else the scheduler starts at the second of two equal timesteps.
    sets_begin = True

    def __init__(
        self, loader: Loader, sizes: Callable[[Params], tuple[int, ...]], component: str = "transformer"
    ) -> None:
        self._sizes = sizes
        self._scheduler, self._transformer = loader.noise_scheduler(), loader.model(component)
        self.device = loader.device
        self.dtype = self._transformer.dtype
        self.transformers = (self._transformer,)

    def verify(self, params: Params) -> None:
        """Raise PermanentError for a size that does not fit, or a missing parameter."""
        self._sizes(params)
        for name, kind in self.required_params.items():
            need(params, name, kind)

    def noise_dtype(self, params: Params) -> torch.dtype | None:
        """Return the dtype in which noise is drawn; None for float32."""
        return None

    def sample_noise(self, params: Params, generator: torch.Generator) -> Tensor:
        """Return noise in the shape of the request's latents."""
        return draw_noise(self._sizes(params), generator, self.noise_dtype(params))

    def constants(self, params: Params, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return {}: the transformer needs no further inputs."""
        return {}

    def noise_scheduler(self, params: Params, latents: Tensor) -> NoiseScheduler:
        """Return a noise scheduler with the timesteps of its configuration."""
        return self._fresh(latents, num_inference_steps=need(params, "num_inference_steps", int))

    def combine(self, towards: Tensor, away: Tensor, scale: float, phase: Hashable, params: Params) -> Tensor:
        """Return the guided prediction: `away`, plus `scale` times the difference to `towards`."""
        return away + scale * (towards - away)

    def phases(self, timesteps: Tensor) -> Sequence[Hashable]:
        """Return (), for each timestep: all of them use the same transformer."""
        return ((),) * len(timesteps)

    def rows_per_latent(self, latents: Tensor) -> int:
        """Return 1: a row has one timestep."""
        return 1

    def finish_latents(self, latents: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the latents unchanged."""
        return latents

    def _fresh(self, latents: Tensor, **timesteps: Any) -> NoiseScheduler:
        """Return a new noise scheduler with these timesteps. Raises UnsupportedRequest."""
        # A request has a scheduler of its own, because `step` changes its state.
        fresh = type(self._scheduler).from_config(self._scheduler.config)
        try:
            fresh.set_timesteps(device=latents.device, **timesteps)
        except READ_ERRORS as error:
            raise UnsupportedRequest(f"the model's noise scheduler does not accept these steps: {error}") from error
        if type(fresh).__name__ in DEVICE_SIGMAS:
            fresh.sigmas = fresh.sigmas.to(latents.device)
        if self.sets_begin:
            fresh.set_begin_index(0)
        scheduler: NoiseScheduler = fresh
        return scheduler

    def shifted(self, params: Params, latents: Tensor) -> NoiseScheduler:
        """Return a noise scheduler with the timestep shift for (rows, patches, …) latents."""
        import numpy as np

        steps, mu = need(params, "num_inference_steps", int), shift(self._scheduler.config, latents.shape[1])
        return self._fresh(latents, sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)

    def _predicted(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the transformer's output."""
        predicted: Tensor = self._transformer(*args, **kwargs, return_dict=False)[0]
        return predicted


class PictureEncoder:
    """The base of image encoders."""

    #: Whether images are encoded one by one, each in its own size instead of the requested one.
    one_by_one = False
    #: Uploads that a request may have beside `image`. The pipeline declares which of them it reads.
    extra_uploads: Sequence[str] = ()
    #: The VAE that encodes the images.
    vae: Any

    def verify(self, params: Params) -> None:
        """Accept all parameters, because none is read."""

    def size(self, pictures: Mapping[str, Sequence[Image]], params: Params) -> tuple[int, int]:
        """Return the requested height and width, to which images are stretched."""
        return need(params, "height", int), need(params, "width", int)


class GridVae:
    """A VaeDecoder for latents in a grid that were normalized by channel."""

    def __init__(self, loader: Loader, channels: str = "z_dim") -> None:
        self.vae, self.device = loader.vae(), loader.device
        self.latents: tuple[int | None, ...] = (1, int(self.vae.config[channels]), None, None, None)
        self._norms: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def norm(self, grid: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and 1/std of the latents, on a grid's device and in its dtype."""
        key = grid.device, grid.dtype
        if key not in self._norms:
            self._norms[key] = norm(self.vae, grid)
        return self._norms[key]

    def unpack(self, latents: Tensor, params: Params) -> Tensor:
        """Return the latents on the VAE's device, in its dtype."""
        from unfuse.stages.device_copies import to_device

        return to_device(latents, self.device, self.vae.dtype)

    def decode(self, grid: Tensor) -> Tensor:
        """Return pixels (rows, 3, frames, height, width)."""
        mean, scale = self.norm(grid)
        return self._decoded(grid / scale + mean)

    def _decoded(self, grid: Tensor) -> Tensor:
        """Return the VAE's output."""
        pixels: Tensor = self.vae.decode(grid, return_dict=False)[0]
        return pixels


NAMED = {"image": "Img2Img", "mask": "Inpaint"}  # the parts of diffusers' class names, by upload


def forces_upcast(vae: Any) -> bool:
    """Return whether a VAE's configuration requests float32; False on the meta device."""
    return bool(vae.config.get("force_upcast")) and not any(weight.is_meta for weight in vae.parameters())


@contextmanager
def computing_in(vae: Any, dtype: torch.dtype) -> Iterator[None]:
    """Cast a VAE to another dtype for the duration of the block."""
    original = vae.dtype
    if original == dtype:
        yield
        return
    vae.to(dtype)
    try:
        yield
    finally:
        vae.to(original)


class PictureVae(PictureEncoder):
    """The VAE as an ImageEncoder, in float32 if it `upcasts`. Images are stretched."""

    extra_uploads: Sequence[str] = (MASK,)

    def __init__(self, loader: Loader, upcasts: bool = False) -> None:
        self.vae, self._device = loader.vae(), loader.device
        self._upcasts = upcasts and forces_upcast(self.vae)

    @override
    def verify(self, params: Params) -> None:
        """Raise PermanentError without a size."""
        self.size({}, params)

    def encode(self, pictures: Mapping[str, Sequence[Image]], params: Params) -> dict[str, Tensor]:
        """Return `moments` (images, 2 * channels, height, width) of the latents' distribution."""
        from diffusers.image_processor import VaeImageProcessor

        size = self.size(pictures, params)
        pixels = VaeImageProcessor(vae_scale_factor=1).preprocess(list(pictures[UPLOAD]), *size)
        dtype = self.vae.dtype
        pixels = pixels.to(self._device, dtype)
        if "z_dim" in self.vae.config:  # a video VAE: the picture is its only frame
            pixels = pixels.unsqueeze(2)
        if self._upcasts:
            pixels = pixels.float()
        with computing_in(self.vae, pixels.dtype):
            moments = self.vae.encode(pixels).latent_dist.parameters
        return {"moments": moments.reshape(*moments.shape[:2], *moments.shape[-2:])}


class PictureFamily(DiffusersFamily):
    """A text-to-image family. The negative prompt has no default."""

    #: The uploads that a request may have. For each, the call of a pipeline of diffusers has the default strength.
    starts: Sequence[str] = ()
    packs = False  # whether the transformer's latents are packed as patches
    whole_steps = False  # whether a step that the strength omits in part is omitted
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
    def model_spec(self, name: str, folder: Path, dtype: str = "auto") -> ModelSpec:
        spec = super().model_spec(name, folder, dtype)
        if not self.starts:
            return spec
        shape = PictureShape.of_vae(ModelFolder(folder))
        width = DTYPES["float32" if self.upcasts else spec.dtypes["vae"]]
        bytes_per_pixel = (2 * shape.channels * width + DTYPES["float32"]) / shape.scale**2
        encode_stage = replace(REDRAW_ENCODE, output_size=OutputSize(2 * ALIGNMENT, bytes_per_pixel))

        def with_moments(stage: StageSpec) -> StageSpec:
            inputs = (*stage.inputs, *encode_stage.outputs) if stage.kind == DENOISE.kind else stage.inputs
            return replace(stage, inputs=inputs)

        return replace(
            spec,
            pipeline=Pipeline((encode_stage, *map(with_moments, spec.pipeline.stages))),
            accepts=tuple(AcceptedInput(name, "redraw", strength=self._default_strength(name)) for name in self.starts),
        )

    def _default_strength(self, upload: str) -> float:
        """Return the default strength of diffusers' pipeline for this upload: "image" or "mask"."""
        (file, name), infix = self.source, NAMED[upload]
        call = call_defaults(file.replace(".py", f"_{infix.lower()}.py"), name.replace("Pipeline", f"{infix}Pipeline"))
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

        if kind == REDRAW_ENCODE.kind:
            device = None if loader.runtime.group else loader.device
            return RedrawEncode(PictureVae(loader, self.upcasts), loader.runtime.options, device)
        return super().stage(kind, loader)


class GridDenoiser(FlowDenoiser):
    """A FlowDenoiser guided by `guidance_scale`, for latents in the transformer's dtype."""

    guidance = staticmethod(guidance_scale)

    @override
    def noise_dtype(self, params: Params) -> torch.dtype | None:
        return self.dtype


class GridPictureVae:
    """An AutoencoderKL as a VaeDecoder. With `cast_first` latents are scaled in its dtype."""

    def __init__(self, loader: Loader, cast_first: bool = False) -> None:
        self.vae, self._device = loader.vae(), loader.device
        self._cast_first = cast_first
        self.latents: tuple[int | None, ...] = (1, int(self.vae.config.latent_channels), None, None)

    def unpack(self, latents: Tensor, params: Params) -> Tensor:
        """Return the latents as a video of one frame."""
        from unfuse.stages.device_copies import to_device

        config, dtype = self.vae.config, self.dtype
        grid = to_device(latents, self._device, dtype if self._cast_first else None) / config.scaling_factor
        shifted: Tensor = grid if config.shift_factor is None else grid + config.shift_factor
        return shifted.to(dtype).unsqueeze(2)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the VAE decodes."""
        dtype: torch.dtype = self.vae.dtype
        return dtype

    def decode(self, grid: Tensor) -> Tensor:
        """Return pixels (rows, 3, 1, height, width)."""
        pixels: Tensor = self.vae.decode(grid.squeeze(2), return_dict=False)[0]
        return pixels.unsqueeze(2)


class PackedDenoiser(FlowDenoiser):
    """A FlowDenoiser of packed latents. Families add `predict`."""

    def __init__(self, loader: Loader, shape: PictureShape) -> None:
        super().__init__(loader, shape.packable)
        self._shape = shape

    @override
    def noise_dtype(self, params: Params) -> torch.dtype | None:
        """Return the transformer's dtype, which is the embeddings' when undivided."""
        return self.dtype

    @override
    def sample_noise(self, params: Params, generator: torch.Generator) -> Tensor:
        return self._shape.pack(super().sample_noise(params, generator))

    noise_scheduler = FlowDenoiser.shifted


class VideoFamily(DiffusersFamily):
    """A text-to-video family, with its class's frame rate. The negative prompt has no default."""

    pixel_multiple: int  # the pipeline requires sides to be multiples of it, whatever the VAE
    float32_latents = True

    @override
    def standard(self, folder: ModelFolder) -> Params:
        self.shape(folder)
        return {"fps": frame_rate(folder.kind, folder.index(), {}), "negative_prompt": None}

    @override
    def limits(self, folder: ModelFolder, defaults: Params) -> MediaLimits:
        shape: VideoShape = self.shape(folder)
        return shape.bounds(lcm(self.pixel_multiple, shape.multiple), defaults)
