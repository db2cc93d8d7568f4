"""The time that one stop may take, with all its parts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any


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

    async def within(self, seconds: float, work: Coroutine[Any, Any, object]) -> None:
        """Do this work for at most so many seconds, and not beyond `hurry`; then it is cancelled."""
        working, hurried = asyncio.ensure_future(work), asyncio.ensure_future(self.hurry.wait())
        try:
            await asyncio.wait({working, hurried}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            for task in (working, hurried):
                task.cancel()
            await asyncio.gather(working, hurried, return_exceptions=True)
