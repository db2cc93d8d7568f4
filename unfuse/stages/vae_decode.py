"""VAE decode: latents become pixels, and pixels an encoded file. Pixels never leave this stage.

A causal VAE decodes a video in steps, from the first frame to the last. The pixels of a step are encoded while the next
step is computed, and clients can stream the encoded frames.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate
from typing_extensions import override

from unfuse.core.plan import Params
from unfuse.stages.base import EncodedMedia, StageInput, StageOutput, SteppedStage, need, need_tensor
from unfuse.stages.device_copies import HostCopy
from unfuse.stages.media import MediaWriter, encode, need_format, not_finite, record, remedy


class VaeDecoder(Protocol):
    """What a model family provides for VAE decode: a VAE in memory."""

    #: Shape of a request's latents, with a batch axis of 1. None is any length.
    latents: tuple[int | None, ...]

    def unpack(self, latents: Tensor, params: Params) -> Tensor:
        """Return a request's latents as a grid, on the VAE's device and in its dtype.

        The grid is (1, channels, frames, height, width).
        """

    def decode(self, grid: Tensor) -> Tensor:
        """Return the pixels of a grid of one or more requests, from −1 to 1.

        `grid`: (requests, channels, latent frames, latent height, latent width). Returns (requests, 3, frames, height,
        width).
        """


@runtime_checkable
class CausalDecoder(VaeDecoder, Protocol):
    """A VAE decoder that can decode one request piece by piece, in frame order."""

    def fragment_count(self, grid: Tensor) -> int:
        """Return the number of pieces of a request's pixels.

        `grid`: (1, channels, latent frames, latent height, latent width).
        """

    def decode_fragments(self, grid: Tensor) -> Iterator[Tensor]:
        """Yield the pieces, (1, 3, frames, height, width).

        Joined along frames, they equal the result of `decode`, bit for bit. Pieces of other requests may be decoded in
        between.
        """


@dataclass
class VaeDecodeState:
    """A request between two steps of VAE decode."""

    #: The latents, (1, channels, frames, height, width).
    grid: Tensor
    #: The number of steps: one for each piece.
    steps: int
    #: The remaining pieces of pixels; empty for a VAE that decodes at once.
    fragments: Iterator[Tensor]
    #: Encodes the frames into files.
    recording: MediaWriter
    #: The pixels of steps that are not encoded yet, in order. One thread appends to it, another one takes them off.
    unencoded: deque[Pixels] = field(default_factory=deque)
    #: The last piece, until it is converted. A step that ran out of memory may be repeated, but the piece comes once.
    piece: Tensor | None = None
    #: The error that ended the step, or None. The pieces end with an error of decoding.
    error: Exception | None = None
    #: The steps done.
    done: int = 0


class VaeDecode(SteppedStage[VaeDecodeState]):
    """The VAE decode stage: `latents` in, media out.

    The files are in the request's `output_format`: one video, or one picture per frame. A request whose pixels come in
    several pieces has one step for each. The others are decoded at once, together with the rest of their batch. A state
    cannot be saved, because its video encoder cannot: another attempt starts from the beginning and makes the same
    bytes.
    """

    kind = "vae_decode"
    encodes = True

    def __init__(self, decoder: VaeDecoder) -> None:
        self._decoder = decoder

    @override
    def verify(self, task: StageInput) -> None:
        """Raise PermanentError unless latents of the right shape and a known format are present."""
        need_tensor(task, "latents", self._decoder.latents)
        need_format(need(task.params, "output_format", str))

    @override
    def start(self, task: StageInput) -> VaeDecodeState:
        latents = need_tensor(task, "latents", self._decoder.latents)
        grid = self._decoder.unpack(latents, task.params)
        recording = record(task.params)
        if isinstance(self._decoder, CausalDecoder) and (pieces := self._decoder.fragment_count(grid)) > 1:
            return VaeDecodeState(grid, pieces, self._decoder.decode_fragments(grid), recording)
        return VaeDecodeState(grid, 1, iter(()), recording)

    @override
    @torch.no_grad()
    def step(self, batch: Sequence[VaeDecodeState]) -> list[VaeDecodeState | Exception]:
        if batch[0].steps > 1:
            return [_add_frames(state, state.fragments) for state in batch]

        decoded = self._decoder.decode(torch.cat([state.grid for state in batch])).chunk(len(batch))
        return [_add_frames(state, iter((pixels,))) for state, pixels in zip(batch, decoded, strict=True)]

    @override
    def progress(self, state: VaeDecodeState) -> tuple[int, int]:
        return state.done, state.steps

    @override
    def video_fragment(self, state: VaeDecodeState) -> bytes:
        return state.recording.add(state.unencoded.popleft().read()) if state.unencoded else b""

    @override
    def discard_frames(self, state: VaeDecodeState) -> None:
        state.unencoded.clear()

    @override
    def finish(self, state: VaeDecodeState) -> StageOutput:
        while state.unencoded:
            self.video_fragment(state)
        return StageOutput(media=state.recording.finish())


def _add_frames(state: VaeDecodeState, pixels: Iterator[Tensor]) -> VaeDecodeState | Exception:
    """Add the next of these pixels to those that the state's file gets.

    `pixels`: yields (1, 3, frames, height, width) each. Returns the state, or the error of decoding.
    """
    try:
        if state.piece is None:
            state.piece = next(pixels)[0]
        state.unencoded.append(Pixels(state.piece))
    except StopIteration:
        assert state.error, "a request has a piece for each step"
        return state.error
    except Exception as error:  # the rest of the batch continues
        state.error = error
        return error
    state.piece = None
    state.done += 1
    return state


class Pixels:
    """The uint8 frames of a video, on their way from the device to the host.

    They are converted on the device, which leaves a quarter of the bytes to copy. The arithmetic is that of diffusers'
    `VideoProcessor.postprocess_video` and `numpy_to_pil`: halves round to even.

    `video`: (3, frames, height, width), from −1 to 1.
    """

    def __init__(self, video: Tensor) -> None:
        zero_to_one = (video.permute(1, 0, 2, 3) * 0.5 + 0.5).clamp_(0, 1).permute(0, 2, 3, 1).float()
        self._dtype = video.dtype
        frames = zero_to_one.mul(255).round_().to(torch.uint8, memory_format=torch.contiguous_format)
        self._copy = HostCopy(frames, zero_to_one.isfinite().all())

    def read(self) -> NDArray[np.uint8]:
        """Return the frames, (frames, height, width, 3). Waits for their copy.

        Raises PermanentError for values that are not finite.
        """
        frames, is_finite = self._copy.read()
        if not bool(is_finite):
            raise not_finite("decoder", remedy("the model's decoder", self._dtype))
        array: NDArray[np.uint8] = frames.numpy()
        return array


#: The longest side of a preview in latent cells: 256 pixels for a VAE with 8 pixels per cell.
CELLS = 32

#: The file format of previews.
FORMAT: Params = {"output_format": "jpeg", "output_compression": 80}


class PreviewDecoder:
    """Decodes small previews: the first frame of a downscaled grid.

    `load` returns the VAE. It is called at the first preview.
    """

    def __init__(self, load: Callable[[], VaeDecoder]) -> None:
        self._load = load
        self._decoder: VaeDecoder | None = None

    def preview(self, latents: Tensor, params: Params) -> EncodedMedia:
        """Return a JPEG preview of a request's latents."""
        self._decoder = self._decoder or self._load()
        grid = self._decoder.unpack(latents, params)[:, :, :1]

        height, width = grid.shape[-2:]
        shrink = CELLS / max(height, width)
        if shrink < 1:
            size = (1, max(1, round(height * shrink)), max(1, round(width * shrink)))
            grid = interpolate(grid, size, mode="area")

        (media,) = encode(Pixels(self._decoder.decode(grid)[0][:, :1]).read(), FORMAT)
        return media
