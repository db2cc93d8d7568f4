"""Where workers are received: their messages in, leases and answers out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec
import structlog

from unfuse.core.errors import LeaseLost, NotFound
from unfuse.core.event import Event, EventType
from unfuse.core.messages import (
    Accepted,
    Ask,
    Beat,
    Bye,
    Done,
    Failed,
    Granted,
    Hello,
    Progress,
    Pulse,
    Refused,
    Stranger,
    ToScheduler,
    ToWorker,
    Welcome,
    WorkerInfo,
)
from unfuse.core.task import Lease
from unfuse.queues.base import Wanted
from unfuse.scheduler.scheduler import Scheduler

MAX_WAIT_S = 30.0
"""How long one Ask may wait; a worker asks again after it."""

MAX_STEPS = 512
"""Steps that one message may list, the newest; no history keeps more."""

PROGRESS: tuple[EventType, ...] = ("progress", "preview")
"""What a step may publish, in order."""

log = structlog.get_logger(__name__)


class Desk:
    """Answers workers for one scheduler.

    `models` are (name, source, dtype) offered to workers that come without; `results` says where they write results,
    `outcome` what their settings have to agree with.
    It remembers which worker each connection is; everything else is in the queue.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        models: Sequence[tuple[str, str, str]],
        results: str,
        outcome: Mapping[str, str] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._queue = scheduler.queue
        ttl = scheduler.lease_ttl
        self._welcome = Welcome(tuple(models), results, ttl, beat=min(1.0, ttl / 4), outcome=dict(outcome or {}))
        self._peers: dict[bytes, Hello] = {}
        self._asks: dict[bytes, asyncio.Task[list[Lease]]] = {}

    async def answer(self, peer: bytes, message: ToScheduler) -> ToWorker | None:
        """The reply to one message."""
        if isinstance(message, Hello):
            return await self._hello(peer, message)
        if peer not in self._peers:
            return Stranger()
        hello = self._peers[peer]
        match message:
            case Ask():
                return await self._ask(peer, hello.worker, message)
            case Beat():
                return await self._beat(hello, message)
            case Bye():
                del self._peers[peer]
                self._withdraw(peer)
                await self._queue.bye(hello.worker.id)
                return Accepted()
            case _:
                return await self._report(hello.worker, message)

    async def undelivered(self, peer: bytes, reply: ToWorker) -> None:
        """Take back what was granted to a worker that is gone."""
        self._peers.pop(peer, None)
        self._withdraw(peer)
        if isinstance(reply, Granted):
            for lease in reply.leases:
                await self._queue.hand_back(lease.claim)

    async def _hello(self, peer: bytes, hello: Hello) -> Welcome:
        known = peer in self._peers
        if hello.worker.pools:
            self._peers[peer] = hello
            await self._queue.hello(hello.worker, hello.cards)
            if not known:
                log.info("worker joined", worker=hello.worker.id, role=hello.worker.role, slots=hello.worker.slots)
        return self._welcome

    async def _ask(self, peer: bytes, worker: WorkerInfo, ask: Ask) -> Granted:
        """Lease for a worker. A newer Ask replaces one that waits, which is answered with nothing."""
        self._withdraw(peer)
        waiting = self._asks[peer] = asyncio.create_task(
            self._queue.lease(
                worker.id,
                Wanted(frozenset(worker.pools), min(ask.slots, worker.slots), ask.room, ask.above),
                self.scheduler.lease_ttl,
                wait=min(ask.wait, MAX_WAIT_S),
            )
        )
        await asyncio.wait({waiting})
        if self._asks.get(peer) is waiting:
            del self._asks[peer]
        leases = [] if waiting.cancelled() else waiting.result()
        return Granted(tuple(leases), dict(await self.scheduler.addresses(leases)))

    def _withdraw(self, peer: bytes) -> None:
        if waiting := self._asks.pop(peer, None):
            waiting.cancel()

    async def _beat(self, hello: Hello, beat: Beat) -> Pulse:
        await self._queue.hello(msgspec.structs.replace(hello.worker, used=beat.used), hello.cards)
        interruption = self.scheduler.interruption
        renewal = await self._queue.renew(beat.claims, self.scheduler.lease_ttl)
        over = await self.scheduler.over(beat.holding)
        if not renewal.ended and not over:
            await asyncio.wait({interruption}, timeout=min(beat.wait, self._welcome.beat))
        return Pulse(renewal.ended, tuple(over))

    async def _report(self, worker: WorkerInfo, message: Progress | Done | Failed) -> Accepted | Refused:
        try:
            match message:
                case Progress():
                    await self._progress(worker, message)
                case Done():
                    await self.scheduler.complete(message, worker.id)
                case Failed():
                    log.warning("task failed", worker=worker.id, kind=message.kind, reason=message.message)
                    await self.scheduler.fail(message, worker.id)
        except (LeaseLost, NotFound) as error:
            return Refused(str(error), lease_lost=True)
        return Accepted()

    async def _progress(self, worker: WorkerInfo, message: Progress) -> None:
        claim, last = message.claim, min(message.step, message.steps)
        stage, attempt, steps = claim.stage, claim.attempt, message.steps
        events = [
            Event(kind, stage=stage, attempt=attempt, worker=worker.id, step=step, steps=steps)
            for step in range(max(1, message.first, last - MAX_STEPS + 1), last + 1)
            for kind in PROGRESS[: 1 + (step in message.previews)]
        ]
        if not await self._queue.progress(claim, events):
            raise LeaseLost(f"stage {claim.stage} of {claim.request} is not leased to {worker.id} any more")
