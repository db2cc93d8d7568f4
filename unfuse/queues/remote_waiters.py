"""Waiting callers of `lease` on a Redis queue.

One call of the script serves up to MAX_BATCH of them together.
"""

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

#: Seconds between two tries to reach a server that does not answer.
RETRY_S = 0.2
#: Most calls in one round trip, and most waiters in one call.
MAX_BATCH = 128
#: Most tasks that one caller can lease at once.
MAX_CLAIMS = 1024
#: Runs a verb of the script. Raises TransientError, and the errors of the verb.
RunVerb = Callable[..., Awaitable[Any]]


class NamedTasks:
    """Background asyncio tasks by name. At most one task of each name runs."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def run(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Start a task of this name unless one runs. Returns the running task."""
        if name not in self._tasks or self._tasks[name].done():
            self._tasks = {name: task for name, task in self._tasks.items() if not task.done()}
            self._tasks[name] = asyncio.create_task(work())
        return self._tasks[name]

    async def end(self, *cancelled: str) -> None:
        """Cancel the tasks of these names, then wait until all tasks have ended.

        This includes the tasks of other names.
        """
        for name in self._tasks.keys() & set(cancelled):
            self._tasks[name].cancel()
        while running := [task for task in self._tasks.values() if not task.done()]:
            await asyncio.wait(running)


class LeaseWaiter:
    """A caller of `lease`, with its encoded request and a future for its leases."""

    def __init__(self, worker: str, wanted: LeaseRequest, ttl: float, patient: bool) -> None:
        self.worker = worker
        self.ttl = ttl
        #: Whether it continues to wait after a call of the script that brings no leases or an error.
        self.patient = patient
        #: Sort key among waiters: the lowest is served first.
        self.sort_key = wanted.priority_above is not None, wanted.rank
        #: Pools whose changes may make a task available to it.
        self.pools = wanted.watched_pools()
        #: Lease tokens, 16 random bytes each, one for every task that it can lease.
        self.tokens = secrets.token_bytes(16 * min(wanted.slots, MAX_CLAIMS))
        fields = {"worker": worker, "ttl": ttl, "tokens": script.raw(self.tokens), "wanted": wanted}
        #: The lease request as an argument of the script, without the codec's version byte.
        self.request = msgspec.Raw(encode(fields)[1:])
        self.answer: asyncio.Future[list[Lease]] = asyncio.get_running_loop().create_future()
        #: Whether a call of the script for this waiter is under way.
        self.in_flight = False

    def complete(self, leases: list[Lease], error: Exception | None = None) -> None:
        """Complete the answer with the result of a call of the script.

        A patient waiter without leases continues to wait, also after an error.
        """
        self.in_flight = False
        if self.answer.done() or (self.patient and not leases):
            return
        if error is not None:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(leases)


#: Decodes a waiter's new leases. Arguments: waiter, stored claims, the queue's time, the Unix time.
ReadLeases = Callable[[LeaseWaiter, list[tuple[bytes, bytes, int]], bytes, bytes], list[Lease]]


class RemoteWaiters:
    """All waiting callers of `lease` on one Redis queue in this process.

    `serve` must be called whenever a task may be available.
    """

    def __init__(self, call: RunVerb, read_leases: ReadLeases, background: NamedTasks, clock: Clock) -> None:
        self._call = call
        self._read_leases = read_leases
        self._background = background
        self._clock = clock
        self._waiters: dict[LeaseWaiter, None] = {}
        #: Whether `serve` was called since the last call of the script began.
        self._stale = False
        self._withdraw_alarm: Callable[[], None] = lambda: None

    async def claim(self, worker: str, wanted: LeaseRequest, ttl: float, wait: float) -> list[Lease]:
        """Lease tasks, waiting up to `wait` seconds for a first one.

        Concurrent callers share calls of the script.
        """
        waiter = LeaseWaiter(worker, wanted, ttl, patient=wait > 0)
        self._waiters[waiter] = None
        self.serve()

        deadline = self._clock.now() + wait
        time_out = partial(self._time_out, waiter)
        withdraw_alarm = self._clock.call_at(deadline, time_out) if waiter.patient else lambda: None
        try:
            await asyncio.wait([waiter.answer])
            return waiter.answer.result()
        except asyncio.CancelledError:
            waiter.patient = False
            if waiter.in_flight or waiter.answer.done():  # it may have leased tasks
                # Shielded, because a second cancellation must not lose these leases.
                await asyncio.shield(self._background.run(f"undo {id(waiter)}", partial(self._undo, waiter)))
            raise
        finally:
            withdraw_alarm()
            del self._waiters[waiter]

    def waits_for(self, pool: str) -> bool:
        """Return whether a change of this pool may make a task available to a waiter."""
        return any(pool in waiter.pools for waiter in self._waiters)

    def serve(self) -> None:
        """Lease tasks for all waiters in the background.

        If a call of the script is under way, another one follows it.
        """
        self._stale = True
        if self._waiters:
            self._background.run("ask", self._serve_all)

    def close(self) -> None:
        """End the waits of all callers.

        Each waiter gets the result of the call that is under way for it, or an empty list.
        """
        for waiter in self._waiters:
            self._time_out(waiter)
        self._withdraw_alarm()

    async def _serve_all(self) -> None:
        """Lease tasks for all waiters, MAX_BATCH in one call. Repeats if `serve` is called meanwhile."""
        while self._stale:
            self._stale = False  # before the calls: a change during one of them needs another round
            self._withdraw_alarm()
            waiting = [waiter for waiter in self._waiters if not waiter.answer.done()]
            waiting.sort(key=lambda waiter: waiter.sort_key)
            for start in range(0, len(waiting), MAX_BATCH):
                await self._lease_for(waiting[start : start + MAX_BATCH])

    async def _lease_for(self, waiters: list[LeaseWaiter]) -> None:
        """Lease tasks for these waiters in one call of the script.

        Sets an alarm for the next delayed task, or for another try after an error.
        """
        for waiter in waiters:
            waiter.in_flight = True
        called_at = self._clock.now()
        try:
            now, due, replies, wall = await self._call("lease", asks=[waiter.request for waiter in waiters])
        except Exception as error:  # every caller must get the error
            for waiter in waiters:
                waiter.complete([], error)
            self._withdraw_alarm = asyncio.get_running_loop().call_later(RETRY_S, self.serve).cancel
            return

        for waiter, claims in zip(waiters, replies, strict=True):
            waiter.complete(self._read_leases(waiter, claims, now, wall))
        if due is not None:
            # `due` and `now` are times of the server's clock, the alarm is one of this process's clock.
            self._withdraw_alarm = self._clock.call_at(called_at + float(due) - float(now), self.serve)

    def _time_out(self, waiter: LeaseWaiter) -> None:
        """End the wait of a waiter.

        It gets an empty list now, or the result of the call that is under way.
        """
        waiter.patient = False
        if not waiter.in_flight:
            waiter.complete([])

    async def _undo(self, waiter: LeaseWaiter) -> None:
        """Hand back the tasks that were leased for a cancelled caller."""
        with suppress(TransientError):
            for lease in await waiter.answer:
                await self._call("hand_back", claim=script.claim_fields(lease.claim), undo=True)
