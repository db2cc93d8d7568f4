"""In-memory indexes of requests and encoder outputs, and the event history of a request."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import attrgetter

import msgspec
from typing_extensions import override

from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import Event, RequestContext, RequestStatus
from unfuse.queues.base import (
    INDEXED_FIELDS,
    LISTED_VALUES,
    MAX_CACHED,
    TENANT_FIELDS,
    EncoderIndex,
    IndexKey,
    RequestFilter,
)
from unfuse.queues.tasks import QueuedTask

#: Most events in the history of one request.
MAX_EVENTS = 512
#: Types of events that may be dropped, because a later event replaces them.
DROPPABLE_EVENTS = ("progress", "preview")
#: Only the last event of this type is stored for each stage.
APPENDED = "appended"


class EventHistory:
    """The bounded history of a request's numbered events, with streams that follow it.

    Above MAX_EVENTS the oldest event is dropped: DROPPABLE_EVENTS first, then any.
    """

    def __init__(self, events: Iterable[Event] = (), last: int = 0) -> None:
        self._events = {event.seq: event for event in events}
        #: Numbers of the DROPPABLE_EVENTS, in order.
        self._droppable: deque[int] = deque()
        #: Number of the last APPENDED event, by stage.
        self._appended: dict[str, int] = {}
        #: Highest number of an event so far.
        self.last = last
        #: Whether no more events will come.
        self.ended = False
        self._followers: list[asyncio.Future[None]] = []

    def publish(self, event: Event, wall: float) -> None:
        """Number and store an event, and wake the streams.

        `wall` is the time of events without one, in Unix seconds.
        """
        self.last += 1
        self._events[self.last] = msgspec.structs.replace(event, seq=self.last, at=event.at or wall)
        if event.type in DROPPABLE_EVENTS:
            self._droppable.append(self.last)
        elif event.type == APPENDED:
            self._events.pop(self._appended.get(event.stage, 0), None)
            self._appended[event.stage] = self.last
        if len(self._events) > MAX_EVENTS:
            del self._events[self._droppable.popleft() if self._droppable else next(iter(self._events))]
        self._wake_followers()

    def after(self, after: int) -> list[Event]:
        """Return the events with a number above `after`."""
        return list(takewhile(lambda event: event.seq > after, reversed(self._events.values())))[::-1]

    def undroppable(self) -> tuple[Event, ...]:
        """Return the events that must be durable: all but DROPPABLE_EVENTS and APPENDED ones."""
        return tuple(event for event in self._events.values() if event.type not in (*DROPPABLE_EVENTS, APPENDED))

    def end(self) -> None:
        """End all streams after their last event."""
        self.ended = True
        self._wake_followers()

    async def follow(self, after: int) -> AsyncIterator[Event]:
        """Yield events with a number above `after`, as they come, until the history has ended."""
        while True:
            while unseen := self.after(after):
                for event in unseen:
                    yield event
                after = unseen[-1].seq
            if self.ended:
                return

            # No await since the last read, so that no event is missed.
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._followers.append(woken)
            try:
                await woken
            finally:
                self._followers.remove(woken)

    def _wake_followers(self) -> None:
        for woken in self._followers:
            if not woken.done():
                woken.set_result(None)


@dataclass(eq=False, slots=True)
class IndexEntry:
    """A stored request with its tasks, its event history, and its place in the index."""

    #: The present context. A commit replaces it.
    context: RequestContext
    #: Number of arrival. Lists are sorted by it.
    number: int
    #: The task of each stage that ever had one; None once it is neither waiting nor leased.
    tasks: dict[str, QueuedTask | None] = field(default_factory=dict)
    #: The request's numbered events.
    history: EventHistory = field(default_factory=EventHistory)
    #: The displayed status. Set by the index, as are `index_keys` and `ended`.
    status: RequestStatus = "queued"
    #: The keys under which it is indexed.
    index_keys: tuple[IndexKey, ...] = ()
    #: When it ended, in Unix seconds; None if it is active.
    ended: float | None = None
    #: Number of recorded output deltas, by stage.
    appended: dict[str, int] = field(default_factory=dict)

    @property
    def queued(self) -> list[QueuedTask]:
        """Its tasks that wait or are leased."""
        return [queued for queued in self.tasks.values() if queued]

    def matches(self, which: RequestFilter) -> bool:
        """Return whether the filter selects this request."""
        return all(
            (self.status if name == "status" else INDEXED_FIELDS[name](self.context)) == value
            for name, value in which.conditions().items()
        )


_number = attrgetter("number")
_end = attrgetter("ended", "number")


class RequestIndex:
    """An index of all stored requests by key (`IndexKey`), sorted by number of arrival.

    A request is under each of its keys. Ended requests are also sorted by the time of their end. Adding or removing a
    request is a bisection and a move of pointers: microseconds at 100,000 requests.
    """

    def __init__(self) -> None:
        #: Entries by key, with the key itself: all entries share this one tuple, which saves memory.
        self._under: dict[IndexKey, tuple[IndexKey, list[IndexEntry]]] = {}
        self._over: list[IndexEntry] = []

    def put(self, entry: IndexEntry, status: RequestStatus) -> None:
        """Index an entry by its present context and its displayed status."""
        context = entry.context
        entry.status = status
        self._list(entry, _index_keys(context, status), (context.completed_at or 0.0) if context.is_over else None)

    def remove(self, entry: IndexEntry) -> None:
        """Remove an entry from the index."""
        self._list(entry, (), None)

    def find(self, which: RequestFilter, after: int | None = None, oldest_first: bool = False) -> Iterator[IndexEntry]:
        """Yield the entries that the filter selects, newest or oldest first, after the number `after`."""
        entries = self._listed(which.index_key)
        if oldest_first:
            positions = range(0 if after is None else bisect_right(entries, after, key=_number), len(entries))
        else:
            positions = range(len(entries) if after is None else bisect_left(entries, after, key=_number))[::-1]
        return (entry for position in positions if (entry := entries[position]).matches(which))

    def count_active(self, tenant: str | None = None) -> int:
        """Return the number of requests that are not over, of one tenant or of all."""
        return len(self._listed((tenant, "is_over", False)))

    def find_repeated(self, context: RequestContext) -> IndexEntry | None:
        """Return the stored request of the same tenant and idempotency key, or None."""
        key = context.caller.idempotency_key
        return next(self.find(RequestFilter(tenant=context.caller.tenant, idempotency_key=key)), None) if key else None

    def ended_before(self, time: float) -> list[IndexEntry]:
        """Return the requests that ended before this Unix time, in the order of their ends."""
        return self._over[: bisect_left(self._over, (time, -1), key=_end)]

    def _listed(self, index_key: IndexKey) -> list[IndexEntry]:
        """Return the entries of a key, by number."""
        return self._under[index_key][1] if index_key in self._under else []

    def _list(self, entry: IndexEntry, index_keys: tuple[IndexKey, ...], ended: float | None) -> None:
        """Index an entry under these keys and no others.

        It is also indexed by the time of its end, if it has ended.
        """
        if ended != entry.ended:
            if entry.ended is not None:
                del self._over[bisect_left(self._over, _end(entry), key=_end)]
            entry.ended = ended
            if ended is not None:
                insort(self._over, entry, key=_end)
        if index_keys == entry.index_keys:
            return

        for index_key in set(entry.index_keys).difference(index_keys):
            entries = self._listed(index_key)
            del entries[bisect_left(entries, entry.number, key=_number)]
            if not entries:
                del self._under[index_key]
        for index_key in set(index_keys).difference(entry.index_keys):
            insort(self._under.setdefault(index_key, (index_key, []))[1], entry, key=_number)
        entry.index_keys = tuple(self._under[index_key][0] for index_key in index_keys)


def _index_keys(context: RequestContext, status: RequestStatus) -> tuple[IndexKey, ...]:
    """Return all index keys of a request: every `RequestFilter.index_key` that must find it."""
    fields: list[tuple[str, object]] = [("", ""), ("status", status)]
    fields += [(name, value) for name, value in LISTED_VALUES.items() if INDEXED_FIELDS[name](context) == value]
    tenant_fields = [(name, value) for name in TENANT_FIELDS if (value := INDEXED_FIELDS[name](context))]
    return (
        *((None, name, value) for name, value in fields),
        *((context.caller.tenant, name, value) for name, value in [*fields, *tenant_fields]),
    )


class MemoryEncoderIndex(EncoderIndex):
    """An LRU index of encoder outputs in memory."""

    def __init__(self) -> None:
        #: Refs by cache key, the least recently used first.
        self._refs: dict[str, ObjectRef] = {}
        self._nbytes = 0

    @override
    async def put_encoding(self, key: str, ref: ObjectRef, room: int) -> None:
        self._remove_ref(key)
        if ref.nbytes > room:
            return
        self._refs[key] = ref
        self._nbytes += ref.nbytes
        while self._nbytes > room or len(self._refs) > MAX_CACHED:
            self._remove_ref(next(iter(self._refs)))

    @override
    async def find_encoding(self, keys: Sequence[str], *, use: bool = True) -> dict[str, ObjectRef]:
        refs = {key: self._refs[key] for key in keys if key in self._refs}
        for key in keys:
            if use and key in refs:
                self._refs[key] = self._refs.pop(key)
        return refs

    @override
    async def cached_bytes(self) -> int:
        return self._nbytes

    @override
    async def remove_encoding(self, key: str, id: str) -> None:
        if key in self._refs and self._refs[key].id == id:
            self._remove_ref(key)

    def _remove_ref(self, key: str) -> None:
        if ref := self._refs.pop(key, None):
            self._nbytes -= ref.nbytes
