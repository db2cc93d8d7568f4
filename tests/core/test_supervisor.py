"""Background work goes on, and tells now and then why it did not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest
from structlog.testing import capture_logs

from unfuse.core import supervisor
from unfuse.core.errors import TransientError
from unfuse.core.supervisor import (
    LOG_EVERY_S,
    LogThrottle,
    Observers,
    RepeatedErrors,
    StopBudget,
    Supervisor,
    run_in_thread,
)
from unfuse.testing.virtual_time import in_virtual_time


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PAUSE_S", 0.0)


async def test_background_loop_continues_after_errors_until_closed() -> None:
    """Given work that fails in its first rounds in ways that nobody has foreseen, then there is a next round."""
    rounds, errors = 0, iter([OSError(5, "Input/output error"), KeyError("x"), TransientError("the queue is away")])
    enough = asyncio.Event()

    async def work() -> None:
        nonlocal rounds
        rounds += 1
        if error := next(errors, None):
            raise error
        enough.set()
        await asyncio.sleep(3600)

    background = Supervisor()
    with capture_logs() as logs:
        task = background.start_loop("working", work)
        await enough.wait()
        await background.close()
    assert (rounds, task.cancelled()) == (4, True)
    assert [(line["doing"], line["log_level"], "exc_info" in line) for line in logs] == [
        ("working", "error", True),
        ("working", "error", True),
        ("working", "warning", False),
    ]


async def test_error_of_one_shot_background_work_is_logged() -> None:
    async def fail() -> None:
        raise ValueError("once")

    background = Supervisor()
    with capture_logs() as logs:
        await background.start("trying", fail)
    await background.close()
    assert [line["doing"] for line in logs] == ["trying"]


async def test_log_errors_propagates_cancelled_error() -> None:
    with pytest.raises(asyncio.CancelledError), Supervisor().log_errors("waiting"):
        raise asyncio.CancelledError


def test_repeated_errors_are_logged_once_per_second_with_a_count() -> None:
    """Given an error that comes a thousand times within a second, each time in other words, then it is one line; the
    next one after that second counts the others. Another cause is not kept waiting."""
    now = 0.0
    causes = RepeatedErrors(lambda: now)
    with capture_logs() as logs:
        for number in range(1000):
            causes.log("reading", ValueError(f"record {number}"), request="a")
        causes.log("reading", KeyError("k"))
        causes.log("writing", ValueError("v"))
        now += LOG_EVERY_S
        causes.log("reading", ValueError("again"))
    assert [(line["doing"], type(line["exc_info"]), line["times"]) for line in logs] == [
        ("reading", ValueError, 1),
        ("reading", KeyError, 1),
        ("writing", ValueError, 1),
        ("reading", ValueError, 1000),
    ]
    assert logs[0]["request"] == "a"


class Hearing:
    """Remembers what it was told of."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def ended(self, what: str) -> None:
        self.heard.append(what)


class Failing(Hearing):
    """Cannot."""

    def ended(self, what: str) -> None:
        raise OSError(28, "No space left on device")


def test_failing_observer_is_logged_once_and_others_are_notified() -> None:
    """Given three observers of which the second fails, when they are told twice, then the others heard all of it."""
    first, last = Hearing(), Hearing()
    observers = Observers[Hearing](Supervisor())
    observers.add(first, Failing())
    observers.add(last)
    with capture_logs() as logs:
        for what in ("one", "two"):
            observers.notify(Hearing.ended, what)
    assert first.heard == last.heard == ["one", "two"]
    assert [line["doing"] for line in logs] == ["notifying Failing of ended"]


HANGS = """
import asyncio, threading
from unfuse.core.supervisor import run_in_thread

async def main():
    begun, never = threading.Event(), threading.Event()
    work = asyncio.create_task(run_in_thread(lambda: (begun.set(), never.wait())))
    await asyncio.to_thread(begun.wait)
    work.cancel()

asyncio.run(main())
print("ended")
"""


async def test_run_in_thread_returns_or_raises_the_outcome_of_the_work() -> None:
    assert await run_in_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await run_in_thread(lambda: 1 // 0)


async def test_cancelled_run_in_thread_does_not_wait_for_the_work() -> None:
    begun, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        goes_on.wait()
        ended.set()

    waits = asyncio.create_task(run_in_thread(work))
    await asyncio.to_thread(begun.wait)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert not ended.is_set()
    goes_on.set()
    await asyncio.to_thread(ended.wait)


@pytest.mark.slow
def test_process_exits_while_run_in_thread_work_hangs() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


def test_log_throttle_counts_events_between_log_lines() -> None:
    now = 0.0
    throttle = LogThrottle(lambda: now)
    assert [throttle.count_if_due("flood") for _ in range(1000)] == [1] + [0] * 999
    assert throttle.count_if_due("another") == 1
    now = 1.0
    assert [throttle.count_if_due("flood") for _ in range(3)] == [1000, 0, 0]
    now = 5.0
    assert throttle.count_if_due("flood") == 3


class Part:
    """A part of a stop that takes 10 s."""

    def __init__(self) -> None:
        self.ended = ""

    async def run(self) -> None:
        try:
            await asyncio.sleep(10)
            self.ended = "done"
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise


def budget_of(seconds: float) -> StopBudget:
    return StopBudget(seconds, asyncio.get_running_loop().time)


@in_virtual_time
async def test_stop_budget_limits_each_part_to_the_remaining_time() -> None:
    budget, first, second = budget_of(15), Part(), Part()
    await budget.limited_to(budget.remaining(), first.run())
    assert first.ended == "done"
    assert [budget.remaining(reserve) for reserve in (0, 2, 7)] == pytest.approx([5, 3, 0])
    await budget.limited_to(budget.remaining(2), second.run())
    assert (second.ended, budget.remaining()) == ("cancelled", pytest.approx(2))


@in_virtual_time
async def test_hurried_stop_cancels_every_part_at_once() -> None:
    """Given a part that runs, and others behind it, when it is hurried, then each is cut off at once."""
    budget, first, second = budget_of(60), Part(), Part()
    asyncio.get_running_loop().call_later(1, budget.hurry.set)
    await budget.limited_to(budget.remaining(), first.run())
    await budget.limited_to(budget.remaining(), second.run())
    assert (first.ended, second.ended, budget.remaining()) == ("cancelled", "cancelled", pytest.approx(59))


@in_virtual_time
async def test_stop_budget_propagates_the_error_of_a_part() -> None:
    async def fails() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        await budget_of(1).limited_to(1, fails())


@in_virtual_time
async def test_cancelling_limited_to_cancels_its_part() -> None:
    budget, part = budget_of(60), Part()
    waiting = asyncio.create_task(budget.limited_to(60, part.run()))
    await asyncio.sleep(1)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert (part.ended, waiting.cancelled()) == ("cancelled", True)
