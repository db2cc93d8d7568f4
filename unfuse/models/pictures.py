"""What families share whose latents are a picture: (rows, channels, height, width)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from unfuse.core.media import Limits
from unfuse.core.plan import Params
from unfuse.models.base import Loader
from unfuse.models.flow_matching import FlowDenoiser
from unfuse.models.redraw import Redrawing
from unfuse.models.text import TruthfulText
from unfuse.stages.base import need
from unfuse.stages.guidance import guidance_scale
from unfuse.weights.folder import ModelFolder

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from unfuse.stages.vae_decode import VaeDecoder


@dataclass(frozen=True)
class LatentGrid:
    """Channels of latents, how many pixels one stands for along a side, and what sides in pixels must divide by."""

    channels: int
    scale: int
    multiple: int
    usual: int  # the side in pixels that nobody has to ask for
    longest: int = Limits().max_size  # the longest side in pixels that the transformer knows

    def latents(self, params: Params) -> tuple[int, ...]:
        """(1, channels, height, width) of a request's latents."""
        sides = (need(params, side, int) // self.scale for side in ("height", "width"))
        return (1, self.channels, *sides)


class ProjectedClip(TruthfulText):
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
    def draw(self, params: Params, generator: torch.Generator) -> Tensor:
        import torch

        return torch.randn(self._sizes(params), generator=generator, device=generator.device, dtype=self.dtype)


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


class GridFamily(Redrawing):
    """Pictures only; a folder with other components than these is served undivided."""

    shape: Callable[[ModelFolder], Any]
    """Reads its LatentGrid. Raises ConfigError for configurations that do not fit each other."""
    vae: Callable[[Loader], VaeDecoder] = GridPictureVae
    else_whole = True

    @override
    def standard(self, folder: ModelFolder) -> Params:
        side = self.shape(folder).usual
        return {"width": side, "height": side, "num_frames": 1, "negative_prompt": None}

    @override
    def limits(self, folder: ModelFolder, defaults: Params) -> Limits:
        shape, length = self.shape(folder), need(defaults, "max_sequence_length", int)
        return Limits(
            size_multiple=shape.multiple,
            min_size=shape.multiple,
            max_size=min(Limits().max_size, shape.longest),
            frame_multiple=1,
            max_sequence_length=length,
        )
