"""An event loop on which waiting takes no time: when nothing can run, it is at once as late as the next timer says."""

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

BEGIN, WALL = 1_000.0, 1_700_000_000.0
"""The loop's time at its start, in seconds, and what people's clocks say then, in Unix seconds."""

Taken = ParamSpec("Taken")
Made = TypeVar("Made")
Arguments = TypeVarTuple("Arguments")


class _Selector(selectors.DefaultSelector):
    """Looks at sockets as the system's does, and never sleeps until a timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.working = BEGIN, 0

    @override
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        if self.working:
            return super().select()
        found = super().select(0)
        if not found:
            self.now = math.nextafter(self.now + timeout, math.inf)
        return found


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Its `time` stands still while anything can run, a socket has something, or a thread that it waits for works
    (one of `run_in_executor` or `asyncio.to_thread`); otherwise it jumps to the next timer.

    Other processes, and threads started otherwise, take time of which it knows nothing: whoever waits for them with a
    timeout sees it pass. A thread must not wait for one of the loop's timers.
    """

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    @override
    def time(self) -> float:
        """Seconds, from BEGIN on."""
        return self._virtual.now

    @override
    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Arguments], Made], *args: *Arguments
    ) -> asyncio.Future[Made]:
        future = super().run_in_executor(executor, func, *args)
        self._virtual.working += 1
        future.add_done_callback(self._worked)
        return future

    def _worked(self, _: object) -> None:
        self._virtual.working -= 1


class VirtualClock(Clock):
    """The time of the running loop, and people's time that goes with it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    @override
    def now(self) -> float:
        return self._loop.time()

    @override
    def wall(self) -> float:
        return WALL + self._loop.time() - BEGIN

    @override
    def call_at(self, when: float, callback: Callable[[], object]) -> Callable[[], None]:
        return self._loop.call_at(when, callback).cancel


def in_virtual_time(function: Callable[Taken, Coroutine[Any, Any, Made]]) -> Callable[Taken, Made]:
    """The function as one that is called without a loop, and runs on a VirtualTimeLoop of its own."""

    @wraps(function)
    def run(*args: Taken.args, **named: Taken.kwargs) -> Made:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            return runner.run(function(*args, **named))

    return run
