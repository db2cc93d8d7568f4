"""Image encoding: the uploaded picture of a request becomes the input of its denoising.

Redraw (image to image, inpainting): denoising starts from the picture with noise by the strength. A mask keeps parts of
the picture unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from PIL import Image
from torch import Tensor
from typing_extensions import override

from unfuse.core.compute_options import ComputeOptions
from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.errors import InvalidParameter, PermanentError
from unfuse.core.modalities import MASK, UPLOAD
from unfuse.core.pixels import read_alpha, read_rgb
from unfuse.core.plan import Params
from unfuse.stages.base import OneStepState, Stage, StageInput, StageOutput, Tensors, need
from unfuse.stages.noise import draw_noise
from unfuse.stages.vae_memory import Size, VaeModes


class ImageEncoder(Protocol):
    """What a model family provides for image encoding: an image encoder, a VAE, or both."""

    #: Uploads that a request may have besides `image`. The family's pipeline decides which it reads.
    extra_uploads: Sequence[str]
    #: Whether pictures are encoded one by one, in their own sizes, whatever size is requested.
    one_by_one: bool
    #: The VAE of diffusers, whose encode can need less memory; None without one.
    vae: Any

    def verify(self, params: Params) -> None:
        """Raise PermanentError unless the parameters have what `encode` reads."""

    def size(self, pictures: Mapping[str, Sequence[Image.Image]], params: Params) -> tuple[int, int]:
        """Return height and width, in pixels, of the largest picture as the VAE encodes it.

        The arguments are those of `encode`.
        """

    def encode(self, pictures: Mapping[str, Sequence[Image.Image]], params: Params) -> Tensors:
        """Return tensors by name, each (requests, …): one row per request.

        `pictures`: the pictures of all requests, in order, by the name of the upload. `params`: those of any of the
        requests, because their sizes are equal.
        """


class ImageEncode(Stage):
    """The image encoder stage: the upload `image` and further ones in, the family's tensors out.

    An encode that runs out of memory is repeated in smaller tiles. `device`: None if ranks must agree on the tiles.
    """

    kind = "image_encode"
    uploads = (UPLOAD,)

    @override
    def batch_key(self, task: StageInput) -> Hashable:
        uploads = self.uploads_of(task.derived)
        return uploads if self._encoder.one_by_one else (uploads, super().batch_key(task))

    @override
    def uploads_of(self, derived: DerivedFacts) -> Sequence[str]:
        return (UPLOAD, *(name for name in self._encoder.extra_uploads if name in derived.image_hashes))

    def __init__(
        self, encoder: ImageEncoder, options: ComputeOptions | None = None, device: torch.device | None = None
    ) -> None:
        self._encoder = encoder
        self._modes = VaeModes.create(encoder.vae, options, device)

    def verify(self, task: StageInput) -> None:
        """Raise PermanentError unless the upload and the family's parameters are present."""
        if UPLOAD not in task.uploads:
            raise PermanentError(f"upload {UPLOAD} is missing")
        self._encoder.verify(task.params)

    @torch.no_grad()
    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        """Encode all requests in one call, or one by one if the family requires it."""
        if self._encoder.one_by_one and len(batch) > 1:
            return [output for task in batch for output in self.run([task])]

        pictures = self._read_pictures(batch)
        mode = self._modes.mode(self._latents(pictures, batch[0].params))
        with self._modes.use(mode):
            encoded = self._encoder.encode(pictures, batch[0].params)

        rows = [slice(row, row + 1) for row in range(len(batch))]
        return [
            StageOutput({name: value if value is None else value[row] for name, value in encoded.items()}, vae=mode.vae)
            for row in rows
        ]

    @override
    def reduce_memory(self, state: OneStepState) -> OneStepState | None:
        latents = self._latents(self._read_pictures([state.task]), state.task.params)
        return state if self._modes.reduce(latents, self._modes.mode(latents)) else None

    def _read_pictures(self, batch: Sequence[StageInput]) -> dict[str, list[Image.Image]]:
        """Return the pictures of tasks that the VAE encodes, by the name of the upload."""
        # `RedrawEncode` scales the mask to the latents; the VAE does not encode it.
        names = [name for name in self.uploads_of(batch[0].derived) if name != MASK]
        return {name: [read_image(task.uploads[name]) for task in batch] for name in names}

    def _latents(self, pictures: Mapping[str, Sequence[Image.Image]], params: Params) -> Size:
        """Return the size of the latents of the largest picture; () without a VAE."""
        return self._modes.latents(*self._encoder.size(pictures, params)) if self._encoder.vae is not None else ()


