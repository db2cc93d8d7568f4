"""Features of chats together: reasoning, calls, stop texts, log probabilities, choices, streams taken up again."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tests.answers.scripts import TOOLS
from tools.server import Server

CASES: dict[str, dict[str, Any]] = {
    "calls behind reasoning": {
        "model": "think",
        "script": "call",
        "tools": TOOLS,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "stop": ["I call", "name"],
        "min_tokens": 3,
    },
    "a stop text that is shown": {
        "model": "think",
        "script": "answer",
        "stop": [" 4"],
        "include_stop_str_in_output": True,
        "logprobs": True,
    },
    "reasoning that is not told": {"model": "think", "script": "answer", "include_reasoning": False, "n": 2},
    "the only call": {"model": "pq", "script": "two", "tools": TOOLS, "parallel_tool_calls": False, "n": 2},
    "special marks": {"model": "deep", "script": "two", "tools": TOOLS, "stop": ["call", "g"], "logprobs": True},
    "tags": {"model": "coder", "script": "two", "tools": TOOLS, "n": 2, "min_tokens": 5, "stop": ["parameter"]},
}

Event = tuple[str, dict[str, Any]]


def body_of(case: str, **more: Any) -> dict[str, Any]:
    about = dict(CASES[case])
    messages = [{"role": "user", "content": about.pop("script")}]
    return {"messages": messages, "temperature": 0, "seed": 1, **about, **more}


def streamed(server: Server, case: str, last: str = "") -> list[Event]:
    """The id and the value of each chunk, those behind an id if it is given."""
    headers = {"Idempotency-Key": f"combined {case}"} | ({"Last-Event-ID": last} if last else {})
    answer = httpx2.post(
        f"{server.url}/v1/chat/completions", json=body_of(case, stream=True), headers=headers, timeout=600
    )
    assert answer.status_code == 200, answer.text
    events = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    assert events.pop() == ["data: [DONE]"]
    return [
        (next(line[4:] for line in lines if line.startswith("id: ")), json.loads(lines[-1].removeprefix("data: ")))
        for lines in events
    ]


def together(events: list[Event]) -> list[dict[str, Any]]:
    """What a client makes of the chunks: of each choice the message, why it ended, and the tokens with logprobs."""
    made = dict[int, dict[str, Any]]()
    for _, chunk in events:
        (choice,) = chunk["choices"]
        one = made.setdefault(choice["index"], {"content": "", "reasoning_content": "", "calls": [], "tokens": []})
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            one[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                one["calls"].append([call["id"], call["function"]["name"], ""])
            one["calls"][call["index"]][2] += call["function"]["arguments"]
        one["tokens"] += [entry["token"] for entry in (choice["logprobs"] or {}).get("content", [])]
        one["reason"] = choice["finish_reason"]
    return [made[index] for index in sorted(made)]


def whole(server: Server, case: str) -> list[dict[str, Any]]:
    """The same of an answer that is not streamed, but for the ids of calls, which are of the request."""
    answer = server.post("/v1/chat/completions", body_of(case))
    found = []
    for choice in answer["choices"]:
        message = choice["message"]
        calls = [
            ["", call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", [])
        ]
        found.append(
            {
                "content": message["content"] or "",
                "reasoning_content": message.get("reasoning_content", ""),
                "calls": calls,
                "tokens": [entry["token"] for entry in (choice["logprobs"] or {}).get("content", [])],
                "reason": choice["finish_reason"],
            }
        )
    return found


def without_ids(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**one, "calls": [["", *call[1:]] for call in one["calls"]]} for one in choices]


@pytest.mark.nightly
@pytest.mark.row("C5:reasoning_content", "C10", "C13", "C20", "K6")
@pytest.mark.parametrize("case", CASES)
def test_resumed_chat_stream_equals_the_unstreamed_completion(scripted: Server, case: str) -> None:
    events = streamed(scripted, case)
    made = together(events)
    assert without_ids(made) == whole(scripted, case)
    for place in (0, len(events) // 3, len(events) // 2, len(events) - 3):
        assert together(events[: place + 1] + streamed(scripted, case, events[place][0])) == made


@pytest.mark.nightly
@pytest.mark.row("C20")
def test_reasoning_tool_calls_and_stop_strings_work_together(scripted: Server) -> None:
    said = {case: whole(scripted, case)[0] for case in CASES}
    called = {case: [call[1] for call in one["calls"]] for case, one in said.items()}
    assert said["calls behind reasoning"]["reasoning_content"] == "I call f."
    assert called["calls behind reasoning"] == ["f"] and called["the only call"] == ["f"]
    assert called["special marks"] == called["tags"] == ["f", "g"]
    shown = said["a stop text that is shown"]
    assert (shown["content"], shown["reason"]) == ("It is 4", "stop")
    assert "".join(shown["tokens"]).startswith("<think>\nLet me see.\n\nYes.\n</think>\n\nIt is 4")
    assert said["reasoning that is not told"]["reasoning_content"] == ""
    assert said["reasoning that is not told"]["content"] == "It is 4."
