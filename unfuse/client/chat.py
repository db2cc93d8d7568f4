"""An answer as it comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self


class Chat(Iterator[str]):
    """The parts of an answer, as they come, each once; and what is known of it when they are all there.

    `tool_calls` are the calls that the model makes, as the messages of a chat have them, and `finish_reason` says why
    the answer ended.
    """

    def __init__(self, choices: Iterator[dict[str, Any]]) -> None:
        self._choices = choices
        self.text = ""
        self.tool_calls: list[dict[str, Any]] = []
        self.finish_reason: str | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        choice = next(self._choices)
        delta: dict[str, Any] = choice["delta"]
        for call in delta.get("tool_calls") or ():
            self.tool_calls.append({key: value for key, value in call.items() if key != "index"})
        self.finish_reason = choice["finish_reason"] or self.finish_reason
        part = str(delta.get("content") or "")
        self.text += part
        return part

    @property
    def message(self) -> dict[str, Any]:
        """The answer so far, as the next messages have it."""
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        return {"role": "assistant", "content": self.text or None, **calls}
