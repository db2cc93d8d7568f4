"""What every queue backend must guarantee: four ports, and the backend that has all of them.

- `TaskQueue`: tasks that wait, leases, and the transitions of requests.
- `RequestStore`: the stored requests, their events, and what their outputs have grown by.
- `WorkerRegistry`: what all processes of a queue agree on: workers, declared models and secrets.
- `EncoderIndex`: which encoder outputs can be used again.

Users take the port that they need; who needs several takes the `QueueBackend`. All state is in the backend, so
schedulers keep none. To check a new backend, run `unfuse.testing.check_queue`. The simplest backend is in memory.

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
from unfuse.core.task import PIECES_AT_ONCE, SLOTS, Claim, Lease, OutputDeltas, Task


class QueueLimits(msgspec.Struct, frozen=True):
    """How much may be accepted: requests that are not over, the sum of their costs, and waiting tasks of one pool.

    A request whose own cost exceeds `max_cost` is accepted when no other is active. Beside that, its `tenant` has an
    allowance.
    """

    max_active: int = 256
    max_queue: int = 1024
    max_cost: float | None = None
    tenant: TenantLimits = TenantLimits()


#: The number of the format in which queues are stored. A queue of another number is refused, and not changed.
SCHEMA = 4

MOST_RETURNS = 3  # a worker that has turned a task down this often does not get it again
MAX_CACHED = 512  # the most encoder outputs that are cached; few, because workers name each with every heartbeat

#: A key by which requests are indexed: a tenant (None: all), a field ("": any request), and the field's value.
Heading = tuple[str | None, str, object]
#: Fields of a context that are indexed only within a tenant; and fields of which only this value is indexed.
TENANT_FIELDS = ("idempotency_key", "fingerprint")
LISTED_VALUES = {"dead": True, "over": False, "video": True, "unheard": True}

#: The fields of a context that a filter may name, and how to read each.
INDEXED_FIELDS: Mapping[str, Callable[[RequestContext], Any]] = {
    **{name: attrgetter(name) for name in LISTED_VALUES},
    **{name: attrgetter(f"caller.{name}") for name in ("tenant", *TENANT_FIELDS)},
}


class RequestFilter(msgspec.Struct, frozen=True):
    """Which requests `list` returns; None means any. `status` is compared to `RequestRecord.status`.

    These filters have an index, alone or with a tenant: everything, a status, dead, not over, video, unheard; and with
    a tenant, an idempotency key and a fingerprint. Their cost depends on the answer's length alone. Any other
    combination reads through what the narrowest of these finds.
    """

    over: bool | None = None
    tenant: str | None = None
    idempotency_key: str | None = None
    fingerprint: str | None = None
    status: RequestStatus | None = None
    dead: bool | None = None
    video: bool | None = None
    unheard: bool | None = None

    def asked(self) -> dict[str, Any]:
        """The fields that it compares, with the values that they must have."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}

    @property
    def heading(self) -> Heading:
        """The narrowest index that has all requests which this filter selects."""
        for name in TENANT_FIELDS if self.tenant is not None else ():
            if value := getattr(self, name):
                return self.tenant, name, value
        if self.status is not None and not self.dead:
            return self.tenant, "status", self.status
        for name, value in LISTED_VALUES.items():
            if getattr(self, name) == value:
                return self.tenant, name, value
        return self.tenant, "", ""


class RegisteredWorker(msgspec.Struct, frozen=True):
    """A registered worker. `seen` is the queue's clock at its last heartbeat; `leased` counts the tasks it holds."""

    info: WorkerInfo
    cards: tuple[ModelSpec, ...]
    seen: float
    leased: int = 0


class DeclaredModels(msgspec.Struct, frozen=True):
    """Models that are to be served whether or not workers are there.

    `asleep` has the declared pools that may be without workers, with the number of slots that their workers would have;
    `gone` has models that are not to be served, whoever brings them. Of what an `admin` added while servers ran,
    `server` is the one that serves it again after a start ("": none does), and `failed` says why it cannot be served.
    """

    cards: tuple[ModelSpec, ...]
    asleep: dict[str, int] = {}
    gone: tuple[str, ...] = ()
    source: Literal["", "admin"] = ""
    server: str = ""
    failed: str = ""

    @property
    def is_current(self) -> bool:
        """Whether its models are to be served."""
        return bool(self.cards) and not self.gone and not self.failed


