"""The interface of a queue backend: four ports with the guarantees of every backend.

- `TaskQueue`: queued tasks, leases, admission control, and the transitions of requests.
- `RequestStore`: stored requests, their events and their output deltas.
- `WorkerRegistry`: registered workers, heartbeats, declared models and shared secrets.
- `EncoderIndex`: an LRU index of reusable encoder outputs.

Depend on the narrowest port; code that needs several depends on `QueueBackend`, which has all of them. All state is in
the backend, so schedulers are stateless. Check a new backend with `unfuse.testing.check_queue`. The reference is
`MemoryQueue`.

Every method is one transaction: all of its effects are visible or none. Times are seconds of the queue's own clock.
"""

from __future__ import annotations

import builtins
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal

import msgspec

from unfuse.core.clock import Clock
from unfuse.core.codec import encode
from unfuse.core.errors import ProtocolError
from unfuse.core.messages import WorkerInfo
from unfuse.core.model_spec import ModelSpec
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import (
    Caller,
    Change,
    Event,
    RequestContext,
    RequestRecord,
    RequestStatus,
    TenantLimits,
    Timings,
)
from unfuse.core.task import MAX_DELTAS_PER_MESSAGE, SLOTS, Claim, Lease, OutputDeltas, Task


class QueueLimits(msgspec.Struct, frozen=True):
    """Limits of admission control, by which `submit` accepts or refuses a new request."""

    #: Most requests that are not over.
    max_active: int = 256
    #: Most waiting tasks of one pool.
    max_queue: int = 1024
    #: Most predicted seconds of all requests that are not over. None: no limit.
    #: A request that exceeds this by itself is accepted when no other is active.
    max_cost: float | None = None
    #: The allowance of the request's tenant.
    tenant: TenantLimits = TenantLimits()


#: Version of the stored format. A queue of another version is refused and not changed.
SCHEMA_VERSION = 5

#: A worker that has turned a task down this often does not get it again.
MAX_REFUSALS = 3
#: Most cached encoder outputs. The number is small because every heartbeat of a worker lists its outputs.
MAX_CACHED = 512

#: An index key: a tenant (None: all tenants), a field ("": any request), and the field's value.
IndexKey = tuple[str | None, str, object]
#: Fields that are indexed only within a tenant.
TENANT_FIELDS = ("idempotency_key", "fingerprint")
#: The fields with a single indexed value, and that value.
LISTED_VALUES = {"is_dead_letter": True, "is_over": False, "video": True, "webhook_pending": True}

#: The fields of a context by which requests can be filtered, and a getter for each.
INDEXED_FIELDS: Mapping[str, Callable[[RequestContext], Any]] = {
    **{name: attrgetter(name) for name in LISTED_VALUES},
    **{name: attrgetter(f"caller.{name}") for name in ("tenant", *TENANT_FIELDS)},
}


