"""Parse answers into reasoning, content and tool calls, by the model's formats.

The formats are data, named like vLLM's parsers. The result does not depend on where the text is split. Text that starts
like a call, but does not call an offered function, is content, unchanged.
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
    "hermes",
    "json",
    ("<tool_call>",),
    ("</tool_call>",),
    open="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    close="\n</tool_call>",
)
BARE = CallFormat(
    "llama3_json",
    "json",
    ("<|python_tag|>",),
    bare="{[",
    head='{"name": "NAME", "parameters": ',
)

#: The formats of tool calls, by vLLM's parser name.
CALL_FORMATS = {
    format.name: format
    for format in (
        HERMES,
        BARE,
        CallFormat(
            "qwen3_coder",
            "tags",
            ("<tool_call>", "<function="),
            ("</function>", "</tool_call>"),
            written=HERMES,
        ),
        CallFormat(
            "deepseek_v3",
            "named",
            _BEGINS,
            _ENDS,
            inner=(SEPARATOR,),
            open=_BEGINS[0] + _BEGINS[1],
            head="function<｜tool▁sep｜>NAME\n```json\n",
            tail="\n```",
            between=f"{_ENDS[0]}\n{_BEGINS[1]}",
            close=_ENDS[0] + _ENDS[1],
        ),
        CallFormat(
            "deepseek_v31",
            "named",
            _BEGINS,
            _ENDS,
            inner=(SEPARATOR,),
            open=_BEGINS[0] + _BEGINS[1],
            head="NAME<｜tool▁sep｜>",
            tail="",
            between=_ENDS[0] + _BEGINS[1],
            close=_ENDS[0] + _ENDS[1],
        ),
        CallFormat("mistral", "listed", ("[TOOL_CALLS]",), inner=("[CALL_ID]", "[ARGS]"), written=BARE),
        CallFormat("pythonic", "python", ("<|python_start|>",), ("<|python_end|>",), bare="[", written=BARE),
    )
}

#: The formats of reasoning, by vLLM's parser name.
REASONING_FORMATS = {
    format.name: format
    for format in (
        ReasoningFormat("qwen3"),
        ReasoningFormat("deepseek_r1", always=True),
        ReasoningFormat("glm45"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
    )
}


def format_of(template: str) -> CallFormat:
    """Return the tool-call format of a model with this chat template."""
    # Qwen3-Coder's template also contains `<tool_call>`, so its own mark is looked for first.
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
    """Return the reasoning format of a model with this chat template.

    None if the template does not mention the marks of a format.
    """
    # Several formats have the marks of qwen3, and a template does not tell which of them it is.
    formats = (REASONING_FORMATS[name] for name in ("seed_oss", "mistral", "qwen3"))
    return next((format for format in formats if format.start_mark in template or format.end_mark in template), None)


#: The kind of a part of an answer. A "mark" is text that clients do not get.
Kind = Literal["content", "reasoning", "call", "arguments", "mark"]

#: Characters between a call and a mark or another call, including a surplus brace and the end of a code fence.
BETWEEN = " \r\n\t,;]}`"

#: The least characters by which a truncated mark is recognized.
MIN_MARK_CHARS = 4


class AnswerPart(msgspec.Struct, frozen=True):
    """A part of the text that a model generated."""

    #: The kind of the part.
    kind: Kind
    #: Content, reasoning, the name of a called function, a delta of the last call's arguments, or "" for a mark.
    text: str
    #: The model's text for this part. All `raw` together are the whole text.
    raw: str


class CallReader:
    """Extracts tool calls from a text, incrementally.

    `functions`: the offered functions, each with the types of its parameters by name, for formats without types.
    `several`: whether more than one call is parsed. If not, `is_over` is true after the first.
    `forced`: whether the answer consists of calls, so that the rest of a truncated call is never content.
    """

    def __init__(
        self,
        format: CallFormat,
        functions: Mapping[str, Mapping[str, str]],
        *,
        several: bool = True,
        forced: bool = False,
    ) -> None:
        self._format = format
        self._several = several
        self._forced = forced
        self._chars = CallInput()
        self._syntax = CallParsers(format, functions, self._chars, several)
        self._parts = list[AnswerPart]()
        self._text = ""  # not parsed yet

        self._candidate = ""  # the start of a possible call, with the white space before it
        self._has_mark = False  # whether that start is a mark of the format
        self._parsing: Generator[None, str, None] | None = None  # the parser of a possible call
        self._between = False  # whether the last parsed element is a call

        self._at_line_start = True  # whether only white space precedes in this line
        self._has_content = False  # whether white space at the beginning was passed
        #: The number of calls so far.
        self.calls = 0
        #: Whether the answer is complete, so that further text is ignored.
        self.is_over = False

    def feed(self, text: str) -> list[AnswerPart]:
        """Add text. Returns the parts that are certain now."""
        self._text += text
        while self._text and not self.is_over and self._advance():
            pass
        if self.is_over:
            self._emit("mark", "", self._text)
            self._text = ""
        return self._pop_parts()

    def finish(self, *, cut: bool = False) -> list[AnswerPart]:
        """Return the remaining parts at the end of the text.

        `cut`: the answer ran out of tokens.
        """
        if self._parsing is not None:
            self._end_truncated_call(cut)
        elif self._text:
            is_space = self._between and not self._text.strip(BETWEEN)
            is_hidden = is_space or (cut and (self._forced or self._between or self._is_truncated_mark(self._text)))
            self._emit("mark" if is_hidden else "content", "" if is_hidden else self._text, self._text)
        self._text = ""
        return self._pop_parts()

    def _is_truncated_mark(self, text: str) -> bool:
        """Return whether a text is a beginning of a start mark, and long enough."""
        text = text.strip()
        return len(text) >= MIN_MARK_CHARS and any(mark.startswith(text) for mark in self._format.starts)

    def _advance(self) -> bool:
        """Parse one step. Returns False if more text is needed."""
        if self._parsing is not None:
            return self._parse()
        return self._read_between() if self._between else self._read_content()

    def _read_content(self) -> bool:
        """Parse content up to a possible call.

        White space at the beginning of an answer is held back, because it is dropped before a call.
        """
        text, index = self._text, 0
        if not self._has_content:
            index = len(text) - len(text.lstrip())

        while index < len(text):
            mark = self._find_start(text, index)
            if mark is None:
                certain_chars = index if self._has_content else 0
                self._emit_content(text[:certain_chars])
                self._text = text[certain_chars:]
                return False

            if mark:
                before = "" if self._has_content else text[:index]
                self._emit_content(text[len(before) : index])
                self._text = text[index + len(mark) :]
                self._start_call(before, mark)
                return True

            self._at_line_start = text[index] == "\n" or (self._at_line_start and text[index].isspace())
            self._has_content = True
            index += 1

        if self._has_content:
            self._emit_content(text)
            self._text = ""
        return False

    def _find_start(self, text: str, index: int) -> str | None:
        """Return the text that starts a call at this index.

        "" if no call starts there, None if more text is needed.
        """
        if self._at_line_start and text[index] in self._format.bare:
            return text[index]

        marks = [mark for mark in self._format.starts if mark[0] == text[index]]
        for mark in marks:
            if text.startswith(mark, index):
                return mark
        lookahead = text[index : index + max(map(len, self._format.marks), default=0)]
        return None if any(mark.startswith(lookahead) for mark in marks) else ""

    def _read_between(self) -> bool:
        """Parse the text after a call: marks, separators, white space, a call or content."""
        remaining = self._text.lstrip(BETWEEN)
        skipped = self._text[: len(self._text) - len(remaining)]
        marks = (*self._format.ends, *self._format.starts)
        mark = next((mark for mark in marks if remaining.startswith(mark)), "")

        if not remaining or (not mark and any(mark.startswith(remaining) for mark in marks)):
            return False
        if mark in self._format.starts or (not mark and self._continues_calls(remaining)):
            self._between = False
            self._text = remaining[len(mark or remaining[0]) :]
            self._start_call(skipped, mark or remaining[0])
        elif mark:
            self._emit("mark", "", skipped + mark)
            self._text = remaining[len(mark) :]
        else:
            space = self._text[: len(self._text) - len(self._text.lstrip())]
            self._emit("mark", "", space)
            self._text = self._text[len(space) :]
            self._between, self._has_content = False, True
            self._at_line_start = "\n" in space
        return True

    def _continues_calls(self, text: str) -> bool:
        """Return whether the text after a call may be another call without a mark."""
        is_list_item = self._format.syntax in ("json", "listed") and text[0] == "{"
        return is_list_item or text[0] in self._format.bare

    def _start_call(self, space: str, start: str) -> None:
        """Start the parser of a possible call, after its start mark or first character, `start`.

        If it is not a call, `start` and the white space before it are content.
        """
        self._chars.reset(space + start)
        self._candidate, self._has_mark = space + start, start in self._format.starts
        self._parsing = self._syntax.parse(start)
        next(self._parsing)

    def _parse(self) -> bool:
        """Feed the text to the call parser, up to the end of the call."""
        assert self._parsing is not None
        text, self._text = self._text, ""
        for index, char in enumerate(text):
            try:
                self._parsing.send(char)
            except (StopIteration, NotACall) as end:
                self._text = text[index + 1 :]
                self._emit_events()
                self._end_parsing(isinstance(end, NotACall))
                return True
        self._emit_events()
        return False

    def _emit_events(self) -> None:
        """Emit the call parser's events as parts."""
        for kind, text, raw in self._chars.pop_events():
            self._emit(kind, text, raw)
            self.calls += kind == "call"

    def _end_parsing(self, failed: bool) -> None:
        """Continue after the end of the call parser.

        If it `failed` before the call was certain, the start of the call is content. The text that the parser did not
        use is parsed again.
        """
        self._parsing = None
        unparsed = self._chars.remaining_text()
        was_call = self._chars.started
        if failed and not was_call:
            self._emit_content(self._candidate)
            self._text = unparsed[len(self._candidate) :] + self._text
            self._at_line_start, self._has_content = False, True
            return

        self._text = unparsed + self._text
        self._between = True
        self.is_over = not self._several and self.calls > 0

    def _end_truncated_call(self, cut: bool) -> None:
        """End an unfinished call at the end of the text."""
        assert self._parsing is not None
        if not cut:
            self._syntax.end()
        self._emit_events()
        unparsed = self._chars.remaining_text()
        is_hidden = self._chars.started or (cut and (self._forced or self._has_mark))
        self._emit("mark" if is_hidden else "content", "" if is_hidden else unparsed, unparsed)
        self._parsing = None

    def _emit_content(self, text: str) -> None:
        self._emit("content", text, text)

    def _emit(self, kind: Kind, text: str, raw: str) -> None:
        """Add a part, or extend the last one if both are of the same kind."""
        if not raw and not text:
            return

        last_part = self._parts[-1] if self._parts else None
        if last_part and last_part.kind == kind and kind != "call":
            self._parts[-1] = AnswerPart(kind, last_part.text + text, last_part.raw + raw)
        else:
            self._parts.append(AnswerPart(kind, text, raw))

    def _pop_parts(self) -> list[AnswerPart]:
        parts, self._parts = self._parts, []
        return parts


