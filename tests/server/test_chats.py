"""Chats at the gateway that `serve` composes, without workers: what is refused, what clients hear while they wait."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.server.composed import composed
from tools.tiny_language import make_language_model

pytestmark = pytest.mark.slow
ASKED = [{"role": "user", "content": "what is the capital of France"}]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = make_language_model(tmp_path_factory.mktemp("model") / "tiny")
    with composed(tmp_path_factory.mktemp("served"), models=(str(folder),), served_model_name=("tiny",)) as port:
        yield port


def test_openai_client_reads_a_stream_past_sse_comments(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a chat that begins late, so that comments are sent behind its first event, then the `openai` client reads
    on to its end."""
    monkeypatch.setattr("unfuse.server.responses.COMMENT_EVERY_S", 0.01)
    with openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0) as ai:
        stream = ai.chat.completions.create(model="tiny", messages=ASKED, stream=True, extra_body={"timeout": 1})
        chunks = iter(stream)
        assert next(chunks).choices[0].delta.role == "assistant"
        with pytest.raises(openai.APIError, match="deadline"):
            next(chunks)
