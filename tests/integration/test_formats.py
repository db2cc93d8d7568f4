"""Answers that have a format, and calls of tools, as `serve` has them by default: with both majors of the client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.examples import examples
from tests.integration.test_chat import ASKED
from tests.integration.test_chat_faults import attempts, kill_computes
from tests.schemas import SCHEMAS
from tools.server import Server, environment, serving, unfuse, until
from tools.tiny_language import make_language_model
from unfuse.client import aconnect, connect
from unfuse.core.errors import InvalidParameter
from unfuse.server.openapi_schemas import ANSWERED

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "likes": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
DAY, NIGHT = 12, 200
"""How many answers are asked for, by each client."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_language_model(tmp_path_factory.mktemp("model") / "tiny", positions=2048)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(
        tmp_path_factory.mktemp("serve"), str(folder), "--served-model-name", "tiny", "--kv", "8MiB"
    ) as server:
        yield server.ready()


@pytest.fixture(scope="module")
def ai(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as ai:
        yield ai


def chat(ai: openai.OpenAI, **asked: Any) -> Any:
    return ai.chat.completions.create(**{"model": "tiny", "messages": ASKED, "max_tokens": 600, **asked})


def test_json_schema_output_is_valid_greedy_sampled_and_streamed(ai: openai.OpenAI) -> None:
    """Of several choices each; and equal seeds give equal texts."""
    person = jsonschema_rs.validator_for(PERSON)
    for how in ({"temperature": 0}, {"temperature": 1.5, "top_p": 0.9, "seed": 4}, {"seed": 5, "n": 3}):
        whole = chat(ai, response_format=FORMAT, logprobs=True, **how)
        texts = [choice.message.content for choice in whole.choices]
        assert all(person.is_valid(json.loads(text)) for text in texts)
        assert {choice.finish_reason for choice in whole.choices} == {"stop"}
        grown = [""] * len(texts)
        for chunk in chat(ai, response_format=FORMAT, stream=True, **how):
            grown[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert all(person.is_valid(json.loads(text)) for text in grown)
        for choice in whole.choices:
            data = b"".join(bytes(one.bytes) for one in choice.logprobs.content)
            assert data.decode() == choice.message.content


@pytest.mark.parametrize(
    ("said", "pattern"),
    [
        ({"type": "regex", "regex": "(red|green) [0-9]{3}"}, r"(red|green) [0-9]{3}"),
        ({"type": "grammar", "grammar": 'start: "a" SIZE "b"\nSIZE: /[0-9]{2}/'}, "a[0-9]{2}b"),
    ],
)
def test_regex_and_grammar_output_matches_its_pattern(ai: openai.OpenAI, said: dict[str, Any], pattern: str) -> None:
    import re

    for seed in range(4):
        made = chat(ai, response_format=said, seed=seed).choices[0]
        assert re.fullmatch(pattern, made.message.content) and made.finish_reason == "stop"


def test_json_object_cut_by_max_tokens_finishes_with_length(ai: openai.OpenAI) -> None:
    made = chat(ai, response_format={"type": "json_object"}, max_tokens=4, temperature=0).choices[0]
    assert (made.message.content.strip()[0], made.finish_reason) == ("{", "length")


def test_stop_string_ends_a_constrained_completion(ai: openai.OpenAI) -> None:
    made = chat(ai, response_format={"type": "regex", "regex": "[a-f]{20}stop[a-f]{20}"}, stop=["stop"]).choices[0]
    assert (len(made.message.content), made.finish_reason) == (20, "stop")


def test_forced_tool_calls_have_valid_arguments_also_streamed(ai: openai.OpenAI) -> None:
    """One that is named, one alone, or several; with arguments of its schema, and ids, streamed or not the same."""
    city = jsonschema_rs.validator_for(CITY)
    named = {"type": "function", "function": {"name": "weather"}}
    for seed in range(4):
        how = {"tools": TOOLS, "tool_choice": named, "seed": seed, "temperature": 1}
        made = chat(ai, **how).choices[0]
        (call,) = made.message.tool_calls
        assert made.message.content is None and made.finish_reason == "tool_calls"
        assert call.function.name == "weather" and city.is_valid(json.loads(call.function.arguments))
        deltas = [chunk.choices[0] for chunk in chat(ai, **how, stream=True)]
        told = [call for one in deltas for call in one.delta.tool_calls or []]
        assert [(one.index, one.function.name) for one in told if one.id] == [(0, "weather")]
        assert city.is_valid(json.loads("".join(one.function.arguments for one in told)))
        assert not any(one.delta.content for one in deltas)
        assert deltas[-1].finish_reason == "tool_calls"
    alone = chat(ai, tools=TOOLS, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert len(alone.message.tool_calls) == 1
    several = chat(ai, tools=TOOLS, tool_choice="required", seed=3).choices[0]
    assert several.message.tool_calls and len({call.id for call in several.message.tool_calls}) == len(
        several.message.tool_calls
    )


def test_tool_call_completion_matches_the_openapi_schema(server: Server) -> None:
    said = {"model": "tiny", "messages": ASKED, "tools": TOOLS, "tool_choice": "required", "max_tokens": 600, "seed": 1}
    reply = server.post("/v1/chat/completions", said)
    assert reply["choices"][0]["message"]["tool_calls"]
    jsonschema_rs.validate(ANSWERED, reply)


def test_tools_and_tool_results_are_rendered_into_the_prompt(ai: openai.OpenAI) -> None:
    """As this model's template knows no tools, they are part of what it reads."""
    made = chat(ai, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    said = made.choices[0].message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "sunny"}
    after = chat(ai, messages=[*ASKED, said, result], tools=TOOLS, tool_choice="none", max_tokens=5)
    free = chat(ai, max_tokens=5)
    assert after.usage.prompt_tokens > free.usage.prompt_tokens
    assert chat(ai, tools=TOOLS, max_tokens=5).usage.prompt_tokens > free.usage.prompt_tokens + 100


def test_optional_tools_with_a_format_return_a_call_or_valid_json(ai: openai.OpenAI) -> None:
    for seed in range(6):
        made = chat(ai, tools=TOOLS, response_format=FORMAT, seed=seed).choices[0]
        if made.message.tool_calls:
            assert made.finish_reason in ("tool_calls", "length") and not made.message.content
        else:
            assert made.finish_reason == "stop" and jsonschema_rs.is_valid(PERSON, json.loads(made.message.content))


NOT: dict[str, Any] = {"not": {}}
BOMB = "start: A\nA: " + " & ".join(f"/.*a.{{{i}}}b.*/" for i in range(30))


@pytest.mark.parametrize(
    ("asked", "param", "says"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": NOT, "strict": True}}},
            "response_format",
            "not",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": False}}}, "response_format", "Unsat"),
        ({"response_format": {"type": "regex", "regex": "((("}}, "response_format", "regex"),
        ({"response_format": {"type": "grammar", "grammar": BOMB}}, "response_format", "exceeds the limits"),
        ({"response_format": {"type": "grammar", "grammar": "x" * 300_000}}, "response_format", "characters"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "maybe"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": NOT, "strict": True}}],
                "tool_choice": "required",
            },
            "tools",
            "not",
        ),
    ],
)
def test_unenforceable_formats_and_tools_return_400(
    ai: openai.OpenAI, asked: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as refused:
        chat(ai, **asked)
    assert refused.value.param == param


@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_random_json_schemas_are_enforced_or_rejected(ai: openai.OpenAI, schema: dict[str, Any], seed: int) -> None:
    try:
        made = chat(ai, response_format=by_schema(schema, strict=True), seed=seed).choices[0]
    except openai.BadRequestError as refused:
        assert refused.param == "response_format" and "cannot be enforced" in refused.message
        return
    assert made.finish_reason == "length" or jsonschema_rs.is_valid(schema, read(made.message.content))


def read(text: str) -> Any:
    """The JSON in a text; where a number in it is larger than any float, the largest."""
    most = sys.float_info.max
    return json.loads(text, parse_float=lambda number: max(-most, min(most, float(number))))


def by_schema(schema: Any, **about: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **about}}


def test_non_strict_schema_ignores_unenforceable_keywords(ai: openai.OpenAI) -> None:
    schema = {"type": "string", "maxLength": 3, "not": {"const": "abc"}}
    made = chat(ai, response_format=by_schema(schema, strict=False)).choices[0]
    assert len(json.loads(made.message.content)) <= 3


def test_json_schema_stream_stays_valid_after_a_decoder_crash(server: Server, ai: openai.OpenAI) -> None:
    """Given a stream of JSON that has begun, when the compute process is killed, then its rest follows, and all of it
    is valid."""
    long = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "array", "items": PERSON, "minItems": 6, "maxItems": 6}},
    }
    asked: dict[str, Any] = {"response_format": long, "seed": 8, "temperature": 1, "max_tokens": 1900}
    text, killed, id = "", False, ""
    for chunk in chat(ai, **asked, stream=True):
        id, text = chunk.id, text + (chunk.choices[0].delta.content or "")
        if len(text) > 60 and not killed:
            server.compute_of(id, "decode.0").kill()
            killed = True
    assert attempts(server, id) > 1
    assert len(json.loads(text)) == 6 and jsonschema_rs.is_valid({"items": PERSON}, json.loads(text))


