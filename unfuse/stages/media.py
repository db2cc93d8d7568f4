"""Encodes frames into files: PNG, JPEG and WebP pictures, MP4 video (H.264).

Equal frames make equal bytes. Frames arrive a few at a time and are not stored: a video is encoded as frames arrive,
and its encoded frames can be streamed.
"""

from __future__ import annotations

import io
import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from typing_extensions import override

from unfuse.core.errors import PermanentError
from unfuse.core.plan import Params
from unfuse.stages.base import EncodedMedia, need
from unfuse.stages.fragments import Fragments, configuration, exact_rate, with_lengths

if TYPE_CHECKING:
    import torch

#: Pixels in RGB: uint8 (frames, height, width, 3).
Frames = NDArray[np.uint8]

#: The content type of each output format.
CONTENT_TYPES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp", "mp4": "video/mp4"}

#: Threads of the video codec. Fixed, not the machine's number, because the bytes depend on it. More threads made larger
#: files in no less time.
THREADS = 1

#: Options of x264: each frame is encoded at once, without lookahead, and frames are in display order.
#:
#: mbtree is off because, with it, x264's vector code makes different bytes from the same frames about once in 1,000
#: files.
X264 = {"preset": "veryfast", "crf": "18", "x264-params": "mbtree=0:bframes=0:force-cfr=1"}

#: The codec's number for the BT.709 colour space.
BT709 = 1
#: The codec's number for limited (video) range.
LIMITED_RANGE = 1


def need_format(output_format: str) -> None:
    """Raise PermanentError for an unknown output format."""
    if output_format not in CONTENT_TYPES:
        raise PermanentError(f"output_format must be {', '.join(CONTENT_TYPES)}, not {output_format!r}")


class MediaWriter(ABC):
    """An open file, or several, to which frames are added as they are decoded."""

    @abstractmethod
    def add(self, frames: Frames) -> bytes:
        """Encode the next frames. Returns the bytes that they add to the stream.

        `frames`: uint8 (frames, height, width, 3). b"": nothing to stream yet. Raises PermanentError for frames that
        cannot be encoded.
        """

    @abstractmethod
    def finish(self) -> tuple[EncodedMedia, ...]:
        """Return the files with all frames. No frame can be added afterwards."""


def record(params: Params) -> MediaWriter:
    """Return a writer of frames in the requested format.

    It makes one video for mp4, else one picture per frame. Reads `output_format`, for mp4 `fps`, for jpeg and webp
    `output_compression` (the quality, 0 to 100; default 100). Raises PermanentError for other formats.
    """
    output_format = need(params, "output_format", str)
    need_format(output_format)
    if output_format == "mp4":
        return VideoWriter(need(params, "fps", float))

    quality = params.get("output_compression")
    return ImageWriter(output_format, max(1, quality) if isinstance(quality, int) else 100)


def to_bytes(frames: NDArray[Any], component: str, advice: str) -> Frames:
    """Return float frames in 0 to 1 as uint8, of the same shape.

    Halves round to even.

    `component`: the component that produced the pixels. `advice`: the remedy for values that are not finite.
    Raises PermanentError, whose message has both, unless all values are finite.
    """
    if not np.isfinite(frames).all():
        raise not_finite(component, advice)
    return (frames * 255).round().astype(np.uint8)


def not_finite(component: str, advice: str) -> PermanentError:
    """Return the error for pixels that are not finite. The arguments are those of `to_bytes`."""
    return PermanentError(f"the {component} produced pixels that are not finite: {advice}")


def encode(frames: Frames, params: Params) -> tuple[EncodedMedia, ...]:
    """Encode frames (frames, height, width, 3) into files, as `record` does.

    Raises PermanentError.
    """
    writer = record(params)
    writer.add(frames)
    return writer.finish()


class ImageWriter(MediaWriter):
    """Writes one picture per frame."""

    def __init__(self, output_format: str, quality: int) -> None:
        self._format, self._quality = output_format, quality
        self._files: list[EncodedMedia] = []

    @override
    def add(self, frames: Frames) -> bytes:
        content_type = CONTENT_TYPES[self._format]
        self._files += [
            EncodedMedia(content_type, _encode_picture(frame, self._format, self._quality)) for frame in frames
        ]
        return b""

    @override
    def finish(self) -> tuple[EncodedMedia, ...]:
        return tuple(self._files)


