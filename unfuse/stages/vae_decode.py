"""VAE decoding: latents become pixels, and pixels an encoded file. Pixels never leave this stage.

A VAE that decodes a video from its beginning to its end does so in steps. Of its pixels those of one step exist at a
time: they are encoded as they come, and clients may have what that makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate
from typing_extensions import override

from unfuse.core.plan import Params
from unfuse.stages.base import EncodedMedia, StageInput, StageOutput, SteppedStage, need, need_tensor
from unfuse.stages.media import MediaWriter, encode, need_format, record, remedy, to_bytes


class VaeDecoder(Protocol):
    """What a family says about decoding: a VAE in memory."""

    latents: tuple[int | None, ...]
    """Shape of the latents a request brings, with a batch axis of 1; None is any length."""

    def unpack(self, latents: Tensor, params: Params) -> Tensor:
        """A request's latents as a grid (1, channels, frames, height, width), on the VAE's device and in its dtype."""

    def decode(self, grid: Tensor) -> Tensor:
        """Pixels (requests, 3, frames, height, width), −1 to 1, for a grid of one or more requests."""


@runtime_checkable
class CausalDecoder(VaeDecoder, Protocol):
    """A decoder that can make a request's pixels in pieces, from the first frame to the last."""

    def pieces(self, grid: Tensor) -> int:
        """How many pieces the pixels of a request come in, by its grid."""

    def decode_pieces(self, grid: Tensor) -> Iterator[Tensor]:
        """These pieces (1, 3, frames, height, width): joined along frames, they are what `decode` makes, bit for bit.

        Between two of them, others may be decoded.
        """


@dataclass
class VaeDecodeState:
    """A request that is decoded in so many `steps`. `part` is what the last one added to the stream of its file."""

    grid: Tensor
    steps: int
    pieces: Iterator[Tensor]
    recording: MediaWriter
    done: int = 0
    part: bytes = b""


class VaeDecode(SteppedStage[VaeDecodeState]):
    """`latents` in, media out, in the request's `output_format`: one video, or one picture a frame.

    Requests whose pixels come in pieces have a step for each; those of others are decoded at once, together with their
    mates. A state cannot be saved, as its encoder's cannot: another attempt makes the same bytes from the beginning.
    """

    kind = "vae_decode"

    def __init__(self, decoder: VaeDecoder) -> None:
        self._decoder = decoder

    @override
    def verify(self, task: StageInput) -> None:
        """Raise PermanentError unless latents of the right shape and a known format are there."""
        need_tensor(task, "latents", self._decoder.latents)
        need_format(need(task.params, "output_format", str))

    @override
    def start(self, task: StageInput) -> VaeDecodeState:
        latents = need_tensor(task, "latents", self._decoder.latents)
        grid = self._decoder.unpack(latents, task.params)
        recording = record(task.params)
        if isinstance(self._decoder, CausalDecoder) and (pieces := self._decoder.pieces(grid)) > 1:
            return VaeDecodeState(grid, pieces, self._decoder.decode_pieces(grid), recording)
        return VaeDecodeState(grid, 1, iter(()), recording)

    @override
    @torch.no_grad()
    def step(self, batch: Sequence[VaeDecodeState]) -> list[VaeDecodeState | Exception]:
        if batch[0].steps > 1:
            return [_added(state, state.pieces) for state in batch]
        whole = iter(self._decoder.decode(torch.cat([state.grid for state in batch])).chunk(len(batch)))
        return [_added(state, whole) for state in batch]

    @override
    def progress(self, state: VaeDecodeState) -> tuple[int, int]:
        return state.done, state.steps

    @override
    def part(self, state: VaeDecodeState) -> bytes:
        return state.part

    @override
    def finish(self, state: VaeDecodeState) -> StageOutput:
        return StageOutput(media=state.recording.finish())


def _added(state: VaeDecodeState, pixels: Iterator[Tensor]) -> VaeDecodeState | Exception:
    """The state with the next of these pixels in its file; an error if they cannot be made or encoded."""
    try:
        state.part = state.recording.add(to_pixels(next(pixels)[0]))
    except Exception as error:  # the others of the batch go on
        return error
    state.done += 1
    return state


def to_pixels(video: Tensor) -> NDArray[np.uint8]:
    """Frames (frames, height, width, 3) as uint8 of pixels (3, frames, height, width), −1 to 1.

    The arithmetic is diffusers' `VideoProcessor.postprocess_video` and `numpy_to_pil`: halves round to even.
    Raises PermanentError for values that are not finite.
    """
    unit = (video.permute(1, 0, 2, 3) * 0.5 + 0.5).clamp(0, 1)
    frames: NDArray[np.float32] = unit.cpu().permute(0, 2, 3, 1).float().numpy()
    return to_bytes(frames, "decoder", remedy("the model's decoder", video.dtype))


CELLS = 32  # longest side that is decoded, in latent cells: 256 pixels of a VAE that makes eight of a cell

FORMAT: Params = {"output_format": "jpeg", "output_compression": 80}


class PreviewDecoder:
    """Decodes one frame of a shrunk grid. `load` brings the VAE; it is called when the first preview is asked for."""

    def __init__(self, load: Callable[[], VaeDecoder]) -> None:
        self._load = load
        self._decoder: VaeDecoder | None = None

    def picture(self, latents: Tensor, params: Params) -> EncodedMedia:
        """A JPEG of a request's latents."""
        self._decoder = self._decoder or self._load()
        grid = self._decoder.unpack(latents, params)[:, :, :1]
        height, width = grid.shape[-2:]
        shrink = CELLS / max(height, width)
        if shrink < 1:
            size = (1, max(1, round(height * shrink)), max(1, round(width * shrink)))
            grid = interpolate(grid, size, mode="area")
        (media,) = encode(to_pixels(self._decoder.decode(grid)[0])[:1], FORMAT)
        return media
