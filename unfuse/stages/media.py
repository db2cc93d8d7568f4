"""Frames to files: PNG, JPEG and WebP pictures, MP4 video. The same frames make the same bytes every time."""

from __future__ import annotations

import io
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfuse.core.errors import PermanentError
from unfuse.core.plan import Params
from unfuse.stages.base import Media, need

Frames = NDArray[np.uint8]

CONTENT_TYPES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp", "mp4": "video/mp4"}

THREADS = 1
"""A fixed number, not the machine's, as the bytes depend on it; more made larger files in no less time."""

X264 = {"preset": "veryfast", "crf": "18", "x264-params": "mbtree=0"}
"""With mbtree, x264's vector code makes other bytes of the same frames about once in 1,000 files."""

BT709 = 1
LIMITED_RANGE = 1


def need_format(output_format: str) -> None:
    """Raise PermanentError for a format nobody writes."""
    if output_format not in CONTENT_TYPES:
        raise PermanentError(f"output_format must be {', '.join(CONTENT_TYPES)}, not {output_format!r}")


def encode(frames: Frames, params: Params) -> tuple[Media, ...]:
    """Encode frames (frames, height, width, 3): one video for mp4, else one picture a frame.

    Reads `output_format`, for mp4 `fps`, for jpeg and webp `output_compression` (the quality, 0 to 100; default 100).
    Raises PermanentError for other formats, and for an odd size as video.
    """
    output_format = need(params, "output_format", str)
    need_format(output_format)
    if output_format == "mp4":
        return (Media(CONTENT_TYPES["mp4"], _video(frames, need(params, "fps", float))),)
    given = params.get("output_compression")
    quality = max(1, given) if isinstance(given, int) else 100
    return tuple(Media(CONTENT_TYPES[output_format], _picture(frame, output_format, quality)) for frame in frames)


def _picture(frame: Frames, output_format: str, quality: int) -> bytes:
    """PNG at level 1: five times as fast as the standard level, and little larger."""
    options: dict[str, Any] = {"compress_level": 1} if output_format == "png" else {"quality": quality}
    file = io.BytesIO()
    Image.fromarray(frame).save(file, output_format, **options)
    return file.getvalue()


def _video(frames: Frames, fps: float) -> bytes:
    """H.264 in yuv420p, tagged BT.709, its index first so that a browser starts before it has all.

    A file on disk: the index is moved in front by rewriting the finished file.
    """
    import av

    height, width = frames.shape[1:3]
    if height % 2 or width % 2:
        raise PermanentError(f"a video must have even sides, not {width}x{height}: ask for png frames instead")
    with tempfile.TemporaryDirectory(prefix="unfuse-") as folder:
        path = Path(folder, "video.mp4")
        with av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as container:
            stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001), options=X264)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            codec = stream.codec_context
            codec.thread_count = THREADS
            codec.colorspace = codec.color_primaries = codec.color_trc = BT709
            codec.color_range = LIMITED_RANGE
            for frame in frames:
                rgb = av.VideoFrame.from_ndarray(frame, format="rgb24")
                yuv = rgb.reformat(format="yuv420p", dst_colorspace="ITU709", threads=THREADS)
                container.mux(stream.encode(yuv))
            container.mux(stream.encode(None))
        return path.read_bytes()
