"""What a model said, as clients read it: text, and calls of tools."""

from __future__ import annotations

from typing import Any

from unfuse.core.request import RequestContext
from unfuse.core.text import Answer
from unfuse.core.tool_calls import Call, CallReader
from unfuse.core.tools import CALLS, FORMATS


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
