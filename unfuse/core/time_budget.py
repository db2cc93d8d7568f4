"""The time that one stop may take, with all its parts, and waiting for the first of several things."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any


async def first(*works: Awaitable[Any], timeout: float | None = None) -> None:
    """Wait until one of these has ended, or so many seconds, and cancel the others. Raises what it raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        ended, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class StopBudget:
    """So many `seconds` from now on. Every part of a stop takes its time from what is `left`.

    `hurry` is set when the stop is to end at once.
    """

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._now = seconds, now
        self._end = now() + seconds
        self.hurry = asyncio.Event()

    def left(self, reserve: float = 0.0) -> float:
        """Seconds that are left, without a `reserve` for what comes later; 0 if there are none."""
        return max(0.0, self._end - self._now() - reserve)

    async def within(self, seconds: float, work: Awaitable[object]) -> None:
        """Do this work for at most so many seconds, and not beyond `hurry`; then it is cancelled."""
        await first(work, self.hurry.wait(), timeout=seconds)