class PoolStats(msgspec.Struct, frozen=True):
    """Statistics of one pool: the number of waiting tasks, and the age of the oldest of the first FRONT, in seconds.

    `left_s` is the sum of the predicted seconds of the pool's stages that are not done, over all active requests.
    """

    waiting: int = 0
    oldest_s: float = 0.0
    left_s: float = 0.0


class QueueStats(msgspec.Struct, frozen=True):
    """How many requests are not over, and the statistics of the pools that were asked for."""

    active: int
    pools: dict[str, PoolStats]


FRONT = 4  # how many tasks, from the front of a pool's queue, count for `PoolStats.oldest_s`


class DamagedRecord(msgspec.Struct, frozen=True):
    """A stored record that cannot be read. `id` is that of a request or worker, or the name of a task."""

    id: str
    kind: str
    reason: str


class RenewalResult(msgspec.Struct, frozen=True):
    """The result of `renew`: the claims that are still held, and those that have ended."""

    held: tuple[Claim, ...]
    ended: tuple[Claim, ...]


PREFERENCE_AMONG = 16
PREFERENCE_S = 0.02  # a preference chooses among so many tasks; a task can be passed over for so many seconds


class PoolOffer(msgspec.Struct, frozen=True):
    """What tasks of one pool may take. `amounts` bounds resources by name; a resource that it lacks is unbounded.

    Among tasks of equal priority, those of the pool with the highest `later` go first. `behind` maps the pools that
    this pool feeds to numbers of tasks: while more tasks wait in one of them, tasks of this pool are held back.
    """

    amounts: dict[str, int]
    later: int = 0
    behind: dict[str, int] = {}

    def lacks(self, needs: Mapping[str, int], used: Mapping[str, int]) -> set[str]:
        """The names of the resources of which less than `needs` is left, after `used` is taken."""
        return {name for name, most in self.amounts.items() if used.get(name, 0) + needs.get(name, 0) > most}


class LeaseRequest(msgspec.Struct, frozen=True):
    """What a worker would take, by pool. All pools draw on the same resources.

    With `above`, the worker takes only tasks of a higher priority than that: its slots are taken by less urgent ones.
    It prefers tasks with inputs on the node `near`, then tasks of this `affinity` (see `TaskQueue.lease`). Among
    workers that wait, the one with the lowest `rank` is served first.
    """

    pools: dict[str, PoolOffer]
    above: int | None = None
    near: str = ""
    affinity: str = ""
    rank: float = 0.0

    @property
    def slots(self) -> int:
        """The most tasks that the worker can get."""
        return max((offer.amounts.get(SLOTS, 0) for offer in self.pools.values()), default=0)

    def watched_pools(self) -> frozenset[str]:
        """The pools whose changes may let the worker take a task."""
        return frozenset(self.pools).union(*(offer.behind for offer in self.pools.values()))


class QueueClock(ABC):
    """The clock of a queue. All processes that share the queue read the same time."""

    @abstractmethod
    async def now(self) -> float:
        """The reading of this queue's clock, in seconds; it never runs backwards."""


