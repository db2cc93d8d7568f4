"""Callers of this process that wait for tasks of a queue in Redis: one call asks for all of them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from unfuse.core.clock import Clock
from unfuse.core.codec import encode
from unfuse.core.errors import TransientError
from unfuse.core.task import Lease
from unfuse.queues import script
from unfuse.queues.base import LeaseRequest

RETRY_S = 0.2  # seconds until a server that did not answer is asked again
MAX_BATCH = 128  # the most calls in one round trip, and the most waiters in one call
MAX_CLAIMS = 1024  # the most tasks that one caller can claim at once
#: Runs a verb of the script. Raises TransientError, and the verb's errors.
RunVerb = Callable[..., Awaitable[Any]]


class NamedTasks:
    """asyncio tasks by name; of each name, at most one runs."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def run(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Start a task of this name unless one runs. Returns the one that runs."""
        if name not in self._tasks or self._tasks[name].done():
            self._tasks = {name: task for name, task in self._tasks.items() if not task.done()}
            self._tasks[name] = asyncio.create_task(work())
        return self._tasks[name]

    async def end(self, *cancelled: str) -> None:
        """Cancel the tasks of these names, and wait until all tasks have ended."""
        for name in self._tasks.keys() & set(cancelled):
            self._tasks[name].cancel()
        while running := [task for task in self._tasks.values() if not task.done()]:
            await asyncio.wait(running)


class LeaseWaiter:
    """A caller of `lease`. `asked`: a call for it is under way. `patient`: it waits for a task, else it gets none."""

    def __init__(self, worker: str, wanted: LeaseRequest, ttl: float, patient: bool) -> None:
        self.worker, self.ttl, self.patient = worker, ttl, patient
        self.turn = wanted.above is not None, wanted.rank
        self.pools = wanted.watched_pools()
        self.tokens = secrets.token_bytes(16 * min(wanted.slots, MAX_CLAIMS))
        ask = {"worker": worker, "ttl": ttl, "tokens": script.raw(self.tokens), "wanted": wanted}
        self.ask = msgspec.Raw(encode(ask)[1:])
        self.answer: asyncio.Future[list[Lease]] = asyncio.get_running_loop().create_future()
        self.asked = False

    def settle(self, leases: list[Lease], error: Exception | None = None) -> None:
        """A call for it has ended: answer it, unless it has no lease yet and waits on."""
        self.asked = False
        if self.answer.done() or (self.patient and not leases):
            return
        if error is not None:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(leases)


#: Reads the leases that the script made for a waiter, from its claims, the queue's time and the Unix time.
ReadLeases = Callable[[LeaseWaiter, list[tuple[bytes, bytes, int]], bytes, bytes], list[Lease]]


class RemoteWaiters:
    """All callers that wait for tasks. Call `serve` whenever there may be a task for them."""

    def __init__(self, call: RunVerb, read_leases: ReadLeases, background: NamedTasks, clock: Clock) -> None:
        self._call, self._read_leases, self._background, self._clock = call, read_leases, background, clock
        self._waiters: dict[LeaseWaiter, None] = {}
        self._stale = False
        self._withdraw_alarm: Callable[[], None] = lambda: None

    async def claim(self, worker: str, wanted: LeaseRequest, ttl: float, wait: float) -> list[Lease]:
        """Claim tasks, waiting up to `wait` seconds for a first one. One call serves all who ask at the same time."""
        waiter = LeaseWaiter(worker, wanted, ttl, patient=wait > 0)
        self._waiters[waiter] = None
        self.serve()
        until, give_up = self._clock.now() + wait, partial(self._give_up, waiter)
        withdraw_alarm = self._clock.call_at(until, give_up) if waiter.patient else lambda: None
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

    def waits_for(self, pool: str) -> bool:
        """Whether a change of this pool may let a waiter take a task."""
        return any(pool in waiter.pools for waiter in self._waiters)

    def serve(self) -> None:
        """Ask for tasks for all waiters; once more after the call that is under way, if there is one."""
        self._stale = True
        if self._waiters:
            self._background.run("ask", self._ask)

    def close(self) -> None:
        """Answer all waiters with nothing."""
        for waiter in self._waiters:
            self._give_up(waiter)
        self._withdraw_alarm()

    async def _ask(self) -> None:
        while self._stale:
            self._stale = False
            self._withdraw_alarm()
            waiting = [waiter for waiter in self._waiters if not waiter.answer.done()]
            waiting.sort(key=lambda waiter: waiter.turn)
            for first in range(0, len(waiting), MAX_BATCH):
                await self._ask_for(waiting[first : first + MAX_BATCH])

    async def _ask_for(self, asking: list[LeaseWaiter]) -> None:
        """Ask for tasks for these waiters, and set an alarm for the next delayed task."""
        for waiter in asking:
            waiter.asked = True
        asked_at = self._clock.now()
        try:
            now, due, answers, wall = await self._call("lease", asks=[waiter.ask for waiter in asking])
        except Exception as error:  # the callers must get any error
            for waiter in asking:
                waiter.settle([], error)
            self._withdraw_alarm = asyncio.get_running_loop().call_later(RETRY_S, self.serve).cancel
            return
        for waiter, claims in zip(asking, answers, strict=True):
            waiter.settle(self._read_leases(waiter, claims, now, wall))
        if due is not None:
            self._withdraw_alarm = self._clock.call_at(asked_at + float(due) - float(now), self.serve)

    def _give_up(self, waiter: LeaseWaiter) -> None:
        """A waiter's time is over: answer it now, or with the result of the call that is under way."""
        waiter.patient = False
        if not waiter.asked:
            waiter.settle([])

    async def _undo(self, waiter: LeaseWaiter) -> None:
        """Hand back the tasks that were claimed for a caller that was cancelled."""
        with suppress(TransientError):
            for lease in await waiter.answer:
                await self._call("hand_back", claim=script.claim_fields(lease.claim), undo=True)
