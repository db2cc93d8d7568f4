"""What families share about denoising and decoding: a noise scheduler a request, plain guidance, normed channels."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unfuse.core.errors import ConfigError, Unsuitable
from unfuse.core.media import Limits, Room
from unfuse.core.object_ref import ALIGNMENT, DTYPES
from unfuse.core.plan import Params
from unfuse.models.base import Loader
from unfuse.models.noise_schedulers import READ_ERRORS
from unfuse.models.text import true_cfg_scale
from unfuse.stages.base import need
from unfuse.weights.folder import ModelFolder

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from unfuse.stages.denoise import NoiseScheduler

Shapes = Mapping[str, tuple[int | None, ...]]

PATCH = 2  # side of the square of latents that the transformer sees as one


@dataclass(frozen=True)
class Packing:
    """Channels of latents, and how many pixels one stands for along a side."""

    channels: int
    scale: int

    @classmethod
    def of(cls, folder: ModelFolder) -> Packing:
        """Read the VAE's configuration. Raises ConfigError."""
        vae = folder.config("vae")
        with folder.reading("vae"):
            if "z_dim" in vae:
                return Packing(int(vae["z_dim"]), 2 ** len(vae["temperal_downsample"]))
            return Packing(int(vae["latent_channels"]), 2 ** (len(vae["block_out_channels"]) - 1))

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
    def room(self) -> Room:
        """What they take, in float32."""
        return Room(ALIGNMENT, self.channels * DTYPES["float32"] / self.spatial**2, self.temporal)

    def grid(self, params: Params) -> tuple[int, int, int]:
        """Frames, height and width of a request's latents."""
        frames = (need(params, "num_frames", int) - 1) // self.temporal + 1
        return frames, need(params, "height", int) // self.spatial, need(params, "width", int) // self.spatial

    def latents(self, params: Params) -> tuple[int, ...]:
        """(1, channels, frames, height, width) of a request's latents."""
        return (1, self.channels, *self.grid(params))

    def bounds(self, multiple: int, defaults: Params) -> Limits:
        """What can be asked for, sides being multiples: twice the default length of a video at most."""
        return Limits(
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

    def draw(self, params: Params, generator: torch.Generator) -> Tensor:
        """Float32 (1, channels, frames, height, width)."""
        import torch

        return torch.randn(self._sizes(params), generator=generator, device=generator.device)

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


class GridVae:
    """A VAE whose latents come as a grid, and were normalised per channel; a VaeDecoder."""

    def __init__(self, loader: Loader, channels: str) -> None:
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