class TaskQueue(QueueClock):
    """Tasks that wait in pools, leases on them, and the transitions of requests that queue and end them."""

    @abstractmethod
    async def submit(
        self, context: RequestContext, tasks: Sequence[Task], events: Sequence[Event], limits: QueueLimits
    ) -> RequestRecord:
        """Store a new request and queue its first tasks.

        Idempotent: if its id is known, or its tenant with its non-empty idempotency key, nothing changes and the stored
        record is returned, whatever the limits. Raises Overloaded, with nothing stored, if a limit would be exceeded;
        LimitReached if it is the tenant's. Only what is stored counts for its rate.
        Raises ProtocolError, as `commit` and `progress` do, for what cannot be stored.
        """

    @abstractmethod
    async def lease(self, worker: str, wanted: LeaseRequest, ttl: float, wait: float = 0.0) -> list[Lease]:
        """Claim tasks, in order of (−priority, −later, order, arrival) over all pools that are not held back.

        Tasks whose `not_before` is in the future are passed over. Among the first PREFERENCE_AMONG tasks with the
        priority and `later` of the first one, a task near the worker is preferred, then one of its affinity, unless the
        first one could have been leased for PREFERENCE_S already.

        When the next task needs more of a resource than is left of its pool's offer, nothing more is claimed from pools
        that use this resource, so that small tasks do not starve a large one. Two kinds of pools go on: those that do
        not use the resource, and those that are later, since they bring requests to their end, which frees it.

        Waits up to `wait` seconds for a first task. It is woken by a push, a hand-back, a `not_before` that comes, a
        task ahead that is gone, or a pool that is no longer held back. Among callers that wait, those without `above`
        are served first, then lower `rank`s, then those that wait longer. A caller that is cancelled while it waits has
        claimed nothing. A claim publishes `stage_started` and shows in `RequestRecord.running`; the context does not
        change. The lease says how many pieces of the stage are recorded.
        """

    @abstractmethod
    async def renew(self, claims: Sequence[Claim], ttl: float) -> RenewalResult:
        """Extend these leases to now + ttl. A claim that no longer holds its lease is returned as ended."""

    @abstractmethod
    async def progress(self, claim: Claim, events: Sequence[Event], used: Timings | None = None) -> bool:
        """Publish progress of a held lease. Returns False, with nothing published, if it is not held.

        `RequestRecord.running` shows the step of the last event, and what the attempt has `used`: the most that was
        reported. An event without a time (`at` 0) gets the queue's time. Progress is not durable, and does not change
        the context's version.
        """

    @abstractmethod
    async def commit(self, change: Change) -> RequestRecord:
        """Apply a transition. Raises NotFound, LeaseLost or Conflict, with nothing changed.

        With a claim: a commit that was already applied (the stored stage is done with the same attempt and token)
        changes nothing and succeeds; a claim that is not held raises LeaseLost. Then a version that is not the stored
        one plus one raises Conflict. A lease whose time has passed is held until a change closes it. `close` removes
        queued tasks and ends leases. `push` queues tasks; a pushed task replaces a queued or leased one of its key.
        Events get their numbers here. After a terminal change, no task of the request is queued or leased.
        """

    @abstractmethod
    async def commit_and_lease(
        self, change: Change, worker: str, wanted: LeaseRequest, ttl: float
    ) -> tuple[RequestRecord, list[Lease]]:
        """Apply a transition as `commit` does and claim tasks as `lease` does without waiting, in one transaction.

        The claim sees what the change pushes, closes and frees, and comes before callers that wait. If this raises,
        nothing is claimed. A repeated commit claims all the same. The record shows the new leases. A caller that is
        cancelled may have claimed tasks: their leases expire.
        """

    @abstractmethod
    async def hand_back(self, claim: Claim) -> bool:
        """Return a leased task to its old place in the queue, as the next attempt. False if it is not held."""

    @abstractmethod
    async def turn_down(self, claim: Claim) -> int:
        """Hand a leased task back, and count this for its worker unless a step was reported under this lease.

        A worker that was counted MOST_RETURNS times does not get the task again until it is pushed anew. The worker in
        the task's `avoids` is treated in the same way. Returns the number of all these workers. Raises LeaseLost if the
        claim is not held.
        """

    @abstractmethod
    async def expired(self, ttl: float) -> list[Lease]:
        """The leases whose time has passed. They stay held until a commit closes them.

        If the last call was more than ttl / 2 ago, no scheduler was there and workers could not renew, or the clock was
        set: then all leases are extended to now + ttl, and none is returned. For `Running.ran_s`, on which time limits
        depend, the time between two calls counts as ttl / 2 at most.
        """

    @abstractmethod
    async def stats(self, pools: Sequence[str]) -> QueueStats:
        """How much there is to do. Its cost does not grow with the number of requests, since no request is read."""

    @abstractmethod
    async def peek(self, pool: str, limit: int = 16) -> Sequence[Task]:
        """The first tasks of a pool that may be leased now, in their order."""