def opened(format: ReasoningFormat, start: str, *, continues: bool = False) -> bool:
    """Return whether an answer starts within its reasoning.

    `start`: the text before the answer in its turn. The template writes it, or it is the last message.
    `continues`: whether the answer continues that message.
    """
    last_begin, last_end = start.rfind(format.start_mark), start.rfind(format.end_mark)
    return last_begin > last_end or (format.always and last_end < 0 and not continues)


class AnswerReader:
    """Parses an answer incrementally into parts.

    The parts do not depend on where the text is split.
    """

    def __init__(self, parsing: AnswerParsing) -> None:
        #: The parser of the reasoning; None if reasoning is not parsed.
        self.reasoning = ReasoningReader(parsing.reasoning, parsing.starts_in_reasoning) if parsing.reasoning else None
        self._calls: CallReader | None = None
        if parsing.calls:
            options = {"several": parsing.allows_several_calls, "forced": parsing.forced}
            self._calls = CallReader(parsing.calls, parsing.functions, **options)

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete, so that further text is ignored."""
        return self._calls is not None and self._calls.is_over

    def feed(self, text: str) -> list[AnswerPart]:
        """Add text. Returns the parts that are certain now."""
        return self._replace_content(
            self.reasoning.feed(text) if self.reasoning else [AnswerPart("content", text, text)]
        )

    def finish(self, *, cut: bool = False) -> list[AnswerPart]:
        """Return the remaining parts at the end of the text.

        `cut`: the answer ran out of tokens.
        """
        parts = self._replace_content(self.reasoning.finish(cut=cut)) if self.reasoning else []
        return parts + (self._calls.finish(cut=cut) if self._calls else [])

    def _replace_content(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        """Replace content by the parts of calls and content in it."""
        if self._calls is None:
            return parts
        replaced = list[AnswerPart]()
        for part in parts:
            replaced += self._calls.feed(part.raw) if part.kind == "content" else [part]
        return replaced


class ReasoningReader:
    """Separates the reasoning at the beginning of an answer from the rest, incrementally.

    White space around the reasoning is dropped.

    `opened`: whether the prompt already contains the start mark.
    """

    def __init__(self, format: ReasoningFormat, opened: bool) -> None:
        self._format = format
        self._buffer = ""  # text that is not parsed yet
        self._only_space = True  # whether the reasoning so far is only white space
        #: Where in the answer the text so far ends. "behind" is between reasoning and content.
        self.state: Literal["start", "opened", "inside", "behind", "content"] = "opened" if opened else "start"

    def feed(self, text: str) -> list[AnswerPart]:
        """Add text. Returns the parts that are certain now."""
        self._buffer += text
        parts = list[AnswerPart]()
        while self._buffer and (new_parts := self._advance()) is not None:
            parts += new_parts
        return parts

    def finish(self, *, cut: bool = False) -> list[AnswerPart]:
        """Return the remaining parts at the end of the text.

        `cut`: the answer ran out of tokens.
        """
        remaining, self._buffer = self._buffer, ""
        if self.state in ("opened", "inside"):
            text = "" if cut or not remaining.strip() else remaining.rstrip()
            return [AnswerPart("reasoning", text, remaining)] if text else _mark_part(remaining)
        is_truncated_mark = self.state == "start" and cut and len(remaining.strip()) >= MIN_MARK_CHARS
        return (
            _mark_part(remaining)
            if is_truncated_mark or not remaining
            else [AnswerPart("content", remaining, remaining)]
        )

    def _advance(self) -> list[AnswerPart] | None:
        """Parse one step. Returns its parts, or None if more text is needed."""
        match self.state:
            case "start" | "opened":
                return self._read_start()
            case "inside":
                return self._read_reasoning()
            case "behind":
                return self._read_after_reasoning()
        content, self._buffer = self._buffer, ""
        return [AnswerPart("content", content, content)]

    def _read_start(self) -> list[AnswerPart] | None:
        """Parse the start mark and the white space around it.

        Without a start mark, the answer is content.
        """
        start_mark, text_from_mark = self._format.start_mark, self._buffer.lstrip()
        if start_mark.startswith(text_from_mark):
            if text_from_mark != start_mark:
                return None
            text_from_mark = ""
        elif text_from_mark.startswith(start_mark):
            text_from_mark = text_from_mark[len(start_mark) :]
        elif self.state == "start":
            self.state = "content"
            return []

        self.state = "inside"
        text = text_from_mark.lstrip()
        mark = self._buffer[: len(self._buffer) - len(text)]
        self._buffer = text
        self._only_space = True
        return _mark_part(mark)

    def _read_reasoning(self) -> list[AnswerPart] | None:
        """Parse reasoning up to its end mark.

        Trailing white space is held back, because it may precede the mark.
        """
        if self._only_space:
            text = self._buffer.lstrip()
            mark = _mark_part(self._buffer[: len(self._buffer) - len(text)])
            self._buffer, self._only_space = text, not text
            return mark

        end_mark = self._format.end_mark
        mark_index = self._buffer.find(end_mark)
        if mark_index >= 0:
            text, raw = self._buffer[:mark_index].rstrip(), self._buffer[: mark_index + len(end_mark)]
            self._buffer = self._buffer[mark_index + len(end_mark) :]
            self.state = "behind"
            return [AnswerPart("reasoning", text, text), *_mark_part(raw[len(text) :])] if text else _mark_part(raw)

        certain_text = self._buffer[: len(self._buffer) - overlap(self._buffer, end_mark)].rstrip()
        if not certain_text:
            return None
        self._buffer = self._buffer[len(certain_text) :]
        return [AnswerPart("reasoning", certain_text, certain_text)]

    def _read_after_reasoning(self) -> list[AnswerPart]:
        """Drop white space between reasoning and content."""
        text = self._buffer.lstrip()
        mark = self._buffer[: len(self._buffer) - len(text)]
        self._buffer = text
        if text:
            self.state = "content"
        return _mark_part(mark)


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that `mark` begins with."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-size:])), 0)


def _mark_part(raw: str) -> list[AnswerPart]:
    """Return text that clients do not get as a part; no part for ""."""
    return [AnswerPart("mark", "", raw)] if raw else []
