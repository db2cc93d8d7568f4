"""The dispatcher: answers worker messages with leases, heartbeat replies and acknowledgements."""

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
from unfuse.core.errors import LeaseLost, NotFound, RecordDamaged, TransientError
from unfuse.core.plan import readable_pool
from unfuse.core.request import Event, EventType, RequestContext, Timings
from unfuse.core.supervisor import Supervisor
from unfuse.core.task import Claim, Lease
from unfuse.scheduler.backpressure import Backpressure, Dispatch
from unfuse.scheduler.observer import Observer
from unfuse.scheduler.scheduler import Scheduler

#: Longest wait of one RequestTasks message, in seconds. Then the worker sends the next one.
MAX_WAIT_S = 30.0

#: Most steps of one progress message that are published, the newest ones. No history has more.
MAX_STEPS = 512

#: Heartbeat intervals without a message after which a worker's connection is dropped. The worker registers again.
MISSED_HEARTBEATS = 3

#: Seconds for which a computed Backpressure is used.
BACKPRESSURE_S = 1.0

#: Attempts to record a report while the queue cannot be reached, and the seconds between them.
#: After the last one the worker gets no answer and sends its report again.
QUEUE_TRIES, QUEUE_PAUSE_S = 16, 0.5

#: Event types that one step may publish, in their order.
PROGRESS: tuple[EventType, ...] = ("progress", "preview")

NOTHING = messages.LeasesGranted((), {})
NOT_LEASED = messages.Rejected("the task is not leased to this worker (any more)", lease_lost=True)

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
    """The connection of one registered worker."""

    registration: messages.Register

    #: The queue's `lease` call for the RequestTasks message that waits. None if no message waits.
    pending_lease: asyncio.Task[list[Lease]] | None = None

    #: Claims that are known to be leased to this worker, so that not every message needs a read of the queue.
    claims: set[Claim] = field(default_factory=set)

    #: Whether the worker handed a task back because it drains. It gets no more tasks.
    is_draining: bool = False

    #: The clock's reading at which the connection is dropped if no message arrives before.
    silent_at: float = 0.0

    #: Cancels the timer that checks `silent_at`.
    cancel_alarm: Callable[[], None] = lambda: None

    #: By pool, the arena bytes that the pending lease leaves free.
    reserved_bytes: dict[str, int] = field(default_factory=dict)

    #: Number of tasks that the worker ran when it last requested tasks.
    task_count: int = 0

    @property
    def worker(self) -> messages.WorkerInfo:
        return self.registration.worker

    def count_tasks(self, request: messages.RequestTasks) -> None:
        """Store how many tasks the worker runs, by the free slots that it reports."""
        self.task_count = self.worker.slots - (request.slots if request.min_priority is None else 0)

    def cancel_request(self) -> None:
        """Answer the waiting RequestTasks message with no lease."""
        if self.pending_lease is not None:
            self.pending_lease.cancel()
            self.pending_lease = None


