"""Grammars that are tried before a request is accepted: one at a time each, once, and counted while somebody waits."""

from __future__ import annotations

import asyncio
import threading

import pytest
from prometheus_client import CollectorRegistry

from unfuse.core.errors import InvalidParameter, TransientError
from unfuse.core.grammar import Grammar, packed
from unfuse.server import trials
from unfuse.server.text_metrics import TextMetrics
from unfuse.server.trials import AT_ONCE, Trials


class Tried:
    """Grammars that are held back until they may be told of; those of bad ones say so."""

    def __init__(self) -> None:
        self.may, self.asked, self.fails = threading.Event(), list[bytes](), False

    def refusal(self, grammar: bytes) -> str:
        self.asked.append(grammar)
        assert self.may.wait(60)
        if self.fails:
            raise TransientError("not now")
        return "it is bad" if b"bad" in grammar else ""


@pytest.fixture
def tried() -> Tried:
    return Tried()


@pytest.fixture
def metrics() -> TextMetrics:
    return TextMetrics(CollectorRegistry())


@pytest.fixture
def trial(tried: Tried, metrics: TextMetrics, monkeypatch: pytest.MonkeyPatch) -> Trials:
    monkeypatch.setattr(trials, "Grammars", lambda: tried)
    return Trials(metrics)


def grammar(text: str) -> bytes:
    return packed(Grammar("regex", text), "x")


async def test_what_came_of_a_grammar_is_known_afterwards(trial: Trials, tried: Tried) -> None:
    tried.may.set()
    for by_tools, param in ((False, "response_format"), (True, "tools")):
        with pytest.raises(InvalidParameter, match=f"{param} cannot be held to: it is bad") as refused:
            await trial.check(grammar("bad"), by_tools)
        assert refused.value.param == param
        await trial.check(grammar("good"), by_tools)
    assert tried.asked == [grammar("bad"), grammar("good")]


async def test_who_waits_is_counted_and_few_are_tried_at_once(
    trial: Trials, tried: Tried, metrics: TextMetrics
) -> None:
    waiting = [asyncio.create_task(trial.check(grammar(f"g{number}"), False)) for number in range(5)]
    while len(tried.asked) < AT_ONCE:
        await asyncio.sleep(0.001)
    assert metrics.trials == 5 and len(tried.asked) == AT_ONCE
    tried.may.set()
    await asyncio.gather(*waiting)
    assert metrics.trials == 0 and len(tried.asked) == 5


async def test_only_some_are_remembered(trial: Trials, tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "KNOWN", 2)
    tried.may.set()
    for text in ("a", "b", "a", "c", "a", "b"):
        await trial.check(grammar(text), False)
    assert tried.asked == [grammar(text) for text in "abcb"]


async def test_a_trial_that_cannot_be_made_is_made_again(trial: Trials, tried: Tried, metrics: TextMetrics) -> None:
    tried.may.set()
    tried.fails = True
    with pytest.raises(TransientError):
        await trial.check(grammar("a"), False)
    assert metrics.trials == 0
    tried.fails = False
    await trial.check(grammar("a"), False)
