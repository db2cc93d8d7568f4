"""VAE decode: latents become pixels, and pixels an encoded file. Pixels never leave this stage.

A causal VAE decodes a video in steps, from the first frame to the last. The pixels of a step are encoded while the next
step is computed, and clients can stream the encoded frames.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate
from typing_extensions import override

from unfuse.core.compute_options import ComputeOptions
from unfuse.core.plan import Params
from unfuse.core.retries import is_out_of_memory
from unfuse.stages.base import EncodedMedia, StageInput, StageOutput, SteppedStage, need, need_tensor
from unfuse.stages.device_copies import HostCopy
from unfuse.stages.media import MediaWriter, encode, need_format, not_finite, record, remedy
from unfuse.stages.vae_memory import AS_CONFIGURED, DecodeMode, VaeModes, most_frugal


class VaeDecoder(Protocol):
    """What a model family provides for VAE decode: a VAE in memory."""

    #: The VAE of diffusers, whose decode can need less memory; None if it is another one.
    vae: Any
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
    #: How the VAE decodes the request.
    mode: DecodeMode = AS_CONFIGURED
    #: The pixels of steps that are not encoded yet, in order. One thread appends to it, another one takes them off.
    unencoded: deque[Pixels] = field(default_factory=deque)
    #: The steps done.
    done: int = 0
    #: The steps that were decoded. One more than `done` if another request or rank has failed in this step.
    decoded: int = 0
    #: The frames that were decoded.
    frames: int = 0


class VaeDecode(SteppedStage[VaeDecodeState]):
    """The VAE decode stage: `latents` in, media out.

    The files are in the request's `output_format`: one video, or one picture per frame. A request whose pixels come in
    several pieces has one step for each. The others are decoded at once, together with the rest of their batch. A state
    cannot be saved, because its video encoder cannot: another attempt starts from the beginning and makes the same
    bytes.

    A decode that runs out of memory is repeated in smaller tiles. A video that has frames already keeps them, since
    clients may have read them, and only the others come from tiles.

    `device`: None if ranks must agree on how they decode.
    """

    kind = "vae_decode"
    encodes = True

    def __init__(
        self, decoder: VaeDecoder, options: ComputeOptions | None = None, device: torch.device | None = None
    ) -> None:
        self._decoder = decoder
        self._modes = VaeModes.create(decoder.vae, options, device)

    @override
    def verify(self, task: StageInput) -> None:
        """Raise PermanentError unless latents of the right shape and a known format are present."""
        need_tensor(task, "latents", self._decoder.latents)
        need_format(need(task.params, "output_format", str))

    @override
    def start(self, task: StageInput) -> VaeDecodeState:
        latents = need_tensor(task, "latents", self._decoder.latents)
        grid = self._decoder.unpack(latents, task.params)
        state = VaeDecodeState(grid, 1, iter(()), record(task.params), self._modes.mode(tuple(grid.shape)))
        self._plan_steps(state)
        return state

    @override
    @torch.no_grad()
    def step(self, batch: Sequence[VaeDecodeState]) -> list[VaeDecodeState | Exception]:
        at_once = [state for state in batch if state.steps == 1 and state.decoded == state.done]
        decoded = iter(self._decode_at_once(at_once) if at_once else ())
        return [self._add_fragment(state) if state.steps > 1 else _add_frames(state, decoded) for state in batch]

    @override
    def reduce_memory(self, state: VaeDecodeState) -> VaeDecodeState | None:
        mode = self._modes.reduce(tuple(state.grid.shape), state.mode)
        if mode is None:
            return None
        state.mode = mode
        if state.decoded > state.done:  # this step failed on another rank only, and all ranks continue alike
            _drop_step(state)
        self._plan_steps(state)
        return state

    @override
    def advance(self, state: VaeDecodeState, result: VaeDecodeState) -> VaeDecodeState:
        state.done = state.decoded
        return state

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
        return StageOutput(media=state.recording.finish(), vae=state.mode.vae)

    def _plan_steps(self, state: VaeDecodeState) -> None:
        """Set the number of steps of a state, and the pieces that it still lacks."""
        decoder, pieces = self._decoder, 1
        if isinstance(decoder, CausalDecoder):
            with self._modes.use(state.mode):
                pieces = decoder.fragment_count(state.grid)
        if isinstance(decoder, CausalDecoder) and pieces > 1:
            state.steps = pieces
            # The decoder's state cannot be copied, so it decodes the pieces once more that it has decoded already.
            state.fragments = islice(decoder.decode_fragments(state.grid), state.decoded, None)
        elif state.decoded:
            state.steps = state.decoded + 1
            state.fragments = self._decode_rest(state)
        else:
            state.steps = 1

    def _decode_rest(self, state: VaeDecodeState) -> Iterator[Tensor]:
        """Yield the frames that a video lacks, as one piece, decoded together with the others."""
        yield self._decoder.decode(state.grid)[:, :, state.frames :]

    def _decode_at_once(self, batch: Sequence[VaeDecodeState]) -> Sequence[Tensor]:
        """Return the pixels of states that are decoded at once, together."""
        mode = most_frugal(state.mode for state in batch)
        for state in batch:
            state.mode = mode
        with self._modes.use(mode):
            pixels = self._decoder.decode(torch.cat([state.grid for state in batch]))
        return pixels.chunk(len(batch))

    def _add_fragment(self, state: VaeDecodeState) -> VaeDecodeState | Exception:
        """Add the next piece of a state to its file."""
        try:
            with self._modes.use(state.mode):
                return _add_frames(state, state.fragments)
        except Exception:
            self._plan_steps(state)  # an iterator that has raised has ended
            raise


def _add_frames(state: VaeDecodeState, pixels: Iterator[Tensor]) -> VaeDecodeState | Exception:
    """Add the next of these pixels to those that the state's file gets.

    `pixels`: yields (1, 3, frames, height, width) each. Returns the state, or the error of decoding. A step that the
    state has made already is not made again. Raises errors for lack of memory.
    """
    if state.decoded > state.done:
        return state
    try:
        video = next(pixels)[0]
        state.unencoded.append(Pixels(video))
    except Exception as error:  # the rest of the batch continues
        if is_out_of_memory(error):
            raise
        return error
    state.decoded += 1
    state.frames += video.shape[1]
    return state


def _drop_step(state: VaeDecodeState) -> None:
    """Drop the frames of a state that are decoded, but not counted as a step."""
    state.frames -= state.unencoded.pop().frames
    state.decoded = state.done


class Pixels:
    """The uint8 frames of a video, on their way from the device to the host.

    They are converted on the device, which leaves a quarter of the bytes to copy. The arithmetic is that of diffusers'
    `VideoProcessor.postprocess_video` and `numpy_to_pil`: halves round to even.

    `video`: (3, frames, height, width), from −1 to 1.
    """

    def __init__(self, video: Tensor) -> None:
        zero_to_one = (video.permute(1, 0, 2, 3) * 0.5 + 0.5).clamp_(0, 1).permute(0, 2, 3, 1).float()
        #: The number of frames.
        self.frames = video.shape[1]
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
