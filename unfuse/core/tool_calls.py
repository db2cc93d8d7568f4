"""Calls of tools in the text of an answer, found while it grows."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

import msgspec

from unfuse.core.tools import CallFormat


class Call(msgspec.Struct, frozen=True):
    """A call of a function, with its arguments as JSON. `id` is the same whenever the same answer is read."""

    id: str
    name: str
    arguments: str

    @property
    def shown(self) -> dict[str, Any]:
        """As clients read it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class CallReader:
    """Takes calls out of a text that comes in pieces. `answer` names the text, of which ids are made.

    What may be the beginning of a call is held back; what turns out to be none is text as any.
    """

    def __init__(self, how: CallFormat, answer: str) -> None:
        self._begin, self._end, self._arguments = how.begin.strip(), how.end.strip(), how.arguments
        self._answer, self._held, self._inside = answer, "", False
        self.calls = list[Call]()
        self._begun = False

    def feed(self, text: str) -> tuple[str, list[Call]]:
        """The text, and the calls, that are certain now."""
        self._held += text
        if not self._begin:
            return self._bare()
        shown, before = "", len(self.calls)
        while True:
            mark = self._end if self._inside else self._begin
            at = self._held.find(mark)
            if at < 0:
                break
            found, self._held = self._held[:at], self._held[at + len(mark) :]
            shown += self._called(found) if self._inside else self._between(found)
            self._inside = not self._inside
        if not self._inside:
            kept = _overlap(self._held, self._begin)
            out, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
            shown += self._between(out)
        return shown, self.calls[before:]

    def finish(self) -> tuple[str, list[Call]]:
        """What was held back, when no text follows."""
        held, before = self._held, len(self.calls)
        self._held = ""
        if not self._inside and self._begin:
            return held, []
        left = self._called(held, closed=False)
        return left, self.calls[before:]

    def _bare(self) -> tuple[str, list[Call]]:
        """An answer that begins as an object is held back to its end; any other is text."""
        if not self._begun and not self._held.strip():
            return "", []
        if not self._begun and self._held.lstrip().startswith("{"):
            return "", []
        self._begun = True
        shown, self._held = self._held, ""
        return shown, []

    def _between(self, text: str) -> str:
        """White space between calls is theirs."""
        return text if not self.calls or text.strip() else ""

    def _called(self, text: str, closed: bool = True) -> str:
        """Read a call; returns the text, as it was, if it is none."""
        if call := self._read(text):
            self.calls.append(call)
            return ""
        return self._begin + text + (self._end if closed else "")

    def _read(self, text: str) -> Call | None:
        try:
            said = msgspec.json.decode(text.strip(), type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            return None
        name, arguments = said.get("name"), said.get(self._arguments, {})
        if not isinstance(name, str) or not isinstance(arguments, dict) or not said.keys() <= {"name", self._arguments}:
            return None
        if not self._begin and self._arguments not in said:
            return None
        number = f"{self._answer}:{len(self.calls)}".encode()
        written = json.dumps(arguments, ensure_ascii=False)
        return Call(f"call_{blake2b(number, digest_size=12).hexdigest()}", name, written)


def _overlap(text: str, mark: str) -> int:
    """How many of the last characters of a text begin the mark."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-size:])), 0)
