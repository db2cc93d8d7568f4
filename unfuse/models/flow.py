"""What families share about denoising and decoding: a noise scheduler a request, plain guidance, normed channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from unfuse.core.errors import ConfigError
from unfuse.core.plan import Params
from unfuse.models.base import Loader
from unfuse.models.folder import ModelFolder

if TYPE_CHECKING:
    from torch import Tensor

    from unfuse.stages.denoise import NoiseScheduler

Shapes = Mapping[str, tuple[int | None, ...]]


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


class FlowDenoiser:
    """Transformer and the configuration of its noise scheduler; the rest of a Denoiser is for its family to say."""

    embeds: Shapes
    masks: Shapes = {}
    conditions: Shapes = {}
    transformers: tuple[Any, ...]

    def __init__(self, loader: Loader) -> None:
        self._scheduler, self._transformer = loader.noise_scheduler(), loader.model("transformer")
        self.device, self.dtype, self.transformers = loader.device, self._transformer.dtype, (self._transformer,)

    def constants(self, params: Params) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def combine(self, towards: Tensor, away: Tensor, scale: float, timestep: Tensor, params: Params) -> Tensor:
        """See Denoiser: so many times the way from the one to the other."""
        return away + scale * (towards - away)

    def settle(self, latents: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """See Denoiser: as they are."""
        return latents

    def _fresh(self, latents: Tensor, **given: Any) -> NoiseScheduler:
        """A new noise scheduler of the same configuration, with these timesteps."""
        fresh = type(self._scheduler).from_config(self._scheduler.config)
        fresh.set_timesteps(device=latents.device, **given)
        fresh.set_begin_index(0)
        found: NoiseScheduler = fresh
        return found
