"""Those who wait on a queue in this process: for tasks, and for what becomes of a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

from unfuse.core.clock import AlarmClock, Clock
from unfuse.core.event import Event
from unfuse.core.task import Lease
from unfuse.queues.history import History
from unfuse.queues.state import QueueState
from unfuse.queues.wanted import Wanted


@dataclass(eq=False, slots=True)
class _Waiter:
    """A caller of `lease` that waits. `pools` are all whose changes concern it."""

    worker: str
    wanted: Wanted
    pools: frozenset[str]
    woken: asyncio.Future[None]


class Waiters:
    """All who wait for tasks of one state. Whoever changes that calls `tell`, before anybody else can."""

    def __init__(self, state: QueueState, clock: Clock) -> None:
        self._state, self._clock = state, clock
        self._waiters: dict[_Waiter, None] = {}
        self._closed = False
        self._ripens: float | None = None
        self._withdraw_alarm: Callable[[], None] = lambda: None

    async def claim(self, worker: str, wanted: Wanted, ttl: float, wait: float) -> list[Lease]:
        """Claim tasks, waiting for a first one."""
        until = self._clock.now() + wait
        while True:
            leases = self._state.claim(worker, wanted, ttl)
            self.tell()
            if leases or wanted.slots < 1 or self._closed or self._clock.now() >= until:
                return leases
            await self._wait(worker, wanted, until)

    def tell(self) -> None:
        """In each pool that has changed, wake the first in line among those that can take what is now first for them.

        One is enough: what it claims is a change again. What is to ripen is told when it does.
        """
        pools, self._state.pools = self._state.pools, {}
        for pool in pools:
            self._wake(pool)
        ripens = None if self._closed else self._state.ripens()
        if ripens != self._ripens:
            self._withdraw_alarm()
            self._ripens, self._withdraw_alarm = ripens, lambda: None
            if ripens is not None:
                self._withdraw_alarm = call_at(self._clock, ripens, partial(self._ripen, ripens))

    def close(self) -> None:
        """Nobody waits any longer."""
        self._closed = True
        for waiter in self._waiters:
            _done(waiter.woken)
        self.tell()

    def _ripen(self, at: float) -> None:
        self._state.ripen(at)
        self.tell()

    def _wake(self, pool: str) -> None:
        for waiter in sorted(self._waiters, key=lambda waiter: (waiter.wanted.above is not None, waiter.wanted.rank)):
            if pool in waiter.pools and not waiter.woken.done() and self._state.first(waiter.worker, waiter.wanted):
                _done(waiter.woken)
                return

    async def _wait(self, worker: str, wanted: Wanted, until: float) -> None:
        waiter = _Waiter(worker, wanted, wanted.concerned(), asyncio.get_running_loop().create_future())
        self._waiters[waiter] = None
        withdraw_alarm = call_at(self._clock, until, partial(_done, waiter.woken))
        try:
            await waiter.woken
        except asyncio.CancelledError:
            self._state.pools |= dict.fromkeys(wanted.pools)
            self.tell()
            raise
        finally:
            withdraw_alarm()
            del self._waiters[waiter]


async def follow(history: History, after: int) -> AsyncIterator[Event]:
    """Events numbered above `after`, waiting for more until the end."""
    while True:
        while unseen := history.above(after):
            for event in unseen:
                yield event
            after = unseen[-1].seq
        if history.ended:
            return
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with history.told(partial(_done, news)):
            await news


def call_at(clock: Clock, when: float, callback: Callable[[], None]) -> Callable[[], None]:
    """Set an alarm; returns what takes it back."""
    if isinstance(clock, AlarmClock):
        return clock.call_at(when, callback)
    return asyncio.get_running_loop().call_later(max(0.0, when - clock.now()), callback).cancel


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
