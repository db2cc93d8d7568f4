"""Paces and causes, on a clock of the test's."""

from __future__ import annotations

from unfuse.core.token_bucket import Seldom, TokenBucket


def test_a_pace_gives_a_burst_then_so_much_a_second_and_saves_no_more_than_a_burst() -> None:
    pace = TokenBucket(rate=8, burst=5, now=100.0)
    assert [pace.take(1, 100.0) for _ in range(6)] == [True] * 5 + [False]
    assert [pace.take(1, 100.125) for _ in range(2)] == [True, False]
    assert [pace.take(5, 1000.0), pace.take(1, 1000.0)] == [True, False]
    assert not pace.take(6, 2000.0)


def test_a_cause_is_told_once_a_second_with_how_often_it_came() -> None:
    now = 0.0
    seldom = Seldom(lambda: now)
    assert [seldom.times("flood") for _ in range(1000)] == [1] + [0] * 999
    assert seldom.times("another") == 1
    now = 1.0
    assert [seldom.times("flood") for _ in range(3)] == [1000, 0, 0]
    now = 5.0
    assert seldom.times("flood") == 3
