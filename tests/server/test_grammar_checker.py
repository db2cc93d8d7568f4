"""Grammars that are tried before a request is accepted: one at a time each, once, and counted while somebody waits."""

from __future__ import annotations

import asyncio
import threading

import pytest

from unfuse.core.errors import InvalidParameter, TransientError
from unfuse.language.grammars import Grammar, pack_grammar
from unfuse.server import chat_formats
from unfuse.server.chat_formats import GRAMMARS_AT_ONCE, GrammarChecker
from unfuse.server.metrics import Metrics


class Tried:
    """Grammars that are held back until they may be told of; those of bad ones say so."""

    def __init__(self) -> None:
        self.may, self.asked, self.fails = threading.Event(), list[bytes](), False

    def refusal(self, grammar: bytes) -> str:
        self.asked.append(grammar)
        assert self.may.wait(60)
        if self.fails:
            raise TransientError("not now")
        if b"never" in grammar:
            return "Unsatisfiable schema"
        return "it is bad" if b"bad" in grammar else ""


@pytest.fixture
def tried() -> Tried:
    return Tried()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("memory")


@pytest.fixture
def trial(tried: Tried, metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> GrammarChecker:
    monkeypatch.setattr(chat_formats, "Grammars", lambda: tried)
    return GrammarChecker(metrics)


def grammar(text: str) -> bytes:
    return pack_grammar(Grammar("regex", text), "x")


async def test_grammar_check_results_are_cached(trial: GrammarChecker, tried: Tried) -> None:
    tried.may.set()
    for param in ("response_format", "tools"):
        with pytest.raises(InvalidParameter, match=f"{param} cannot be enforced: it is bad") as refused:
            await trial.choose([grammar("bad")], param)
        assert refused.value.param == param
        assert await trial.choose([grammar("good")], param) == grammar("good")
    assert tried.asked == [grammar("bad"), grammar("good")]


async def test_waiting_grammar_checks_are_counted_and_limited_in_parallel(
    trial: GrammarChecker, tried: Tried, metrics: Metrics
) -> None:
    waiting = [asyncio.create_task(trial.choose([grammar(f"g{number}")], "tools")) for number in range(5)]
    while len(tried.asked) < GRAMMARS_AT_ONCE:
        await asyncio.sleep(0.001)
    assert metrics.grammars == 5 and len(tried.asked) == GRAMMARS_AT_ONCE
    tried.may.set()
    await asyncio.gather(*waiting)
    assert metrics.grammars == 0 and len(tried.asked) == 5


async def test_first_usable_grammar_is_chosen_if_none_before_is_unsatisfiable(
    trial: GrammarChecker, tried: Tried
) -> None:
    """But not behind one that nothing matches: a looser one would let pass what is forbidden."""
    tried.may.set()
    assert await trial.choose([grammar("bad"), grammar("good"), grammar("better")], "tools") == grammar("good")
    with pytest.raises(InvalidParameter, match="tools cannot be enforced: it is bad"):
        await trial.choose([grammar("bad"), grammar("bad too")], "tools")
    with pytest.raises(InvalidParameter, match="Unsatisfiable"):
        await trial.choose([grammar("never"), grammar("good")], "tools")
    assert tried.asked == [grammar(text) for text in ("bad", "good", "bad too", "never")]


async def test_grammar_check_cache_is_bounded(
    trial: GrammarChecker, tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_formats, "MAX_CACHED_GRAMMARS", 2)
    tried.may.set()
    for text in ("a", "b", "a", "c", "a", "b"):
        await trial.choose([grammar(text)], "tools")
    assert tried.asked == [grammar(text) for text in "abcb"]


async def test_grammar_check_is_repeated_after_a_transient_error(
    trial: GrammarChecker, tried: Tried, metrics: Metrics
) -> None:
    tried.may.set()
    tried.fails = True
    with pytest.raises(TransientError):
        await trial.choose([grammar("a")], "tools")
    assert metrics.grammars == 0
    tried.fails = False
    await trial.choose([grammar("a")], "tools")