def test_tool_call_stream_resumes_after_last_event_id(server: Server) -> None:
    """Given an event of a stream, when its client comes back with its id, then what follows is what followed."""
    body = {
        "model": "tiny",
        "messages": ASKED,
        "tools": TOOLS,
        "tool_choice": "required",
        "seed": 2,
        "max_tokens": 600,
        "stream": True,
    }
    headers = {"content-type": "application/json", "idempotency-key": "calls"}

    def events(**more: str) -> list[tuple[str, Any]]:
        call = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode(), headers | more)
        with urllib.request.urlopen(call, timeout=120) as answer:
            read = answer.read().decode().split("\n\n")
        parts = [dict(line.split(": ", 1) for line in one.splitlines() if ": " in line) for one in read]
        return [(one["id"], json.loads(one["data"])["choices"]) for one in parts if "id" in one]

    whole = events()
    calls = [place for place, (_, (choice,)) in enumerate(whole) if choice["delta"].get("tool_calls")]
    assert calls
    assert events(**{"last-event-id": "0"}) == whole
    for place in calls:
        assert events(**{"last-event-id": whole[place][0]}) == whole[place + 1 :]


def test_unfuse_client_supports_response_formats_and_tool_calls(server: Server) -> None:
    with connect(server.url) as client:
        text = "".join(client.chat("hello", response_format=FORMAT, max_tokens=600, seed=1))
        assert jsonschema_rs.is_valid(PERSON, json.loads(text))
        chat = client.chat("hello", tools=TOOLS, tool_choice="required", max_tokens=900, seed=1)
        parts = "".join(chat)
        assert (parts, chat.finish_reason) == ("", "tool_calls")
        assert {call["function"]["name"] for call in chat.tool_calls} <= {"weather", "now"}
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "5"} for call in chat.tool_calls]
        asked = [{"role": "user", "content": "hello"}, chat.message, *results]
        assert "".join(client.chat(asked, tools=TOOLS, tool_choice="none", max_tokens=5)) is not None


