"""The clock of this machine, and what every clock's alarms do."""

from __future__ import annotations

import asyncio

import pytest

from unfuse.core.clock import Clock, SystemClock, TokenBucket
from unfuse.testing.clock import ManualClock


def test_the_systems_clock_runs_forward() -> None:
    clock = SystemClock()
    assert clock.now() <= clock.now()
    assert clock.wall() > 1_600_000_000


async def test_its_alarms_ring_when_their_time_has_come_unless_they_are_taken_back() -> None:
    clock, rung = SystemClock(), asyncio.get_running_loop().create_future()
    clock.call_at(clock.now() + 0.01, lambda: rung.set_exception(AssertionError("taken back too late")))()
    due = clock.now() + 0.02
    clock.call_at(due, lambda: rung.set_result(clock.now()))
    assert await rung >= due


@pytest.mark.parametrize("clock", [SystemClock(), ManualClock()])
async def test_an_alarm_for_a_time_that_has_come_rings_soon_and_never_at_once(clock: Clock) -> None:
    """So who sets one has its answer before it rings, and nobody who comes late waits for ever."""
    rung: list[float] = []
    clock.call_at(clock.now() - 1.0, lambda: rung.append(clock.now()))
    assert rung == []
    while not rung:
        await asyncio.sleep(0)


def test_a_pace_gives_a_burst_then_so_much_a_second_and_saves_no_more_than_a_burst() -> None:
    pace = TokenBucket(rate=8, burst=5, now=100.0)
    assert [pace.try_acquire(1, 100.0) for _ in range(6)] == [True] * 5 + [False]
    assert [pace.try_acquire(1, 100.125) for _ in range(2)] == [True, False]
    assert [pace.try_acquire(5, 1000.0), pace.try_acquire(1, 1000.0)] == [True, False]
    assert not pace.try_acquire(6, 2000.0)