class RequestFilter(msgspec.Struct, frozen=True):
    """The requests that `list` returns: those that match every field that is not None.

    These filters have an index, alone or with a tenant: everything, a status, dead letters, active
    requests, videos, pending webhooks; and with a tenant, an idempotency key and a fingerprint. Their cost depends only
    on the number of results. Any other combination scans the narrowest of these indexes.
    """

    #: Whether the request has ended.
    is_over: bool | None = None
    #: Compared to `Caller.tenant`. None: all tenants.
    tenant: str | None = None
    #: Compared to `Caller.idempotency_key`, which is unique within a tenant.
    idempotency_key: str | None = None
    #: Compared to `Caller.fingerprint`, the hash of the client's body.
    fingerprint: str | None = None
    #: Compared to `RequestRecord.status`, which is `in_progress` as soon as a stage runs.
    status: RequestStatus | None = None
    #: Whether the request is a dead letter.
    is_dead_letter: bool | None = None
    #: Whether the request generates a video.
    video: bool | None = None
    #: Whether the request has ended and its webhook delivery is pending.
    webhook_pending: bool | None = None

    def conditions(self) -> dict[str, Any]:
        """Return the fields to compare, with their required values."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}

    @property
    def index_key(self) -> IndexKey:
        """The key of the narrowest index that contains all matching requests."""
        # Keys of single requests first: their lists are the shortest.
        for name in TENANT_FIELDS if self.tenant is not None else ():
            if value := getattr(self, name):
                return self.tenant, name, value
        if self.status is not None and not self.is_dead_letter:  # dead letters are fewer than requests of one status
            return self.tenant, "status", self.status
        for name, value in LISTED_VALUES.items():
            if getattr(self, name) == value:
                return self.tenant, name, value
        return self.tenant, "", ""


class RegisteredWorker(msgspec.Struct, frozen=True):
    """A registered worker and the time of its last heartbeat."""

    #: The worker's description of itself in its last registration.
    info: WorkerInfo
    #: Specs of the models that the worker serves.
    models: tuple[ModelSpec, ...]
    #: Time of the last heartbeat, in seconds of the queue's clock.
    last_heartbeat: float
    #: Number of tasks that it has leased.
    leased: int = 0


class DeclaredModels(msgspec.Struct, frozen=True):
    """A declaration of models to serve, even while they have no workers."""

    #: Specs of the models to serve.
    models: tuple[ModelSpec, ...]
    #: Pools that may be scaled to zero, and the slots that their workers will have.
    scalable_to_zero: dict[str, int] = {}
    #: Names of models to stop serving, even if workers serve them.
    withdrawn: tuple[str, ...] = ()
    #: "admin": the models were added while servers ran.
    source: Literal["", "admin"] = ""
    #: The server that serves an admin's model again after a restart. "": none.
    server: str = ""
    #: Why an admin's model cannot be served. "": it can.
    failure: str = ""

    @property
    def is_current(self) -> bool:
        """Whether these models are to be served."""
        return bool(self.models) and not self.withdrawn and not self.failure


class PoolStats(msgspec.Struct, frozen=True):
    """The queue length and predicted work of one pool."""

    #: Number of waiting tasks, delayed ones included.
    waiting: int = 0
    #: Age of the oldest of the first FRONT_TASKS tasks, in seconds.
    oldest_s: float = 0.0
    #: Predicted seconds of the pool's stages that are not done, summed over all active requests.
    left_s: float = 0.0


class QueueStats(msgspec.Struct, frozen=True):
    """The number of active requests, and statistics of some pools."""

    #: Number of stored requests that are not over.
    active: int
    #: Statistics of the pools that the call named, by pool.
    pools: dict[str, PoolStats]


#: Number of tasks at the front of a pool's queue that count for `PoolStats.oldest_s`.
FRONT_TASKS = 4


class DamagedRecord(msgspec.Struct, frozen=True):
    """A stored record that cannot be read."""

    #: The id of a request or worker, or the name of a task or declaration.
    id: str
    #: "request", "worker", "card" (the specs of a worker's models), "task", "lease" or "declaration".
    kind: str
    #: Why it cannot be read.
    reason: str


class RenewalResult(msgspec.Struct, frozen=True):
    """The result of `renew`, with every claim of the call in one of two lists."""

    #: Claims whose lease was extended.
    renewed: tuple[Claim, ...]
    #: Claims that hold no lease any more. Their tasks must be stopped.
    ended: tuple[Claim, ...]


#: Number of tasks at the front of the queue among which a worker's preference chooses.
PREFERENCE_TASKS = 16
#: Longest time, in seconds, for which a preference may pass over the first task.
PREFERENCE_S = 0.02


class PoolOffer(msgspec.Struct, frozen=True):
    """The resources that a worker offers to tasks of one pool, with back-pressure."""

    #: The free amount of each resource, by name. A resource without an entry is unbounded.
    amounts: dict[str, int]
    #: Depth of the pool's stage in the pipeline. Of equal priorities, the deepest pool goes first.
    stage_depth: int = 0
    #: Back-pressure: while more than this many tasks wait in a pool that this one feeds, it is held back.
    backpressure: dict[str, int] = {}

    def missing_resources(self, needs: Mapping[str, int], used: Mapping[str, int]) -> set[str]:
        """Return the names of the resources that are too scarce for `needs`.

        The amounts in `used` are subtracted from the offer first.
        """
        return {name for name, free in self.amounts.items() if used.get(name, 0) + needs.get(name, 0) > free}


class LeaseRequest(msgspec.Struct, frozen=True):
    """The tasks that a worker can accept, as one offer for each pool.

    All offers share the same resources.
    """

    #: The offer to the tasks of each pool, by pool.
    pools: dict[str, PoolOffer]
    #: Lease only tasks of a higher priority, because less urgent tasks occupy the slots. None: any priority.
    priority_above: int | None = None
    #: First preference: tasks with inputs on this node. See `TaskQueue.lease`.
    preferred_node: str = ""
    #: Second preference: tasks of this affinity.
    affinity: str = ""
    #: Among waiting workers, the lowest rank is served first.
    rank: float = 0.0

    @property
    def slots(self) -> int:
        """The most tasks that the worker can lease."""
        return max((offer.amounts.get(SLOTS, 0) for offer in self.pools.values()), default=0)

    def watched_pools(self) -> frozenset[str]:
        """Return the pools whose changes may make a task available to the worker."""
        return frozenset(self.pools).union(*(offer.backpressure for offer in self.pools.values()))


class QueueClock(ABC):
    """The clock of a queue. All processes that share the queue read the same time."""

    @abstractmethod
    async def now(self) -> float:
        """Return the time of this queue's clock, in seconds. It never runs backwards."""


