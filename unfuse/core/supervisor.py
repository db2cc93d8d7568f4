"""Keeps background work going: an error in it is logged, and the work goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from unfuse.core.errors import UnfuseError
from unfuse.core.log_throttle import LogThrottle

log = structlog.get_logger(__name__)


class RepeatedErrors:
    """Logs each cause (what failed, and the type of the error) at most once in LOG_EVERY_S seconds.

    An UnfuseError is logged as its message. Any other error is a defect, and is logged with its traceback.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._throttle = LogThrottle(now)

    def log(self, what: str, error: Exception, **about: object) -> None:
        """Log that `what` failed with this error, and how often since the last line; or only count it."""
        times = self._throttle.count_if_due(f"{what}: {type(error).__name__}")
        if times and isinstance(error, UnfuseError):
            log.warning("failed, going on", doing=what, reason=str(error), times=times, **about)
        elif times:
            log.error("failed, going on", doing=what, exc_info=error, times=times, **about)


PAUSE_S = 0.2  # seconds before work that has failed is repeated


class Supervisor:
    """Runs the background work of one owner, on one event loop, until `close`."""

    def __init__(self) -> None:
        self._errors = RepeatedErrors()
        self._tasks: set[asyncio.Task[None]] = set()

    def forever(self, what: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Start a task that repeats this work, and waits PAUSE_S only after it failed: `work` must pace itself."""
        return self._begin(self.repeat(what, work))

    def once(self, what: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Start a task that does this work once."""
        return self._begin(self._once(what, work))

    async def repeat(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        """Repeat this work as `forever` does, in the caller's task."""
        while True:
            failed = True
            with self.besides(what):
                await work()
                failed = False
            if failed:
                await asyncio.sleep(PAUSE_S)

    @contextmanager
    def besides(self, what: str, **about: object) -> Iterator[None]:
        """A context that logs any error raised inside and goes on. `about` is logged too."""
        try:
            yield
        except Exception as error:  # also an error that nobody has foreseen
            self.log(what, error, **about)

    def log(self, what: str, error: Exception, **about: object) -> None:
        """Log an error of this work, once while it repeats."""
        self._errors.log(what, error, **about)

    async def close(self) -> None:
        """Cancel all work, and wait until it has ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _once(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        with self.besides(what):
            await work()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
