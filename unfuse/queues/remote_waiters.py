"""Those who wait for tasks in this process, for a queue that is elsewhere: one call asks for all of them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from unfuse.core.clock import AlarmClock, Clock
from unfuse.core.codec import encode
from unfuse.core.errors import TransientError
from unfuse.core.task import Lease
from unfuse.queues import script
from unfuse.queues.unreadable import Unreadable
from unfuse.queues.wanted import Wanted

RETRY_S = 0.2
"""How long until a server that did not answer is asked again."""

TOGETHER = 128
"""Calls in one round trip, and those who wait in one call."""

MAX_CLAIMS = 1024
"""Tasks of one lease, at most."""


Call = Callable[..., Awaitable[Any]]
"""Runs a verb of the script with its arguments. Raises TransientError, and what the verb refuses with."""


class Background:
    """Tasks by name, each running at most once at a time."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def run(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Have the task of that name run, unless it does."""
        if name not in self._tasks or self._tasks[name].done():
            self._tasks = {name: task for name, task in self._tasks.items() if not task.done()}
            self._tasks[name] = asyncio.create_task(work())
        return self._tasks[name]

    async def end(self, *cancelled: str) -> None:
        """Cancel those, and wait for all."""
        for name in self._tasks.keys() & set(cancelled):
            self._tasks[name].cancel()
        while running := [task for task in self._tasks.values() if not task.done()]:
            await asyncio.wait(running)


class Waiter:
    """A caller of `lease`: `asked` for while a call is under way, answered with nothing once it is not `patient`."""

    def __init__(self, worker: str, wanted: Wanted, ttl: float, patient: bool) -> None:
        self.worker, self.ttl, self.patient = worker, ttl, patient
        self.turn = wanted.above is not None, wanted.rank
        self.pools = wanted.concerned()
        self.tokens = secrets.token_bytes(16 * min(wanted.slots, MAX_CLAIMS))
        ask = {"worker": worker, "ttl": ttl, "tokens": script.raw(self.tokens), "wanted": wanted}
        self.ask = msgspec.Raw(encode(ask)[1:])
        self.answer: asyncio.Future[list[Lease]] = asyncio.get_running_loop().create_future()
        self.asked = False

    def leases(self, claims: list[list[bytes]], now: float, unreadable: Unreadable) -> list[Lease]:
        """What the script claimed for it, one token after the other."""
        tokens = (self.tokens[at : at + 16] for at in range(0, len(self.tokens), 16))
        found = zip(claims, tokens, strict=False)
        read = (
            (unreadable.sound("task", f"of {self.worker}", partial(script.task, *claim)), token)
            for claim, token in found
        )
        return [Lease(task, self.worker, token, now + self.ttl) for task, token in read if task]

    def settle(self, leases: list[Lease], error: Exception | None = None) -> None:
        """A call for it has ended."""
        self.asked = False
        if self.answer.done() or (self.patient and not leases):
            return
        if error is not None:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(leases)


class RemoteWaiters:
    """All who wait. `serve` is for whenever there may be something for them."""

    def __init__(self, call: Call, background: Background, clock: Clock, unreadable: Unreadable) -> None:
        self._call, self._background, self._clock, self._unreadable = call, background, clock, unreadable
        self._waiters: dict[Waiter, None] = {}
        self._stale = False
        self._withdraw_alarm: Callable[[], None] = lambda: None

    async def claim(self, worker: str, wanted: Wanted, ttl: float, wait: float) -> list[Lease]:
        """Claim tasks, waiting for a first one. All who ask at the same time are served by one call, in their turn."""
        waiter = Waiter(worker, wanted, ttl, patient=wait > 0)
        self._waiters[waiter] = None
        self.serve()
        now = self._clock.now()
        withdraw_alarm = self._call_at(now, now + wait, partial(self._give_up, waiter)) if wait > 0 else lambda: None
        try:
            await asyncio.wait([waiter.answer])
            return waiter.answer.result()
        except asyncio.CancelledError:
            waiter.patient = False
            if waiter.asked or waiter.answer.done():
                await asyncio.shield(self._background.run(f"undo {id(waiter)}", partial(self._undo, waiter)))
            raise
        finally:
            withdraw_alarm()
            del self._waiters[waiter]

    def concerns(self, pool: str) -> bool:
        """Whether a change of that pool may let somebody take something."""
        return any(pool in waiter.pools for waiter in self._waiters)

    def serve(self) -> None:
        """Have everyone who waits asked for, once more if that is being done."""
        self._stale = True
        if self._waiters:
            self._background.run("ask", self._ask)

    def close(self) -> None:
        """Nobody waits any longer."""
        for waiter in self._waiters:
            self._give_up(waiter)
        self._withdraw_alarm()

    async def _ask(self) -> None:
        while self._stale:
            self._stale = False
            self._withdraw_alarm()
            waiting = [waiter for waiter in self._waiters if not waiter.answer.done()]
            waiting.sort(key=lambda waiter: waiter.turn)
            for first in range(0, len(waiting), TOGETHER):
                await self._ask_for(waiting[first : first + TOGETHER])

    async def _ask_for(self, asking: list[Waiter]) -> None:
        """Settle who gets something, and who does not wait; have the others asked for when a task's time comes."""
        for waiter in asking:
            waiter.asked = True
        try:
            now, ripens, answers = await self._call("lease", asks=[waiter.ask for waiter in asking])
        except Exception as error:  # whatever it is, those who wait must hear of it
            for waiter in asking:
                waiter.settle([], error)
            self._withdraw_alarm = asyncio.get_running_loop().call_later(RETRY_S, self.serve).cancel
            return
        for waiter, claims in zip(asking, answers, strict=True):
            waiter.settle(waiter.leases(claims, float(now), self._unreadable))
        if ripens is not None:
            self._withdraw_alarm = self._call_at(float(now), float(ripens), self.serve)

    def _give_up(self, waiter: Waiter) -> None:
        """A waiter's time is over: it is answered now, or with what the call under way brings."""
        waiter.patient = False
        if not waiter.asked:
            waiter.settle([])

    async def _undo(self, waiter: Waiter) -> None:
        """Give back what a caller who is gone has claimed."""
        with suppress(TransientError):
            for lease in await waiter.answer:
                await self._call("hand_back", claim=script.shown(lease.claim), undo=True)

    def _call_at(self, now: float, when: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Set an alarm for a time of a clock that shows `now`; returns what takes it back."""
        if not isinstance(self._clock, AlarmClock):
            return asyncio.get_running_loop().call_later(max(0.0, when - now), callback).cancel
        if when > self._clock.now():
            return self._clock.call_at(when, callback)
        callback()
        return lambda: None
