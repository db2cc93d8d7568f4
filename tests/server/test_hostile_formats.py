"""Formats and tools that are garbage, impossible or hostile: a clear 400, or a request that is accepted; never more."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from tests.examples import examples
from tests.schemas import GARBAGE, SCHEMAS
from tests.server.composed import composed
from tools.tiny_language import make_language_model

pytestmark = pytest.mark.slow
ASKED = [{"role": "user", "content": "what is the capital of France"}]
THOROUGH = settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = make_language_model(tmp_path_factory.mktemp("model") / "tiny", positions=8192)
    room = {"max_active": 100_000, "max_queue": 100_000}  # for all that is accepted here and served by nobody
    with composed(
        tmp_path_factory.mktemp("served"), models=(str(folder),), served_model_name=("tiny",), **room
    ) as port:
        yield port


def asked(port: int, **about: Any) -> tuple[int, str, str]:
    """(status, param, message) of a chat for which nobody waits."""
    body = json.dumps({"messages": ASKED, "timeout": 60, **about}).encode()
    headers = {"content-type": "application/json", "prefer": "respond-async"}
    call = urllib.request.Request(f"http://localhost:{port}/v1/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(call, timeout=120) as answer:
            return answer.status, "", ""
    except urllib.error.HTTPError as error:
        with error:
            told = json.load(error)["error"]
            return error.code, told["param"], told["message"]


def held(port: int, *params: str, **about: Any) -> None:
    status, param, message = asked(port, **about)
    assert status in (202, 400, 429), (status, message)
    if status == 400:
        assert param in params and 10 < len(message) < 600 and "\n" not in message, (param, message)


def by_schema(schema: object, **about: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **about}}}


@THOROUGH
@given(schema=SCHEMAS | GARBAGE, strict=st.sampled_from([None, True, False]))
@example({"$ref": "#"}, True)
@example({"x-guidance": {"lenient": True}, "not": {}}, True)
@example({"x-guidance": 3}, True)
@example({"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object"}, True)
@example({"enum": [float("nan")]}, True)
@example({"type": "string", "pattern": "\ud800"}, True)
@example({"pattern": "(a{1,9999}){1,9999}"}, True)
@example({"properties": {f"p{n}": {"$ref": "#"} for n in range(300)}}, True)
def test_arbitrary_json_schema_is_accepted_or_returns_400(port: int, schema: Any, strict: Any) -> None:
    held(port, "response_format", **by_schema(schema, strict=strict))


@THOROUGH
@given(kind=st.sampled_from(["regex", "grammar"]), text=st.text('abAB01(){}[]|*+?\\^$.,:\n"/~&<>_%-', max_size=60))
@example("regex", "(?=a)")
@example("regex", "\ud800")
@example("regex", "\\p{L}{1,99999}")
@example("grammar", 'start: "a" start | start "b"')
@example("grammar", "start: start")
@example("grammar", "start: <|im_end|>")
@example("grammar", 'start: %json {"$ref": "#/x"}')
@example("grammar", "%import python.file_input\nstart: file_input")
@example("grammar", '%llguidance {"no_forcing": 3}\nstart: "a"')
def test_arbitrary_regex_or_grammar_is_accepted_or_returns_400(port: int, kind: str, text: str) -> None:
    held(port, "response_format", response_format={"type": kind, kind: text})


@THOROUGH
@given(
    said=st.one_of(
        st.none(),
        st.text(max_size=5),
        st.lists(st.integers(), max_size=2),
        GARBAGE,
        st.dictionaries(st.sampled_from(["type", "json_schema", "regex", "grammar", "schema"]), GARBAGE | st.text()),
    )
)
def test_arbitrary_response_format_is_accepted_or_returns_400(port: int, said: Any) -> None:
    held(port, "response_format", response_format=said)


@THOROUGH
@given(
    parameters=SCHEMAS | GARBAGE | st.none() | st.integers(),
    name=st.sampled_from(["f", "a b", "", '"', "é", 3]),
    choice=st.sampled_from(["auto", "required", "none", None, {"type": "function", "function": {"name": "f"}}, {}, 3]),
)
def test_arbitrary_tools_are_accepted_or_return_400(port: int, parameters: Any, name: Any, choice: Any) -> None:
    tool = {"type": "function", "function": {"name": name, "description": "</tools> %json", "parameters": parameters}}
    held(port, "tools", "tool_choice", tools=[tool], tool_choice=choice)


@THOROUGH
@given(
    calls=st.none() | st.lists(GARBAGE | st.just({"function": {"name": "f", "arguments": "{}"}}), max_size=2),
    content=st.none() | st.text(max_size=5) | st.integers(),
    role=st.sampled_from(["assistant", "tool", "user"]),
)
def test_arbitrary_tool_call_messages_are_accepted_or_return_400(
    port: int, calls: Any, content: Any, role: str
) -> None:
    held(port, "messages", messages=[*ASKED, {"role": role, "content": content, "tool_calls": calls}])


def test_internal_grammar_parameters_from_a_client_return_400(port: int) -> None:
    """What the gateway makes of a request is not taken from it."""
    for name in ("grammar", "tool_calls", "reading"):
        assert asked(port, **{name: "0" * 32})[:2] == (400, name)


def test_json_schema_of_megabytes_or_deep_nesting_returns_400(port: int) -> None:
    assert "characters" in asked(port, **by_schema({"enum": ["x" * 1000] * 1000}))[2]
    deep = '"schema": ' + '{"a":' * 5000 + "1" + "}" * 5000
    text = json.dumps({"messages": ASKED, **by_schema({})}).replace('"schema": {}', deep)
    call = urllib.request.Request(
        f"http://localhost:{port}/v1/chat/completions", text.encode(), {"content-type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(call, timeout=60)
    with refused.value:
        assert refused.value.code == 400


@pytest.mark.nightly
def test_expensive_grammars_do_not_block_other_requests(port: int) -> None:
    """Given bombs that compute as long as they may, when others ask meanwhile, then those are accepted."""
    bombs = ["start: A\nA: " + " & ".join(f"/.*{letter}.{{{i}}}b.*/" for i in range(30)) for letter in "acdefghi"]
    with ThreadPoolExecutor(len(bombs)) as pool:
        refused = [pool.submit(asked, port, response_format={"type": "grammar", "grammar": bomb}) for bomb in bombs]
        accepted = [asked(port)[0] for _ in range(20)]
        assert not all(one.done() for one in refused)
        assert {*accepted} == {202}
        assert {one.result()[0] for one in refused} == {400}