class TaskQueue(QueueClock):
    """Queued tasks by pool, leases on tasks, and the transitions that queue and end tasks."""

    @abstractmethod
    async def submit(
        self, context: RequestContext, tasks: Sequence[Task], events: Sequence[Event], limits: QueueLimits
    ) -> RequestRecord:
        """Store a new request and queue its first tasks, subject to admission control.

        Idempotent: if its id, or its tenant with its non-empty idempotency key, is stored already, nothing changes and
        the stored record is returned, whatever the limits. Raises Overloaded, with nothing stored, if a limit would be
        exceeded; LimitReached if it is the tenant's. Only stored requests count toward the tenant's rate.
        Raises ProtocolError, as `commit` and `progress` do, for data that `check_storable` refuses.
        """

    @abstractmethod
    async def lease(self, worker: str, wanted: LeaseRequest, ttl: float, wait: float = 0.0) -> list[Lease]:
        """Lease the first tasks in the queue that the worker can accept, for `ttl` seconds.

        Tasks are in order of (−priority, −stage_depth, order, arrival) over all pools that are not held back. A task
        whose `not_before` is in the future is passed over. Among the first PREFERENCE_TASKS tasks with the priority
        and `stage_depth` of the first one, a task near the worker is preferred, then one of its affinity, unless the
        first one could have been leased for PREFERENCE_S already.

        When the next task needs more of a resource than its pool's offer has left, no more tasks of pools that use this
        resource are leased. Otherwise small tasks would starve a large one. Pools of a greater `stage_depth` are
        exempt: their tasks complete requests, which frees the resource.

        Waits up to `wait` seconds for a first task. The wait ends with a push, a hand-back, a `not_before` that passes,
        the removal of a task ahead, and the end of back-pressure on a pool. Among waiting callers, those without
        `priority_above` are served first, then lower `rank`s, then longer waits. A caller that is cancelled while it
        waits leases nothing. A lease publishes `stage_started` and appears in `RequestRecord.running`; the context does
        not change. `Lease.recorded_deltas` is the number of recorded output deltas of the stage.
        """

    @abstractmethod
    async def renew(self, claims: Sequence[Claim], ttl: float) -> RenewalResult:
        """Extend the leases of these claims to now + `ttl` seconds."""

    @abstractmethod
    async def progress(self, claim: Claim, events: Sequence[Event], used: Timings | None = None) -> bool:
        """Publish the progress of a leased task. Returns False, with nothing published, without its lease.

        `RequestRecord.running` shows the step of the last event, and the attempt's timings: the largest `used` that was
        reported. An event without a time (`at` 0) gets the queue's time. Progress is not durable, and does not change
        the context's version.
        """

    @abstractmethod
    async def commit(self, change: Change) -> RequestRecord:
        """Apply a transition of a request. Raises NotFound, LeaseLost or Conflict, with nothing changed.

        With a claim: a commit that was already applied (the stored stage is done with the same attempt and token)
        changes nothing and succeeds; a claim that holds no lease raises LeaseLost. Then a version that is not the
        stored one plus one raises Conflict. An expired lease stays valid until a change closes it. `close` removes
        queued tasks and ends leases. `push` queues tasks; a pushed task replaces a queued or leased one of its
        key. Events are numbered here. After a terminal change, no task of the request is queued or leased.
        """

    @abstractmethod
    async def commit_and_lease(
        self, change: Change, worker: str, wanted: LeaseRequest, ttl: float
    ) -> tuple[RequestRecord, list[Lease]]:
        """Apply a transition like `commit`, then lease tasks like `lease` without waiting, in one transaction.

        The new leases see all effects of the change, and precede waiting callers. If this raises, nothing is leased. A
        repeated commit also leases. The record shows the new leases. A caller that is cancelled may have leased tasks:
        their leases expire.
        """

    @abstractmethod
    async def hand_back(self, claim: Claim) -> bool:
        """Return a leased task to its old place in the queue, as the next attempt.

        Returns False without its lease.
        """

    @abstractmethod
    async def refuse(self, claim: Claim) -> int:
        """Hand a leased task back, and count it as refused by its worker.

        It is not counted if a step was reported under this lease. A worker is excluded from the task after MAX_REFUSALS
        refusals, or if it is the task's `avoid_worker`, until the task is pushed anew. Returns the number of excluded
        workers. Raises LeaseLost without the lease.
        """

    @abstractmethod
    async def sweep_expired(self, ttl: float) -> list[Lease]:
        """Return the expired leases. They stay valid until a commit closes them.

        If the last call was more than ttl / 2 ago, no scheduler ran and workers could not renew, or the clock was set:
        then all leases are extended to now + ttl, and none is returned. For `RunningStage.ran_s`, on which time limits
        depend, the time between two calls counts as ttl / 2 at most.
        """

    @abstractmethod
    async def stats(self, pools: Sequence[str]) -> QueueStats:
        """Return statistics of the queue and these pools; only pools are read, not requests."""

    @abstractmethod
    async def peek(self, pool: str, limit: int = 16) -> Sequence[Task]:
        """Return the first tasks of a pool that may be leased now, in queue order."""


