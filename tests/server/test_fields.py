"""Every field of the installed `openai` package's types is accepted, or refused by a sentence of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import httpx2
import pytest
from openai.types import image_edit_params, image_generate_params, video_create_params
from openai.types.chat import chat_completion_content_part_image_param as image_part

from tests.server.served import serve
from tools.cards import MOVING, PICTURES, card
from unfuse.core.modalities import IMAGE, VIDEO
from unfuse.core.parameters import Modality
from unfuse.server.multimodal_messages import DETAILS

FILMS = card("test/films")

FILES = ("image", "mask", "input_reference")
"""Fields that are no parameters: those for pictures."""

REFUSED = {
    ("background", "transparent"): "background must be one of auto, opaque",
    ("output_format", "gif"): "output_format must be one of png, jpeg, webp",
    ("output_format", "svg"): "output_format must be one of png, jpeg, webp",
}
"""Values whose neglect would be a wrong answer, and what is said of them."""

GENERATE = image_generate_params.ImageGenerateParamsStreaming
EDIT = image_edit_params.ImageEditParamsStreaming
CREATE = video_create_params.VideoCreateParams


def choices_of(annotation: Any) -> list[object]:
    """The values that a type names."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for part in get_args(annotation) for value in choices_of(part)]


def fields(params: type) -> dict[str, list[object]]:
    """The fields of a call of the client, each with the values that its type names."""
    return {name: choices_of(kind) for name, kind in get_type_hints(params).items()}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    with (
        serve(tmp_path_factory.mktemp("fields"), cards=(PICTURES, FILMS, MOVING)) as running,
        httpx2.Client(base_url=running.url, timeout=60, trust_env=False) as client,
    ):
        yield client


@pytest.mark.row("P33", "K13", "N3")
@pytest.mark.parametrize(("params", "medium"), [(GENERATE, IMAGE), (EDIT, IMAGE), (CREATE, VIDEO)])
def test_every_field_of_the_openai_client_is_a_known_parameter(params: type, medium: Modality) -> None:
    known = {one.name for one in medium.parameters}
    assert fields(params).keys() - known - {*FILES} == set()


@pytest.mark.row("P33", "K13")
@pytest.mark.parametrize("params", [GENERATE, EDIT])
def test_openai_enum_values_are_accepted_or_rejected_with_a_message(params: type, http: httpx2.Client) -> None:
    named = {
        (name, value) for name, values in fields(params).items() for value in values if name not in ("model", "size")
    }
    assert named >= {("background", "transparent"), ("quality", "high")}
    for name, value in sorted(named, key=str):
        body = {"model": PICTURES.name, "prompt": "a ring", "partial_images": 0, name: value}
        body["response_format"] = "b64_json"
        answer = http.post("/v1/images/generations", json=body, headers={"prefer": "respond-async"})
        if says := REFUSED.get((name, value)):
            assert answer.status_code == 400 and says in answer.json()["error"]["message"], (name, value)
        else:
            assert answer.status_code == 202, (name, value, answer.text)


@pytest.mark.row("P33")
def test_several_frames_and_markup_return_400_but_inert_fields_pass(http: httpx2.Client) -> None:
    body = {"model": PICTURES.name, "prompt": "a ring"}
    headers = {"prefer": "respond-async"}
    for extra in ({"complexity": "low"}, {"frame_count": 1, "frame_duration_ms": 40}, {"svg": {"model": "m"}}):
        assert http.post("/v1/images/generations", json=body | extra, headers=headers).status_code == 202
    for extra, says in (
        ({"frame_count": 2}, "frame_count must be 1, not 2"),
        ({"markup": "data:image/png;base64,AAAA"}, "markup is not supported: draw it into the picture"),
    ):
        answer = http.post("/v1/images/generations", json=body | extra)
        assert answer.status_code == 400 and answer.json()["error"]["message"] == says


@pytest.mark.row("C36")
def test_every_openai_image_detail_value_is_supported() -> None:
    assert {*fields(image_part.ImageURL)["detail"]} <= {*DETAILS}


@pytest.mark.row("P46", "K19")
def test_unknown_parameter_hints_use_field_names_of_the_endpoint(http: httpx2.Client) -> None:
    def told(url: str, **body: Any) -> str:
        answer = http.post(url, json={"prompt": "a ring", **body})
        assert answer.status_code == 400
        return str(answer.json()["error"]["message"])

    url = "data:image/png;base64,AAAA"
    assert told("/v1/videos", model=FILMS.name, image=url).endswith("did you mean input_reference?")
    assert told("/v1/videos", model=FILMS.name, duration=4).endswith("did you mean seconds?")
    assert told("/v1/images/generations", model=PICTURES.name, steps=4).endswith("did you mean num_inference_steps?")
    assert told("/v1/images/generations", model=PICTURES.name, image=url).endswith("to /v1/images/edits")
    assert told("/v1/images/edits", model=MOVING.name, image=url, init_image=url).endswith("did you mean image?")
    assert "the parameters are" in told("/v1/images/generations", model=PICTURES.name, clip_skip=2)