def read_image(data: bytes) -> Image.Image:
    """Return an upload as RGB, composited on white, with EXIF rotation applied.

    Raises PermanentError if it is not a complete picture.
    """
    return _read_or_fail(read_rgb, data, "the picture")


def read_mask(data: bytes) -> Image.Image:
    """Return the alpha channel of an upload (mode L). Raises PermanentError as `read_image` does."""
    return _read_or_fail(read_alpha, data, "the mask")


def _read_or_fail(read: Callable[[bytes, str], Image.Image], data: bytes, name: str) -> Image.Image:
    """Read a picture. Raises PermanentError for InvalidParameter."""
    try:
        return read(data, name)
    except InvalidParameter as error:
        raise PermanentError(str(error)) from error


#: The tensor with the mean and log-variance that the VAE computes of a picture.
MOMENTS = "moments"


class KeptLatents(NamedTuple):
    """The latents of a picture that must stay where its mask is 0.

    All three have the shape of the request's latents; the mask may have one channel only.
    """

    #: The latents of the picture, without noise.
    latents: Tensor
    #: The noise of the request.
    noise: Tensor
    #: 1 where denoising changes the picture, else 0.
    mask: Tensor

    def apply_to(self, scheduler: Any, latents: Tensor, step: int) -> Tensor:
        """Return latents after a step, with the picture's latents where the mask is 0.

        `step`: the number of steps done. The picture's latents get as much noise as the next step expects, none after
        the last.
        """
        next_timestep = scheduler.timesteps[step : step + 1]
        picture_latents = (
            noised(scheduler, self.latents, self.noise, next_timestep) if len(next_timestep) else self.latents
        )
        return (1 - self.mask) * picture_latents + self.mask * latents


class DenoiseStart(NamedTuple):
    """The start of denoising."""

    #: The first latents.
    latents: Tensor
    #: How many steps are skipped.
    step: int = 0
    #: The latents of the picture that must stay where its mask is 0; None without a mask.
    kept_latents: KeptLatents | None = None


@dataclass(frozen=True)
class Redraw:
    """Redraws pictures as a family's pipelines do (image to image, inpainting)."""

    #: The configuration of the VAE.
    config: Mapping[str, Any]
    #: Channels of the latents.
    channels: int
    #: The dtype of the transformer.
    dtype: torch.dtype
    #: Turns a grid, (1, channels, height, width), into the transformer's latents; None: they are the grid.
    pack: Callable[[Tensor], Tensor] | None = None
    #: Whether a fraction of a step is skipped; else it is computed as a whole step.
    rounds_up: bool = False
    #: Whether the pipeline copies the latents if there is a mask, which changes their memory layout.
    repeats: bool = False

    def shapes(self, task: StageInput) -> dict[str, tuple[int | None, ...]]:
        """Return the shapes of the tensors that redrawing needs, by name.

        Empty for a task without a picture. Raises PermanentError if the strength leaves no step to compute.
        """
        known_shapes = {MOMENTS: (1, 2 * self.channels, None, None), MASK: (1, 1, None, None)}
        shapes: dict[str, tuple[int | None, ...]] = {
            name: shape for name, shape in known_shapes.items() if task.tensors.get(name) is not None
        }

        if shapes and self._skipped_steps(task.params) >= need(task.params, "num_inference_steps", int):
            raise PermanentError("strength leaves no denoising step to run: send a larger strength")
        return shapes

    def sample_latents(self, moments: Tensor, generator: torch.Generator) -> Tensor:
        """Sample a latent grid from the VAE's moments of a picture, shifted and scaled.

        `moments`: (1, 2 × channels, height, width). Returns (1, channels, height, width) in the transformer's dtype.
        """
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        channels_last_moments = moments.clone(memory_format=torch.channels_last)  # the layout that the VAE returns
        distribution = DiagonalGaussianDistribution(channels_last_moments)
        noise = draw_noise(distribution.mean.shape, generator, distribution.mean.dtype).to(moments.device)
        sample = (distribution.mean + distribution.std * noise).to(self.dtype)

        shift, scale = self.config.get("shift_factor"), self.config.get("scaling_factor", 0.18215)
        if self.config.get("latents_mean"):
            statistics = (torch.tensor(self.config[f"latents_{name}"]).view(1, -1, 1, 1) for name in ("mean", "std"))

            shift, deviation = (values.to(sample) for values in statistics)
            scale = 1.0 / deviation

        shifted_sample = sample if shift is None else sample - shift
        latents: Tensor = shifted_sample * scale
        return latents

    def start(self, task: StageInput, grid: Tensor, noise: Tensor, scheduler: Any) -> DenoiseStart:
        """Return the start of denoising from a picture's latent grid.

        With a mask and a strength of 1, the first latents are noise only. Raises PermanentError if the picture's
        latents have another size than the noise.
        """
        step, mask = self._skipped_steps(task.params), task.tensors.get(MASK)
        latents = self._pack_grid(grid.contiguous() if self.repeats and mask is not None else grid)

        scheduler.set_begin_index(step)
        if latents.shape != noise.shape:
            raise PermanentError(f"the picture's latents have the shape {tuple(grid.shape)}, which is the wrong size")

        noisy_latents = noised(scheduler, latents, noise, scheduler.timesteps[step : step + 1])

        if mask is None:
            return DenoiseStart(noisy_latents, step)
        kept_latents = KeptLatents(latents, noise, self._pack_grid(mask.to(grid)))
        return DenoiseStart(
            scaled(scheduler, noise) if task.params["strength"] == 1 else noisy_latents, step, kept_latents
        )

    def _pack_grid(self, grid: Tensor) -> Tensor:
        """Return a grid, (1, 1 or channels, height, width), as the transformer's latents."""
        return self.pack(grid.expand(-1, self.channels, -1, -1)) if self.pack else grid

    def _skipped_steps(self, params: Params) -> int:
        """Return how many steps are skipped by the request's strength."""
        steps = need(params, "num_inference_steps", int)
        computed = min(steps * need(params, "strength", float), steps)
        return steps - int(computed) if self.rounds_up else int(steps - computed)


