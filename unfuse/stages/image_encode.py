"""Image encoding: the picture that a request brings becomes what its denoising starts from.

Redrawing: denoising starts from the picture, with as much noise as the strength says, and keeps what a mask does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from PIL import Image
from torch import Tensor
from typing_extensions import override

from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.errors import InvalidParameter, PermanentError
from unfuse.core.modalities import MASK, UPLOAD
from unfuse.core.pixels import read_alpha, read_rgb
from unfuse.core.plan import Params
from unfuse.stages.base import Stage, StageInput, StageOutput, Tensors, need


class ImageEncoder(Protocol):
    """What a family says about pictures: image encoder, VAE, or both in memory."""

    beside: Sequence[str]
    """Uploads that a request may bring beside `image`; what its pipeline says it reads."""
    each: bool
    """Whether pictures are encoded one by one, in sizes of their own, whatever size is asked for."""

    def verify(self, params: Params) -> None:
        """Raise PermanentError unless the parameters hold what `encode` reads."""

    def encode(self, pictures: Mapping[str, Sequence[Image.Image]], params: Params) -> Tensors:
        """Tensors by name, with a batch axis of one row a request.

        `pictures` has those of each request, in order, by the name of the upload. `params` are any request's: sizes
        agree.
        """


class ImageEncode(Stage):
    """The upload `image` in, and others that a request has beside it; whatever the family makes of them out."""

    kind = "image_encode"
    uploads = (UPLOAD,)

    @override
    def batch_key(self, task: StageInput) -> Hashable:
        brings = self.uploads_of(task.derived)
        return brings if self._encoder.each else (brings, super().batch_key(task))

    @override
    def uploads_of(self, derived: DerivedFacts) -> Sequence[str]:
        return (UPLOAD, *(name for name in self._encoder.beside if name in derived.pictures))

    def __init__(self, encoder: ImageEncoder) -> None:
        self._encoder = encoder

    def verify(self, task: StageInput) -> None:
        """Raise PermanentError unless there is an upload, and the parameters the family reads."""
        if UPLOAD not in task.uploads:
            raise PermanentError(f"upload {UPLOAD} is missing")
        self._encoder.verify(task.params)

    @torch.no_grad()
    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        """Encode all at once, or one by one."""
        if self._encoder.each and len(batch) > 1:
            return [output for task in batch for output in self.run([task])]
        names = [name for name in self.uploads_of(batch[0].derived) if name != MASK]
        pictures = {name: [read_picture(task.uploads[name]) for task in batch] for name in names}
        together = self._encoder.encode(pictures, batch[0].params)
        rows = [slice(row, row + 1) for row in range(len(batch))]
        return [
            StageOutput({name: value if value is None else value[row] for name, value in together.items()})
            for row in rows
        ]


def read_picture(data: bytes) -> Image.Image:
    """Return an upload as RGB, composited on white, with EXIF rotation applied.

    Raises PermanentError if it is not a complete picture.
    """
    return _read(read_rgb, data, "the picture")


def read_mask(data: bytes) -> Image.Image:
    """Return the alpha channel of an upload (mode L). Raises PermanentError as `read_picture` does."""
    return _read(read_alpha, data, "the mask")


def _read(read: Callable[[bytes, str], Image.Image], data: bytes, name: str) -> Image.Image:
    try:
        return read(data, name)
    except InvalidParameter as error:
        raise PermanentError(str(error)) from error


MOMENTS = "moments"


class KeptLatents(NamedTuple):
    """A picture's latents, the noise of its request, and where denoising changes them: there the mask is 1."""

    latents: Tensor
    noise: Tensor
    mask: Tensor

    def over(self, scheduler: Any, latents: Tensor, step: int) -> Tensor:
        """Latents after so many steps, and where they are not to change those of the picture, which are as noisy."""
        following = scheduler.timesteps[step : step + 1]
        kept = noised(scheduler, self.latents, self.noise, following) if len(following) else self.latents
        return (1 - self.mask) * kept + self.mask * latents


class DenoiseStart(NamedTuple):
    """Where denoising begins: with which latents, after how many steps, and what it keeps."""

    latents: Tensor
    step: int = 0
    kept: KeptLatents | None = None


