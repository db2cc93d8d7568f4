"""The formats of tool calls and reasoning, one table row each, under vLLM's parser names."""

from __future__ import annotations

from unfuse.core.text import SEPARATOR, CallFormat, ReasoningFormat

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
