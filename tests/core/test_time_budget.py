"""What is left of the time for a stop, and how its parts are cut off."""

from __future__ import annotations

import asyncio

import pytest

from unfuse.core.supervisor import StopBudget
from unfuse.testing.virtual_time import in_virtual_time


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
async def test_every_part_takes_its_time_from_what_is_left() -> None:
    budget, first, second = budget_of(15), Part(), Part()
    await budget.within(budget.left(), first.run())
    assert first.ended == "done"
    assert [budget.left(reserve) for reserve in (0, 2, 7)] == pytest.approx([5, 3, 0])
    await budget.within(budget.left(2), second.run())
    assert (second.ended, budget.left()) == ("cancelled", pytest.approx(2))


@in_virtual_time
async def test_a_stop_that_is_hurried_waits_for_nothing() -> None:
    """Given a part that runs, and others behind it, when it is hurried, then each is cut off at once."""
    budget, first, second = budget_of(60), Part(), Part()
    asyncio.get_running_loop().call_later(1, budget.hurry.set)
    await budget.within(budget.left(), first.run())
    await budget.within(budget.left(), second.run())
    assert (first.ended, second.ended, budget.left()) == ("cancelled", "cancelled", pytest.approx(59))


@in_virtual_time
async def test_what_a_part_raises_is_raised() -> None:
    async def fails() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        await budget_of(1).within(1, fails())


@in_virtual_time
async def test_who_is_cancelled_takes_its_part_along() -> None:
    budget, part = budget_of(60), Part()
    waiting = asyncio.create_task(budget.within(60, part.run()))
    await asyncio.sleep(1)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert (part.ended, waiting.cancelled()) == ("cancelled", True)