@dataclass(frozen=True)
class Redraw:
    """How a family's pipelines redraw, by the configuration of its VAE, with latents of these channels, in the dtype of
    the transformer. `pack` makes of a grid what the transformer sees; `whole`: what is less than a step is not made;
    `repeats`: beside a mask latents are repeated, and lie otherwise then.
    """

    config: Mapping[str, Any]
    channels: int
    dtype: torch.dtype
    pack: Callable[[Tensor], Tensor] | None = None
    whole: bool = False
    repeats: bool = False

    def shapes(self, task: StageInput) -> dict[str, tuple[int | None, ...]]:
        """Of what it needs of a task, to redraw its picture, if there is one. Raises PermanentError."""
        given = {MOMENTS: (1, 2 * self.channels, None, None), MASK: (1, 1, None, None)}
        found: dict[str, tuple[int | None, ...]] = {
            name: shape for name, shape in given.items() if task.tensors.get(name) is not None
        }
        if found and self._skipped(task.params) >= need(task.params, "num_inference_steps", int):
            raise PermanentError("strength leaves no step to make: send more")
        return found

    def draw(self, moments: Tensor, generator: torch.Generator) -> Tensor:
        """A grid drawn from what the VAE says of a picture, shifted and scaled."""
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        as_pictures = moments.clone(memory_format=torch.channels_last)  # as the VAE made them: see `layout`
        drawn = DiagonalGaussianDistribution(as_pictures).sample(generator).to(self.dtype)
        shift, scale = self.config.get("shift_factor"), self.config.get("scaling_factor", 0.18215)
        if self.config.get("latents_mean"):
            named = (torch.tensor(self.config[f"latents_{name}"]).view(1, -1, 1, 1) for name in ("mean", "std"))
            shift, deviation = (values.to(drawn) for values in named)
            scale = 1.0 / deviation
        shifted = drawn if shift is None else drawn - shift
        found: Tensor = shifted * scale
        return found

    def begin(self, task: StageInput, grid: Tensor, noise: Tensor, scheduler: Any) -> DenoiseStart:
        """From the picture's latents in this grid; with a mask and all steps from the noise alone."""
        step, mask = self._skipped(task.params), task.tensors.get(MASK)
        latents = self._arranged(grid.contiguous() if self.repeats and mask is not None else grid)
        scheduler.set_begin_index(step)
        if latents.shape != noise.shape:
            raise PermanentError(f"latents of the picture are {tuple(grid.shape)}, which is another size")
        started = noised(scheduler, latents, noise, scheduler.timesteps[step : step + 1])
        if mask is None:
            return DenoiseStart(started, step)
        kept = KeptLatents(latents, noise, self._arranged(mask.to(grid)))
        return DenoiseStart(scaled(scheduler, noise) if task.params["strength"] == 1 else started, step, kept)

    def _arranged(self, grid: Tensor) -> Tensor:
        return self.pack(grid.expand(-1, self.channels, -1, -1)) if self.pack else grid

    def _skipped(self, params: Params) -> int:
        steps = need(params, "num_inference_steps", int)
        made = min(steps * need(params, "strength", float), steps)
        return steps - int(made) if self.whole else int(steps - made)


def noised(scheduler: Any, latents: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
    """Latents as noisy as before the step that the scheduler makes next."""
    flows = hasattr(scheduler, "scale_noise")
    given = (latents, timestep, noise) if flows else (latents, noise, timestep)
    made: Tensor = (scheduler.scale_noise if flows else scheduler.add_noise)(*given)
    return made


def scaled(scheduler: Any, noise: Tensor) -> Tensor:
    """Noise as the first latents of a scheduler that goes all the way."""
    return noise * getattr(scheduler, "init_noise_sigma", 1.0)


def layout(latents: Tensor) -> torch.memory_format:
    """How a grid lies in memory: as pictures do, if it began as one, for convolutions round otherwise there."""
    as_pictures = latents.ndim == 4 and not latents.is_contiguous()
    return torch.channels_last if as_pictures else torch.contiguous_format


class RedrawEncode(ImageEncode):
    """The upload `image` in, and `mask` if there is one; what the VAE says of the picture out, and where it changes."""

    kind = "redraw_encode"

    @override
    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        made = zip(batch, super().run(batch), strict=True)
        return [StageOutput({**output.tensors, MASK: _mask(task, output)}) for task, output in made]


def _mask(task: StageInput, encoded: StageOutput) -> Tensor | None:
    """1 for latents that change, which are those in whose places the mask is transparent, else 0."""
    from diffusers.image_processor import VaeImageProcessor

    if MASK not in task.uploads or (moments := encoded.tensors[MOMENTS]) is None:
        return None
    alpha = read_mask(task.uploads[MASK])
    processor = VaeImageProcessor(vae_scale_factor=1, do_normalize=False, do_binarize=True, do_convert_grayscale=True)
    size = {side: need(task.params, side, int) for side in ("height", "width")}
    changes = processor.preprocess(Image.eval(alpha, lambda opaque: 255 - opaque), **size)
    return torch.nn.functional.interpolate(changes, size=tuple(moments.shape[-2:]))