class RequestStore(ABC):
    """The stored requests: their records, events and output deltas."""

    @abstractmethod
    async def load(self, request: str) -> RequestRecord:
        """Return the record of a request. Raises NotFound, and RecordDamaged if it cannot be read.

        Its position is the least number of tasks ahead of one of its queued tasks, in that task's pool. It is None if a
        stage runs, or no task is queued.
        """

    def cached_record(self, claim: Claim) -> RequestRecord | None:
        """Return the request's cached record, or None. It may be stale, which `commit` detects."""
        return None

    @abstractmethod
    async def list(
        self, which: RequestFilter, *, after: str | int | None = None, limit: int = 100, oldest_first: bool = False
    ) -> list[RequestRecord]:
        """Return up to `limit` records, newest or oldest first, that come after one request.

        `after` is the id or number of that request, which need not match the filter. Raises NotFound if it is unknown,
        or of another tenant than the filter's. Unreadable records are left out: see `damaged`. A record whose latest
        change cannot be stored, because the disk is full, is listed as it was stored last.
        """

    @abstractmethod
    async def ended_among(self, requests: Sequence[str]) -> builtins.list[str]:
        """Return those of these requests that are over or unknown, in argument order.

        A request whose state cannot be read, or whose end cannot be stored, is left out. No context is read.
        """

    @abstractmethod
    def watch(self, request: str, after: int = 0) -> AsyncIterator[Event]:
        """Yield the events of a request numbered above `after`, up to the terminal event.

        The history is bounded: old progress is dropped first, and no number is used twice. The stream ends after the
        terminal event (at once, if `after` is its number or higher), when the request is dropped, and on `close`.
        Raises NotFound for an unknown request, at once or at the first event.
        """

    @abstractmethod
    async def append_deltas(self, outputs: Sequence[OutputDeltas]) -> builtins.list[bool]:
        """Record output deltas of leased tasks, as durably as a commit.

        Returns for each output whether its claim holds a lease. Nothing is recorded without a lease. A recorded delta
        is never replaced, whichever attempt sent it; only deltas beyond the recorded ones are added. For each stage
        with new deltas, an event `appended`, whose `step` is their total number, replaces the last such event. The
        context's version does not change. Deltas are dropped with their request, and not before. Raises ProtocolError,
        with nothing changed, for an offset beyond the recorded deltas, and for calls that `check_deltas` refuses.
        """

    @abstractmethod
    async def read_deltas(
        self, request: str, stage: str, after: int = 0, limit: int = MAX_DELTAS_PER_MESSAGE
    ) -> builtins.list[bytes]:
        """Return up to `limit` recorded deltas of a stage, from number `after` on. Raises NotFound."""

    def choose_id(self, ids: Iterator[str], caller: Caller) -> str:
        """Return the first of these endless new ids whose shard may store this caller's request.

        Requests of one idempotency key share a shard, as do all of a tenant with an allowance.
        """
        return next(ids)

    def is_reachable(self, request: str) -> bool:
        """Return whether the shard of this request is reachable, by the last known state."""
        return True

    @abstractmethod
    async def drop_ended_before(self, before: float) -> Sequence[str]:
        """Drop all requests that ended before the Unix time `before`. Returns their ids."""

    @abstractmethod
    async def drop(self, request: str) -> None:
        """Drop one request, if it is over. Idempotent."""

    async def damaged(self) -> Sequence[DamagedRecord]:
        """Return the stored records that cannot be read."""
        return ()

    async def discard(self, id: str) -> None:
        """Drop the unreadable records with this id, and all data that belongs to them."""
        await self.drop(id)


