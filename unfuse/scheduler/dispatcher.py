"""Where workers are received: their messages in, leases and answers out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

import msgspec
import structlog
from typing_extensions import override

from unfuse import __version__
from unfuse.core import messages
from unfuse.core.errors import Damaged, LeaseLost, NotFound, TransientError
from unfuse.core.request import Event, EventType, RequestContext, Timings
from unfuse.core.supervisor import Supervisor
from unfuse.core.task import Claim, Lease
from unfuse.scheduler.backpressure import Backpressure, Dispatch
from unfuse.scheduler.observer import Observer
from unfuse.scheduler.scheduler import Scheduler

MAX_WAIT_S = 30.0  # how long one Ask may wait; a worker asks again after it
MAX_STEPS = 512  # steps that one message may list, the newest; no history keeps more
BEATS_MISSED = 3  # heartbeats without a word after which a worker is set aside: a stranger, until it is heard again
BACKPRESSURE_S = 1.0  # how old may be what is known of the pools and of who serves them

QUEUE_TRIES, QUEUE_PAUSE_S = 16, 0.5
"""How often, and how far apart, an outcome is recorded while the queue is away; then the worker says it again."""

PROGRESS: tuple[EventType, ...] = ("progress", "preview")  # what a step may publish, in order

NOTHING = messages.LeasesGranted((), {})
NOT_LEASED = messages.Rejected("it is not leased to this worker (any more)", lease_lost=True)

_Report = (
    messages.OutputAnnounced
    | messages.CheckpointSaved
    | messages.CachePrefix
    | messages.TaskCompleted
    | messages.TaskFailed
    | messages.TaskStopped
)

log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class _Peer:
    """A worker's connection: who it is, the Ask that waits and what that keeps free, how many tasks it held when it
    asked, and claims seen to be its own.

    One that hands a task back because it `leaves` gets no other.
    """

    hello: messages.Register
    ask: asyncio.Task[list[Lease]] | None = None
    claims: set[Claim] = field(default_factory=set)
    leaves: bool = False
    silent_at: float = 0.0
    withdraw_alarm: Callable[[], None] = lambda: None
    keep: dict[str, int] = field(default_factory=dict)
    held: int = 0

    @property
    def worker(self) -> messages.WorkerInfo:
        return self.hello.worker

    def asks(self, ask: messages.RequestTasks) -> None:
        """Remember how many tasks it holds."""
        self.held = self.worker.slots - (ask.slots if ask.above is None else 0)

    def withdraw(self) -> None:
        """Have the Ask that waits answered with nothing."""
        if self.ask is not None:
            self.ask.cancel()
            self.ask = None


class Dispatcher(Observer):
    """Answers workers for one scheduler.

    `models` are (name, source, dtype) offered to workers that come without; `places` says where they keep things,
    `outcome` what their settings have to agree with. `node` is this machine: its workers join without a log line.
    It remembers which worker each connection is; everything else is in the queue.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        models: Sequence[tuple[str, str, str]],
        places: messages.StorageLocations,
        outcome: Mapping[str, str] | None = None,
        dispatch: Dispatch = "locality",
        node: str = "",
    ) -> None:
        self.scheduler, self._queue, self._clock = scheduler, scheduler.queue, scheduler.clock
        self._dispatch, self._node, ttl = dispatch, node, scheduler.lease_ttl
        self._welcome = messages.Registered(
            tuple(models), places, ttl, beat=min(1.0, ttl / 4), outcome=dict(outcome or {}),
            version=__version__,
        )  # fmt: skip
        self._peers: dict[bytes, _Peer] = {}
        self._backpressure: Backpressure | None = None
        self._backpressure_until = 0.0
        self._looking, self._background, self._interruption = asyncio.Lock(), Supervisor(), asyncio.Event()
        self._withholds = False
        scheduler.observers.add(self)

    def offer(self, models: Sequence[tuple[str, str, str]]) -> None:
        """Offer these models from now on to workers that come without."""
        self._welcome = msgspec.structs.replace(self._welcome, models=tuple(models))

    def withhold(self) -> None:
        """Give nobody a task from now on, since this scheduler is about to stop, and tell all workers that it is."""
        self._withholds = True
        for peer in self._peers.values():
            peer.withdraw()
        self._interrupt()

    async def answer(self, peer: bytes, message: messages.ToScheduler) -> messages.ToWorker | None:
        """The reply to one message, or None while the queue is away: the worker will say it again."""
        if isinstance(message, messages.Register):
            return await self._hello(peer, message)
        known = self._peers.get(peer)
        if known is None or isinstance(message, messages.FetchAdapter):
            return messages.Rejected("it lends nothing itself") if known else messages.UnknownWorker()
        self._heard(known)
        match message:
            case messages.RequestTasks():
                return await self._ask(known, message)
            case messages.Heartbeat():
                return await self._beat(known, message)
            case messages.ReportProgress():
                return messages.HeartbeatReply(
                    tuple([one.claim for one in message.progress if not await self._stepped(known, one)]), ()
                )
            case messages.AppendOutput():
                return await self._append(known, message)
            case messages.ReadOutput():
                return await self._recall(known, message.claim, message.after)
            case messages.Unregister():
                self._leave(peer)
                await self._queue.bye(known.worker.id)
                return messages.Accepted()
            case _:
                return await self._report(known, message)

    @override
    def announced(self, context: RequestContext) -> None:
        """Have those ask anew who would take something with less kept free than has to be from now on."""
        for peer in self._peers.values():
            if peer.ask and (
                not self._backpressure or self._backpressure.keep(peer.worker, self.scheduler.in_flight) != peer.keep
            ):
                peer.withdraw()

    @override
    def ended(self, context: RequestContext) -> None:
        self.announced(context)
        if context.status != "completed":  # workers may still run it
            self._interrupt()

    def _interrupt(self) -> None:
        """Have the heartbeats that wait for news answered."""
        self._interruption.set()
        self._interruption = asyncio.Event()

    async def undelivered(self, peer: bytes, reply: messages.ToWorker) -> None:
        """Take back what was granted to a worker whose connection broke."""
        if known := self._peers.get(peer):
            self.scheduler.upkeep.disconnected(known.worker.id)
        self._leave(peer)
        if isinstance(reply, messages.LeasesGranted):
            await self._take_back(reply.leases)

    async def _take_back(self, leases: Sequence[Lease]) -> None:
        """Put tasks back that nobody was given."""
        for lease in leases:
            with self._background.besides("taking a task back"):
                await self._queue.hand_back(lease.claim)

    async def _hello(self, peer: bytes, hello: messages.Register) -> messages.Registered | messages.Rejected:
        """Register a worker, unless another one goes by its id. It has one connection: the newest."""
        proof = blake2b(hello.secret, digest_size=16).digest() if hello.secret else b""
        worker = msgspec.structs.replace(hello.worker, proof=proof)
        welcome = msgspec.structs.replace(self._welcome, now=self._clock.wall())
        if not worker.pools and not worker.changed:
            return welcome
        if any(member.info.id == worker.id and member.info.proof != proof for member in await self._queue.workers()):
            log.warning("refused a worker under another one's id", worker=worker.id)
            return messages.Rejected(
                f"worker {worker.id} is registered with another secret: start this one under an id of its own"
            )
        await self._queue.hello(worker, hello.cards)
        if peer not in self._peers:
            joined = {"worker": worker.id, "role": worker.role, "node": worker.node, "slots": worker.slots}
            (log.debug if worker.node == self._node else log.info)("worker joined", **joined)
        for identity in [identity for identity, other in self._peers.items() if other.worker.id == worker.id]:
            self._leave(identity)
        self._peers[peer] = _Peer(msgspec.structs.replace(hello, worker=worker, secret=b""))
        self._heard(self._peers[peer])
        self._watch(peer)
        self._backpressure = None
        await self.scheduler.upkeep.joined()
        return welcome

    def _heard(self, peer: _Peer) -> None:
        """A worker lives; when nothing more comes for some beats, it is set aside."""
        peer.silent_at = self._clock.now() + BEATS_MISSED * self._welcome.beat

    def _watch(self, identity: bytes) -> None:
        """Set a worker aside that is silent by now; look again at any other when it would be."""
        peer = self._peers[identity]
        if peer.silent_at > self._clock.now():
            peer.withdraw_alarm = self._clock.call_at(peer.silent_at, partial(self._watch, identity))
        else:
            log.warning("worker set aside until it is heard again", worker=peer.worker.id)
            self._leave(identity)

    def _leave(self, identity: bytes) -> None:
        """Forget a connection; who was given work through it keeps that."""
        if peer := self._peers.pop(identity, None):
            peer.withdraw()
            self._backpressure = None
            peer.withdraw_alarm()

    async def _ask(self, peer: _Peer, ask: messages.RequestTasks) -> messages.LeasesGranted:
        """Lease for a worker. A newer Ask replaces one that waits, which is answered with nothing."""
        backpressure = await self._look()
        keep = backpressure.keep(peer.worker, self.scheduler.in_flight)
        wanted = backpressure.wanted(peer.worker, ask, keep, self._dispatch)
        peer.withdraw()
        if peer.leaves:
            return NOTHING
        if self._withholds:
            await asyncio.sleep(min(ask.wait, MAX_WAIT_S))  # or it would ask again and again
            return NOTHING
        peer.asks(ask)
        peer.keep = keep
        ttl, wait = self.scheduler.lease_ttl, min(ask.wait, MAX_WAIT_S)
        waiting = peer.ask = asyncio.create_task(self._queue.lease(peer.worker.id, wanted, ttl, wait=wait))
        try:
            await asyncio.wait({waiting})
        finally:
            waiting.cancel()  # nobody may be given work when we are not here to say so
        if peer.ask is waiting:
            peer.ask = None
        return await self._granted(peer, [] if waiting.cancelled() else waiting.result())

    async def _complete(self, peer: _Peer, done: messages.TaskCompleted) -> messages.Accepted | messages.LeasesGranted:
        """Record an outcome; with an Ask, lease what the worker would take next in the same transaction.

        Where who gets a task is up to who has waited, or somebody who waits holds fewer, the worker asks again instead.
        """
        ask, worker = done.ask, peer.worker
        if ask is not None:
            peer.asks(ask)
        if ask is None or peer.leaves or self._withholds or self._dispatch != "locality" or self._is_relieved(peer):
            await self.scheduler.complete(done, worker.id)
            return NOTHING if ask else messages.Accepted()
        backpressure = await self._look()
        wanted = backpressure.wanted(worker, ask, backpressure.keep(worker, self.scheduler.in_flight), self._dispatch)
        peer.withdraw()
        _, leases = await self.scheduler.complete(done, worker.id, wanted)
        return await self._granted(peer, leases)

    def _is_relieved(self, peer: _Peer) -> bool:
        """Whether a worker that could take its next tasks waits with fewer than it holds."""
        pools = {*peer.worker.pools}
        others = (other for other in self._peers.values() if other.ask and not other.leaves)
        return any(other.held < peer.held and not pools.isdisjoint(other.worker.pools) for other in others)

    async def _granted(self, peer: _Peer, leases: Sequence[Lease]) -> messages.LeasesGranted:
        """The answer that gives a worker these tasks, with all it needs for them; they go back if there is none."""
        try:
            leases = [await self.scheduler.resumed(lease) for lease in leases]
            owners = await self.scheduler.registry.owners(leases)
        except BaseException:
            await self._take_back(leases)
            raise
        peers = {id: (owner.node, owner.arena) for id, owner in owners.items()}
        peer.claims.update(lease.claim for lease in leases)
        for lease in leases:
            self.scheduler.observers.tell(Observer.dispatched, lease.task.planned.pool)
            self.scheduler.swaps.worked(peer.worker.id)
        return messages.LeasesGranted(tuple(leases), peers, {id: owner.engines for id, owner in owners.items()})

    async def _look(self) -> Backpressure:
        """The flow through the pools, as it was lately."""
        async with self._looking:
            now = self._clock.now()
            if self._backpressure is None or now > self._backpressure_until:
                cards = (await self.scheduler.registry.cards()).values()
                members = await self.scheduler.registry.workers()
                self._backpressure = Backpressure.of(cards, members, self.scheduler.registry.asleep())
                self._backpressure_until = now + BACKPRESSURE_S
            return self._backpressure

    async def _owns(self, peer: _Peer, claim: Claim) -> bool:
        """Whether a claim is of a task that was leased to this worker, at whichever scheduler."""
        if claim not in peer.claims and await self.scheduler.holds(peer.worker.id, claim):
            peer.claims.add(claim)
        return claim in peer.claims

    async def _may_own(self, peer: _Peer, claim: Claim) -> bool:
        """Whether it does, as far as is known: also while the part of the queue is away that could say."""
        with suppress(TransientError):
            return await self._owns(peer, claim)
        return True

    async def _beat(self, peer: _Peer, beat: messages.Heartbeat) -> messages.HeartbeatReply:
        hello = peer.hello
        worker = self.scheduler.swaps.heard(msgspec.structs.replace(hello.worker, status=beat.status))
        await self._queue.hello(worker, hello.cards)
        for engine, moved in beat.moved.items():
            self.scheduler.observers.tell(Observer.moved, engine, moved)
        if beat.retracted:
            self.scheduler.observers.tell(Observer.retracted, beat.retracted)
        for memory, nbytes in beat.leaked.items():
            self.scheduler.observers.tell(Observer.leaked, worker.role, memory, nbytes)
        interruption = self._interruption
        own = [claim for claim in beat.claims if await self._may_own(peer, claim)]
        held = set((await self._queue.renew(own, self.scheduler.lease_ttl)).held)
        peer.claims &= held
        load, soon = await self.scheduler.swaps.next(worker, bool(held))
        ended = tuple(claim for claim in beat.claims if claim not in held)
        over = await self.scheduler.over(beat.holding)
        if not (ended or over or load):
            with suppress(TimeoutError):
                await asyncio.wait_for(interruption.wait(), min(beat.wait, self._welcome.beat))
        lost = tuple(self.scheduler.in_flight.lost(beat.holding))
        return messages.HeartbeatReply(ended, tuple(over), lost, load, soon, self._withholds)

    async def _report(
        self, peer: _Peer, message: _Report
    ) -> messages.Accepted | messages.LeasesGranted | messages.Rejected | None:
        """Record what a worker says of a task; while the queue is away, an outcome waits for it."""
        claim, worker = message.claim, peer.worker.id
        self.scheduler.swaps.worked(worker)
        about = {"request": claim.request, "stage": claim.stage, "attempt": claim.attempt, "worker": worker}
        if isinstance(message, messages.TaskFailed) and message.reason == "drain":
            log.info("task handed back", reason=message.message, **about)
        elif isinstance(message, messages.TaskFailed):
            log.warning("task failed", kind=message.kind, reason=message.message, **about)
        refused: messages.Rejected | None = None
        for _ in range(QUEUE_TRIES):
            try:
                recorded = await self._record(peer, message)
                return refused or recorded
            except (LeaseLost, NotFound, Damaged) as error:
                log.info("report refused", reason=str(error), **about)
                refused = messages.Rejected(str(error), lease_lost=True)
                if not isinstance(message, messages.TaskCompleted | messages.TaskFailed):
                    return refused
                message = messages.TaskStopped(claim, message.timings)  # what the attempt has used counts all the same
            except TransientError:
                await asyncio.sleep(QUEUE_PAUSE_S)
        return None

    async def _record(self, peer: _Peer, message: _Report) -> messages.Accepted | messages.LeasesGranted:
        worker = peer.worker.id
        if isinstance(message, messages.TaskCompleted | messages.TaskFailed | messages.TaskStopped):
            message = msgspec.structs.replace(message, timings=_on_devices(message.timings, peer.worker))
        match message:
            case messages.OutputAnnounced():
                await self.scheduler.announce(message, worker)
            case messages.CheckpointSaved():
                await self.scheduler.save(message, worker)
            case messages.CachePrefix():
                await self.scheduler.keep(message, worker)
            case messages.TaskCompleted():
                return await self._complete(peer, message)
            case messages.TaskFailed():
                peer.leaves |= message.reason == "drain"
                await self.scheduler.fail(message, worker)
            case messages.TaskStopped():
                await self.scheduler.stopped(message, worker)
        return messages.Accepted()

    async def _append(self, peer: _Peer, message: messages.AppendOutput) -> messages.HeartbeatReply:
        """Record what has grown; tells of which tasks it cannot be."""
        own = [one for one in message.grown if await self._owns(peer, one.claim)]
        kept = await self.scheduler.growing.append(own)
        return messages.HeartbeatReply(tuple(one.claim for one in message.grown if one.claim not in kept), ())

    async def _recall(self, peer: _Peer, claim: Claim, after: int) -> messages.RecordedOutput | messages.Rejected:
        """Read what is recorded of a task for the worker that has it."""
        with suppress(NotFound, Damaged):
            if await self._owns(peer, claim):
                return messages.RecordedOutput(tuple(await self._queue.appended(claim.request, claim.stage, after)))
        return NOT_LEASED

    async def _stepped(self, peer: _Peer, message: messages.StepProgress) -> bool:
        """Publish steps; False if the lease is not this worker's (any more). While the queue is away they are lost."""
        claim, last, worker = message.claim, min(message.step, message.steps), peer.worker.id
        stage, attempt, steps = claim.stage, claim.attempt, message.steps
        events = [
            Event(kind, stage=stage, attempt=attempt, worker=worker, step=step, steps=steps)
            for step in range(max(1, message.first, last - MAX_STEPS + 1), last + 1)
            for kind in PROGRESS[: 1 + (step in message.previews)]
        ]
        try:
            used = _on_devices(Timings(share_s=message.share_s), peer.worker)
            return await self._owns(peer, claim) and await self._queue.progress(claim, events, used)
        except (NotFound, Damaged):
            return False
        except TransientError:
            return True


def _on_devices(timings: Timings, worker: messages.WorkerInfo) -> Timings:
    """The timings with the devices on which the worker computes, and without a wait that it cannot know."""
    return msgspec.structs.replace(
        timings, device=worker.device, devices=max(1, len(worker.status.ranks)), queued_s=0.0
    )
