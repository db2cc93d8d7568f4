"""An event loop with virtual time, which jumps to the next timer when idle."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from functools import wraps
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

from typing_extensions import override

from unfuse.core.clock import Clock

#: The loop's time at its start, in seconds.
START = 1_000.0
#: The Unix time at its start, in seconds.
WALL = 1_700_000_000.0

Argument = ParamSpec("Argument")
Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class _Selector(selectors.DefaultSelector):
    """A selector whose waits for timers advance virtual time instead of blocking."""

    def __init__(self) -> None:
        super().__init__()
        #: The virtual time, in seconds.
        self.now = START
        #: Number of threads that work for the loop.
        self.working = 0

    @override
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        if self.working:
            return super().select()
        ready = super().select(0)
        if not ready:
            self.now = math.nextafter(self.now + timeout, math.inf)  # not before the timer, despite rounding
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time` stands still while anything can run.

    It also stands still while a socket is ready, or while a thread works that was started by `run_in_executor` or
    `asyncio.to_thread`. Otherwise it jumps to the next timer.

    Other processes, and threads started otherwise, are not tracked: a timeout of a wait for them passes at once. A
    thread must not wait for a timer of the loop.
    """

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    @override
    def time(self) -> float:
        """Return the virtual time in seconds, from START on."""
        return self._virtual.now

    @override
    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Arguments], Result], *args: *Arguments
    ) -> asyncio.Future[Result]:
        future = super().run_in_executor(executor, func, *args)
        self._virtual.working += 1
        future.add_done_callback(self._count_end)
        return future

    def _count_end(self, _: object) -> None:
        self._virtual.working -= 1


class VirtualClock(Clock):
    """The virtual time of the running loop, and Unix time that advances with it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    @override
    def now(self) -> float:
        return self._loop.time()

    @override
    def wall(self) -> float:
        return WALL + self._loop.time() - START

    @override
    def call_at(self, when: float, callback: Callable[[], object]) -> Callable[[], None]:
        return self._loop.call_at(when, callback).cancel


def in_virtual_time(function: Callable[Argument, Coroutine[Any, Any, Result]]) -> Callable[Argument, Result]:
    """Return a synchronous function that runs the coroutine function on its own VirtualTimeLoop."""

    @wraps(function)
    def run(*args: Argument.args, **named: Argument.kwargs) -> Result:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            return runner.run(function(*args, **named))

    return run
