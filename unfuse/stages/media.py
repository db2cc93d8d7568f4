"""Frames to files: PNG, JPEG and WebP pictures, MP4 video. The same frames make the same bytes every time.

Frames come a few at a time, and are not kept: a video's are encoded, and of what that makes a stream can be sent on.
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

Frames = NDArray[np.uint8]

CONTENT_TYPES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp", "mp4": "video/mp4"}

THREADS = 1  # a fixed number, not the machine's, as the bytes depend on it; more made larger files in no less time

X264 = {"preset": "veryfast", "crf": "18", "x264-params": "mbtree=0:bframes=0:force-cfr=1"}
"""Each frame is encoded as soon as it is there, without looking ahead, in the order in which frames are shown.

With mbtree, x264's vector code makes other bytes of the same frames about once in 1,000 files.
"""

BT709 = 1
LIMITED_RANGE = 1


def need_format(output_format: str) -> None:
    """Raise PermanentError for a format nobody writes."""
    if output_format not in CONTENT_TYPES:
        raise PermanentError(f"output_format must be {', '.join(CONTENT_TYPES)}, not {output_format!r}")


class MediaWriter(ABC):
    """A file, or several, to which frames (frames, height, width, 3) are added as they are made."""

    @abstractmethod
    def add(self, frames: Frames) -> bytes:
        """Encode the next frames; returns what they add to the stream (b"": nothing). Raises PermanentError."""

    @abstractmethod
    def finish(self) -> tuple[EncodedMedia, ...]:
        """What all frames have become. Nothing can be added any more."""


def record(params: Params) -> MediaWriter:
    """Begin a recording: one video for mp4, else one picture a frame.

    Reads `output_format`, for mp4 `fps`, for jpeg and webp `output_compression` (the quality, 0 to 100; default 100).
    Raises PermanentError for other formats.
    """
    output_format = need(params, "output_format", str)
    need_format(output_format)
    if output_format == "mp4":
        return VideoWriter(need(params, "fps", float))
    given = params.get("output_compression")
    return ImageWriter(output_format, max(1, given) if isinstance(given, int) else 100)


def to_bytes(frames: NDArray[Any], whose: str, advice: str) -> Frames:
    """Frames of 0 to 1 as uint8; halves round to even. Raises PermanentError, with `advice`, unless all are finite."""
    if not np.isfinite(frames).all():
        raise PermanentError(f"the {whose} produced pixels that are not finite: {advice}")
    return (frames * 255).round().astype(np.uint8)


def encode(frames: Frames, params: Params) -> tuple[EncodedMedia, ...]:
    """Encode frames (frames, height, width, 3) that are all there, as `record` would. Raises PermanentError."""
    recording = record(params)
    recording.add(frames)
    return recording.finish()


class ImageWriter(MediaWriter):
    """A picture for each frame."""

    def __init__(self, output_format: str, quality: int) -> None:
        self._format, self._quality = output_format, quality
        self._pictures: list[EncodedMedia] = []

    @override
    def add(self, frames: Frames) -> bytes:
        kind = CONTENT_TYPES[self._format]
        self._pictures += [EncodedMedia(kind, _picture(frame, self._format, self._quality)) for frame in frames]
        return b""

    @override
    def finish(self) -> tuple[EncodedMedia, ...]:
        return tuple(self._pictures)


class VideoWriter(MediaWriter):
    """H.264 in yuv420p, tagged BT.709. The finished file has its index first, so that browsers start before its end.

    A file on disk, without a name: the index is moved in front by rewriting the finished file, which libav opens again.
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
            self._begin(*frames.shape[1:3])
        packets = []
        for frame in frames:
            rgb = av.VideoFrame.from_ndarray(frame, format="rgb24")
            yuv = rgb.reformat(format="yuv420p", dst_colorspace="ITU709", threads=THREADS)
            packets += self._stream.encode(yuv)
        streamed = [self._streamed(bytes(packet)) for packet in packets]
        self._container.mux(packets)
        return b"".join(streamed)

    @override
    def finish(self) -> tuple[EncodedMedia, ...]:
        if self._container is None:
            raise PermanentError("a video has at least one frame")
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return (EncodedMedia(CONTENT_TYPES["mp4"], self._path.read_bytes()),)

    def _begin(self, height: int, width: int) -> None:
        import av

        if height % 2 or width % 2:
            raise PermanentError(f"a video must have even sides, not {width}x{height}: ask for png frames instead")
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
        self._path = Path(f"/proc/self/fd/{descriptor}")
        self._container = av.open(str(self._path), "w", format="mp4", options={"movflags": "faststart"})
        weakref.finalize(self, _close, descriptor, self._container)
        self._stream = self._container.add_stream("libx264", rate=self._rate, options=X264)
        self._stream.width, self._stream.height, self._stream.pix_fmt = width, height, "yuv420p"
        codec = self._stream.codec_context
        codec.thread_count = THREADS
        codec.colorspace = codec.color_primaries = codec.color_trc = BT709
        codec.color_range = LIMITED_RANGE

    def _streamed(self, encoded: bytes) -> bytes:
        """An encoded frame as a fragment of the stream; the first one behind the stream's head."""
        head = b""
        if self._fragments is None:
            codec = self._stream.codec_context
            record = configuration(codec.extradata)
            self._fragments = Fragments(codec.width, codec.height, self._rate, record)
            head = self._fragments.head()
        return head + self._fragments.fragment(with_lengths(encoded))


def read_frames(data: bytes, numbers: Sequence[int]) -> Iterator[Image.Image]:
    """An MP4 file's frames by ascending numbers from 0, each when decoded. Raises PermanentError if one is missing."""
    import av

    left = deque(numbers)
    try:
        with av.open(io.BytesIO(data), "r", format="mp4") as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = THREADS
            for number, frame in enumerate(container.decode(stream)):
                while left and left[0] == number:
                    left.popleft()
                    yield Image.fromarray(frame.to_ndarray(format="rgb24"))
                if not left:
                    return
    except (av.FFmpegError, IndexError, ValueError) as error:
        raise PermanentError(f"the video cannot be decoded: {error}") from error
    raise PermanentError(f"the video has no frame {left[0]}: it is cut or damaged")


def _close(descriptor: int, container: Any) -> None:
    """Close a file and libav's own hold of it, which nothing else ends when a video is given up in the middle."""
    with suppress(Exception):
        container.close()
    os.close(descriptor)


def _picture(frame: Frames, output_format: str, quality: int) -> bytes:
    """PNG at level 1: five times as fast as the standard level, and little larger."""
    options: dict[str, Any] = {"compress_level": 1} if output_format == "png" else {"quality": quality}
    file = io.BytesIO()
    Image.fromarray(frame).save(file, output_format, **options)
    return file.getvalue()


def remedy(what: str, dtype: torch.dtype | None, params: Params | None = None) -> str:
    """Return advice for a part of a model (`what`, in `dtype`) that produced NaN or infinite values.

    `params` are the request's parameters, if they may be the cause.
    """
    import torch  # encoding files does without it

    asked = params or {}
    knobs = ["guidance_scale"] * bool(asked.get("guidance_scale")) + ["lora_scale"] * bool(asked.get("lora"))
    tries = [f"try a smaller {' or '.join(knobs)}"] if knobs else []
    if dtype == torch.float32:
        tries.append("download the model's files again, in case they are damaged")
    else:
        tries.append(f"serve {what} in float32")
    return ", or ".join(tries)
