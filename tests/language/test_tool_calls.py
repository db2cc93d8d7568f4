"""Calls of tools in texts: found in every format, however the text is cut, and nothing lost that is none."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import example, given, settings, strategies as st

from unfuse.language.answer_reader import CALL_FORMATS as FORMATS, AnswerPart, CallReader, format_of

FUNCTIONS = {"f": {"a": "integer", "b": "string", "c": "array", "d": "boolean", "e": "string|null"}, "g": {}}
JSON = '{"name": "f", "arguments": {"a": "</tool_call>", "b": [1, "]}"]}}'
TAGGED = f"<tool_call>\n{JSON}\n</tool_call>"
SEP, CALLS, CALL, END, ENDS = (
    "<｜tool▁sep｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
CODER = """<tool_call>
<function=f>
<parameter=a>
1
</parameter>
<parameter=b>
say <b>
</parameter> here
</parameter>
<parameter=c>
[1, "x"]
</parameter>
<parameter=d>
True
</parameter>
<parameter=e>
null
</parameter>
</function>
</tool_call>"""

CODED = {"a": 1, "b": "say <b>\n</parameter> here", "c": [1, "x"], "d": True, "e": None}

Called = tuple[str, object]


def read(
    text: str, format: str, cuts: list[int] | None = None, *, cut: bool = False, **about: bool
) -> list[AnswerPart]:
    """The parts of a text that comes in pieces."""
    reader = CallReader(FORMATS[format], FUNCTIONS, **about)
    ends = sorted({0, len(text), *(place % (len(text) + 1) for place in cuts or [])})
    parts = [part for start, end in pairwise(ends) for part in reader.feed(text[start:end])]
    return parts + reader.finish(cut=cut)


def content(parts: list[AnswerPart]) -> str:
    return "".join(part.text for part in parts if part.kind == "content")


def called(parts: list[AnswerPart]) -> list[tuple[str, str]]:
    """Each call with its arguments as text."""
    found = list[tuple[str, str]]()
    for part in parts:
        if part.kind == "call":
            found.append((part.text, ""))
        elif part.kind == "arguments":
            found[-1] = (found[-1][0], found[-1][1] + part.text)
    return found


def values(parts: list[AnswerPart]) -> list[Called]:
    return [(name, json.loads(arguments)) for name, arguments in called(parts)]


A = {"a": 1}
EXAMPLES: list[tuple[str, str, str, list[Called]]] = [
    ("hermes", TAGGED, "", [("f", {"a": "</tool_call>", "b": [1, "]}"]})]),
    ("hermes", f"Let me see.\n{TAGGED}\n{TAGGED}\n", "Let me see.\n", [("f", json.loads(JSON)["arguments"])] * 2),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "id": "x", "type": "function", "name": "f"}', "", [("f", A)]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", A)]),
    ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call> ok', "ok", [("f", A)]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>', "", [("f", {}), ("g", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "", [("f", A)]),
    (
        "hermes",
        f"Use <tool_call> for it. {TAGGED.replace('</tool_call>', '', 0)}",
        "Use <tool_call> for it. ",
        [("f", json.loads(JSON)["arguments"])],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"b": "x\n\ty"}}</tool_call>', "", [("f", {"b": "x\n\ty"})]),
    ("hermes", '<tool_call>{"arguments": {"b": "x\n"}, "name": "f"}</tool_call>', "", [("f", {"b": "x\n"})]),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}}\n</tool_call>', "", [("f", A)]),
    ("hermes", '<tool_call>\n{{"name": "f", "arguments": {"a": 1}}}\n</tool_call>', "", [("f", A)]),
    ("hermes", '<tool_call>\n```json\n{"name": "f", "arguments": {"a": 1}}\n```\n</tool_call>', "", [("f", A)]),
    ("hermes", f"{TAGGED}\n`x` is }} set", "`x` is } set", [("f", json.loads(JSON)["arguments"])]),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [("f", A)]),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        "",
        [("f", A), ("g", {})],
    ),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}\n{"name": "g", "arguments": {}}', "", [("f", A), ("g", {})]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [("f", A)]),
    ("llama3_json", ' \n{"name": "f", "parameters": {"a": 1}} ', "", [("f", A)]),
    ("llama3_json", 'I call:\n{"name": "f", "parameters": {"a": 1}}', "I call:\n", [("f", A)]),
    ("llama3_json", '{"function": "f", "parameters": {"a": 1}}', "", [("f", A)]),
    ("llama3_json", '{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}', "", [("f", A)]),
    (
        "llama3_json",
        '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]',
        "",
        [("f", A), ("g", {})],
    ),
    ("qwen3_coder", CODER, "", [("f", CODED)]),
    ("qwen3_coder", "Well.\n<function=g>\n</function>", "Well.\n", [("g", {})]),
    ("qwen3_coder", f"{CODER}\n{CODER}"[:-13], "", [("f", CODED)] * 2),
    ("qwen3_coder", TAGGED, "", [("f", json.loads(JSON)["arguments"])]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>", "", [("f", A)]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=g>\n</function>\n</tool_call>",
        "",
        [("f", A), ("g", {})],
    ),
    (
        "qwen3_coder",
        "<function=f>\n<parameter=a>\n1\n<parameter=b>\nx\n</parameter>\n</function>",
        "",
        [("f", A | {"b": "x"})],
    ),
    ("qwen3_coder", "<function=f>\n<parameter=a>\n1\n<parameter=b>\nx", "", [("f", A | {"b": "x"})]),
    (
        "qwen3_coder",
        "<function=f>\n<parameter=b>\n<function=g>\n</function>\n</tool_call>\n</parameter>\n</function>",
        "",
        [("f", {"b": "<function=g>\n</function>\n</tool_call>"})],
    ),
    (
        "qwen3_coder",
        "<function=f>\n<parameter=c>\n['x', True, None]\n</parameter>\n</function>",
        "",
        [("f", {"c": ["x", True, None]})],
    ),
    ("qwen3_coder", "<function=f>\n<parameter=a>\nNaN\n</parameter>\n</function>", "", [("f", {"a": "NaN"})]),
    (
        "deepseek_v3",
        f'Hm.{CALLS}{CALL}function{SEP}f\n```json\n{{"a": 1}}\n```{END}\n'
        f"{CALL}function{SEP}g\n```json\n{{}}\n```{END}{ENDS}",
        "Hm.",
        [("f", A), ("g", {})],
    ),
    ("deepseek_v31", f'{CALLS}{CALL}f{SEP}{{"a": 1}}{END}{CALL}g{SEP}{{}}{END}{ENDS}', "", [("f", A), ("g", {})]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "",
        [("f", A), ("g", {})],
    ),
    ("mistral", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g{}', "", [("f", A), ("g", {})]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}', "", [("f", A)]),
    ("pythonic", "[f(a=1), g()]", "", [("f", A), ("g", {})]),
    (
        "pythonic",
        "[f(a=-1, b='it\\'s (', c=[1, {'x': None}], d=true)]<|python_end|>",
        "",
        [("f", {"a": -1, "b": "it's (", "c": [1, {"x": None}], "d": True})],
    ),
]


@pytest.mark.parametrize(("format", "text", "shown", "calls"), EXAMPLES)
def test_tool_calls_are_extracted_from_text(format: str, text: str, shown: str, calls: list[Called]) -> None:
    parts = read(text, format)
    assert (content(parts), values(parts)) == (shown, calls)
    assert "".join(part.raw for part in parts) == text


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", text)
        for text in [
            "",
            "a < b",
            "<tool",
            "<tool_call>",
            "<tool_call>x</tool_call>",
            '<tool_call>{"name": 3}</tool_call> and',
            '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
            "<tool_call>" + "[" * 10_000,
            "</tool_call>",
            '<tool_call>{"name": "h", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
            '{"name": "f", "arguments": {}}',
        ]
    ]
    + [
        ("llama3_json", text)
        for text in [
            '{"name": "Bob", "parameters": {"x": 9}}',
            '{"name": "f"}',
            '{"a": 1}',
            "{",
            "x {",
            '[{"name": "f"}]',
            " ",
            "hello",
            '{"title": {"name": "f", "parameters": {}}}',
            "{\n  foo();\n}",
            "<|python_tag|>print(1)",
        ]
    ]
    + [("qwen3_coder", text) for text in ["<function=h>\n</function>", "<tool_call>\nx", "<function=", "a <b>"]]
    + [("deepseek_v3", text) for text in [f"{CALLS}x", f"{CALL}function{SEP}h\n```json\n{{}}\n```"]]
    + [("mistral", text) for text in ["[TOOL_CALLS]", "[TOOL_CALLS]h{}", '[TOOL_CALLS][{"name": "h"}]', "[TOOL"]]
    + [
        ("pythonic", text)
        for text in [
            "[f(1)]",
            "[f(a=b)]",
            "[f(**{})]",
            "[1, 2]",
            "[h()]",
            "[f(a=__import__('os'))]",
            "[f(a=1e999)]",
            "[f(a='\\ud800')]",
            "[f(a=" + "(" * 500 + ")" * 500 + ")]",
            "f(a=1)",
            "[f(a=1",
            "[]",
        ]
    ],
)
def test_malformed_calls_stay_content(format: str, text: str) -> None:
    parts = read(text, format)
    assert (content(parts), called(parts)) == (text, [])


PIECES = [
    "<",
    "<tool_call>",
    "</tool_call>",
    "text ",
    "\n",
    '{"name": "f"',
    ', "arguments": {}}',
    TAGGED,
    "[f(a=1)",
    ", ",
    "]",
    "g()",
    "{",
    '{"name": "f", "parameters": {"a": 1}}',
    "; ",
    "<function=f>",
    "<parameter=a>",
    "</parameter>",
    "</function>",
    CODER,
    CALLS,
    CALL,
    SEP,
    "f",
    "```json\n",
    "```",
    END,
    "[TOOL_CALLS]",
    '"',
    "[",
    "<|python_tag|>",
]


def merged(parts: list[AnswerPart]) -> list[tuple[str, str]]:
    """Parts without marks, joined where they are of one kind."""
    found = list[tuple[str, str]]()
    for part in parts:
        if part.kind == "mark":
            continue
        if found and found[-1][0] == part.kind != "call":
            found[-1] = (part.kind, found[-1][1] + part.text)
        else:
            found.append((part.kind, part.text))
    return found


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(PIECES)).map("".join) | st.sampled_from([one[1] for one in EXAMPLES]),
    st.lists(st.integers(0, 500)),
    st.sampled_from(sorted(FORMATS)),
    st.booleans(),
    st.booleans(),
)
@example(f"a{TAGGED}", [*range(100)], "hermes", False, True)
@example(CODER, [*range(300)], "qwen3_coder", False, True)
def test_parse_does_not_depend_on_chunk_boundaries(
    text: str, cuts: list[int], format: str, cut: bool, several: bool
) -> None:
    whole = read(text, format, cut=cut, several=several)
    parts = read(text, format, cuts, cut=cut, several=several)
    assert merged(parts) == merged(whole)
    assert "".join(part.raw for part in parts) == text


@settings(deadline=None)
@given(st.text(st.sampled_from("<tol_ca>{}\n x")), st.lists(st.integers(0, 60)))
def test_text_without_calls_is_returned_unchanged(text: str, cuts: list[int]) -> None:
    assert content(read(text, "hermes", cuts)) == text


@pytest.mark.parametrize(("format", "text"), [(one[0], one[1]) for one in EXAMPLES if len(one[3]) == 2])
def test_only_first_call_is_parsed_without_parallel_calls(format: str, text: str) -> None:
    whole, first = read(text, format), read(text, format, several=False)
    assert called(first) == called(whole)[:1]
    reader = CallReader(FORMATS[format], FUNCTIONS, several=False)
    reader.feed(text)
    assert reader.is_over


@pytest.mark.parametrize(
    ("format", "text", "begun"),
    [
        ("hermes", '<tool_call>\n{"name":', []),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "b', [("f", '{"a": "b')]),
        ("llama3_json", '<|python_tag|>{"name": "f"', []),
        ("llama3_json", '{"name": "f", "parameters": {"a', [("f", '{"a')]),
        ("qwen3_coder", "<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx", [("f", '{"a": 1')]),
        ("deepseek_v3", f'{CALLS}{CALL}function{SEP}f\n```json\n{{"a"', [("f", '{"a"')]),
        ("mistral", '[TOOL_CALLS]f{"a"', [("f", '{"a"')]),
        ("mistral", "[TOOL_CALLS]f", []),
    ],
)
def test_truncated_call_is_returned_partially_and_not_as_content(
    format: str, text: str, begun: list[tuple[str, str]]
) -> None:
    parts = read(text, format, cut=True)
    assert (content(parts), called(parts)) == ("", begun)


def test_truncated_end_mark_after_call_is_not_content() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_'
    parts = read(text, "hermes", cut=True)
    assert content(parts) == "" and "".join(part.raw for part in parts) == text
    assert [part.text for part in parts if part.kind == "call"] == ["f"]


def test_truncated_bare_json_is_hidden_only_with_forced_call() -> None:
    text = '{"name": "f", "par'
    assert content(read(text, "llama3_json", cut=True)) == text
    assert content(read(text, "llama3_json", cut=True, forced=True)) == ""


def test_call_arguments_are_streamed_incrementally() -> None:
    reader = CallReader(FORMATS["hermes"], FUNCTIONS)
    assert reader.feed("a <tool") == [AnswerPart("content", "a ", "a ")]
    assert reader.feed('_call>{"name": "f", "arguments": ') == []
    begun = reader.feed('{"a"')
    assert [(part.kind, part.text) for part in begun] == [("call", "f"), ("arguments", '{"a"')]
    assert reader.feed(": 1") == [AnswerPart("arguments", ": 1", ": 1")]
    assert reader.feed("}") == [AnswerPart("arguments", "}", "}")]
    assert [part.kind for part in reader.feed("}</tool_call>")] == ["mark"]


def test_text_is_emitted_as_soon_as_call_is_ruled_out() -> None:
    reader = CallReader(FORMATS["hermes"], FUNCTIONS)
    reader.feed("a <tool")
    assert content(reader.feed("s> ")) == "<tools> "
    bare = CallReader(FORMATS["llama3_json"], FUNCTIONS)
    assert content(bare.feed("Hello ")) == "Hello "
    assert content(bare.feed('{"name"')) == '{"name"'


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ messages }}", "hermes"),
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}{{ tools }}{% endif %}", "hermes"),
        ('{% if tools %}{"name": , "parameters": }{% endif %}', "llama3_json"),
        ('{% if tools %}<tool_call>{"name": , "parameters": }{% endif %}', "hermes"),
        ("<tool_call>\n<function=x>\n<parameter=", "qwen3_coder"),
        (f"{CALLS}{CALL}' + tool['type'] + '{SEP}' + '\\n' + '```json' + '\\n'", "deepseek_v3"),
        (f"{CALLS}{CALL}' + name + '{SEP}", "deepseek_v31"),
        ("[TOOL_CALLS][AVAILABLE_TOOLS]", "mistral"),
        ("[func_name1(params_name1=params_value1, …)]", "pythonic"),
    ],
)
def test_call_format_is_detected_from_chat_template(template: str, name: str) -> None:
    assert format_of(template).name == name
