"""Incremental parser of the tool calls in the text of an answer.

The result does not depend on where the text is split. Text that starts like a call, but is not a call of an offered
function, is content, unchanged.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Literal

import msgspec

from unfuse.core.text import CallFormat
from unfuse.language.call_syntax import Chars, NotACall, Syntaxes

Kind = Literal["content", "reasoning", "call", "arguments", "mark"]

BETWEEN = " \r\n\t,;]}`"
"""Characters between a call and a mark or another call, including a surplus brace and the end of a code fence."""

LEAST = 4  # characters by which a truncated mark is recognized


class Part(msgspec.Struct, frozen=True):
    """A part of the text that a model wrote.

    `text` is content, reasoning, the name of a called function, a piece of the last call's arguments, or "" for a mark.
    `raw` is the model's text for this part: the `raw` of all parts together are the whole text.
    """

    kind: Kind
    text: str
    raw: str


class CallReader:
    """Extracts calls of the offered `functions` from a text, incrementally.

    `functions` maps each function to the types of its parameters by name, for formats without types. Without
    `several`, only the first call is parsed, and the text is `over` after it. `forced` means that the answer consists
    of calls, so that the rest of a truncated call is never content.
    """

    def __init__(
        self,
        format: CallFormat,
        functions: Mapping[str, Mapping[str, str]],
        *,
        several: bool = True,
        forced: bool = False,
    ) -> None:
        self._format, self._several, self._forced = format, several, forced
        self._chars = Chars()
        self._syntax = Syntaxes(format, functions, self._chars, several)
        self._parts = list[Part]()
        self._text = ""  # not parsed yet
        self._candidate, self._marked = "", False  # the start of a possible call; whether it is a mark
        self._parsing: Generator[None, str, None] | None = None
        self._between = False  # whether the last parsed element is a call
        self._new_line, self._begun = True, False
        self.calls, self.over = 0, False

    def feed(self, text: str) -> list[Part]:
        """Add text. Returns the parts that are certain now."""
        self._text += text
        while self._text and not self.over and self._advance():
            pass
        if self.over:
            self._emit("mark", "", self._text)
            self._text = ""
        return self._pop_parts()

    def finish(self, *, cut: bool = False) -> list[Part]:
        """Return the remaining parts at the end of the text. `cut`: the answer ran out of tokens."""
        if self._parsing is not None:
            self._end_call(cut)
        elif self._text:
            blank = self._between and not self._text.strip(BETWEEN)
            hidden = blank or (cut and (self._forced or self._between or self._is_part_of_mark(self._text)))
            self._emit("mark" if hidden else "content", "" if hidden else self._text, self._text)
        self._text = ""
        return self._pop_parts()

    def _is_part_of_mark(self, text: str) -> bool:
        """Whether a text is the beginning of a start mark, and long enough not to be something else."""
        text = text.strip()
        return len(text) >= LEAST and any(mark.startswith(text) for mark in self._format.starts)

    def _advance(self) -> bool:
        """Parse one step. Returns False if more text is needed."""
        if self._parsing is not None:
            return self._parse()
        return self._read_between() if self._between else self._read_content()

    def _read_content(self) -> bool:
        """Parse content up to a possible call. White space at the beginning of an answer is held back."""
        text, place = self._text, 0
        if not self._begun:
            place = len(text) - len(text.lstrip())
        while place < len(text):
            start = self._start(text, place)
            if start is None:
                sure = place if self._begun else 0
                self._show(text[:sure])
                self._text = text[sure:]
                return False
            if start:
                before = "" if self._begun else text[:place]
                self._show(text[len(before) : place])
                self._text = text[place + len(start) :]
                self._begin(before, start)
                return True
            self._new_line = text[place] == "\n" or (self._new_line and text[place].isspace())
            self._begun = True
            place += 1
        if self._begun:
            self._show(text)
            self._text = ""
        return False

    def _start(self, text: str, place: int) -> str | None:
        """Return the text that begins a call at this place: "" if none does, None if more text is needed."""
        if self._new_line and text[place] in self._format.bare:
            return text[place]
        marks = [mark for mark in self._format.starts if mark[0] == text[place]]
        for mark in marks:
            if text.startswith(mark, place):
                return mark
        rest = text[place : place + max(map(len, self._format.marks), default=0)]
        return None if any(mark.startswith(rest) for mark in marks) else ""

    def _read_between(self) -> bool:
        """Parse the text after a call: marks, separators and white space, another call, or content."""
        rest = self._text.lstrip(BETWEEN)
        skipped = self._text[: len(self._text) - len(rest)]
        marks = (*self._format.ends, *self._format.starts)
        mark = next((mark for mark in marks if rest.startswith(mark)), "")
        if not rest or (not mark and any(mark.startswith(rest) for mark in marks)):
            return False
        if mark in self._format.starts or (not mark and self._goes_on(rest)):
            self._between = False
            self._text = rest[len(mark or rest[0]) :]
            self._begin(skipped, mark or rest[0])
        elif mark:
            self._emit("mark", "", skipped + mark)
            self._text = rest[len(mark) :]
        else:
            blank = self._text[: len(self._text) - len(self._text.lstrip())]
            self._emit("mark", "", blank)
            self._text = self._text[len(blank) :]
            self._between, self._begun = False, True
            self._new_line = "\n" in blank
        return True

    def _goes_on(self, rest: str) -> bool:
        """Whether this may be a further object of a list, or a further bare call."""
        listed = self._format.syntax in ("json", "listed") and rest[0] == "{"
        return listed or rest[0] in self._format.bare

    def _begin(self, before: str, start: str) -> None:
        """Start parsing a possible call at `start`. If it is not a call, `before` and `start` are content."""
        self._chars.reset(before + start)
        self._candidate, self._marked = before + start, start in self._format.starts
        self._parsing = self._syntax.parse(start)
        next(self._parsing)

    def _parse(self) -> bool:
        """Feed the text to the call parser, up to the end of the call."""
        assert self._parsing is not None
        text, self._text = self._text, ""
        for place, char in enumerate(text):
            try:
                self._parsing.send(char)
            except (StopIteration, NotACall) as end:
                self._text = text[place + 1 :]
                self._drain()
                self._close(isinstance(end, NotACall))
                return True
        self._drain()
        return False

    def _drain(self) -> None:
        for kind, piece, raw in self._chars.pop_events():
            self._emit(kind, piece, raw)
            self.calls += kind == "call"

    def _close(self, failed: bool) -> None:
        """Handle the end of the call parser: its unparsed text is content, or is parsed again."""
        self._parsing = None
        left = self._chars.left()
        began = self._chars.started
        if failed and not began:
            self._show(self._candidate)
            self._text = left[len(self._candidate) :] + self._text
            self._new_line, self._begun = False, True
            return
        self._text = left + self._text
        self._between = True
        self.over = not self._several and self.calls > 0

    def _end_call(self, cut: bool) -> None:
        """End an unfinished call at the end of the text."""
        assert self._parsing is not None
        if not cut:
            self._syntax.end()
        self._drain()
        left = self._chars.left()
        hidden = self._chars.started or (cut and (self._forced or self._marked))
        self._emit("mark" if hidden else "content", "" if hidden else left, left)
        self._parsing = None

    def _show(self, text: str) -> None:
        self._emit("content", text, text)

    def _emit(self, kind: Kind, text: str, raw: str) -> None:
        """Add a part; join it to the last one if both are of the same kind."""
        if not raw and not text:
            return
        last = self._parts[-1] if self._parts else None
        if last and last.kind == kind and kind != "call":
            self._parts[-1] = Part(kind, last.text + text, last.raw + raw)
        else:
            self._parts.append(Part(kind, text, raw))

    def _pop_parts(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts
