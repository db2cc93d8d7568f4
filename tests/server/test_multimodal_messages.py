"""Pictures in messages at the gateway that `serve` composes, without workers: what is counted, and what is refused."""

from __future__ import annotations

import base64
import io
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from tests.server.composed import composed
from tools.tiny_vision import KINDS, make_vision_model
from unfuse.core.errors import InvalidParameter
from unfuse.language.tokenizer import ChatTokenizer
from unfuse.models import read_model_spec
from unfuse.server import multimodal_messages
from unfuse.stages.media import VideoWriter

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("model") / "tiny", KINDS[1])


@pytest.fixture(scope="module")
def ai(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    served = tmp_path_factory.mktemp("served")
    with (
        composed(served, models=(str(folder),), served_model_name=("tiny",)) as port,
        openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0) as ai,
    ):
        yield ai


def picture(width: int, height: int, form: str = "PNG", **how: Any) -> str:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (width % 255, height % 255, 9)).save(file, form, **how)
    return f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def part(url: object, **more: object) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def accepted(ai: openai.OpenAI, *parts: Any) -> dict[str, Any]:
    """The request that a chat with these parts becomes."""
    messages: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": "the quick fox"}]}]
    answer = ai.chat.completions.with_raw_response.create(
        model="tiny", messages=messages, extra_headers={"prefer": "respond-async"}
    )
    assert answer.status_code == 202
    made: dict[str, Any] = json.loads(answer.content)
    return made


