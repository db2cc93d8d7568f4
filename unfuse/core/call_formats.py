"""How models write calls of tools: one line of a table for each format, by vLLM's names of tool-call parsers."""

from __future__ import annotations

from typing import Literal

import msgspec

ToolCallParser = Literal[
    "auto", "hermes", "llama3_json", "qwen3_coder", "deepseek_v3", "deepseek_v31", "mistral", "pythonic"
]
"""What an operator may choose: a format, or that of the model's chat template."""

Syntax = Literal["json", "xml", "deepseek", "mistral", "python"]
"""What is between the marks: JSON objects, Qwen3-Coder's tags, a name and JSON arguments, or Python calls."""


class CallFormat(msgspec.Struct, frozen=True):
    """One format. The first group of fields is for reading calls, the second for the grammar that makes a model call.

    `starts` are marks behind which a call begins. Where `bare` is not empty, a line that begins with one of its
    characters may be a call, too. `ends` are marks that may follow a call, and are not part of the content. `inner`
    are marks within a call.

    A grammar writes `open`, calls with `between` them, `close`. A call is `head`, with NAME replaced, arguments as
    JSON, `tail`. A format whose `written` names another one is written in that one by grammars.
    """

    name: str
    syntax: Syntax
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    bare: str = ""
    inner: tuple[str, ...] = ()

    open: str = ""
    head: str = '{"name": "NAME", "arguments": '
    tail: str = "}"
    between: str = ""
    close: str = ""
    written: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts that may be special tokens of a model, and are no content."""
        return (*self.starts, *self.ends, *self.inner)

    @property
    def as_written(self) -> CallFormat:
        """The format in which a grammar makes the model call."""
        return FORMATS[self.written or self.name]


SEPARATOR = "<｜tool▁sep｜>"
"""DeepSeek's mark between what is called and its arguments."""

_BEGINS = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
_ENDS = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "```")

FORMATS = {
    one.name: one
    for one in (
        CallFormat(
            "hermes", "json", ("<tool_call>",), ("</tool_call>",),
            open="<tool_call>\n", between="\n</tool_call>\n<tool_call>\n", close="\n</tool_call>",
        ),
        CallFormat(
            "llama3_json", "json", ("<|python_tag|>",), bare="{[", head='{"name": "NAME", "parameters": ',
        ),
        CallFormat(
            "qwen3_coder", "xml", ("<tool_call>", "<function="), ("</function>", "</tool_call>"), written="hermes",
        ),
        CallFormat(
            "deepseek_v3", "deepseek", _BEGINS, _ENDS, inner=(SEPARATOR,),
            open=_BEGINS[0] + _BEGINS[1], head="function<｜tool▁sep｜>NAME\n```json\n", tail="\n```",
            between=f"{_ENDS[0]}\n{_BEGINS[1]}", close=_ENDS[0] + _ENDS[1],
        ),
        CallFormat(
            "deepseek_v31", "deepseek", _BEGINS, _ENDS, inner=(SEPARATOR,),
            open=_BEGINS[0] + _BEGINS[1], head="NAME<｜tool▁sep｜>", tail="",
            between=_ENDS[0] + _BEGINS[1], close=_ENDS[0] + _ENDS[1],
        ),
        CallFormat(
            "mistral", "mistral", ("[TOOL_CALLS]",), inner=("[CALL_ID]", "[ARGS]"), written="llama3_json",
        ),
        CallFormat(
            "pythonic", "python", ("<|python_start|>",), ("<|python_end|>",), bare="[", written="llama3_json",
        ),
    )
}  # fmt: skip
"""By name. The first one is written where a template does not say how."""


def format_of(template: str) -> CallFormat:
    """The format in which a model with this chat template writes calls."""
    if "<function=" in template:
        return FORMATS["qwen3_coder"]
    if "<tool_call>" in template:
        return FORMATS["hermes"]
    if SEPARATOR in template:
        return FORMATS["deepseek_v3" if "```json" in template else "deepseek_v31"]
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral"]
    if "func_name1(params_name1=params_value1" in template or "<|python_start|>" in template:
        return FORMATS["pythonic"]
    if '"parameters"' in template:
        return FORMATS["llama3_json"]
    return FORMATS["hermes"]
