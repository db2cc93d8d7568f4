"""An answer as it comes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any, Self


class ReceivedAnswer:
    """The answer received so far; complete after the last delta.

    `tool_calls` have the form that messages of a chat have. `reasoning` is the text before the answer, if the server
    parses reasoning. `finish_reason` says why the answer ended.
    """

    def __init__(self) -> None:
        self.text = ""
        self.reasoning = ""
        self.tool_calls: list[dict[str, Any]] = []
        self.finish_reason: str | None = None

    def take(self, choice: dict[str, Any]) -> str:
        """Read what is told of the only choice; returns the text that it adds."""
        delta: dict[str, Any] = choice["delta"]
        self.reasoning += str(delta.get("reasoning_content") or "")
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                self.tool_calls.append({key: value for key, value in call.items() if key != "index"})
            else:
                self.tool_calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        self.finish_reason = choice["finish_reason"] or self.finish_reason
        part = str(delta.get("content") or "")
        self.text += part
        return part

    @property
    def message(self) -> dict[str, Any]:
        """The answer so far, as the next messages have it."""
        if self.tool_calls:
            return {"role": "assistant", "content": self.text or None, "tool_calls": self.tool_calls}
        return {"role": "assistant", "content": self.text}


class Chat(ReceivedAnswer, Iterator[str]):
    """The parts of an answer, as they come, each once."""

    def __init__(self, choices: Iterator[dict[str, Any]]) -> None:
        super().__init__()
        self._choices = choices

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        return self.take(next(self._choices))


class AsyncChat(ReceivedAnswer, AsyncIterator[str]):
    """The same, for `async for`. `choices` yields what the parts are read from."""

    def __init__(self, choices: AsyncGenerator[dict[str, Any], None]) -> None:
        super().__init__()
        self.choices = choices

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        return self.take(await anext(self.choices))
