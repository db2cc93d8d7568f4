"""Chats at the gateway: which model is meant where none is named, and which fields of OpenAI's API are known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import openai
import pytest
from openai.types.chat.chat_completion_content_part_image_param import ImageURL
from openai.types.chat.completion_create_params import CompletionCreateParamsBase

from tests.server.composed import call, composed
from tools.tiny_language import make_language_model
from unfuse.core.modalities import TEXT
from unfuse.core.text_parameters import IGNORED, REFUSED
from unfuse.server.multimodal_messages import DETAILS

ASKED = [{"role": "user", "content": "what is the capital of France"}]

OLD_CALLS = {"functions", "function_call"}
"""Fields that `tools` and `tool_choice` replaced."""


@pytest.mark.row("N3", "K1")
def test_every_openai_chat_field_is_known() -> None:
    """Given the types of the installed `openai` package, then no field of a chat is an unknown parameter here."""
    theirs = CompletionCreateParamsBase.__annotations__.keys() - OLD_CALLS
    known = TEXT.parameters_for({}).keys()
    assert len(theirs) > 30
    assert not theirs - known
    assert {*IGNORED, *(name for name, _ in REFUSED)} <= theirs | {"user"}


@pytest.mark.row("K1")
def test_every_openai_image_detail_is_known() -> None:
    assert {*get_args(get_type_hints(ImageURL)["detail"])} <= {*DETAILS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_language_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def port(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    data = tmp_path_factory.mktemp("served")
    names = ("first", "second")
    with composed(data, models=(str(folder),), served_model_name=names, api_key=("a-secret-of-tests",)) as port:
        yield port


@pytest.mark.slow
@pytest.mark.row("N1")
@pytest.mark.parametrize("named", [{}, {"model": None}])
def test_model_is_optional_for_one_model_served_under_two_names(port: int, named: dict[str, None]) -> None:
    with openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="a-secret-of-tests", max_retries=0) as ai:
        body = {"messages": ASKED, "timeout": 1, **named}
        stream = ai.chat.completions.create(model=openai.omit, messages=ASKED, stream=True, extra_body=body)
        assert next(iter(stream)).choices[0].delta.role == "assistant"


@pytest.mark.slow
@pytest.mark.row("C5:x-api-key")
@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("x-api-key: a-secret-of-tests", 200),
        ("Authorization: Bearer a-secret-of-tests", 200),
        ("x-api-key: other", 401),
        ("x-key: a-secret-of-tests", 401),
    ],
)
def test_x_api_key_header_is_accepted(port: int, header: str, status: int) -> None:
    assert call(port, "/v1/models", header).status == status
