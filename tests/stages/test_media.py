"""Frames to files and back."""

import gc
import io
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from PIL import Image

from tests.descriptors import descriptors
from tests.examples import examples
from unfuse.core.errors import PermanentError
from unfuse.core.plan import Params
from unfuse.stages.base import EncodedMedia
from unfuse.stages.media import encode, record


def scene(frames: int, width: int, height: int) -> NDArray[np.uint8]:
    """A blue square that moves to the right over a slope of reds."""
    video = np.zeros((frames, height, width, 3), np.uint8)
    video[..., 0] = np.linspace(60, 200, width, dtype=np.uint8)
    for number in range(frames):
        video[number, 4:12, 2 * number : 2 * number + 8] = (20, 40, 220)
    return video


def picture(media: EncodedMedia) -> NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(media.data)))


def one(frames: NDArray[np.uint8], **params: str | float) -> EncodedMedia:
    (media,) = encode(frames, {**params})
    return media


@given(data=st.data(), width=st.integers(1, 12), height=st.integers(1, 12))
@settings(max_examples=examples(15))
def test_png_encoding_is_lossless(data: st.DataObject, width: int, height: int) -> None:
    size = width * height * 3
    raw = data.draw(st.binary(min_size=size, max_size=size))
    frames = np.frombuffer(raw, np.uint8).reshape(1, height, width, 3)

    assert np.array_equal(picture(one(frames, output_format="png")), frames[0])


@pytest.mark.parametrize(("output_format", "magic"), [("jpeg", b"\xff\xd8"), ("webp", b"RIFF")])
def test_jpeg_and_webp_files_shrink_with_lower_quality(output_format: str, magic: bytes) -> None:
    frames = scene(1, 64, 32)

    best = one(frames, output_format=output_format)
    worst = one(frames, output_format=output_format, output_compression=0)

    assert best.content_type == f"image/{output_format}"
    assert best.data.startswith(magic)
    assert np.abs(picture(best).astype(int) - frames[0]).mean() < 4
    assert len(worst.data) < len(best.data)
    assert best == one(frames, output_format=output_format, output_compression=100)


def test_video_frames_encode_to_one_png_each() -> None:
    frames = scene(3, 16, 16)

    assert np.array_equal(np.stack([picture(media) for media in encode(frames, {"output_format": "png"})]), frames)


def decoded(media: EncodedMedia) -> tuple[NDArray[np.uint8], float]:
    with av.open(io.BytesIO(media.data)) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.name == "h264"
        assert stream.codec_context.pix_fmt == "yuv420p"
        rate = float(stream.average_rate or 0)
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]), rate


@pytest.mark.parametrize(("count", "width", "height", "fps"), [(9, 64, 48, 8), (1, 16, 16, 24), (5, 18, 34, 12.5)])
def test_mp4_preserves_frame_size_rate_and_colours(count: int, width: int, height: int, fps: float) -> None:
    frames = scene(count, width, height)

    media = one(frames, output_format="mp4", fps=fps)
    found, rate = decoded(media)

    assert media.content_type == "video/mp4"
    assert found.shape == frames.shape
    assert rate == pytest.approx(fps, rel=1e-3)
    assert np.abs(found.astype(int) - frames).mean() < 8


def test_mp4_is_deterministic_and_starts_with_its_moov_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    frames = scene(9, 32, 32)

    made = {one(frames, output_format="mp4", fps=8).data for _ in range(40)}

    assert len(made) == 1
    assert list(tmp_path.iterdir()) == []
    (data,) = made
    assert data.index(b"moov") < data.index(b"mdat")


@pytest.mark.parametrize("form", ["png", "webp", "mp4"])
def test_incremental_encoding_equals_encoding_all_frames_at_once(form: str) -> None:
    frames, params = scene(7, 32, 32), {"output_format": form, "fps": 8}
    recording = record({**params})

    parts = [recording.add(frames[begin:end]) for begin, end in ((0, 1), (1, 5), (5, 7))]

    assert [media.data for media in recording.finish()] == [media.data for media in encode(frames, {**params})]
    assert [bool(part) for part in parts] == [form == "mp4"] * 3


def test_abandoned_video_leaves_no_open_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gc.collect()
    before = descriptors()
    video = record({"output_format": "mp4", "fps": 8})
    video.add(scene(3, 32, 32))
    assert list(tmp_path.iterdir()) == []
    assert descriptors() - before

    del video
    gc.collect()

    assert descriptors() <= before


def test_video_without_frames_raises_permanent_error() -> None:
    with pytest.raises(PermanentError, match="at least one frame"):
        record({"output_format": "mp4", "fps": 8}).finish()


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"output_format": "gif"}, "output_format must be png, jpeg, webp, mp4, not 'gif'"),
        ({}, "parameter output_format must be of type str"),
        ({"output_format": "mp4"}, "parameter fps must be of type float"),
        ({"output_format": "mp4", "fps": 8}, "a video must have even sides, not 15x16: request png frames instead"),
    ],
)
def test_unsupported_output_parameters_raise_permanent_error(params: Params, sentence: str) -> None:
    with pytest.raises(PermanentError, match=sentence):
        encode(np.zeros((1, 16, 15, 3), np.uint8), params)