async def test_async_client_returns_the_same_text_and_tool_calls(server: Server) -> None:
    with connect(server.url) as client:
        chat = client.chat("hello", tools=TOOLS, tool_choice="required", max_tokens=900, seed=1)
        text = "".join(client.chat("hello", response_format=FORMAT, max_tokens=600, seed=1))
        assert not "".join(chat)
    async with aconnect(server.url) as one:
        other = one.chat("hello", tools=TOOLS, tool_choice="required", max_tokens=900, seed=1)
        assert not "".join([part async for part in other])
        parts = one.chat("hello", response_format=FORMAT, max_tokens=600, seed=1)
        assert "".join([part async for part in parts]) == text
        with pytest.raises(InvalidParameter, match="max_tokens"):
            await anext(one.chat("hello", max_tokens=-2))
    called = [[call["function"] for call in answer.tool_calls] for answer in (chat, other)]
    assert called[0] == called[1] and chat.finish_reason == other.finish_reason


def test_chat_cli_enforces_a_schema_file(server: Server, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(PERSON))
    command = unfuse("chat", "hello", "--schema", str(schema), "--server", server.url, "--max-tokens", "600")
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, check=True)
    assert jsonschema_rs.is_valid(PERSON, json.loads(done.stdout))
    schema.write_text("{")
    refused = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True)
    assert refused.returncode == 2 and "cannot be read as JSON" in refused.stderr


def test_grammar_queue_gauge_is_exported(server: Server) -> None:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        assert "unfuse_grammar_queue 0.0" in answer.read().decode()


