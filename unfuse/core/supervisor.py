"""Background tasks of a process, throttled error logs, observers, and a shutdown budget."""

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

log = structlog.get_logger(__name__)

LOG_EVERY_S = 1.0  # seconds between two log lines about one cause
PAUSE_S = 0.2  # seconds before failed work is repeated


class LogThrottle:
    """Limits the log to one line per cause in `LOG_EVERY_S` seconds.

    It counts the occurrences between two lines. A cause is never forgotten: pass fixed texts, never text that a peer
    sent, or memory grows without bound.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._next: dict[str, float] = {}
        self._unlogged: Counter[str] = Counter()

    def count_if_due(self, cause: str) -> int:
        """Count one occurrence, and return the number since the last log line.

        0 means: do not log now.
        """
        now = self._now()
        self._unlogged[cause] += 1
        if now < self._next.get(cause, now):
            return 0
        self._next[cause] = now + LOG_EVERY_S
        return self._unlogged.pop(cause)


class RepeatedErrors:
    """Logs errors that may repeat: each cause at most once in LOG_EVERY_S seconds.

    A cause is the name of the work and the type of the error. An UnfuseError is logged as its message. Any other error
    is a defect and is logged with its traceback.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._throttle = LogThrottle(now)

    def log(self, operation: str, error: Exception, **fields: object) -> None:
        """Log that an operation failed, and how often since the last line.

        Within LOG_EVERY_S of the last line, it is only counted. `fields` are further fields of the log line.
        """
        times = self._throttle.count_if_due(f"{operation}: {type(error).__name__}")
        if times and isinstance(error, UnfuseError):
            log.warning("operation failed, continuing", doing=operation, reason=str(error), times=times, **fields)
        elif times:
            log.error("operation failed, continuing", doing=operation, exc_info=error, times=times, **fields)


class Supervisor:
    """Runs the background tasks of one owner, on one event loop, until `close`."""

    def __init__(self) -> None:
        self._errors = RepeatedErrors()
        self._tasks: set[asyncio.Task[None]] = set()

    def start_loop(self, operation: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Start a task that repeats this work until `close`.

        It waits PAUSE_S only after an error, so `work` must wait by itself. `operation` names the work in log lines.
        """
        return self._start_task(self.repeat(operation, work))

    def start(self, operation: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Start a task that does this work once. `operation` names the work in log lines."""
        return self._start_task(self._once(operation, work))

    async def repeat(self, operation: str, work: Callable[[], Awaitable[None]]) -> None:
        """Repeat this work as `start_loop` does, in the caller's task."""
        while True:
            failed = True
            with self.log_errors(operation):
                await work()
                failed = False
            if failed:
                await asyncio.sleep(PAUSE_S)

    @contextmanager
    def log_errors(self, operation: str, **fields: object) -> Iterator[None]:
        """Return a context manager that logs and suppresses any error raised inside.

        `fields` are further fields of the log line.
        """
        try:
            yield
        except Exception as error:  # unexpected errors too: one failure must not end other work
            self.log(operation, error, **fields)

    def log(self, operation: str, error: Exception, **fields: object) -> None:
        """Log that an operation failed, throttled as in RepeatedErrors."""
        self._errors.log(operation, error, **fields)

    async def close(self) -> None:
        """Cancel all background tasks and wait until they have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _once(self, operation: str, work: Callable[[], Awaitable[None]]) -> None:
        with self.log_errors(operation):
            await work()

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        # the event loop has only weak references to tasks: without this one, a task could be garbage-collected
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def first_completed(*awaitables: Awaitable[Any], timeout: float | None = None) -> None:
    """Wait until one awaitable has ended, or until the timeout, and cancel the others.

    Raises the error of an awaitable that failed. `timeout` is in seconds; None: wait without limit.
    """
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        completed, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in completed:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class StopBudget:
    """The time budget of a shutdown.

    Each part of the shutdown uses up some of the seconds that remain.
    """

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._end = now() + seconds
        #: The whole budget.
        self.seconds = seconds
        #: Set when the shutdown must end at once.
        self.hurry = asyncio.Event()

    def remaining(self, reserve: float = 0.0) -> float:
        """Return the seconds that remain, minus a `reserve` for later parts; at least 0."""
        return max(0.0, self._end - self._now() - reserve)

    async def limited_to(self, seconds: float, work: Awaitable[object]) -> None:
        """Await this work until `seconds` have passed or `hurry` is set, and then cancel it."""
        await first_completed(work, self.hurry.wait(), timeout=seconds)


Observer = TypeVar("Observer")
Args = ParamSpec("Args")


class Observers(Generic[Observer]):
    """Calls the same method of several observers, in the order in which they were added.

    An error in one observer is logged, and the others are still called.
    """

    def __init__(self, background: Supervisor) -> None:
        self._background = background
        self._observers: list[Observer] = []

    def add(self, *observers: Observer) -> None:
        """Add observers, which are called from now on."""
        self._observers += observers

    def notify(
        self, method: Callable[Concatenate[Observer, Args], None], *args: Args.args, **kwargs: Args.kwargs
    ) -> None:
        """Call a method of each observer with these arguments.

        For example, `observers.notify(Observer.on_ended, context)`. An exception of an observer is logged.
        """
        for observer in self._observers:
            try:
                # by name, since the observer's class may override the method
                getattr(observer, method.__name__)(*args, **kwargs)
            except Exception as error:  # the other observers must still be called
                self._background.log(f"notifying {type(observer).__name__} of {method.__name__}", error)


T = TypeVar("T")


async def run_in_thread(work: Callable[[], T]) -> T:
    """Run blocking `work` in a new daemon thread and return its result.

    If the caller is cancelled, it does not wait for the thread. Neither does the end of the process, unlike with
    `asyncio.to_thread`. `work` may therefore block for long, as when a remote server does not answer.
    """
    future: Future[T] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(context.run(work))
        except BaseException as error:  # also SystemExit, else the caller would wait forever
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)
