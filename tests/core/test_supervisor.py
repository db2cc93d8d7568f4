"""Background work goes on, and tells now and then why it did not."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from unfuse.core import supervisor
from unfuse.core.errors import TransientError
from unfuse.core.supervisor import LOG_EVERY_S, RepeatedErrors, Supervisor


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PAUSE_S", 0.0)


async def test_work_that_fails_is_done_again_until_it_is_ended() -> None:
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
        task = background.forever("working", work)
        await enough.wait()
        await background.close()
    assert (rounds, task.cancelled()) == (4, True)
    assert [(line["doing"], line["log_level"], "exc_info" in line) for line in logs] == [
        ("working", "error", True),
        ("working", "error", True),
        ("working", "warning", False),
    ]


async def test_work_that_is_done_once_is_waited_for_by_nobody() -> None:
    async def fail() -> None:
        raise ValueError("once")

    background = Supervisor()
    with capture_logs() as logs:
        await background.once("trying", fail)
    await background.close()
    assert [line["doing"] for line in logs] == ["trying"]


async def test_what_ends_a_task_is_not_held_up() -> None:
    with pytest.raises(asyncio.CancelledError), Supervisor().besides("waiting"):
        raise asyncio.CancelledError


def test_a_cause_is_told_once_a_second_and_says_how_often_it_came_meanwhile() -> None:
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
