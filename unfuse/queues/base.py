"""The queue port: where tasks wait and contexts live. All state is here, so schedulers keep none.

Whoever writes a backend runs `unfuse.testing.check_queue` on it: the suite is the contract in executable form,
and the memory backend its plainest reading.
"""

from __future__ import annotations

import builtins
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from operator import attrgetter
from typing import Any, Self

import msgspec

from unfuse.core.card import ModelCard
from unfuse.core.clock import Clock
from unfuse.core.codec import encode
from unfuse.core.errors import ProtocolError
from unfuse.core.event import Event
from unfuse.core.messages import WorkerInfo
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import Change, Record, RequestContext, RequestStatus
from unfuse.core.task import Claim, Lease, Task
from unfuse.queues.wanted import Wanted


class Limits(msgspec.Struct, frozen=True):
    """How much may be accepted: requests that are not over, their cost in all, and tasks that wait in one pool.

    A request that costs more than everything may is accepted when nothing else is active.
    """

    max_active: int = 256
    max_queue: int = 1024
    max_cost: float | None = None


MOST_RETURNS = 3
"""So often a worker may turn a task down; from then on it gets that one no more."""

MAX_CACHED = 512
"""Encoder outputs that are kept, at most: whoever owns them names each with every heartbeat."""


Heading = tuple[str | None, str, object]
"""What requests are listed under: a tenant or None for all of them, a field or "" for any request, and its value."""

ONES_OWN = ("idempotency_key", "fingerprint")
TELLING = {"dead": True, "over": False, "video": True}
"""Fields of a context that few requests share, listed by tenant alone; and those of which one value is listed."""


class Filter(msgspec.Struct, frozen=True):
    """Which requests `list` returns; None means any. `status` is the one that is shown (`Record.status`).

    Asking costs as much as is answered, however much is stored, for each of these alone or within a tenant: everything,
    a status, what is dead, what is not over, what is a video; and within a tenant for an idempotency key and for a
    fingerprint. Any other combination looks through what the narrowest of those finds.
    """

    over: bool | None = None
    tenant: str | None = None
    idempotency_key: str | None = None
    fingerprint: str | None = None
    status: RequestStatus | None = None
    dead: bool | None = None
    video: bool | None = None

    def asked(self) -> dict[str, Any]:
        """What it asks of a request's fields."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}

    @property
    def heading(self) -> Heading:
        """The narrowest heading that all are listed under for which it asks."""
        for name in ONES_OWN if self.tenant is not None else ():
            if value := getattr(self, name):
                return self.tenant, name, value
        if self.status is not None and not self.dead:
            return self.tenant, "status", self.status
        for name, value in TELLING.items():
            if getattr(self, name) == value:
                return self.tenant, name, value
        return self.tenant, "", ""


class Member(msgspec.Struct, frozen=True):
    """A registered worker. `seen` is the queue's clock at its last heartbeat; `leased` counts the tasks it holds."""

    info: WorkerInfo
    cards: tuple[ModelCard, ...]
    seen: float
    leased: int = 0


class Declaration(msgspec.Struct, frozen=True):
    """Models that are to be served whether or not workers are there, and declared pools that may be `asleep`.

    That is how many slots each of these has when its workers are awake.
    """

    cards: tuple[ModelCard, ...]
    asleep: dict[str, int] = {}


class PoolStats(msgspec.Struct, frozen=True):
    """What waits in a pool: how many tasks, and how many seconds ago the first of the first FRONT in line was pushed.

    `left_s` is how many seconds were predicted for all stages of the pool, of active requests, that are not done.
    """

    waiting: int = 0
    oldest_s: float = 0.0
    left_s: float = 0.0


class Stats(msgspec.Struct, frozen=True):
    """How many requests are not over, and the lines of the pools that were asked for."""

    active: int
    pools: dict[str, PoolStats]


FRONT = 4
"""Of so many tasks of a line it is looked at how long they wait."""


class Damage(msgspec.Struct, frozen=True):
    """Something stored that cannot be read: the `id` of a request or worker or the name of a task, its kind, why."""

    id: str
    kind: str
    reason: str


class Renewal(msgspec.Struct, frozen=True):
    """What became of renewed claims: those still held, and those that ended (lost, or their request is over)."""

    held: tuple[Claim, ...]
    ended: tuple[Claim, ...]


EXACT = 2**53
"""Up to here, every backend means the same by a number."""

_NUMBERS = {
    kind: attrgetter(
        *(field.name for field in msgspec.structs.fields(kind) if field.type in (int, float, float | None))
    )
    for kind in (RequestContext, Task, Event)
}


