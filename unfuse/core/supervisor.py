"""Background tasks of a process: errors are logged and throttled, observers are called, a stop has its budget."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import structlog

from unfuse.core.errors import UnfuseError

LOG_EVERY_S = 1.0  # seconds between two log lines about one cause


class LogThrottle:
    """Lets each cause be logged once in `LOG_EVERY_S` seconds, and counts how often it occurred meanwhile.

    Every cause is remembered for ever: pass texts of our own, never text that a peer sent.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._next: dict[str, float] = {}
        self._unlogged: Counter[str] = Counter()

    def count_if_due(self, cause: str) -> int:
        """Count this occurrence. Returns how many there were since the last log line; 0: do not log now."""
        now = self._now()
        self._unlogged[cause] += 1
        if now < self._next.get(cause, now):
            return 0
        self._next[cause] = now + LOG_EVERY_S
        return self._unlogged.pop(cause)


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


async def first(*works: Awaitable[Any], timeout: float | None = None) -> None:
    """Wait until one of these has ended or the timeout is over, and cancel the others. Raises its error."""
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


Observer = TypeVar("Observer")
Said = ParamSpec("Said")


class Observers(Generic[Observer]):
    """All who hear it, in the order in which they came. What fails in one costs nothing but itself."""

    def __init__(self, background: Supervisor) -> None:
        self._background = background
        self._all: list[Observer] = []

    def add(self, *observers: Observer) -> None:
        """Have these hear everything from now on."""
        self._all += observers

    def tell(self, of: Callable[Concatenate[Observer, Said], None], *said: Said.args, **more: Said.kwargs) -> None:
        """Call the method of that name in each: `observers.tell(Observer.ended, context)`."""
        for observer in self._all:
            try:
                getattr(observer, of.__name__)(*said, **more)
            except Exception as error:  # the others must hear it
                self._background.log(f"telling {type(observer).__name__} of {of.__name__}", error)


T = TypeVar("T")


async def in_own_thread(work: Callable[[], T]) -> T:
    """Return what `work` returns, which may take long, as where a server elsewhere does not answer.

    A caller that is cancelled does not wait for it, and neither does the end of the process, as it would for
    `asyncio.to_thread`.
    """
    future: Future[T] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(context.run(work))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)