class RequestStore(ABC):
    """The stored requests: their records, their events, and the pieces that their outputs have grown by."""

    @abstractmethod
    async def load(self, request: str) -> RequestRecord:
        """The stored request. Raises NotFound, and Damaged for one that cannot be read.

        Its position is the number of tasks ahead of its own in their pool, the least over its queued tasks. It is None
        if a stage runs, or no task is queued.
        """

    def known(self, claim: Claim) -> RequestRecord | None:
        """Return the cached record of a leased task's request, possibly stale, or None. `commit` detects staleness."""
        return None

    @abstractmethod
    async def list(
        self, which: RequestFilter, *, after: str | int | None = None, limit: int = 100, oldest_first: bool = False
    ) -> list[RequestRecord]:
        """Up to `limit` requests, newest or oldest first, starting behind the one with the id, or number, `after`.

        The filter need not select that request. Raises NotFound if it is unknown, or of another tenant than the
        filter's. Records that cannot be read are left out here, as everywhere in a list: see `damaged`. A record that
        cannot be stored as it is now, because there is no room, is listed as it was stored last.
        """

    @abstractmethod
    async def over(self, requests: Sequence[str]) -> builtins.list[str]:
        """Which of these requests are over or unknown, in the order of the argument.

        A request of which this cannot be read, or stored, is left out. No context is read, however many ids there are.
        """

    @abstractmethod
    def watch(self, request: str, after: int = 0) -> AsyncIterator[Event]:
        """Events of a request with a number above `after`; waits for more until the terminal one.

        The history is bounded: old progress is dropped first, and no number is used twice. The stream ends after the
        terminal event (at once, if `after` is its number or higher), when the request is forgotten, and on `close`.
        Raises NotFound for an unknown request, at once or at the first event.
        """

    @abstractmethod
    async def append_all(self, grown: Sequence[OutputDeltas]) -> builtins.list[bool]:
        """Record new pieces of the outputs of leased tasks, as durably as a commit. Returns whether each lease is held.

        A claim that does not hold its lease changes nothing. A piece that is recorded stays as it is, whichever attempt
        it was of; those behind it are added. Of each stage that has more pieces now, an event `appended` with their
        number as its `step` replaces the last such one. The context's version does not change. Pieces go with their
        request, and before that whatever else becomes of their stage. Raises ProtocolError, with nothing changed, for
        an offset beyond what is recorded, and for what `check_growth` refuses.
        """

    @abstractmethod
    async def appended(
        self, request: str, stage: str, after: int = 0, limit: int = PIECES_AT_ONCE
    ) -> builtins.list[bytes]:
        """The recorded pieces of a stage from number `after` on, up to `limit`. Raises NotFound."""

    def placed(self, ids: Iterator[str], caller: Caller) -> str:
        """Return one of these endless new ids, whose request is stored with the others of its key or limited tenant."""
        return next(ids)

    def answers(self, request: str) -> bool:
        """Whether the part of the queue that stores a request of this id answers, as far as is known."""
        return True

    @abstractmethod
    async def forget(self, before: float) -> Sequence[str]:
        """Drop requests that ended before the Unix time `before`. Returns their ids."""

    @abstractmethod
    async def drop(self, request: str) -> None:
        """Drop one request, if it is over. Idempotent."""

    async def damaged(self) -> Sequence[DamagedRecord]:
        """Records that could not be read, and are still there."""
        return ()

    async def discard(self, id: str) -> None:
        """Drop the unreadable records of the request or worker with this id, and everything that belongs to them."""
        await self.drop(id)


class WorkerRegistry(QueueClock):
    """What all processes of a queue agree on: registered workers, declared models and secrets."""

    @abstractmethod
    async def hello(self, worker: WorkerInfo, cards: Sequence[ModelSpec] = ()) -> None:
        """Register a worker, or note that it is alive. Its cards are known as long as it is registered.

        A worker that brings no cards keeps those that it brought before.
        """

    @abstractmethod
    async def bye(self, worker: str) -> None:
        """Forget a worker: its leases expire now."""

    @abstractmethod
    async def workers(self) -> Sequence[RegisteredWorker]:
        """All registered workers."""

    @abstractmethod
    async def declare(self, by: str, declaration: DeclaredModels, *, new: bool = False) -> bool:
        """Store a declaration in place of the last one named `by`, as durably as a request.

        With `new`, one that is current stays: then nothing changes, and the answer is False.
        """

    @abstractmethod
    async def declared(self) -> dict[str, DeclaredModels]:
        """All declarations, by the name under which each was stored."""

    @abstractmethod
    async def secret(self, name: str, proposed: str) -> str:
        """Return the secret of this name. If there is none yet, store `proposed`; all callers get the same value.

        It must be as durable as a request, and is never replaced or deleted.
        """


