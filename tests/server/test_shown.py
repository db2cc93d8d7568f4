"""Pictures in messages at the gateway that `serve` composes, without workers: what is counted, and what is refused."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from tests.server.composed import composed
from tools.tiny_vision import KINDS, make_vision_model
from unfuse.core.errors import InvalidParameter
from unfuse.models import card_of
from unfuse.models.tokenizer import ChatTokenizer
from unfuse.server import shown

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
def test_a_picture_has_the_tokens_of_its_grid(ai: openai.OpenAI, url: str, rows: int, columns: int) -> None:
    plain, made = accepted(ai), accepted(ai, part(url, detail="low"))
    (entry,) = json.loads(made["params"]["shown"])
    assert (entry["rows"], entry["columns"], entry["tokens"]) == (rows, columns, rows * columns // 4)
    between = 2  # begin and end
    assert made["params"]["prompt_tokens"] == plain["params"]["prompt_tokens"] + between + rows * columns // 4
    assert [stage["name"] for stage in made["stages"]] == ["vision_encode.0", "prefill", "decode.0"]
    assert "shown" not in plain["params"]


def test_a_picture_lies_as_its_camera_says(ai: openai.OpenAI) -> None:
    sideways = Image.Exif()
    sideways[0x0112] = 6
    (entry,) = json.loads(accepted(ai, part(picture(320, 64, "JPEG", exif=sideways)))["params"]["shown"])
    assert (entry["rows"], entry["columns"]) == (20, 4)


def test_sixty_four_pictures_are_taken_and_equal_ones_are_encoded_once(ai: openai.OpenAI) -> None:
    made = accepted(ai, *[part(picture(64 + number % 2, 64)) for number in range(64)])
    assert len(json.loads(made["params"]["shown"])) == 64
    assert len(made["stages"]) == 2 + 2


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([part(picture(9, 9))] * 65, "64 pictures, and have more"),
        ([part("data:image/png;base64,%%%")], r"content\[0\].image_url.url is not base64"),
        ([part("data:image/png;base64,AAAA")], "not a PNG, JPEG or WebP"),
        ([part(picture(40, 40)[:-40])], "base64|cut or damaged"),
        ([part(picture(9, 9, "GIF"))], "not a PNG, JPEG or WebP"),
        ([part(picture(50_000, 2))], "50000x2 pixels; there may be at most 16384 a side"),
        ([part(picture(900, 3))], "no side may be more than 200"),
        ([part("https://example.com/a.png")], "nothing is fetched here"),
        ([part("file:///etc/passwd")], "nothing is fetched here"),
        ([part(7)], "must be a data: URL"),
        ([part(picture(9, 9), detail="much")], "detail must be one of auto, low, high"),
        ([{"type": "image_url"}], "must be a data: URL"),
        ([{"type": "image"}], "send pictures as image_url"),
        ([{"type": "input_audio", "input_audio": {}}], "type input_audio are not read"),
        ([{"type": "text", "text": "<|image_pad|>"}], "leave out the tokens"),
        ([{"type": "text", "text": "<|image_pad|>"}, part(picture(9, 9))], "leave out the tokens"),
        ([part(picture(256, 256 + number)) for number in range(40)], "the model takes 2048"),
    ],
)  # fmt: skip
def test_what_cannot_be_shown_is_refused(ai: openai.OpenAI, parts: list[Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as refused:
        accepted(ai, *parts)
    assert refused.value.param == "messages"


def test_what_a_client_says_is_shown_counts_for_nothing(ai: openai.OpenAI) -> None:
    answer = ai.chat.completions.with_raw_response.create(
        model="tiny", messages=[{"role": "user", "content": "fox"}], extra_headers={"prefer": "respond-async"},
        extra_body={"shown": '[{"shown": "a"}]', "prompt_tokens": 1},
    )  # fmt: skip
    params = json.loads(answer.content)["params"]
    assert "shown" not in params and params["prompt_tokens"] > 1


def test_pixels_are_bounded_in_all_before_they_are_decoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given pictures that are many pixels together, when they are read, then no more are decoded than there may be."""
    decoded = []
    read = shown.read_picture
    monkeypatch.setattr(shown, "MAX_PIXELS", 250)
    monkeypatch.setattr(shown, "read_picture", lambda name, url: decoded.append(name) or read(name, url))
    messages = [{"role": "user", "content": [part(picture(10, 10)) for _ in range(9)]}]
    vision = card_of("m", folder).vision
    assert vision
    with pytest.raises(InvalidParameter, match="250 pixels in all"):
        shown.read_shown(vision, ChatTokenizer.read(folder), messages)
    assert len(decoded) == 3
