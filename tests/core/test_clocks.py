"""The clock of this machine, and what every clock's alarms do."""

from __future__ import annotations

import asyncio

import pytest

from unfuse.core.clock import Clock, SystemClock, TokenBucket
from unfuse.testing.clock import ManualClock


def test_system_clock_is_monotonic() -> None:
    clock = SystemClock()
    assert clock.now() <= clock.now()
    assert clock.wall() > 1_600_000_000


async def test_system_clock_alarms_fire_when_due_unless_cancelled() -> None:
    clock, rung = SystemClock(), asyncio.get_running_loop().create_future()
    clock.call_at(clock.now() + 0.01, lambda: rung.set_exception(AssertionError("taken back too late")))()
    due = clock.now() + 0.02
    clock.call_at(due, lambda: rung.set_result(clock.now()))
    assert await rung >= due


@pytest.mark.parametrize("clock", [SystemClock(), ManualClock()])
async def test_alarm_for_a_past_time_fires_soon_but_not_synchronously(clock: Clock) -> None:
    """So who sets one has its answer before it rings, and nobody who comes late waits for ever."""
    rung: list[float] = []
    clock.call_at(clock.now() - 1.0, lambda: rung.append(clock.now()))
    assert rung == []
    while not rung:
        await asyncio.sleep(0)


def test_token_bucket_allows_a_burst_and_then_its_rate() -> None:
    pace = TokenBucket(rate=8, burst=5, now=100.0)
    assert [pace.try_acquire(1, 100.0) for _ in range(6)] == [True] * 5 + [False]
    assert [pace.try_acquire(1, 100.125) for _ in range(2)] == [True, False]
    assert [pace.try_acquire(5, 1000.0), pace.try_acquire(1, 1000.0)] == [True, False]
    assert not pace.try_acquire(6, 2000.0)