ASK = """
import json, sys, openai
from pydantic import BaseModel
from concurrent.futures import ThreadPoolExecutor
assert openai.__version__.startswith(sys.argv[1]), openai.__version__
ai = openai.OpenAI(base_url=sys.argv[2] + "/v1", api_key="none", max_retries=0)
asked = {"model": "tiny", "messages": [{"role": "user", "content": "what is the capital of France"}], "max_tokens": 900}
PERSON, CITY, TOOLS, count = json.loads(sys.argv[3])

class Person(BaseModel):
    happy: bool
    age: int

def parsed(seed):
    made = ai.chat.completions.parse(**asked, response_format=Person, seed=seed).choices[0]
    assert made.finish_reason == "stop" and isinstance(made.message.parsed, Person), made

def schema(seed):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    made = ai.chat.completions.create(**asked, response_format=form, seed=seed).choices[0]
    assert made.finish_reason == "stop", made
    return ["PERSON", made.message.content]

def tool(seed):
    made = ai.chat.completions.create(**asked, tools=TOOLS, seed=seed, parallel_tool_calls=False,
        tool_choice={"type": "function", "function": {"name": "weather"}}).choices[0]
    assert made.finish_reason == "tool_calls", made
    return ["CITY", made.message.tool_calls[0].function.arguments]

def streamed(seed):
    with ai.chat.completions.stream(**asked, response_format=Person, seed=seed) as stream:
        made = stream.get_final_completion().choices[0]
    assert isinstance(made.message.parsed, Person), made

def chatted(seed):
    made = ai.chat.completions.create(**asked | {"max_tokens": 8}, n=2, stop=["zzz"], logprobs=True, top_logprobs=2,
        seed=seed)
    assert len(made.choices) == 2 and len(made.choices[0].logprobs.content[0].top_logprobs) == 2, made
    chunks = [*ai.chat.completions.create(**asked | {"max_tokens": 8}, n=2, seed=seed, stream=True,
        stream_options={"include_usage": True})]
    assert chunks[-1].usage == made.usage, chunks[-1]
    for choice in made.choices:
        own = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == choice.index]
        assert "".join(one.delta.content or "" for one in own) == choice.message.content

with ThreadPoolExecutor(4) as pool:
    kinds = (schema, tool, schema, tool, parsed, streamed)
    made = [*pool.map(lambda seed: kinds[seed % len(kinds)](seed), range(count))]
chatted(1)
print(json.dumps([one for one in made if one]))
"""


@pytest.mark.parametrize("count", [DAY, pytest.param(NIGHT, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("major", ["2.", "3."])
def test_constrained_completions_are_valid_with_openai_2_and_3(
    server: Server, tmp_path: Path, major: str, count: int
) -> None:
    """JSON by schema and by class, streamed and not, and calls; four at once."""
    two = Path(sys.prefix) / "openai-2"
    if major == "2." and not two.is_dir() and not os.environ.get("CI"):
        pytest.skip(f"no openai 2.x in {two}: `make test` installs it")
    variables = environment(tmp_path) | ({"PYTHONPATH": str(two)} if major == "2." else {})
    command = [sys.executable, "-c", ASK, major, server.url, json.dumps([PERSON, CITY, TOOLS, count])]
    done = subprocess.run(command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, check=True)
    made = json.loads(done.stdout)
    assert len(made) >= count // 2
    schemas = {"PERSON": jsonschema_rs.validator_for(PERSON), "CITY": jsonschema_rs.validator_for(CITY)}
    assert all(schemas[kind].is_valid(json.loads(text)) for kind, text in made)


@pytest.mark.nightly
@pytest.mark.parametrize("loop", [pytest.param("normal", marks=pytest.mark.nightly), "overlapped"])
def test_exact_pool_json_logprobs_are_identical_after_a_decoder_crash(folder: Path, tmp_path: Path, loop: str) -> None:
    flags = ["--served-model-name", "tiny", "--kv", "8MiB", "--workers", "prefill=1,decode=1", "--batching", "exact"]
    flags += ["--loop", loop]
    with (
        serving(tmp_path, str(folder), *flags) as server,
        openai.OpenAI(base_url=f"{server.ready().url}/v1", api_key="none", max_retries=0) as client,
    ):
        asked = {"response_format": FORMAT, "seed": 3, "logprobs": True, "top_logprobs": 2}
        calm = chat(client, **asked).choices[0]
        killed, told = False, []
        for chunk in chat(client, **asked, stream=True):
            told += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
            if len(told) > 8 and not killed:
                kill_computes(server)
                killed = True
        until(lambda: killed, "the kill")
        assert told == calm.logprobs.content
        client.close()