class WorkerRegistry(QueueClock):
    """The state that all processes of a queue share: registered workers, declared models, secrets."""

    @abstractmethod
    async def register(self, worker: WorkerInfo, specs: Sequence[ModelSpec] = ()) -> None:
        """Register a worker, or record its heartbeat.

        `specs` are the specs of the models that it serves. Without any, the last ones stay registered.
        """

    @abstractmethod
    async def unregister(self, worker: str) -> None:
        """Unregister a worker. Its leases expire now."""

    @abstractmethod
    async def workers(self) -> Sequence[RegisteredWorker]:
        """Return all registered workers."""

    @abstractmethod
    async def declare(self, by: str, declaration: DeclaredModels, *, new: bool = False) -> bool:
        """Store or replace the declaration named `by`, as durably as a request.

        With `new`, a declaration that is current is not replaced: then nothing changes, and False is returned.
        """

    @abstractmethod
    async def declarations(self) -> dict[str, DeclaredModels]:
        """Return all declarations by name."""

    @abstractmethod
    async def secret(self, name: str, proposed: str) -> str:
        """Return the secret of this name. If there is none yet, `proposed` is stored.

        All callers get the same value. It must be as durable as a request, and is never replaced or deleted.
        """


class EncoderIndex(ABC):
    """An LRU index of reusable encoder outputs by cache key. A restart may lose it."""

    @abstractmethod
    async def put_encoding(self, key: str, ref: ObjectRef, room: int) -> None:
        """Index an encoder output under this key, in place of another. Not durable.

        The least recently used outputs are removed until at most `room` bytes and MAX_CACHED outputs are left. An
        output larger than `room` is not indexed.
        """

    @abstractmethod
    async def find_encoding(self, keys: Sequence[str], *, use: bool = True) -> dict[str, ObjectRef]:
        """Return cached outputs by key; `use` marks them as just used, in this order."""

    @abstractmethod
    async def cached_bytes(self) -> int:
        """Return the total bytes of all cached outputs."""

    @abstractmethod
    async def remove_encoding(self, key: str, id: str) -> None:
        """Remove the output of this key if it is the object `id`. Idempotent."""


