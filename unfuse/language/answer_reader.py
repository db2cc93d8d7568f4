"""Split the text of an answer into reasoning, content and tool calls, by the model's formats."""

from __future__ import annotations

from typing import Literal

from unfuse.core.text import Reading, ReasoningFormat
from unfuse.language.tool_calls import LEAST, CallReader, Part


def opened(format: ReasoningFormat, start: str, *, continues: bool = False) -> bool:
    """Return whether an answer begins within reasoning, if `start` is the text before it in its turn.

    The template writes that text, or it is the last message, which the answer `continues`.
    """
    begun, ended = start.rfind(format.begin), start.rfind(format.end)
    return begun > ended or (format.always and ended < 0 and not continues)


class AnswerReader:
    """Parses an answer incrementally. The parts do not depend on where the text is split."""

    def __init__(self, reading: Reading) -> None:
        self.reasoning = ReasoningReader(reading.reasoning, reading.opened) if reading.reasoning else None
        self._calls: CallReader | None = None
        if reading.calls:
            about = {"several": reading.several, "forced": reading.forced}
            self._calls = CallReader(reading.calls, reading.functions, **about)

    @property
    def over(self) -> bool:
        """Whether the answer is complete, so that further text is ignored."""
        return self._calls is not None and self._calls.over

    def feed(self, text: str) -> list[Part]:
        """Add text. Returns the parts that are certain now."""
        return self._read(self.reasoning.feed(text) if self.reasoning else [Part("content", text, text)])

    def finish(self, *, cut: bool = False) -> list[Part]:
        """Return the remaining parts at the end of the text. `cut`: the answer ran out of tokens."""
        parts = self._read(self.reasoning.finish(cut=cut)) if self.reasoning else []
        return parts + (self._calls.finish(cut=cut) if self._calls else [])

    def _read(self, parts: list[Part]) -> list[Part]:
        """Replace content by the parts that the call parser makes of it."""
        if self._calls is None:
            return parts
        found = list[Part]()
        for part in parts:
            found += self._calls.feed(part.raw) if part.kind == "content" else [part]
        return found


class ReasoningReader:
    """Separates the reasoning at the beginning of an answer from the rest, incrementally.

    White space around the reasoning is dropped. `opened`: the prompt already contains the begin mark.
    """

    def __init__(self, format: ReasoningFormat, opened: bool) -> None:
        self._format, self._held = format, ""
        self._blank = True  # whether the reasoning so far is only white space
        self.state: Literal["start", "opened", "inside", "behind", "content"] = "opened" if opened else "start"

    def feed(self, text: str) -> list[Part]:
        """Add text. Returns the parts that are certain now."""
        self._held += text
        parts = list[Part]()
        while self._held and (more := self._advance()) is not None:
            parts += more
        return parts

    def finish(self, *, cut: bool = False) -> list[Part]:
        """Return the remaining parts at the end of the text. `cut`: the answer ran out of tokens."""
        held, self._held = self._held, ""
        if self.state in ("opened", "inside"):
            shown = "" if cut or not held.strip() else held.rstrip()
            return [Part("reasoning", shown, held)] if shown else _mark(held)
        marked = self.state == "start" and cut and len(held.strip()) >= LEAST
        return _mark(held) if marked or not held else [Part("content", held, held)]

    def _advance(self) -> list[Part] | None:
        """Parse one step. Returns its parts, or None if more text is needed."""
        match self.state:
            case "start" | "opened":
                return self._read_start()
            case "inside":
                return self._read_reasoning()
            case "behind":
                return self._read_behind()
        held, self._held = self._held, ""
        return [Part("content", held, held)]

    def _read_start(self) -> list[Part] | None:
        begin, rest = self._format.begin, self._held.lstrip()
        if begin.startswith(rest):
            if rest != begin:
                return None
            rest = ""
        elif rest.startswith(begin):
            rest = rest[len(begin) :]
        elif self.state == "start":
            self.state = "content"
            return []
        self.state = "inside"
        text = rest.lstrip()
        mark = self._held[: len(self._held) - len(text)]
        self._held = text
        self._blank = True
        return _mark(mark)

    def _read_reasoning(self) -> list[Part] | None:
        """Parse reasoning up to its end mark. Trailing white space is held back, because it may precede the mark."""
        if self._blank:
            text = self._held.lstrip()
            mark = _mark(self._held[: len(self._held) - len(text)])
            self._held, self._blank = text, not text
            return mark
        end = self._format.end
        at = self._held.find(end)
        if at >= 0:
            text, raw = self._held[:at].rstrip(), self._held[: at + len(end)]
            self._held = self._held[at + len(end) :]
            self.state = "behind"
            return [Part("reasoning", text, text), *_mark(raw[len(text) :])] if text else _mark(raw)
        sure = self._held[: len(self._held) - overlap(self._held, end)].rstrip()
        if not sure:
            return None
        self._held = self._held[len(sure) :]
        return [Part("reasoning", sure, sure)]

    def _read_behind(self) -> list[Part]:
        """Drop white space between reasoning and content."""
        text = self._held.lstrip()
        mark = self._held[: len(self._held) - len(text)]
        self._held = text
        if text:
            self.state = "content"
        return _mark(mark)


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `mark`."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-size:])), 0)


def _mark(raw: str) -> list[Part]:
    return [Part("mark", "", raw)] if raw else []