class Dispatcher(Observer):
    """Answers the messages of all workers that are connected to one scheduler.

    It stores one record for each connection. Everything else is in the queue.

    models: (name, source, dtype) of each model that is offered to workers that register without models.
    locations: where workers store results, tensors and checkpoints.
    required_numerics: the numerics that the settings of workers must agree with.
    dispatch: which task a worker gets, see `Dispatch`.
    node: name of this machine. Workers on it join without a log line at level info.
    exact_only: whether workers must refuse to decode in tiles for lack of memory.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        models: Sequence[tuple[str, str, str]],
        locations: messages.StorageLocations,
        required_numerics: Mapping[str, str] | None = None,
        dispatch: Dispatch = "locality",
        node: str = "",
        exact_only: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self._queue = scheduler.queue
        self._clock = scheduler.clock
        self._dispatch = dispatch
        self._node = node
        self._registered_reply = messages.Registered(
            tuple(models),
            locations,
            scheduler.lease_ttl,
            heartbeat_s=min(1.0, scheduler.lease_ttl / 4),
            required_numerics=dict(required_numerics or {}),
            exact_only=exact_only,
            version=__version__,
        )
        self._peers: dict[bytes, _Peer] = {}

        self._backpressure: Backpressure | None = None
        self._backpressure_until = 0.0
        self._backpressure_lock = asyncio.Lock()

        self._background = Supervisor()
        #: Set when a lease ended or this scheduler is about to stop, so that waiting heartbeats are answered at once.
        self._heartbeat_wakeup = asyncio.Event()
        self._is_withholding = False
        scheduler.observers.add(self)

    def set_offered_models(self, models: Sequence[tuple[str, str, str]]) -> None:
        """Replace the models that are offered to workers that register without models."""
        self._registered_reply = msgspec.structs.replace(self._registered_reply, models=tuple(models))

    def stop_granting(self) -> None:
        """Grant no more leases, because this scheduler is about to stop, and notify all workers."""
        self._is_withholding = True
        for peer in self._peers.values():
            peer.cancel_request()
        self._wake_heartbeats()

    async def answer(self, identity: bytes, message: messages.ToScheduler) -> messages.ToWorker | None:
        """Return the reply to one message, or None while the queue cannot be reached.

        A worker that gets no reply sends its message again.

        identity: the bytes that identify the connection.
        """
        if isinstance(message, messages.Register):
            return await self._register(identity, message)
        peer = self._peers.get(identity)
        if peer is None or isinstance(message, messages.FetchAdapter):
            return messages.Rejected("the dispatcher does not serve adapters") if peer else messages.UnknownWorker()
        self._note_contact(peer)
        match message:
            case messages.RequestTasks():
                return await self._lease_tasks(peer, message)
            case messages.Heartbeat():
                return await self._answer_heartbeat(peer, message)
            case messages.ReportProgress():
                return messages.HeartbeatReply(
                    tuple([step.claim for step in message.progress if not await self._publish_steps(peer, step)]), ()
                )
            case messages.AppendOutput():
                return await self._append_output(peer, message)
            case messages.ReadOutput():
                return await self._read_output(peer, message.claim, message.after)
            case messages.Unregister():
                self._drop_peer(identity)
                await self._queue.unregister(peer.worker.id)
                return messages.Accepted()
            case _:
                return await self._report(peer, message)

    @override
    def on_announced(self, context: RequestContext) -> None:
        """Cancel waiting task requests whose reserved arena bytes are out of date.

        Their workers send the next request at once, and then lease with the new reserve.
        """
        for peer in self._peers.values():
            if peer.pending_lease and (
                not self._backpressure
                or self._backpressure.reserved_bytes(peer.worker, self.scheduler.in_flight) != peer.reserved_bytes
            ):
                peer.cancel_request()

    @override
    def on_ended(self, context: RequestContext) -> None:
        self.on_announced(context)
        if context.status != "completed":  # workers may still run it
            self._wake_heartbeats()

    def _wake_heartbeats(self) -> None:
        """Answer the waiting heartbeats now."""
        self._heartbeat_wakeup.set()
        self._heartbeat_wakeup = asyncio.Event()

    async def handle_undelivered(self, identity: bytes, reply: messages.ToWorker) -> None:
        """Hand back the leases of an undelivered reply, and drop its broken connection."""
        if peer := self._peers.get(identity):
            self.scheduler.maintenance.on_client_disconnected(peer.worker.id)
        self._drop_peer(identity)
        if isinstance(reply, messages.LeasesGranted):
            await self._return_leases(reply.leases)

    async def _return_leases(self, leases: Sequence[Lease]) -> None:
        """Hand back leased tasks that no worker received."""
        for lease in leases:
            with self._background.log_errors("handing back an undelivered task"):
                await self._queue.hand_back(lease.claim)

    async def _register(self, identity: bytes, request: messages.Register) -> messages.Registered | messages.Rejected:
        """Register a worker, or reject it if its id is registered with another secret.

        Each worker has one connection, the newest. A worker without pools only gets the models to serve.
        """
        secret_hash = blake2b(request.secret, digest_size=16).digest() if request.secret else b""
        worker = msgspec.structs.replace(request.worker, secret_hash=secret_hash)
        reply = msgspec.structs.replace(self._registered_reply, now=self._clock.wall())
        if not worker.pools and not worker.changed:
            return reply
        if any(
            member.info.id == worker.id and member.info.secret_hash != secret_hash
            for member in await self._queue.workers()
        ):
            log.warning("rejected a worker with the id of another one", worker=worker.id)
            return messages.Rejected(
                f"worker {worker.id} is registered with another secret: start this one with another id"
            )
        await self._queue.register(worker, request.model_specs)
        if identity not in self._peers:
            log_fields = {"worker": worker.id, "role": worker.role, "node": worker.node, "slots": worker.slots}
            (log.debug if worker.node == self._node else log.info)("worker joined", **log_fields)
        replaced = [other for other, peer in self._peers.items() if other == identity or peer.worker.id == worker.id]
        for stale in replaced:
            self._drop_peer(stale)

        self._peers[identity] = _Peer(msgspec.structs.replace(request, worker=worker, secret=b""))
        self._note_contact(self._peers[identity])
        self._check_contact(identity)
        self._backpressure = None
        await self.scheduler.maintenance.on_worker_registered()
        return reply

    def _note_contact(self, peer: _Peer) -> None:
        """Postpone the time at which the connection is dropped for silence."""
        peer.silent_at = self._clock.now() + MISSED_HEARTBEATS * self._registered_reply.heartbeat_s

    def _check_contact(self, identity: bytes) -> None:
        """Drop a connection without recent messages, else check it again later."""
        peer = self._peers[identity]
        if peer.silent_at > self._clock.now():
            peer.cancel_alarm = self._clock.call_at(peer.silent_at, partial(self._check_contact, identity))
        else:
            log.warning("worker is silent, its connection is dropped", worker=peer.worker.id)
            self._drop_peer(identity)

    def _drop_peer(self, identity: bytes) -> None:
        """Forget a connection. Leases that were granted through it stay valid."""
        if peer := self._peers.pop(identity, None):
            peer.cancel_request()
            self._backpressure = None
            peer.cancel_alarm()

    async def _lease_tasks(self, peer: _Peer, request: messages.RequestTasks) -> messages.LeasesGranted:
        """Lease tasks for a worker.

        A newer request replaces a waiting one, which is answered with no lease.
        """
        backpressure = await self._current_backpressure()
        reserved_bytes = backpressure.reserved_bytes(peer.worker, self.scheduler.in_flight)
        lease_request = backpressure.lease_request(peer.worker, request, reserved_bytes, self._dispatch)
        peer.cancel_request()
        if peer.is_draining:
            return NOTHING
        if self._is_withholding:
            await asyncio.sleep(min(request.wait, MAX_WAIT_S))  # an answer at once would bring the next request at once
            return NOTHING

        peer.count_tasks(request)
        peer.reserved_bytes = reserved_bytes
        wait = min(request.wait, MAX_WAIT_S)
        lease_call = self._queue.lease(peer.worker.id, lease_request, self.scheduler.lease_ttl, wait=wait)
        pending = peer.pending_lease = asyncio.create_task(lease_call)
        try:
            await asyncio.wait({pending})
        finally:
            pending.cancel()  # if this coroutine is cancelled, no task may be leased: the worker would not learn of it
        if peer.pending_lease is pending:
            peer.pending_lease = None
        return await self._grant(peer, [] if pending.cancelled() else pending.result())

    async def _complete(
        self, peer: _Peer, completed: messages.TaskCompleted
    ) -> messages.Accepted | messages.LeasesGranted:
        """Record a completed task and lease the worker's next ones in the same transaction.

        The answer is empty, so that the worker sends a separate request, if the dispatch policy ranks waiting workers,
        or if a waiting worker with fewer tasks could take the next ones.
        """
        request = completed.next_request
        worker = peer.worker
        if request is not None:
            peer.count_tasks(request)
        may_lease = not (peer.is_draining or self._is_withholding)
        if request is None or not may_lease or self._dispatch != "locality" or self._should_yield(peer):
            await self.scheduler.complete(completed, worker.id)
            return NOTHING if request else messages.Accepted()

        backpressure = await self._current_backpressure()
        reserved_bytes = backpressure.reserved_bytes(worker, self.scheduler.in_flight)
        lease_request = backpressure.lease_request(worker, request, reserved_bytes, self._dispatch)
        peer.cancel_request()
        _, leases = await self.scheduler.complete(completed, worker.id, lease_request)
        return await self._grant(peer, leases)

    def _should_yield(self, peer: _Peer) -> bool:
        """Return whether a waiting worker of the same pools runs fewer tasks."""
        pools = {*peer.worker.pools}
        waiting = (other for other in self._peers.values() if other.pending_lease and not other.is_draining)
        return any(other.task_count < peer.task_count and not pools.isdisjoint(other.worker.pools) for other in waiting)

    async def _grant(self, peer: _Peer, leases: Sequence[Lease]) -> messages.LeasesGranted:
        """Return the answer with these leases, their checkpoints, and the addresses of their inputs' owners.

        If one of these cannot be read, the tasks are handed back and the error is raised.
        """
        try:
            leases = [await self.scheduler.add_resume_data(lease) for lease in leases]
            owners = await self.scheduler.registry.owners(leases)
        except BaseException:
            await self._return_leases(leases)
            raise
        addresses = {id: (owner.node, owner.arena) for id, owner in owners.items()}
        peer.claims.update(lease.claim for lease in leases)
        for lease in leases:
            self.scheduler.observers.notify(Observer.on_dispatched, lease.task.planned.pool)
            self.scheduler.model_swaps.note_activity(peer.worker.id)
            task, pool = lease.task, readable_pool(lease.task.planned.pool)
            log_fields = {"request": task.request, "stage": task.stage, "attempt": task.attempt, "pool": pool}
            log.debug("task leased", **log_fields, worker=peer.worker.id)
        return messages.LeasesGranted(tuple(leases), addresses, {id: owner.engines for id, owner in owners.items()})

    async def _current_backpressure(self) -> Backpressure:
        """Return the back-pressure between pools, computed again after BACKPRESSURE_S."""
        # The lock lets requests that arrive at one time share one computation.
        async with self._backpressure_lock:
            now = self._clock.now()
            if self._backpressure is None or now > self._backpressure_until:
                specs = (await self.scheduler.registry.model_specs()).values()
                members = await self.scheduler.registry.workers()
                self._backpressure = Backpressure.of(specs, members, self.scheduler.registry.scaled_to_zero())
                self._backpressure_until = now + BACKPRESSURE_S
            return self._backpressure

    async def _owns_claim(self, peer: _Peer, claim: Claim) -> bool:
        """Return whether this task is leased to the worker, by any scheduler of the queue."""
        if claim not in peer.claims and await self.scheduler.is_leased_to(peer.worker.id, claim):
            peer.claims.add(claim)
        return claim in peer.claims

    async def _may_own_claim(self, peer: _Peer, claim: Claim) -> bool:
        """Return `_owns_claim`, or True while the queue cannot read the request."""
        with suppress(TransientError):
            return await self._owns_claim(peer, claim)
        return True

    async def _answer_heartbeat(self, peer: _Peer, heartbeat: messages.Heartbeat) -> messages.HeartbeatReply:
        """Renew the leases of a heartbeat.

        If there is nothing to report to the worker, the answer waits, for one heartbeat interval at most.
        """
        registration = peer.registration
        worker = self.scheduler.model_swaps.on_heartbeat(
            msgspec.structs.replace(registration.worker, status=heartbeat.status)
        )
        await self._queue.register(worker, registration.model_specs)
        for engine, stats in heartbeat.transfers.items():
            self.scheduler.observers.notify(Observer.on_transfer, engine, stats)
        if heartbeat.retracted:
            self.scheduler.observers.notify(Observer.on_retracted, heartbeat.retracted)
        for memory, nbytes in heartbeat.leaks.items():
            self.scheduler.observers.notify(Observer.on_leaked, worker.role, memory, nbytes)
        for errors in heartbeat.device_errors:
            self.scheduler.observers.notify(Observer.on_device_errors, worker, errors)

        wakeup = self._heartbeat_wakeup  # read before the leases are: an event that is set meanwhile is not missed
        claims = [claim for claim in heartbeat.claims if await self._may_own_claim(peer, claim)]
        renewed = set((await self._queue.renew(claims, self.scheduler.lease_ttl)).renewed)
        peer.claims &= renewed
        to_load, likely_next = await self.scheduler.model_swaps.decide_swap(worker, bool(renewed))
        ended_claims = tuple(claim for claim in heartbeat.claims if claim not in renewed)
        releasable = await self.scheduler.releasable(heartbeat.stored_requests)
        if not (ended_claims or releasable or to_load):
            with suppress(TimeoutError):
                await asyncio.wait_for(wakeup.wait(), min(heartbeat.wait, self._registered_reply.heartbeat_s))
        lost_outputs = tuple(self.scheduler.in_flight.lost_outputs(heartbeat.stored_requests))
        return messages.HeartbeatReply(
            ended_claims, tuple(releasable), lost_outputs, to_load, likely_next, self._is_withholding
        )

    async def _report(
        self, peer: _Peer, message: _Report
    ) -> messages.Accepted | messages.LeasesGranted | messages.Rejected | None:
        """Record a worker's report on a task, trying again while the queue cannot be reached.

        Returns None if it was not recorded: the worker sends the report again.
        """
        claim = message.claim
        worker = peer.worker.id
        self.scheduler.model_swaps.note_activity(worker)
        log_fields = {"request": claim.request, "stage": claim.stage, "attempt": claim.attempt, "worker": worker}
        if isinstance(message, messages.TaskFailed) and message.reason == "drain":
            log.info("task handed back", reason=message.message, **log_fields)
        elif isinstance(message, messages.TaskFailed):
            log.warning("task failed", kind=message.kind, reason=message.message, **log_fields)

        rejection: messages.Rejected | None = None
        for _ in range(QUEUE_TRIES):
            try:
                reply = await self._record(peer, message)
                return rejection or reply
            except (LeaseLost, NotFound, RecordDamaged) as error:
                log.info("report refused", reason=str(error), **log_fields)
                rejection = messages.Rejected(str(error), lease_lost=True)
                if not isinstance(message, messages.TaskCompleted | messages.TaskFailed):
                    return rejection
                message = messages.TaskStopped(claim, message.timings)  # the device time of the attempt counts anyway
            except TransientError:
                await asyncio.sleep(QUEUE_PAUSE_S)
        return None

    async def _record(self, peer: _Peer, message: _Report) -> messages.Accepted | messages.LeasesGranted:
        worker = peer.worker.id
        if isinstance(message, messages.TaskCompleted | messages.TaskFailed | messages.TaskStopped):
            message = msgspec.structs.replace(message, timings=_on_devices(message.timings, peer.worker))
        match message:
            case messages.OutputAnnounced():
                await self.scheduler.announce_output(message, worker)
            case messages.CheckpointSaved():
                await self.scheduler.save_checkpoint(message, worker)
            case messages.CachePrefix():
                await self.scheduler.cache_prefix(message, worker)
            case messages.TaskCompleted():
                return await self._complete(peer, message)
            case messages.TaskFailed():
                peer.is_draining |= message.reason == "drain"
                await self.scheduler.fail(message, worker)
            case messages.TaskStopped():
                await self.scheduler.account_stopped(message, worker)
        return messages.Accepted()

    async def _append_output(self, peer: _Peer, message: messages.AppendOutput) -> messages.HeartbeatReply:
        """Record new output chunks. The answer has the claims whose chunks cannot be recorded."""
        deltas = [delta for delta in message.deltas if await self._owns_claim(peer, delta.claim)]
        recorded = await self.scheduler.output_rates.append(deltas)
        return messages.HeartbeatReply(
            tuple(delta.claim for delta in message.deltas if delta.claim not in recorded), ()
        )

    async def _read_output(self, peer: _Peer, claim: Claim, after: int) -> messages.RecordedOutput | messages.Rejected:
        """Return the recorded output chunks of a task from number `after` on.

        Rejected if the task is not leased to this worker.
        """
        with suppress(NotFound, RecordDamaged):
            if await self._owns_claim(peer, claim):
                return messages.RecordedOutput(tuple(await self._queue.read_deltas(claim.request, claim.stage, after)))
        return NOT_LEASED

    async def _publish_steps(self, peer: _Peer, message: messages.StepProgress) -> bool:
        """Publish steps as events. Returns False if the worker has no lease on the task.

        While the queue cannot be reached, steps are dropped.
        """
        claim = message.claim
        last_step = min(message.step, message.steps)
        events = [
            Event(
                event_type,
                stage=claim.stage,
                attempt=claim.attempt,
                worker=peer.worker.id,
                step=step,
                steps=message.steps,
            )
            for step in range(max(1, message.first, last_step - MAX_STEPS + 1), last_step + 1)
            for event_type in PROGRESS[: 1 + (step in message.previews)]
        ]
        try:
            timings = _on_devices(Timings(share_s=message.share_s), peer.worker)
            return await self._owns_claim(peer, claim) and await self._queue.progress(claim, events, timings)
        except (NotFound, RecordDamaged):
            return False
        except TransientError:
            return True


def _on_devices(timings: Timings, worker: messages.WorkerInfo) -> Timings:
    """Return the timings with the worker's devices and without a queue wait.

    Workers cannot measure a queue wait.
    """
    return msgspec.structs.replace(
        timings, device=worker.device, devices=max(1, len(worker.status.ranks)), queued_s=0.0
    )
