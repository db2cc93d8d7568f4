"""Streams and whole messages of chats, made from the recorded text: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from hashlib import blake2b
from typing import Any

from unfuse.core.request import Event, RequestContext
from unfuse.core.task import PIECES_AT_ONCE
from unfuse.core.text import Answer
from unfuse.language.answer_reader import AnswerPart, AnswerReader
from unfuse.queues.base import RequestStore


async def output_stream(
    queue: RequestStore, request: str, offsets: Mapping[str, int]
) -> AsyncIterator[tuple[str, bytes]]:
    """The chunks of these stages as (stage, chunk), each stage from its offset on, until the request is over.

    A reader that counts them may go on from there with another call. For a slow reader nothing is kept but one answer
    of the queue. Raises NotFound for an unknown request, and TransientError while the queue cannot be read.
    """
    counts = dict(offsets)
    async for stages in _stages_with_news(queue.watch(request), counts):
        for stage in stages:
            size = PIECES_AT_ONCE
            while size == PIECES_AT_ONCE:
                chunks = await queue.appended(request, stage, counts[stage])
                size = len(chunks)
                for chunk in chunks:
                    counts[stage] += 1
                    yield stage, chunk


async def _stages_with_news(events: AsyncIterator[Event], counts: Mapping[str, int]) -> AsyncIterator[Collection[str]]:
    """The stages that may have more chunks than `counts`: all at first and at the end, between them one at a time."""
    yield counts.keys()
    async for event in events:
        if event.type == "appended" and event.step > counts.get(event.stage, event.step):
            yield (event.stage,)
    yield counts.keys()


class StreamedMessage:
    """Turns the text of one choice into deltas. A parsed answer must be fed from its beginning."""

    def __init__(self, context: RequestContext, index: int) -> None:
        reading = context.request.derived.reading
        self._reader = AnswerReader(reading) if reading else None
        self._hidden = "reasoning" if reading and reading.hidden else ""
        self._answer = f"{context.id}:{index}"
        self._later = ""  # arguments of the last call for the next delta: its first delta has only id and name
        self.calls = 0

    @property
    def looks_back(self) -> bool:
        """Whether it has to be read from its beginning."""
        return self._reader is not None

    def add(self, text: str) -> dict[str, Any]:
        """What a client is told of more text: nothing, perhaps."""
        if self._reader is None:
            return {"content": text} if text else {}
        return self._delta(self._reader.feed(text))

    def finish(self, ended: str) -> list[dict[str, Any]]:
        """Return the remaining deltas at the end of the answer, at least one."""
        if self._reader is None:
            return [{}]
        deltas = [self._delta(self._reader.finish(cut=ended == "length"))]
        while self._later:
            deltas.append(self._delta([]))
        return deltas

    def reason(self, ended: str) -> str:
        """Why the choice ended, as clients read it."""
        return "tool_calls" if ended == "stop" and self.calls else ended

    def _delta(self, parts: list[AnswerPart]) -> dict[str, Any]:
        """Return the delta with these parts, and with arguments left from the previous one."""
        texts = {"reasoning": "", "content": ""}
        calls = dict[int, dict[str, Any]]()
        later, self._later = self._later, ""
        if later:
            calls[self.calls - 1] = {"index": self.calls - 1, "function": {"arguments": later}}
        for part in parts:
            if part.kind == "call":
                self._flush(calls)
                calls[self.calls] = self._begin(part.text)
                self.calls += 1
            elif part.kind == "arguments":
                self._add_arguments(calls, part.text)
            elif part.kind not in ("mark", self._hidden):
                texts[part.kind] += part.text
        names = {"reasoning_content": texts["reasoning"], "content": texts["content"]}
        delta: dict[str, Any] = {name: text for name, text in names.items() if text}
        return {**delta, "tool_calls": [*calls.values()]} if calls else delta

    def _begin(self, name: str) -> dict[str, Any]:
        """Return the first delta of a call. Its id is derived from the request, so that it stays the same."""
        number = f"{self._answer}:{self.calls}".encode()
        id = f"call_{blake2b(number, digest_size=12).hexdigest()}"
        return {"index": self.calls, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}

    def _add_arguments(self, calls: dict[int, dict[str, Any]], text: str) -> None:
        """Add arguments to the last call, or to the next delta if the call begins in this one."""
        last = self.calls - 1
        if last in calls and "id" in calls[last]:
            self._later += text
        else:
            calls.setdefault(last, {"index": last, "function": {"arguments": ""}})["function"]["arguments"] += text

    def _flush(self, calls: dict[int, dict[str, Any]]) -> None:
        """Put the left arguments into this delta, because another call begins in it."""
        if self._later:
            calls[self.calls - 1]["function"]["arguments"] += self._later
            self._later = ""


def whole(context: RequestContext, index: int, answer: Answer) -> tuple[dict[str, Any], str]:
    """The message of a choice, and why it ended."""
    message = StreamedMessage(context, index)
    texts, calls = {"reasoning_content": "", "content": ""}, list[dict[str, Any]]()
    for delta in (message.add(answer.text), *message.finish(answer.finish_reason)):
        for name in texts:
            texts[name] += delta.get(name, "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append({key: value for key, value in call.items() if key != "index"})
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    told: dict[str, Any] = {"content": texts["content"] or (None if calls else "")}
    if texts["reasoning_content"]:
        told["reasoning_content"] = texts["reasoning_content"]
    if calls:
        told["tool_calls"] = calls
    return told, message.reason(answer.finish_reason)
