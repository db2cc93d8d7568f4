"""What a model said, as clients read it, whole or while it grows: text, and calls of tools."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from unfuse.core.event import Event
from unfuse.core.growth import PIECES_AT_ONCE
from unfuse.core.request import RequestContext
from unfuse.core.text import Answer
from unfuse.core.tool_calls import Call, CallReader
from unfuse.core.tools import CALLS, FORMATS
from unfuse.queues.base import TaskQueue


async def pieces(queue: TaskQueue, request: str, stage: str, after: int = 0) -> AsyncIterator[bytes]:
    """The recorded pieces of a stage from number `after` on, as they come, until the request is over.

    Whoever counts what came may go on from there with another call. For a slow reader nothing is kept but one answer of
    the queue. Raises NotFound for an unknown request, and TransientError while the queue cannot be read.
    """
    events, ended = queue.watch(request), False
    while True:
        more = True
        while more:
            some = await queue.appended(request, stage, after)
            for piece in some:
                yield piece
            after += len(some)
            more = len(some) == PIECES_AT_ONCE
        if ended:
            return
        ended = not await _grew(events, stage, after)


async def _grew(events: AsyncIterator[Event], stage: str, after: int) -> bool:
    """Wait until a stage has a piece of number `after`; False at the end of the request."""
    async for event in events:
        if (event.type, event.stage) == ("appended", stage) and event.step > after:
            return True
    return False


class GrowingMessage:
    """One choice of a chat, as parts of it come. One whose calls are read has to be read from its beginning."""

    def __init__(self, context: RequestContext, index: int) -> None:
        how = FORMATS.get(str(context.params.get(CALLS)))
        self._reader = CallReader(how, f"{context.id}:{index}") if how else None

    @property
    def calls(self) -> list[Call]:
        """Those that were found so far."""
        return self._reader.calls if self._reader else []

    @property
    def looks_back(self) -> bool:
        """Whether it has to be read from its beginning."""
        return self._reader is not None

    def add(self, text: str) -> dict[str, Any]:
        """What a client is told of more text: nothing, perhaps."""
        return self._delta(*self._reader.feed(text)) if self._reader else self._delta(text, [])

    def finish(self) -> dict[str, Any]:
        """What it is told at the end."""
        return self._delta(*self._reader.finish()) if self._reader else {}

    def reason(self, ended: str) -> str:
        """Why the choice ended, as clients read it."""
        return "tool_calls" if ended == "stop" and self.calls else ended

    def _delta(self, text: str, calls: list[Call]) -> dict[str, Any]:
        told: dict[str, Any] = {"content": text} if text else {}
        if calls:
            first = len(self.calls) - len(calls)
            told["tool_calls"] = [{"index": first + place, **call.shown} for place, call in enumerate(calls)]
        return told


def whole(context: RequestContext, index: int, answer: Answer) -> tuple[dict[str, Any], str]:
    """The message of a choice, and why it ended."""
    message = GrowingMessage(context, index)
    text = "".join(part.get("content", "") for part in (message.add(answer.text), message.finish()))
    told = {"content": text or None, "tool_calls": [call.shown for call in message.calls]}
    return told if message.calls else {"content": text}, message.reason(answer.finish_reason)
