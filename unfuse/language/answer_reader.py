"""Split the text of an answer into reasoning, content and tool calls, by the model's formats: one table row each.

The result does not depend on where the text is split. Text that starts like a call, but is not a call of an offered
function, is content, unchanged. Formats have vLLM's parser names.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Literal

import msgspec

from unfuse.core.text import SEPARATOR, AnswerParsing, CallFormat, ReasoningFormat
from unfuse.language.call_syntax import CallInput, CallParsers, NotACall

_BEGINS = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
_ENDS = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "```")

HERMES = CallFormat(
    "hermes", "json", ("<tool_call>",), ("</tool_call>",),
    open="<tool_call>\n", between="\n</tool_call>\n<tool_call>\n", close="\n</tool_call>",
)  # fmt: skip
BARE = CallFormat(
    "llama3_json", "json", ("<|python_tag|>",), bare="{[", head='{"name": "NAME", "parameters": ',
)  # fmt: skip

CALL_FORMATS = {
    one.name: one
    for one in (
        HERMES,
        BARE,
        CallFormat(
            "qwen3_coder", "tags", ("<tool_call>", "<function="), ("</function>", "</tool_call>"), written=HERMES,
        ),
        CallFormat(
            "deepseek_v3", "named", _BEGINS, _ENDS, inner=(SEPARATOR,),
            open=_BEGINS[0] + _BEGINS[1], head="function<｜tool▁sep｜>NAME\n```json\n", tail="\n```",
            between=f"{_ENDS[0]}\n{_BEGINS[1]}", close=_ENDS[0] + _ENDS[1],
        ),
        CallFormat(
            "deepseek_v31", "named", _BEGINS, _ENDS, inner=(SEPARATOR,),
            open=_BEGINS[0] + _BEGINS[1], head="NAME<｜tool▁sep｜>", tail="",
            between=_ENDS[0] + _BEGINS[1], close=_ENDS[0] + _ENDS[1],
        ),
        CallFormat("mistral", "listed", ("[TOOL_CALLS]",), inner=("[CALL_ID]", "[ARGS]"), written=BARE),
        CallFormat("pythonic", "python", ("<|python_start|>",), ("<|python_end|>",), bare="[", written=BARE),
    )
}  # fmt: skip

REASONING_FORMATS = {
    one.name: one
    for one in (
        ReasoningFormat("qwen3"),
        ReasoningFormat("deepseek_r1", always=True),
        ReasoningFormat("glm45"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
    )
}


def format_of(template: str) -> CallFormat:
    """Return the tool-call format of a model with this chat template."""
    if "<function=" in template:
        return CALL_FORMATS["qwen3_coder"]
    if "<tool_call>" in template:
        return CALL_FORMATS["hermes"]
    if SEPARATOR in template:
        return CALL_FORMATS["deepseek_v3" if "```json" in template else "deepseek_v31"]
    if "[TOOL_CALLS]" in template:
        return CALL_FORMATS["mistral"]
    if "func_name1(params_name1=params_value1" in template or "<|python_start|>" in template:
        return CALL_FORMATS["pythonic"]
    if '"parameters"' in template:
        return CALL_FORMATS["llama3_json"]
    return CALL_FORMATS["hermes"]


def reasoning_of(template: str) -> ReasoningFormat | None:
    """Return the reasoning format of a model with this chat template, or None."""
    found = (REASONING_FORMATS[name] for name in ("seed_oss", "mistral", "qwen3"))
    return next((one for one in found if one.begin in template or one.end in template), None)


Kind = Literal["content", "reasoning", "call", "arguments", "mark"]

BETWEEN = " \r\n\t,;]}`"
"""Characters between a call and a mark or another call, including a surplus brace and the end of a code fence."""

LEAST = 4  # characters by which a truncated mark is recognized


class AnswerPart(msgspec.Struct, frozen=True):
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
        self._chars = CallInput()
        self._syntax = CallParsers(format, functions, self._chars, several)
        self._parts = list[AnswerPart]()
        self._text = ""  # not parsed yet
        self._candidate, self._marked = "", False  # the start of a possible call; whether it is a mark
        self._parsing: Generator[None, str, None] | None = None
        self._between = False  # whether the last parsed element is a call
        self._new_line, self._begun = True, False
        self.calls, self.over = 0, False

    def feed(self, text: str) -> list[AnswerPart]:
        """Add text. Returns the parts that are certain now."""
        self._text += text
        while self._text and not self.over and self._advance():
            pass
        if self.over:
            self._emit("mark", "", self._text)
            self._text = ""
        return self._pop_parts()

    def finish(self, *, cut: bool = False) -> list[AnswerPart]:
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
            self._parts[-1] = AnswerPart(kind, last.text + text, last.raw + raw)
        else:
            self._parts.append(AnswerPart(kind, text, raw))

    def _pop_parts(self) -> list[AnswerPart]:
        parts, self._parts = self._parts, []
        return parts


def opened(format: ReasoningFormat, start: str, *, continues: bool = False) -> bool:
    """Return whether an answer begins within reasoning, if `start` is the text before it in its turn.

    The template writes that text, or it is the last message, which the answer `continues`.
    """
    begun, ended = start.rfind(format.begin), start.rfind(format.end)
    return begun > ended or (format.always and ended < 0 and not continues)


class AnswerReader:
    """Parses an answer incrementally. The parts do not depend on where the text is split."""

    def __init__(self, reading: AnswerParsing) -> None:
        self.reasoning = ReasoningReader(reading.reasoning, reading.opened) if reading.reasoning else None
        self._calls: CallReader | None = None
        if reading.calls:
            about = {"several": reading.several, "forced": reading.forced}
            self._calls = CallReader(reading.calls, reading.functions, **about)

    @property
    def over(self) -> bool:
        """Whether the answer is complete, so that further text is ignored."""
        return self._calls is not None and self._calls.over

    def feed(self, text: str) -> list[AnswerPart]:
        """Add text. Returns the parts that are certain now."""
        return self._read(self.reasoning.feed(text) if self.reasoning else [AnswerPart("content", text, text)])

    def finish(self, *, cut: bool = False) -> list[AnswerPart]:
        """Return the remaining parts at the end of the text. `cut`: the answer ran out of tokens."""
        parts = self._read(self.reasoning.finish(cut=cut)) if self.reasoning else []
        return parts + (self._calls.finish(cut=cut) if self._calls else [])

    def _read(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        """Replace content by the parts that the call parser makes of it."""
        if self._calls is None:
            return parts
        found = list[AnswerPart]()
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

    def feed(self, text: str) -> list[AnswerPart]:
        """Add text. Returns the parts that are certain now."""
        self._held += text
        parts = list[AnswerPart]()
        while self._held and (more := self._advance()) is not None:
            parts += more
        return parts

    def finish(self, *, cut: bool = False) -> list[AnswerPart]:
        """Return the remaining parts at the end of the text. `cut`: the answer ran out of tokens."""
        held, self._held = self._held, ""
        if self.state in ("opened", "inside"):
            shown = "" if cut or not held.strip() else held.rstrip()
            return [AnswerPart("reasoning", shown, held)] if shown else _mark(held)
        marked = self.state == "start" and cut and len(held.strip()) >= LEAST
        return _mark(held) if marked or not held else [AnswerPart("content", held, held)]

    def _advance(self) -> list[AnswerPart] | None:
        """Parse one step. Returns its parts, or None if more text is needed."""
        match self.state:
            case "start" | "opened":
                return self._read_start()
            case "inside":
                return self._read_reasoning()
            case "behind":
                return self._read_behind()
        held, self._held = self._held, ""
        return [AnswerPart("content", held, held)]

    def _read_start(self) -> list[AnswerPart] | None:
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

    def _read_reasoning(self) -> list[AnswerPart] | None:
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
            return [AnswerPart("reasoning", text, text), *_mark(raw[len(text) :])] if text else _mark(raw)
        sure = self._held[: len(self._held) - overlap(self._held, end)].rstrip()
        if not sure:
            return None
        self._held = self._held[len(sure) :]
        return [AnswerPart("reasoning", sure, sure)]

    def _read_behind(self) -> list[AnswerPart]:
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


def _mark(raw: str) -> list[AnswerPart]:
    return [AnswerPart("mark", "", raw)] if raw else []
