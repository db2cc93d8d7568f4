"""Streamed and whole messages of chats: content, reasoning and tool calls from the recorded text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from hashlib import blake2b
from typing import Any

from unfuse.core.request import Event, RequestContext
from unfuse.core.task import MAX_DELTAS_PER_MESSAGE
from unfuse.core.text import Answer
from unfuse.language.answer_reader import AnswerPart, AnswerReader
from unfuse.queues.base import RequestStore


async def output_stream(
    queue: RequestStore, request: str, offsets: Mapping[str, int]
) -> AsyncIterator[tuple[str, bytes]]:
    """Yield the output chunks of stages as (stage, chunk), until the request is over.

    offsets: by stage, the number of chunks to skip. A reader that counts chunks can resume with another call.

    For a slow reader, at most one reply of the queue is buffered. Raises NotFound for an unknown request, and
    TransientError while the queue cannot be read.
    """
    counts = dict(offsets)
    async for stages in _stages_with_output(queue.watch(request), counts):
        for stage in stages:
            # A reply with the maximum of chunks may not have all, so the next one is read at once.
            chunk_count = MAX_DELTAS_PER_MESSAGE
            while chunk_count == MAX_DELTAS_PER_MESSAGE:
                chunks = await queue.read_deltas(request, stage, counts[stage])
                chunk_count = len(chunks)
                for chunk in chunks:
                    counts[stage] += 1
                    yield stage, chunk


async def _stages_with_output(
    events: AsyncIterator[Event], counts: Mapping[str, int]
) -> AsyncIterator[Collection[str]]:
    """Yield the stages that may have more chunks than `counts`.

    All stages are yielded at the start and at the end, and in between the stage of each event with new chunks.
    """
    yield counts.keys()
    async for event in events:
        if event.type == "appended" and event.step > counts.get(event.stage, event.step):
            yield (event.stage,)
    yield counts.keys()


class StreamedMessage:
    """Converts the text of one choice to deltas of the streaming API.

    A parsed answer (`is_parsed`) must be added from its beginning, also if the client has a part of it.
    """

    def __init__(self, context: RequestContext, index: int) -> None:
        parsing = context.request.derived.parsing
        self._reader = AnswerReader(parsing) if parsing else None
        self._hidden_kind = "reasoning" if parsing and parsing.hides_reasoning else ""
        self._answer_id = f"{context.id}:{index}"
        # Arguments of the last call for the next delta: the first delta of a call has only its id and name.
        self._later_arguments = ""
        #: The number of tool calls so far.
        self.calls = 0

    @property
    def is_parsed(self) -> bool:
        """Whether the answer is parsed, so that it has to be added from its beginning."""
        return self._reader is not None

    def add(self, text: str) -> dict[str, Any]:
        """Return the delta for more text.

        It is empty while no part of the text is certain, for example within the mark of a tool call.
        """
        if self._reader is None:
            return {"content": text} if text else {}
        return self._delta(self._reader.feed(text))

    def finish(self, reason: str) -> list[dict[str, Any]]:
        """Return the remaining deltas at the end of the answer, at least one."""
        if self._reader is None:
            return [{}]
        deltas = [self._delta(self._reader.finish(cut=reason == "length"))]
        while self._later_arguments:
            deltas.append(self._delta([]))
        return deltas

    def finish_reason(self, reason: str) -> str:
        """Return the `finish_reason` of the choice: `tool_calls` for an answer that ended with calls."""
        return "tool_calls" if reason == "stop" and self.calls else reason

    def _delta(self, parts: list[AnswerPart]) -> dict[str, Any]:
        """Return the delta with these parts, and with arguments left from the previous one."""
        texts = {"reasoning": "", "content": ""}
        calls = dict[int, dict[str, Any]]()
        later_arguments, self._later_arguments = self._later_arguments, ""
        if later_arguments:
            calls[self.calls - 1] = {"index": self.calls - 1, "function": {"arguments": later_arguments}}

        for part in parts:
            if part.kind == "call":
                self._flush_arguments(calls)
                calls[self.calls] = self._first_call_delta(part.text)
                self.calls += 1
            elif part.kind == "arguments":
                self._add_arguments(calls, part.text)
            elif part.kind not in ("mark", self._hidden_kind):
                texts[part.kind] += part.text

        fields = {"reasoning_content": texts["reasoning"], "content": texts["content"]}
        delta: dict[str, Any] = {name: text for name, text in fields.items() if text}
        return {**delta, "tool_calls": [*calls.values()]} if calls else delta

    def _first_call_delta(self, name: str) -> dict[str, Any]:
        """Return the first delta of a call.

        Its id is derived from the request's, so that it is always the same.
        """
        number = f"{self._answer_id}:{self.calls}".encode()
        id = f"call_{blake2b(number, digest_size=12).hexdigest()}"
        return {"index": self.calls, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}

    def _add_arguments(self, calls: dict[int, dict[str, Any]], text: str) -> None:
        """Add arguments to the last call.

        They are saved for the next delta if the call starts in this one.
        """
        index = self.calls - 1
        if index in calls and "id" in calls[index]:
            self._later_arguments += text
        else:
            calls.setdefault(index, {"index": index, "function": {"arguments": ""}})["function"]["arguments"] += text

    def _flush_arguments(self, calls: dict[int, dict[str, Any]]) -> None:
        """Add saved arguments to this delta, because another call starts in it."""
        if self._later_arguments:
            calls[self.calls - 1]["function"]["arguments"] += self._later_arguments
            self._later_arguments = ""


def whole_message(context: RequestContext, index: int, answer: Answer) -> tuple[dict[str, Any], str]:
    """Return the whole message of a choice, and its `finish_reason`."""
    message = StreamedMessage(context, index)
    texts = {"reasoning_content": "", "content": ""}
    calls = list[dict[str, Any]]()
    for delta in (message.add(answer.text), *message.finish(answer.finish_reason)):
        for name in texts:
            texts[name] += delta.get(name, "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append({key: value for key, value in call.items() if key != "index"})
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]

    fields: dict[str, Any] = {"content": texts["content"] or (None if calls else "")}
    if texts["reasoning_content"]:
        fields["reasoning_content"] = texts["reasoning_content"]
    if calls:
        fields["tool_calls"] = calls
    return fields, message.finish_reason(answer.finish_reason)