def check_storable(*parts: RequestContext | Task | Event) -> None:
    """Raise ProtocolError for what no backend stores, before it has stored any of it.

    That is text that is not Unicode, more than a message may hold, a number beyond EXACT or that is none.
    """
    encode(parts)
    for part in parts:
        needs = part.needs.values() if isinstance(part, Task) else ()
        for number in (*_NUMBERS[type(part)](part), *needs):
            if not -EXACT <= (number or 0) <= EXACT:
                raise ProtocolError(f"{type(part).__name__} with a number of {number}: up to {EXACT} are stored")


class TaskQueue(ABC):
    """Tasks, leases, contexts, events and the worker registry behind one set of transactions.

    Every method is one transaction: its effects are all visible or none. Times are seconds of the queue's own clock.
    What is in a `shared` one, the schedulers of other processes see too.
    """

    shared = False

    @classmethod
    @abstractmethod
    def at(cls, url: str, clock: Clock) -> Self:
        """The queue at `url`, which begins with this backend's name; one with a clock of its own may ignore `clock`.

        Raises ConfigError when the address makes no sense.
        """

    @abstractmethod
    async def now(self) -> float:
        """This queue's clock, in seconds; it never runs backwards."""

    async def reach(self) -> None:
        """Raise ConfigError when what is at the address cannot be this queue, now or later. What passes does not."""
        return

    @abstractmethod
    async def check(self) -> None:
        """Raise TransientError while this queue cannot work; the answer comes within a few seconds."""

    @abstractmethod
    async def submit(
        self, context: RequestContext, tasks: Sequence[Task], events: Sequence[Event], limits: Limits
    ) -> Record:
        """Store a new request and queue its first tasks.

        Idempotent: a context whose id is known, or whose (tenant, non-empty idempotency key) is, changes nothing and
        the stored record is returned. Raises Overloaded, having stored nothing, when a limit would be passed; a repeat
        is answered even then. Raises ProtocolError, as `commit` and `progress` do, for what cannot be stored.
        """

    @abstractmethod
    async def lease(self, worker: str, wanted: Wanted, ttl: float, wait: float = 0.0) -> list[Lease]:
        """Claim tasks, in order of (−priority, −later, order, arrival) over all the pools that are not held back.

        Of the first PREFERENCE_AMONG tasks of the first one's priority and `later`, one near the worker, else one of
        its affinity, goes first, unless the first could have been leased for PREFERENCE_S already. Who waits without
        `above` is woken before who waits with it, then who has the lower `rank`, then who waits longer.

        Tasks whose `not_before` is in the future are passed over. Claiming stops at the first task that needs more of a
        resource, with what the tasks claimed before it need, than its pool is offered, so that a large task is not
        starved by small ones: no more is taken of pools that draw on that resource and are not later. Later ones go on,
        since they let requests come to their end and give it back, and so do those that do not draw on it.

        Waits up to `wait` seconds for a first task, woken by whatever lets it take one (a push, a hand-back, a
        `not_before` that comes, a task ahead that is gone, a pool that is not held back any more); a caller that is
        cancelled while it waits has claimed nothing. A claim publishes `stage_started`; the context does not change:
        `Record.running` tells of it.
        """

    @abstractmethod
    async def renew(self, claims: Sequence[Claim], ttl: float) -> Renewal:
        """Move the end of these leases to now + ttl; a claim that does not hold any more is answered as ended."""

    @abstractmethod
    async def progress(self, claim: Claim, events: Sequence[Event]) -> bool:
        """Publish progress of a held lease; not durable, outside the version. False, and nothing, if it is not held.

        The step of the last event is what `Record.running` shows. Events without a time (at 0) get the queue's.
        """

    @abstractmethod
    async def commit(self, change: Change) -> Record:
        """Apply a transition. One that raises has had no effect. Raises NotFound, LeaseLost, Conflict.

        With a claim: a commit that was applied already (the stored stage state is done with the same attempt and
        token) changes nothing and succeeds; a claim that is not held raises LeaseLost. Then a version that is not the
        stored one plus one raises Conflict. A lease whose time has passed is still held until a change closes it.
        `close` removes queued tasks and ends leases; `push` queues tasks (one per key: a pushed task replaces one that
        waits under its key, and ends a lease under it). Events get their numbers here. After a terminal change nothing
        of the request is queued or leased.
        """

    @abstractmethod
    async def commit_and_lease(
        self, change: Change, worker: str, wanted: Wanted, ttl: float
    ) -> tuple[Record, builtins.list[Lease]]:
        """Apply a transition as `commit` does, then claim tasks as `lease` does without waiting, with nobody between.

        What the change pushes, closes and gives back counts for the claim; who waits is served behind it. What raises
        has claimed nothing; a repeat that was applied already claims like any other. The record tells of these leases.
        Whoever is cancelled meanwhile may have claimed: such leases end with their time.
        """

    @abstractmethod
    async def hand_back(self, claim: Claim) -> bool:
        """Return a leased task to its old place in the queue, under the next attempt. False if it is not held."""

    @abstractmethod
    async def turn_down(self, claim: Claim) -> int:
        """Hand a leased task back, and count that its worker did, unless a step of it was reported under this lease.

        A worker that has turned a task down MOST_RETURNS times is not leased it any more, until the task is pushed
        again. Returns how many such workers there are. Raises LeaseLost if the claim is not held.
        """

    @abstractmethod
    async def expired(self, ttl: float) -> list[Lease]:
        """Leases whose time has passed, for the caller to decide on; they stay held until a commit closes them.

        When nobody has asked for longer than ttl / 2 (while every scheduler was away, workers could not renew), all
        leases that would end sooner are first moved to now + ttl, once, and none is returned.
        """

    @abstractmethod
    async def load(self, request: str) -> Record:
        """The stored request. Raises NotFound, and Damaged for one that cannot be read.

        Its position is the number of tasks that would be leased from the pool before the first of its own (the least
        over its queued tasks); None unless it waits: something is queued and nothing runs.
        """

    @abstractmethod
    async def over(self, requests: Sequence[str]) -> builtins.list[str]:
        """Which of these requests are over, or not known, in the order in which they were asked for.

        One of which that cannot be read is not among them. However many are asked for, no context is read for it.
        """

    @abstractmethod
    async def list(
        self, which: Filter, *, after: str | None = None, limit: int = 100, oldest_first: bool = False
    ) -> list[Record]:
        """Up to `limit` requests, newest or oldest first, starting behind the one of id `after`.

        That one need not be asked for itself. Raises NotFound when it is not known, or is not of the tenant that is.
        One that cannot be read is left out, here and wherever several things are answered: see `damaged`.
        """

    @abstractmethod
    async def size(self, pool: str) -> int:
        """Tasks that wait in a pool, those whose `not_before` is in the future among them (leased ones not counted)."""

    @abstractmethod
    async def stats(self, pools: Sequence[str]) -> Stats:
        """How much there is to do. It costs the same however much that is: no request is looked at for it."""

    @abstractmethod
    async def peek(self, pool: str, limit: int = 16) -> Sequence[Task]:
        """The tasks of a pool that may be leased now, in the order they would be."""

    @abstractmethod
    def watch(self, request: str, after: int = 0) -> AsyncIterator[Event]:
        """Events of a request with a number above `after`, waiting for more until the terminal one.

        The log is bounded: old progress is dropped first, numbers are never given twice. The stream ends behind the
        terminal event (at once, if `after` is that one or a later), when the request is forgotten, and on `close`.
        Raises NotFound for an unknown request, at once or when the first event is asked for.
        """

    @abstractmethod
    async def cache(self, key: str, ref: ObjectRef, room: int) -> None:
        """Let an encoder's output be found under that key, in place of what was found there; not durable.

        Then the least recently used are given up, until there are `room` bytes of them and MAX_CACHED, at most. One
        that is larger than the room is not kept.
        """

    @abstractmethod
    async def cached(self, keys: Sequence[str], *, use: bool = True) -> dict[str, ObjectRef]:
        """What is found under these keys, which thereby are used, in this order, unless it is no `use`."""

    @abstractmethod
    async def cached_bytes(self) -> int:
        """Bytes of all that is found under any key."""

    @abstractmethod
    async def uncache(self, key: str, id: str) -> None:
        """Let the object of that id be found under the key no more; another one stays. Idempotent."""

    @abstractmethod
    async def hello(self, worker: WorkerInfo, cards: Sequence[ModelCard] = ()) -> None:
        """Register a worker, or say that it lives. Cards stay known while a worker that brought them is registered.

        A worker that says so without cards keeps those it brought before.
        """

    @abstractmethod
    async def bye(self, worker: str) -> None:
        """Forget a worker; its leases run out as they would."""

    @abstractmethod
    async def declare(self, by: str, declaration: Declaration) -> None:
        """Keep this in place of what was declared under that name; a queue of one process keeps it as long as that."""

    @abstractmethod
    async def declared(self) -> dict[str, Declaration]:
        """What is declared, by the names of those who did."""

    @abstractmethod
    async def workers(self) -> Sequence[Member]:
        """The registry."""

    @abstractmethod
    async def forget(self, before: float) -> Sequence[str]:
        """Drop requests that were over before Unix time `before`; returns their ids."""

    @abstractmethod
    async def drop(self, request: str) -> None:
        """Forget one request that is over, now; one that is not stays. Idempotent."""

    async def damaged(self) -> Sequence[Damage]:
        """What was met that is stored here and cannot be read, and still is."""
        return ()

    async def discard(self, id: str) -> None:
        """Drop what cannot be read of a request, or a worker, of that id, with all that is known to belong to it."""
        await self.drop(id)

    @abstractmethod
    async def close(self) -> None:
        """Release the backend; waiting callers are woken with an empty answer."""