def noised(scheduler: Any, latents: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
    """Return latents with the noise level of this timestep.

    `latents`, `noise`: of equal shape. `timestep`: (1,). Returns the same shape.
    """
    is_flow_matching = hasattr(scheduler, "scale_noise")
    args = (latents, timestep, noise) if is_flow_matching else (latents, noise, timestep)
    noisy_latents: Tensor = (scheduler.scale_noise if is_flow_matching else scheduler.add_noise)(*args)
    return noisy_latents


def scaled(scheduler: Any, noise: Tensor) -> Tensor:
    """Return noise as the first latents of a scheduler that runs all steps. Same shape."""
    return noise * getattr(scheduler, "init_noise_sigma", 1.0)


def layout(latents: Tensor) -> torch.memory_format:
    """Return the memory layout of latents: channels-last if they came from a picture.

    Convolutions round differently by layout.
    """
    is_channels_last = latents.ndim == 4 and not latents.is_contiguous()
    return torch.channels_last if is_channels_last else torch.contiguous_format


class RedrawEncode(ImageEncode):
    """The redraw encoder stage: `image` and an optional `mask` in, `moments` and `mask` out."""

    kind = "redraw_encode"

    @override
    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        encoded = zip(batch, super().run(batch), strict=True)
        return [
            StageOutput({**output.tensors, MASK: _latent_mask(task, output)}, vae=output.vae)
            for task, output in encoded
        ]


def _latent_mask(task: StageInput, encoded: StageOutput) -> Tensor | None:
    """Return a mask of the latents that change; None without an uploaded mask or picture.

    Its shape is (1, 1, latent height, latent width): 1 for latents that change, else 0. Latents change where the
    uploaded mask is transparent.
    """
    from diffusers.image_processor import VaeImageProcessor

    if MASK not in task.uploads or (moments := encoded.tensors[MOMENTS]) is None:
        return None

    alpha = read_mask(task.uploads[MASK])

    processor = VaeImageProcessor(vae_scale_factor=1, do_normalize=False, do_binarize=True, do_convert_grayscale=True)
    size = {side: need(task.params, side, int) for side in ("height", "width")}
    change_mask = processor.preprocess(Image.eval(alpha, lambda opacity: 255 - opacity), **size)
    return torch.nn.functional.interpolate(change_mask, size=tuple(moments.shape[-2:]))
