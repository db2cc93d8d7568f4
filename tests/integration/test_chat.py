"""A language model, served: chats as the `openai` client has them, in one worker and in prefill and decode pools."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tools.server import Server, computes_of, serving, until
from tools.tiny_language import KINDS, TEXT, make_language_model
from unfuse.client import connect
from unfuse.core.errors import InvalidParameter
from unfuse.core.text import PREFILL_CHUNK_TOKENS
from unfuse.language.tokenizer import ChatTokenizer

ASKED = [{"role": "user", "content": "what is the capital of France"}]
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_language_model(tmp_path_factory.mktemp("model") / "tiny", positions=1024)


@pytest.fixture(scope="module", params=["language=1", "prefill=1,decode=1 --loop normal"])
def server(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(
        tmp_path_factory.mktemp("serve"),
        str(folder),
        "--served-model-name",
        "tiny",
        "--workers",
        *request.param.split(),
        "--kv",
        "8MiB",
        "--threads",
        "1",
    ) as server:
        yield server.ready()


@pytest.fixture(scope="module")
def ai(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as ai:
        yield ai


@pytest.fixture(scope="module")
def expected(folder: Path) -> str:
    """The likeliest answer."""
    return generated(folder, ASKED)


def generated(folder: Path, messages: list[dict[str, str]]) -> str:
    """The likeliest answer to these messages, by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(ids["input_ids"], do_sample=False, max_new_tokens=12)
    return str(tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


def whole_words(folder: Path) -> dict[str, int]:
    """Biases towards tokens that are words, of which the chat template makes the same tokens again."""
    tokenizer = ChatTokenizer.read(folder)
    spelled = (tokenizer.ids(f" {word}") for word in TEXT.split())
    return {str(ids[0]): 100 for ids in spelled if len(ids) == 1}


def chat(ai: openai.OpenAI, **asked: Any) -> Any:
    return ai.chat.completions.create(model="tiny", messages=ASKED, **{**GREEDY, **asked})


def test_greedy_chat_matches_transformers_generate(ai: openai.OpenAI, expected: str) -> None:
    made = chat(ai)
    assert made.choices[0].message.content == expected
    assert made.choices[0].finish_reason in ("stop", "length")
    assert made.usage.completion_tokens <= 12
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens


def test_mixture_of_experts_chat_matches_transformers_generate(tmp_path: Path) -> None:
    mixture = make_language_model(tmp_path / "mixture", KINDS[3], positions=512)
    flags = "--workers", "prefill=1,decode=1", "--kv", "8MiB", "--threads", "1"
    with serving(tmp_path, str(mixture), *flags) as server:
        made = server.ready().post("/v1/chat/completions", {"messages": ASKED, **GREEDY})
    assert made["choices"][0]["message"]["content"] == generated(mixture, ASKED)


def test_streamed_chat_matches_the_unstreamed_one_and_reports_usage(ai: openai.OpenAI) -> None:
    whole = chat(ai, seed=3, temperature=1, n=2, logprobs=True, top_logprobs=2)
    chunks = [
        *chat(
            ai,
            seed=3,
            temperature=1,
            n=2,
            logprobs=True,
            top_logprobs=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    ]
    assert chunks[-1].usage == whole.usage
    assert not chunks[-1].choices
    for choice in whole.choices:
        own = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == choice.index]
        assert own[0].delta.role == "assistant"
        assert "".join(one.delta.content or "" for one in own) == choice.message.content
        assert [one.finish_reason for one in own if one.finish_reason] == [choice.finish_reason]
        told = [token for one in own if one.logprobs for token in one.logprobs.content]
        assert [token.token for token in told] == [token.token for token in choice.logprobs.content]
        for token, same in zip(told, choice.logprobs.content, strict=True):
            assert token.logprob == pytest.approx(same.logprob, abs=1e-3)  # its mates in a forward are others
            assert len(token.top_logprobs) == 2
    assert whole.choices[0].message.content != whole.choices[1].message.content


def test_next_chat_turn_reuses_the_kv_of_prompt_and_completion(ai: openai.OpenAI, folder: Path) -> None:
    """Given an answer of some hundred tokens, when the chat goes on, then the whole chunks of prompt and answer are
    found, and the next answer is the one that is made without; where the first turn shares nothing, nothing is."""
    long = {"logit_bias": whole_words(folder), "max_tokens": 300, "temperature": 1}
    assert len(long["logit_bias"]) > 5
    for seed, shares in ((5, True), (6, False)):
        first = chat(ai, **long, seed=seed, extra_body={"cache": shares})
        said = first.choices[0].message.content
        talk = [*ASKED, {"role": "assistant", "content": said}, {"role": "user", "content": "and the lazy dog"}]
        alone, then = (
            ai.chat.completions.create(model="tiny", messages=talk, **GREEDY, extra_body={"cache": cache})
            for cache in (False, True)
        )
        cached = [made.usage.prompt_tokens_details.cached_tokens for made in (first, alone, then)]
        assert cached == [
            0,
            0,
            (first.usage.total_tokens - 1) // PREFILL_CHUNK_TOKENS * PREFILL_CHUNK_TOKENS if shares else 0,
        ]
        texts = {made.choices[0].message.content for made in (alone, then)}
        assert texts == {generated(folder, talk)} if shares else len(texts) == 1


def test_equal_seeds_sample_equal_texts(ai: openai.OpenAI) -> None:
    one, same, other = (chat(ai, seed=seed, temperature=1.5) for seed in (5, 5, 6))
    assert one.choices[0].message.content == same.choices[0].message.content != other.choices[0].message.content


def test_completion_ends_before_a_stop_string_across_tokens(ai: openai.OpenAI, expected: str) -> None:
    """Also where that lies over several tokens."""
    stop = expected[len(expected) // 2 :][:4]
    made = chat(ai, stop=[stop, "never said"])
    assert made.choices[0].message.content == expected[: expected.index(stop)]
    assert made.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("asked", "param", "says"),
    [
        ({"messages": []}, "messages", "list of at least one"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "messages", "length is 1024 tokens. However"),
        ({"max_tokens": 10_000}, "messages", "10000 in the completion"),
        ({"max_tokens": 1020}, "messages", "request at most"),
        ({"n": 1_000_000}, "n", "1 to 128"),
        ({"stop": ["x" * 2_000_000]}, None, ""),
        ({"stop": ["x" * 2000]}, "stop", "1 to 1000"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "0 to"),
        ({"top_logprobs": 2}, "top_logprobs", "set logprobs to true"),
        ({"response_format": {"type": "json"}}, "response_format", "json_object"),
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, "messages", ""),
    ],
)
def test_invalid_chat_parameters_are_rejected_with_the_parameter_name(
    ai: openai.OpenAI, asked: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        ai.chat.completions.create(**{"model": "tiny", "messages": ASKED, **asked})
    assert refused.value.status_code in (400, 413)
    assert says in refused.value.message
    assert param in (None, refused.value.param)


def test_image_request_to_a_language_model_is_rejected(server: Server) -> None:
    with connect(server.url) as client, pytest.raises(InvalidParameter, match="texts"):
        client.generate("a circle")


def test_async_chat_supports_idempotency_keys_and_cancel(server: Server) -> None:
    """Its object, events, result and end are those of pictures."""
    body = {"messages": ASKED, **GREEDY, "max_tokens": 900, "logit_bias": {"2": -100}, "ignored": None}
    headers = {"content-type": "application/json", "prefer": "respond-async", "idempotency-key": "one"}
    call = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(call, timeout=60) as answer:
        assert answer.status == 202
        id = json.load(answer)["id"]
    with urllib.request.urlopen(call, timeout=60) as answer:
        assert json.load(answer)["id"] == id
    server.post(f"/v1/requests/{id}/cancel", {})
    assert server.finished(id)["status"] == "cancelled"
    assert server.get(f"/v1/requests/{id}")["modality"] == "text"


def test_stream_has_every_token_once_after_a_decoder_crash(server: Server) -> None:
    """Given a stream that has begun, when the compute process that decodes is killed, then the rest of the text
    follows: it is the text of a chat that nobody disturbed."""
    asked = {**GREEDY, "max_tokens": 300, "logit_bias": {"2": -100, "0": -100}}
    with connect(server.url) as client:
        calm = "".join(client.chat(ASKED, **asked))
        said = ""
        for part in client.chat(ASKED, **asked):
            if not said and part:
                workers = [one for one in server.get("/v1/workers")["data"] if one["role"] in ("decode", "language")]
                for process in computes_of(*(one["pid"] for one in workers)):
                    process.kill()
            said += part
    assert said == calm


def test_client_stream_resumes_after_a_server_crash(folder: Path, tmp_path: Path) -> None:
    """Given a stream that has begun, when the whole server is killed and started again, then our client gets the rest:
    each token once."""
    asked = {**GREEDY, "max_tokens": 300, "logit_bias": {"2": -100, "0": -100}}
    with (
        serving(tmp_path, str(folder), "--workers", "language=1", "--kv", "8MiB", "--threads", "1") as server,
        connect(server.ready().url) as client,
    ):
        calm = "".join(client.chat(ASKED, **asked))
        said = ""
        for part in client.chat(ASKED, **asked):
            if not said and part:
                server.killed_and_started_again()
                until(lambda: server.get("/health"), "the gateway", server.process)
            said += part
    assert said == calm
