"""Rates, on a clock of the test's."""

from __future__ import annotations

from unfuse.core.clock import TokenBucket


def test_a_pace_gives_a_burst_then_so_much_a_second_and_saves_no_more_than_a_burst() -> None:
    pace = TokenBucket(rate=8, burst=5, now=100.0)
    assert [pace.take(1, 100.0) for _ in range(6)] == [True] * 5 + [False]
    assert [pace.take(1, 100.125) for _ in range(2)] == [True, False]
    assert [pace.take(5, 1000.0), pace.take(1, 1000.0)] == [True, False]
    assert not pace.take(6, 2000.0)
