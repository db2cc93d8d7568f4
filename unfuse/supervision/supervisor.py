"""Keeps background work going: what it raises costs one round of it, and is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from unfuse.supervision.repeated_errors import RepeatedErrors

PAUSE_S = 0.2
"""Before work that has failed is done again."""


class Supervisor:
    """The background work of one owner, on one event loop, until `close`."""

    def __init__(self) -> None:
        self._causes = RepeatedErrors()
        self._tasks: set[asyncio.Task[None]] = set()

    def forever(self, what: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Do this work over and over, with a pause after a round that failed. It paces itself otherwise."""
        return self._begin(self.repeat(what, work))

    def once(self, what: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Do this work, beside everything else."""
        return self._begin(self._once(what, work))

    async def repeat(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        """What `forever` does, here."""
        while True:
            failed = True
            with self.besides(what):
                await work()
                failed = False
            if failed:
                await asyncio.sleep(PAUSE_S)

    @contextmanager
    def besides(self, what: str, **about: object) -> Iterator[None]:
        """What fails inside costs nothing but itself: what counts was done before, or is done all the same."""
        try:
            yield
        except Exception as error:  # that nobody has foreseen, too
            self._causes.tell(what, error, **about)

    async def close(self) -> None:
        """End all of it."""
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
