"""Opens the queue of a service, and waits for one that is away, that loads its data, or whose disk is full."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog

from unfuse import queues
from unfuse.core.errors import TransientError
from unfuse.queues.base import QueueBackend

RETRY_S = 0.5  # seconds between two tries

T = TypeVar("T")

log = structlog.get_logger(__name__)


class ServiceStopped(Exception):
    """The service was stopped before its queue could be used."""


class QueueStart:
    """Waits for a queue, `longest_s` seconds at most in all, or until `stop` is set.

    `waits` is called with the reason whenever the queue could not be used.
    """

    def __init__(self, longest_s: float, stop: asyncio.Event, waits: Callable[[str], object]) -> None:
        self._end = asyncio.get_running_loop().time() + longest_s
        self._stop, self._on_wait = stop, waits
        self._has_waited = False

    async def open(self, url: str) -> QueueBackend:
        """Open the queue at `url` and see that it works. Raises ConfigError if it can never be the queue.

        Raises TransientError if it does not work in time, and ServiceStopped.
        """

        async def opened() -> QueueBackend:
            return queues.open(url)

        async def answers() -> None:
            await queue.reach()
            await queue.check()

        queue = await self.until_done(opened)
        try:
            await self.until_done(answers)
        except BaseException:
            await queue.close()
            raise
        return queue

    async def until_done(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Repeat this work until the queue does not fail it. Raises TransientError (too long) and ServiceStopped."""
        while True:
            try:
                done = await self._unless_stopped(work())
            except TransientError as error:
                if asyncio.get_running_loop().time() >= self._end:
                    raise
                self._say(str(error))
            else:
                self._say("")
                return done
            await self._unless_stopped(asyncio.sleep(RETRY_S))

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Do this work. Raises ServiceStopped when the service is stopped before it is done."""
        working, stopped = asyncio.create_task(work), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ServiceStopped
            return working.result()
        finally:
            for task in (working, stopped):
                task.cancel()
            await asyncio.gather(working, stopped, return_exceptions=True)

    def _say(self, reason: str) -> None:
        """Log once that the start waits, and once that it goes on."""
        if reason and not self._has_waited:
            log.warning("the queue cannot be used yet: waiting for it", reason=reason)
        if self._has_waited and not reason:
            log.info("the queue can be used now")
        if reason:
            self._on_wait(reason)
        self._has_waited = bool(reason)