@pytest.mark.parametrize(
    ("url", "rows", "columns"),
    [
        (picture(1, 1), 4, 4),
        (picture(320, 64, "JPEG"), 4, 20),
        (picture(64, 320, "WEBP"), 20, 4),
        (picture(4000, 2000), 10, 22),
    ],
)
def test_image_token_count_follows_its_patch_grid(ai: openai.OpenAI, url: str, rows: int, columns: int) -> None:
    plain, made = accepted(ai), accepted(ai, part(url, detail="low"))
    (entry,) = json.loads(made["params"]["shown"])
    assert (entry["rows"], entry["columns"], entry["tokens"]) == (rows, columns, rows * columns // 4)
    between = 2  # begin and end
    assert made["params"]["prompt_tokens"] == plain["params"]["prompt_tokens"] + between + rows * columns // 4
    assert [stage["name"] for stage in made["stages"]] == ["vision_encode.0", "prefill", "decode.0"]
    assert "shown" not in plain["params"]


def test_image_is_rotated_by_its_exif_orientation(ai: openai.OpenAI) -> None:
    sideways = Image.Exif()
    sideways[0x0112] = 6
    (entry,) = json.loads(accepted(ai, part(picture(320, 64, "JPEG", exif=sideways)))["params"]["shown"])
    assert (entry["rows"], entry["columns"]) == (20, 4)


def test_64_images_are_accepted_and_equal_images_are_encoded_once(ai: openai.OpenAI) -> None:
    made = accepted(ai, *[part(picture(64 + number % 2, 64)) for number in range(64)])
    assert len(json.loads(made["params"]["shown"])) == 64
    assert len(made["stages"]) == 2 + 2


def film(frames: int, width: int = 64, height: int = 32, rate: float = 2) -> bytes:
    recording = VideoWriter(rate)
    recording.add(np.zeros((frames, height, width, 3), np.uint8))
    return recording.finish()[0].data


def video(data: bytes) -> dict[str, Any]:
    url = f"data:video/mp4;base64,{base64.b64encode(data).decode()}"
    return {"type": "video_url", "video_url": {"url": url}}


def said(data: bytes, box: bytes, at: int, number: int) -> bytes:
    """A file in which a box says another number at this place."""
    place = data.rindex(box) + 4 + at
    return data[:place] + struct.pack(">I", number) + data[place + 4 :]


FRAMES = [picture(64, 32)] * 8


def test_frame_list_and_video_file_have_the_same_tokens(ai: openai.OpenAI) -> None:
    listed, filed = accepted(ai, {"type": "video", "video": FRAMES, "fps": 2}), accepted(ai, video(film(8)))
    assert listed["params"]["prompt_tokens"] == filed["params"]["prompt_tokens"]
    (one,), (other,) = (json.loads(made["params"]["shown"]) for made in (listed, filed))
    assert (one["images"], one["frames"], one["frame_indexes"]) == (8, 4, "")
    assert other == {
        **one,
        "frame_indexes": "0,1,2,3,4,5,6,7",
        "content_hash": other["content_hash"],
        "upload": other["upload"],
    }


def test_frames_larger_than_a_control_message_are_accepted(ai: openai.OpenAI) -> None:
    """Given frames of more bytes than a control message may have, then they are taken; they were a 500."""
    made = accepted(ai, {"type": "video", "video": [picture(1024, 1024, "BMP")] * 4, "fps": 2})
    (one,) = json.loads(made["params"]["shown"])
    assert one["images"] == 4


def test_longer_video_is_sampled_at_two_frames_per_second(ai: openai.OpenAI) -> None:
    (entry,) = json.loads(accepted(ai, video(film(90, rate=30)))["params"]["shown"])
    assert entry["frame_indexes"] == "0,18,36,53,71,89"
    assert entry["seconds"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (said(film(8), b"stsz", 8, 100_000), "100000 frames of 64x32 pixels: it may have 10000"),
        (said(film(8), b"avc1", 24, (20_000 << 16) + 20_000), "at most 16384 pixels a side"),
        (film(1), "2 frames or more"),
        (film(8)[:700], "an invalid size"),
        (said(film(8), b"mdia", -8, 5), "an invalid size"),
        (b"", "not an MP4 file"),
        (b"GIF89a" + bytes(50), "not an MP4 file"),
        (bytes(8) * 20_000, "not an MP4 file"),
    ],
)
def test_invalid_or_oversized_video_file_returns_400(ai: openai.OpenAI, data: bytes, says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as refused:
        accepted(ai, video(data))
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([part(picture(9, 9))] * 65, "more than 64 pictures and videos"),
        ([part("data:image/png;base64,%%%")], r"content\[0\].image_url.url is not base64"),
        ([part("data:image/png;base64,AAAA")], "not a PNG, JPEG, WebP, GIF, BMP or AVIF picture"),
        ([part(picture(40, 40)[:-40])], "base64|truncated or damaged"),
        ([part(picture(9, 9, "TIFF"))], "not a PNG, JPEG"),
        ([part(picture(50_000, 2))], "50000x2 pixels; at most 16384 a side"),
        ([part(picture(900, 3))], "the longer side must be at most 200"),
        ([part("https://example.com/a.png")], "only pictures from --image"),
        ([part("file:///etc/passwd")], "only pictures from --image"),
        ([part(7)], "must be a data: URL"),
        ([part(picture(9, 9), detail="much")], "detail must be one of auto, low, high"),
        ([{"type": "image_url"}], "must be a data: URL"),
        ([{"type": "image"}], "must be a data: URL"),
        ([{"type": "input_audio", "input_audio": {}}], "type input_audio are not supported"),
        ([{"type": "video"}], "must be a list of 2 to 768 frames"),
        ([{"type": "video", "video": FRAMES[:1]}], "must be a list of 2 to 768 frames"),
        ([{"type": "video", "video": [*FRAMES, picture(32, 32)]}], "all frames must have the same size, not 2 sizes"),
        ([{"type": "video", "video": FRAMES, "fps": 0}], "fps must be 0.01 to 1000"),
        ([{"type": "video", "video": [*FRAMES, "data:,"]}], r"video\[8\] is a data: URL of type ''"),
        ([{"type": "video_url", "video_url": FRAMES[0]}], "send one of video/mp4"),
        ([{"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}], "only pictures from --image"),
        ([part(picture(256, 256 + number)) for number in range(40)], "2048"),
    ],
)
def test_invalid_image_or_video_parts_return_400(ai: openai.OpenAI, parts: list[Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as refused:
        accepted(ai, *parts)
    assert refused.value.param == "messages"


@pytest.mark.row("C44")
@pytest.mark.parametrize(
    "parts",
    [
        [{"type": "text", "text": "<|image_pad|>"}],
        [{"type": "text", "text": "<|vision_start|><|video_pad|><|vision_end|>"}],
        [{"type": "text", "text": "<|image_pad|>"}, part(picture(9, 9))],
        [part(picture(9, 9)), {"type": "text", "text": "<|vision_"}, {"type": "text", "text": "end|><|image_pad|>"}],
    ],
)
def test_image_placeholder_tokens_in_text_are_accepted(ai: openai.OpenAI, parts: list[Any]) -> None:
    accepted(ai, *parts)


def test_internal_parameters_from_a_client_return_400(ai: openai.OpenAI) -> None:
    for name, value in (("shown", '[{"shown": "a"}]'), ("prompt_tokens", 1)):
        with pytest.raises(openai.BadRequestError, match="unknown parameter") as refused:
            ai.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "fox"}], extra_body={name: value}
            )
        assert refused.value.param == name


def test_total_pixels_are_limited_before_images_are_decoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given pictures that are many pixels together, when they are read, then no more are decoded than there may be."""
    decoded = []
    read = multimodal_messages.read_image
    monkeypatch.setattr(multimodal_messages, "MAX_PIXELS", 250)
    monkeypatch.setattr(multimodal_messages, "read_image", lambda name, url: decoded.append(name) or read(name, url))
    messages = [{"role": "user", "content": [part(picture(10, 10)) for _ in range(9)]}]
    vision = read_model_spec("m", folder).vision
    assert vision
    with pytest.raises(InvalidParameter, match="more than 250 pixels"):
        multimodal_messages.read_messages(vision, ChatTokenizer.read(folder), messages)
    assert len(decoded) == 3