class QueueBackend(TaskQueue, RequestStore, WorkerRegistry, EncoderIndex):
    """A queue: all four ports over one state."""

    #: Whether schedulers of several processes can use this queue.
    shared = False

    @classmethod
    @abstractmethod
    def open(cls, url: str, clock: Clock | None = None) -> QueueBackend:
        """Open the queue at `url`, which begins with this backend's name.

        `clock` replaces the clock of its server or this machine. Raises ConfigError for an unusable address, and
        TransientError for one that is unusable now.
        """

    async def check_address(self) -> None:
        """Raise ConfigError if the address can never be this queue's. Transient errors are not raised."""
        return

    @abstractmethod
    async def check(self) -> None:
        """Raise TransientError while this queue is unavailable. Returns within a few seconds."""

    def unreachable_parts(self) -> Sequence[str]:
        """Return a sentence for each unreachable shard. The queue still works without them."""
        return ()

    @abstractmethod
    async def close(self) -> None:
        """Release the backend. Waiting callers of `lease` get an empty list."""


#: Every backend stores integers up to this one exactly. Lua in Redis has only doubles, which end there.
MAX_SAFE_INTEGER = 2**53

#: Types of numeric fields.
NUMBERS = (int, float, float | None)

#: For each stored type, a getter of its numeric fields.
_GET_NUMBERS = {
    kind: attrgetter(*nested, *(field.name for field in msgspec.structs.fields(kind) if field.type in NUMBERS))
    for kind, nested in (
        (RequestContext, ("delivery.priority", "request.time_limit_s")),
        (Task, ("planned.output_size",)),
        (Event, ()),
    )
}


def check_storable(*parts: RequestContext | Task | Event) -> None:
    """Raise ProtocolError for data that no backend can store.

    That is text that is not Unicode, more bytes than a message may have, NaN, or a number beyond ±MAX_SAFE_INTEGER.
    """
    encode(parts)
    check_numbers(*parts)


def check_numbers(*parts: RequestContext | Task | Event) -> None:
    """Raise ProtocolError for NaN and numbers beyond ±MAX_SAFE_INTEGER, which encoding does not refuse."""
    for part in parts:
        needs = part.planned.needs.values() if isinstance(part, Task) else ()
        for number in (*_GET_NUMBERS[type(part)](part), *needs):
            if not -MAX_SAFE_INTEGER <= (number or 0) <= MAX_SAFE_INTEGER:
                raise ProtocolError(f"{type(part).__name__} has the number {number}, which exceeds ±{MAX_SAFE_INTEGER}")


#: Sums count whole nanoseconds, so that adding and subtracting the same number leaves exactly 0.
NANOSECONDS = 10**9
#: Longest prediction that counts, in seconds. A longer one, or NaN, counts as 0.
MAX_SECONDS = 10**5


def remaining_of(context: RequestContext) -> dict[str, int]:
    """Return the predicted nanoseconds of stages that are not done, by pool.

    The result is empty once the request is over.
    """
    remaining = Counter[str]()
    for stage in () if context.is_over else context.plan.stages:
        state = context.stages.get(stage.name)
        if 0 < stage.cost <= MAX_SECONDS and (state is None or state.status != "done"):
            remaining[stage.pool] += round(stage.cost * NANOSECONDS)
    return {pool: nanoseconds for pool, nanoseconds in remaining.items() if nanoseconds}