class VideoWriter(MediaWriter):
    """Writes an MP4 video: H.264 in yuv420p, tagged BT.709.

    The index is at the start of the finished file (faststart), so that browsers play it before they have all of it.
    libav moves the index by rewriting the finished file, which it opens again. The file is therefore on disk, without a
    name.
    """

    def __init__(self, fps: float) -> None:
        self._rate = exact_rate(fps)
        self._path = Path()
        self._container: Any = None
        self._stream: Any = None
        self._fragments: Fragments | None = None

    @override
    def add(self, frames: Frames) -> bytes:
        import av

        if self._container is None:
            self._open(*frames.shape[1:3])

        packets = []
        for frame in frames:
            rgb = av.VideoFrame.from_ndarray(frame, format="rgb24")
            yuv = rgb.reformat(format="yuv420p", dst_colorspace="ITU709", threads=THREADS)
            packets += self._stream.encode(yuv)

        fragments = [self._fragment(bytes(packet)) for packet in packets]
        self._container.mux(packets)
        return b"".join(fragments)

    @override
    def finish(self) -> tuple[EncodedMedia, ...]:
        if self._container is None:
            raise PermanentError("a video has at least one frame")
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return (EncodedMedia(CONTENT_TYPES["mp4"], self._path.read_bytes()),)

    def _open(self, height: int, width: int) -> None:
        """Open the file and the encoder for frames of this size.

        Raises PermanentError for odd sizes.
        """
        import av

        if height % 2 or width % 2:
            raise PermanentError(f"a video must have even sides, not {width}x{height}: request png frames instead")

        # The file has no name, so that it is gone when its last descriptor is closed, even if the process is killed.
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
        self._path = Path(f"/proc/self/fd/{descriptor}")

        self._container = av.open(str(self._path), "w", format="mp4", options={"movflags": "faststart"})
        weakref.finalize(self, _close_file, descriptor, self._container)

        self._stream = self._container.add_stream("libx264", rate=self._rate, options=X264)
        self._stream.width = width
        self._stream.height = height
        self._stream.pix_fmt = "yuv420p"

        codec = self._stream.codec_context
        codec.thread_count = THREADS
        codec.colorspace = BT709
        codec.color_primaries = BT709
        codec.color_trc = BT709
        codec.color_range = LIMITED_RANGE

    def _fragment(self, encoded: bytes) -> bytes:
        """Return an encoded frame as a fragment of the stream.

        The stream's header comes before the first one.
        """
        header = b""
        if self._fragments is None:
            codec = self._stream.codec_context
            decoder_configuration = configuration(codec.extradata)
            self._fragments = Fragments(codec.width, codec.height, self._rate, decoder_configuration)
            header = self._fragments.head()
        return header + self._fragments.fragment(with_lengths(encoded))


def read_frames(data: bytes, numbers: Sequence[int]) -> Iterator[Image.Image]:
    """Yield the frames of an MP4 file with these numbers, as RGB pictures.

    `numbers`: frame numbers from 0, ascending. Each frame is yielded as soon as it is decoded. Raises PermanentError if
    a frame is missing or the file cannot be decoded.
    """
    import av

    remaining = deque(numbers)

    try:
        with av.open(io.BytesIO(data), "r", format="mp4") as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = THREADS
            for number, frame in enumerate(container.decode(stream)):
                while remaining and remaining[0] == number:
                    remaining.popleft()
                    yield Image.fromarray(frame.to_ndarray(format="rgb24"))
                if not remaining:
                    return
    except (av.FFmpegError, IndexError, ValueError) as error:
        raise PermanentError(f"the video cannot be decoded: {error}") from error
    raise PermanentError(f"the video has no frame {remaining[0]}: it is truncated or damaged")


def _close_file(descriptor: int, container: Any) -> None:
    """Close the file and libav's container of it.

    Called when a `VideoWriter` is freed, also if its video was not finished.
    """
    with suppress(Exception):
        container.close()
    os.close(descriptor)


def _encode_picture(frame: Frames, output_format: str, quality: int) -> bytes:
    """Encode one frame, (height, width, 3).

    PNG uses level 1: five times as fast as the default level, and little larger.
    """
    options: dict[str, Any] = {"compress_level": 1} if output_format == "png" else {"quality": quality}
    file = io.BytesIO()
    Image.fromarray(frame).save(file, output_format, **options)
    return file.getvalue()


def remedy(component: str, dtype: torch.dtype | None, params: Params | None = None) -> str:
    """Return advice for a component that produced NaN or infinite values.

    `component`: its name. `dtype`: its dtype. `params`: the request's parameters, if they may be the cause.
    """
    import torch  # imported here because encoding files needs no torch

    parameters = params or {}
    causes = ["guidance_scale"] * bool(parameters.get("guidance_scale")) + ["lora_scale"] * bool(parameters.get("lora"))

    suggestions = [f"try a smaller {' or '.join(causes)}"] if causes else []

    if dtype == torch.float32:
        suggestions.append("download the model's files again, in case they are damaged")
    else:
        suggestions.append(f"serve {component} in float32")
    return ", or ".join(suggestions)
