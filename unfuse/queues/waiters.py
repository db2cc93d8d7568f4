"""Wakes callers that wait on a queue of this process: for tasks, or for a request's events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

from unfuse.core.clock import Clock
from unfuse.core.event import Event
from unfuse.core.task import Lease
from unfuse.queues.base import Wanted
from unfuse.queues.history import History
from unfuse.queues.state import QueueState


@dataclass(eq=False, slots=True)
class _Waiter:
    """A caller of `lease` that waits. A change in one of `pools` may let it take a task."""

    worker: str
    wanted: Wanted
    pools: frozenset[str]
    woken: asyncio.Future[None]


class Waiters:
    """All callers that wait for tasks. Whoever changes the state must call `wake` before it awaits anything."""

    def __init__(self, state: QueueState, clock: Clock) -> None:
        self._state, self._clock = state, clock
        self._waiters: dict[_Waiter, None] = {}
        self._closed = False
        self._due: float | None = None
        self._withdraw_alarm: Callable[[], None] = lambda: None

    async def claim(self, worker: str, wanted: Wanted, ttl: float, wait: float) -> list[Lease]:
        """Claim tasks, waiting up to `wait` seconds for a first one."""
        until = self._clock.now() + wait
        while True:
            leases = self._state.claim(worker, wanted, ttl)
            self.wake()
            if leases or wanted.slots < 1 or self._closed or self._clock.now() >= until:
                return leases
            await self._wait(worker, wanted, until)

    def wake(self) -> None:
        """For each pool that has changed, wake the first waiter that can take a task there now.

        One waiter is enough, since its claim is a change again. An alarm wakes waiters for tasks that are delayed.
        """
        pools, self._state.changed_pools = self._state.changed_pools, {}
        for pool in pools:
            self._wake_for(pool)
        due = None if self._closed else self._state.pool_queues.next_due()
        if due != self._due:
            self._withdraw_alarm()
            self._due, self._withdraw_alarm = due, lambda: None
            if due is not None:
                self._withdraw_alarm = self._clock.call_at(due, partial(self._release, due))

    def close(self) -> None:
        """Wake all waiters for good."""
        self._closed = True
        for waiter in self._waiters:
            _done(waiter.woken)
        self.wake()

    def _release(self, at: float) -> None:
        self._state.release_due(at)
        self.wake()

    def _wake_for(self, pool: str) -> None:
        for waiter in sorted(self._waiters, key=lambda waiter: (waiter.wanted.above is not None, waiter.wanted.rank)):
            if pool in waiter.pools and not waiter.woken.done() and self._state.next_task(waiter.worker, waiter.wanted):
                _done(waiter.woken)
                return

    async def _wait(self, worker: str, wanted: Wanted, until: float) -> None:
        waiter = _Waiter(worker, wanted, wanted.watched_pools(), asyncio.get_running_loop().create_future())
        self._waiters[waiter] = None
        withdraw_alarm = self._clock.call_at(until, partial(_done, waiter.woken))
        try:
            await waiter.woken
        except asyncio.CancelledError:
            self._state.changed_pools |= dict.fromkeys(wanted.pools)
            self.wake()
            raise
        finally:
            withdraw_alarm()
            del self._waiters[waiter]


async def follow(history: History, after: int) -> AsyncIterator[Event]:
    """Events with a number above `after`; waits for more until the history has ended."""
    while True:
        while unseen := history.above(after):
            for event in unseen:
                yield event
            after = unseen[-1].seq
        if history.ended:
            return
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with history.listening(partial(_done, news)):
            await news


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