class EncoderIndex(ABC):
    """Encoder outputs by cache key, the least recently used first to go. It need not survive a restart."""

    @abstractmethod
    async def cache(self, key: str, ref: ObjectRef, room: int) -> None:
        """Put an encoder's output into the cache under this key, in place of another; not durable.

        The least recently used outputs are removed until at most `room` bytes and MAX_CACHED outputs are left. An
        output larger than `room` is not cached.
        """

    @abstractmethod
    async def cached(self, keys: Sequence[str], *, use: bool = True) -> dict[str, ObjectRef]:
        """The cached outputs of these keys, by key. With `use` they count as used now, in this order."""

    @abstractmethod
    async def cached_bytes(self) -> int:
        """Bytes of all cached outputs."""

    @abstractmethod
    async def uncache(self, key: str, id: str) -> None:
        """Remove the object of this id from the key; another object stays. Idempotent."""


class QueueBackend(TaskQueue, RequestStore, WorkerRegistry, EncoderIndex):
    """All four ports over one state. A `shared` queue is used by the schedulers of several processes."""

    shared = False

    @classmethod
    @abstractmethod
    def at(cls, url: str, clock: Clock | None = None) -> QueueBackend:
        """Open the queue at `url`, which begins with this backend's name.

        It keeps time by `clock`, if one is given, instead of by its server's or this machine's. Raises ConfigError for
        an address that it cannot use, and TransientError for one that it cannot use yet.
        """

    async def reach(self) -> None:
        """Raise ConfigError if what is at the address can never be this queue. Errors that may pass are not raised."""
        return

    @abstractmethod
    async def check(self) -> None:
        """Raise TransientError while this queue cannot work; returns within a few seconds."""

    def away(self) -> Sequence[str]:
        """Return, in words, which parts of the queue do not answer while the others go on."""
        return ()

    @abstractmethod
    async def close(self) -> None:
        """Release the backend. Callers that wait get an empty answer."""


EXACT = 2**53  # every backend stores integers up to this one exactly

NUMBERS = (int, float, float | None)
_NUMBERS = {
    kind: attrgetter(*nested, *(one.name for one in msgspec.structs.fields(kind) if one.type in NUMBERS))
    for kind, nested in (
        (RequestContext, ("delivery.priority", "request.time_limit_s")),
        (Task, ("planned.room",)),
        (Event, ()),
    )
}


def check_storable(*parts: RequestContext | Task | Event) -> None:
    """Raise ProtocolError for what no backend can store, before any of it is stored.

    That is text that is not Unicode, more bytes than a message may have, NaN, or a number beyond EXACT.
    """
    encode(parts)
    check_numbers(*parts)


def check_numbers(*parts: RequestContext | Task | Event) -> None:
    """Raise ProtocolError for NaN, or a number beyond EXACT: what encoding does not refuse."""
    for part in parts:
        needs = part.planned.needs.values() if isinstance(part, Task) else ()
        for number in (*_NUMBERS[type(part)](part), *needs):
            if not -EXACT <= (number or 0) <= EXACT:
                raise ProtocolError(f"{type(part).__name__} with a number of {number}: up to {EXACT} are stored")


NANOSECONDS = 10**9  # sums count whole nanoseconds: adding and subtracting the same number leaves exactly nothing
MOST_S = 10**5  # the longest prediction, in seconds, that counts; a longer one, or one of no number, counts as 0


def remaining_of(context: RequestContext) -> dict[str, int]:
    """Predicted nanoseconds of the stages that are not done, by pool; empty for a request that is over."""
    left = Counter[str]()
    for stage in () if context.over else context.plan.stages:
        state = context.stages.get(stage.name)
        if 0 < stage.cost <= MOST_S and (state is None or state.status != "done"):
            left[stage.pool] += round(stage.cost * NANOSECONDS)
    return {pool: nanoseconds for pool, nanoseconds in left.items() if nanoseconds}
