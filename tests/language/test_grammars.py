"""Grammars in processes of their own: which tokens may follow, and what hostile ones do to anybody else."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tools.server import until
from tools.tiny_language import make_language_model
from unfuse.core.errors import TransientError
from unfuse.core.text_parameters import schema_text
from unfuse.language import grammars
from unfuse.language.answer_reader import CALL_FORMATS as FORMATS, CallReader
from unfuse.language.grammars import Grammar, GrammarConstraint, Grammars, InvalidGrammar, pack_grammar
from unfuse.language.tokenizer import ChatTokenizer
from unfuse.language.tools import grammar_of, read_tools

pytestmark = pytest.mark.slow
WORD = pack_grammar(Grammar("regex", "(red|green) circle"), "x")


def schema(said: Any) -> bytes:
    return pack_grammar(Grammar("json_schema", schema_text(said, True, "x")), "x")


def lark(text: str) -> bytes:
    return pack_grammar(Grammar("lark", text), "x")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_language_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ChatTokenizer:
    return ChatTokenizer.read(folder)


@pytest.fixture(scope="module")
def opened(folder: Path) -> Iterator[Grammars]:
    opened = Grammars(str(folder), patience_s=None)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def trial() -> Iterator[Grammars]:
    trial = Grammars()
    yield trial
    trial.close()


def ids_of(mask: bytes | None) -> set[int]:
    assert mask is not None
    whole = int.from_bytes(mask, "little")
    return {place for place in range(len(mask) * 8) if whole >> place & 1}


def written(constraint: GrammarConstraint, text: str, tokenizer: ChatTokenizer) -> list[int]:
    """The ids of a text, each of which is allowed where it stands, and behind which the text may end."""
    made = list[int]()
    for id in tokenizer.ids(text):
        assert id in ids_of(constraint.allowed(made)), tokenizer.decode([*made, id])
        made.append(id)
    assert ids_of(constraint.allowed(made)) & tokenizer.stops
    return made


def test_mask_allows_only_tokens_that_match_grammar(opened: Grammars, tokenizer: ChatTokenizer) -> None:
    constraint = opened.open(WORD)
    first = {tokenizer.decode([id]) for id in ids_of(constraint.allowed([]))}
    assert first and all("red circle".startswith(text) or "green circle".startswith(text) for text in first)
    made = written(constraint, "green circle", tokenizer)
    assert ids_of(constraint.allowed(made)) == tokenizer.stops
    constraint.close()


def test_constraint_resumes_from_recorded_tokens(opened: Grammars, tokenizer: ChatTokenizer) -> None:
    """Given the tokens of an earlier attempt, then what may follow is what would have followed there."""
    one, other = opened.open(WORD), opened.open(WORD)
    made = written(one, "red circle", tokenizer)
    for length in (4, len(made)):
        assert other.allowed(made[:length]) == opened.open(WORD).allowed(made[:length])
    one.close()
    assert ids_of(other.allowed(made)) == tokenizer.stops


def test_strict_tools_allow_free_text_and_only_valid_calls(opened: Grammars, tokenizer: ChatTokenizer) -> None:
    city = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
    function = {"name": "f", "strict": True, "parameters": {**city, "additionalProperties": False}}
    said = {"tools": [{"type": "function", "function": function}]}
    found = grammar_of(None, read_tools(said), FORMATS["hermes"])
    assert found
    held, call = pack_grammar(found, "x"), '<tool_call>\n{"name": "f", "arguments": {"city": "Paris"}}\n</tool_call>'
    for text in ("", "a <b> text", "<tool", call, f"Let me see.\n{call}\nand {call} so"):
        constraint = opened.open(held)
        written(constraint, text, tokenizer)
        constraint.close()
    begun, other = tokenizer.ids('see <tool_call>\n{"name": "f", "arguments": {"city": '), opened.open(held)
    assert {tokenizer.decode([id]).strip()[:1] for id in ids_of(other.allowed(begun))} <= {"", '"'}
    assert not ids_of(other.allowed(begun)) & tokenizer.stops
    other.close()


@pytest.mark.parametrize("format", FORMATS)
def test_required_calls_are_generated_and_parsed_in_each_format(
    format: str, opened: Grammars, tokenizer: ChatTokenizer
) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    said = {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}
    tools, how = read_tools(said | {"tool_choice": "required"}), FORMATS[format].as_written
    found = grammar_of(None, tools, FORMATS[format])
    assert found and tools
    call = how.head.replace("NAME", "f") + '{"a": 1}' + how.tail
    calls = [call, call] if how.between else [call]
    text = how.open + how.between.join(calls) + how.close
    constraint = opened.open(pack_grammar(found, "x"))
    written(constraint, text, tokenizer)
    constraint.close()
    parts = CallReader(how, tools.types).feed(text)
    assert [part.text for part in parts if part.kind in ("call", "arguments")] == ["f", '{"a": 1}'] * len(calls)


EBNF = """
# llama.cpp writes grammars so
root   ::= answer "!" ws tail?
answer ::= "yes" | "n\\"o" | [a-c]{2,3}
ws     ::= [ \\n]*
tail   ::= ("x" | tail-two)+
tail-two ::= [^a-z"]
"""


@pytest.mark.parametrize("text", ["yes!", 'n"o! ', "abc!\nxx", "ab!xÄ"])
def test_ebnf_grammar_is_enforced(text: str, opened: Grammars, tokenizer: ChatTokenizer) -> None:
    constraint = opened.open(pack_grammar(Grammar("ebnf", EBNF), "x"))
    written(constraint, text, tokenizer)
    constraint.close()


def test_repeated_mask_queries_return_the_same(opened: Grammars, tokenizer: ChatTokenizer) -> None:
    constraint, ids = opened.open(WORD), tokenizer.ids("red")
    constraint.query(ids)
    assert constraint.allowed(ids) == constraint.allowed(ids) == opened.open(WORD).allowed(ids)


def test_json_whitespace_is_bounded(opened: Grammars, tokenizer: ChatTokenizer) -> None:
    said = schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    written(opened.open(said), '{"a":1}', tokenizer)
    written(opened.open(said), json.dumps({"a": 1}, indent=4), tokenizer)
    constraint, made = opened.open(said), tokenizer.ids("{" + 16 * " ")
    assert all("\n" not in tokenizer.decode([id]) for id in ids_of(constraint.allowed(made)))


def test_compiling_grammar_does_not_block_steps(folder: Path) -> None:
    """Given a program that has yet to start, then a text waits, steps go on, and later it is there."""
    impatient = Grammars(str(folder))
    constraint = impatient.open(WORD)
    assert constraint.compiling and constraint.waits()
    assert constraint.allowed([]) is None
    until(lambda: not constraint.waits(0.01), "the grammar to be compiled")
    assert not constraint.compiling
    assert constraint.allowed([])
    impatient.close()


BOMBS = {
    "stack": lark("start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(12_000)) + 'r12000: "a"'),
    "time": lark("start: A\nA: " + " & ".join(f"/.*a.{{{i}}}b.*/" for i in range(30))),
    "references": schema(
        {
            "$ref": "#/$defs/a0",
            "$defs": {
                f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(2_000)
            }
            | {"a2000": {}},
        }
    ),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_grammar_bomb_is_rejected_and_others_still_compile(bomb: str, trial: Grammars) -> None:
    assert "exceeds the limits" in trial.refusal(BOMBS[bomb])
    assert trial.refusal(WORD) == ""


@pytest.mark.parametrize("bomb", [pytest.param("time", marks=pytest.mark.nightly), "references"])
def test_grammar_bomb_does_not_affect_other_sequences(bomb: str, opened: Grammars) -> None:
    """Where it was not tried before."""
    calm = opened.open(WORD)
    calm.query([])
    hostile = opened.open(BOMBS[bomb])
    with pytest.raises(InvalidGrammar, match="exceeds the limits"):
        hostile.allowed([])
    hostile.close()
    assert calm.allowed([]) == opened.open(WORD).allowed([])


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (pack_grammar(Grammar("regex", "((("), "x"), "unclosed group"),
        (pack_grammar(Grammar("regex", "(?=a)b"), "x"), "look-around"),
        (lark("start: A\nA: /a/ & /b/"), "no text matches"),
        (lark("begin: A"), ""),
        (lark('start: "a" <|im_end|>'), ""),
        (lark("start: " + "(" * 100_000), "nested"),
        (pack_grammar(Grammar("ebnf", "root ::= ("), "x"), "not valid EBNF"),
        (pack_grammar(Grammar("ebnf", 'start ::= "a"'), "x"), ""),
        (schema({"not": {}}), '"not"'),
        (schema({"enum": []}), "Unsatisfiable"),
        (schema(False), "Unsatisfiable"),
        (schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
        (schema({"type": "weird"}), "weird"),
        (schema({"$ref": "https://example.com/x"}), "retriev"),
        (schema({"$ref": "file:///etc/passwd"}), "retriev"),
        (schema({"type": "string", "format": "weird"}), "weird"),
        (schema({"type": float("nan")}), ""),
        (pack_grammar(Grammar("json_schema", "[" * 100_000), "x"), ""),
        (pack_grammar(Grammar("json_schema", "3"), "x"), ""),
    ],
)
def test_unusable_grammar_is_rejected_with_one_line_reason(grammar: bytes, says: str, trial: Grammars) -> None:
    why = trial.refusal(grammar)
    assert why and "\n" not in why and len(why) < 400
    assert says in why


def test_invalid_grammar_fails_only_its_own_sequence(opened: Grammars) -> None:
    bad, good = opened.open(lark("begin: A")), opened.open(WORD)
    with pytest.raises(InvalidGrammar, match="cannot be used"):
        bad.allowed([])
    assert good.allowed([])
    bad.close()
    good.close()


def test_tokens_that_violate_grammar_raise_invalid_grammar(opened: Grammars, tokenizer: ChatTokenizer) -> None:
    constraint = opened.open(WORD)
    with pytest.raises(InvalidGrammar, match="cannot continue"):
        constraint.allowed(tokenizer.ids("blue"))
    constraint.close()


def program() -> psutil.Process:
    """The program that was started last."""
    return max(psutil.Process().children(), key=lambda one: one.create_time())


def test_constraint_survives_kill_of_grammar_processes(folder: Path, tokenizer: ChatTokenizer) -> None:
    """Given a text half written, when the process of its grammar is killed, and the program, then it is followed on."""
    opened = Grammars(str(folder), patience_s=None)
    constraint = opened.open(WORD)
    made = tokenizer.ids("green ci")
    expected = constraint.allowed(made)
    (process,) = program().children()
    for victim in (process, program()):
        victim.kill()
        victim.wait()
    assert constraint.allowed(made) == expected
    assert opened.open(WORD).allowed(made) == expected
    opened.close()


def test_idle_grammar_processes_are_limited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_IDLE_PROCESSES", 2)
    opened = Grammars(str(folder), patience_s=None)
    for number in range(5):
        constraint = opened.open(pack_grammar(Grammar("regex", f"a{number}"), "x"))
        assert constraint.allowed([])
        constraint.close()
    until(lambda: len(program().children()) == 2, "processes of grammars to end")
    opened.close()


def test_grammar_processes_end_when_their_owner_is_collected(folder: Path) -> None:
    opened = Grammars(str(folder), patience_s=None)
    constraint = opened.open(WORD)
    assert constraint.allowed([])
    everyone = [program(), *program().children()]
    del constraint, opened
    until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in everyone), "their end")


def test_missing_grammar_program_raises_transient_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(grammars, "PROGRAM", "unfuse.models.no_such_program")
    trial = Grammars()
    with pytest.raises(TransientError, match="log"):
        trial.refusal(WORD)
    trial.close()
    assert "no_such_program" in capfd.readouterr().err


def test_stopped_grammar_process_does_not_block_steps(folder: Path, tokenizer: ChatTokenizer) -> None:
    opened = Grammars(str(folder))
    constraint = opened.open(WORD)
    until(lambda: not constraint.waits(0.01), "the grammar to be compiled")
    (process,) = program().children()
    os.kill(process.pid, signal.SIGSTOP)
    made = tokenizer.ids("red")
    assert constraint.allowed(made) is None and constraint.waits()
    os.kill(process.pid, signal.SIGCONT)
    until(lambda: not constraint.waits(0.01), "the answer")
    assert constraint.allowed(made)
    opened.close()
