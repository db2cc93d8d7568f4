"""Indexes in memory: requests with their event histories, and encoder outputs by key."""

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
    Heading,
    RequestFilter,
)
from unfuse.queues.tasks import QueuedTask

MAX_EVENTS = 512  # events kept of one request
PASSING = ("progress", "preview")  # events that may be dropped, because a later one replaces them
APPENDED = "appended"  # the event of which only the last one of each stage is kept


class EventHistory:
    """Numbered events. Above MAX_EVENTS the oldest is dropped: progress first, then any."""

    def __init__(self, events: Iterable[Event] = (), last: int = 0) -> None:
        self._events = {event.seq: event for event in events}
        self._droppable: deque[int] = deque()
        self._appended: dict[str, int] = {}
        self.last = last  # the highest number that an event has got
        self.ended = False  # whether no more events will come
        self._followers: list[asyncio.Future[None]] = []

    def publish(self, event: Event, wall: float) -> None:
        """Give an event its number, and a time if it has none, and wake who follows."""
        self.last += 1
        self._events[self.last] = msgspec.structs.replace(event, seq=self.last, at=event.at or wall)
        if event.type in PASSING:
            self._droppable.append(self.last)
        elif event.type == APPENDED:
            self._events.pop(self._appended.get(event.stage, 0), None)
            self._appended[event.stage] = self.last
        if len(self._events) > MAX_EVENTS:
            del self._events[self._droppable.popleft() if self._droppable else next(iter(self._events))]
        self._wake_followers()

    def above(self, after: int) -> list[Event]:
        """The events with a number above `after`."""
        return list(takewhile(lambda event: event.seq > after, reversed(self._events.values())))[::-1]

    def lasting(self) -> tuple[Event, ...]:
        """The events that must not be lost: all but the PASSING ones, and those that only count pieces."""
        return tuple(event for event in self._events.values() if event.type not in (*PASSING, APPENDED))

    def end(self) -> None:
        """No more events will come: who follows reads the last ones."""
        self.ended = True
        self._wake_followers()

    async def follow(self, after: int) -> AsyncIterator[Event]:
        """Events with a number above `after`; waits for more until the history has ended."""
        while True:
            while unseen := self.above(after):
                for event in unseen:
                    yield event
                after = unseen[-1].seq
            if self.ended:
                return
            news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._followers.append(news)
            try:
                await news
            finally:
                self._followers.remove(news)

    def _wake_followers(self) -> None:
        for news in self._followers:
            if not news.done():
                news.set_result(None)


@dataclass(eq=False, slots=True)
class IndexEntry:
    """A stored request and its history. `tasks` has the task of each stage that had one so far: None where it is gone.

    `appended` says how many pieces of each stage are recorded. The index maintains the other fields.
    """

    context: RequestContext
    number: int
    tasks: dict[str, QueuedTask | None] = field(default_factory=dict)
    history: EventHistory = field(default_factory=EventHistory)
    status: RequestStatus = "queued"
    headings: tuple[Heading, ...] = ()
    ended: float | None = None
    appended: dict[str, int] = field(default_factory=dict)

    @property
    def queued(self) -> list[QueuedTask]:
        """Its tasks that wait or are leased."""
        return [queued for queued in self.tasks.values() if queued]

    def fits(self, which: RequestFilter) -> bool:
        """Whether the filter selects this request."""
        return all(
            (self.status if name == "status" else INDEXED_FIELDS[name](self.context)) == value
            for name, value in which.asked().items()
        )


_number = attrgetter("number")
_end = attrgetter("ended", "number")


class RequestIndex:
    """Every stored request under each of its headings, sorted by number; ended ones also by the time of their end.

    Adding or removing one is a bisection and a move of pointers: microseconds at 100,000 requests.
    """

    def __init__(self) -> None:
        self._under: dict[Heading, tuple[Heading, list[IndexEntry]]] = {}
        self._over: list[IndexEntry] = []

    def put(self, entry: IndexEntry, status: RequestStatus) -> None:
        """Index an entry by its present context, and by the status that is shown for it."""
        context, entry.status = entry.context, status
        self._list(entry, _headings(context, status), (context.completed_at or 0.0) if context.over else None)

    def remove(self, entry: IndexEntry) -> None:
        """Remove an entry from the index."""
        self._list(entry, (), None)

    def find(self, which: RequestFilter, behind: int | None = None, oldest_first: bool = False) -> Iterator[IndexEntry]:
        """The entries that the filter selects, newest or oldest first, starting behind the number `behind`."""
        listed = self._listed(which.heading)
        if oldest_first:
            places = range(0 if behind is None else bisect_right(listed, behind, key=_number), len(listed))
        else:
            places = range(len(listed) if behind is None else bisect_left(listed, behind, key=_number))[::-1]
        return (entry for place in places if (entry := listed[place]).fits(which))

    def count_active(self, tenant: str | None = None) -> int:
        """The number of requests that are not over, of one tenant or of all."""
        return len(self._listed((tenant, "over", False)))

    def repeated(self, context: RequestContext) -> IndexEntry | None:
        """The stored request of the same tenant and idempotency key, if any."""
        key = context.caller.idempotency_key
        return next(self.find(RequestFilter(tenant=context.caller.tenant, idempotency_key=key)), None) if key else None

    def over_before(self, time: float) -> list[IndexEntry]:
        """The requests that ended before this Unix time, in the order of their ends."""
        return self._over[: bisect_left(self._over, (time, -1), key=_end)]

    def _listed(self, heading: Heading) -> list[IndexEntry]:
        return self._under[heading][1] if heading in self._under else []

    def _list(self, entry: IndexEntry, headings: tuple[Heading, ...], ended: float | None) -> None:
        if ended != entry.ended:
            if entry.ended is not None:
                del self._over[bisect_left(self._over, _end(entry), key=_end)]
            entry.ended = ended
            if ended is not None:
                insort(self._over, entry, key=_end)
        if headings == entry.headings:
            return
        for heading in set(entry.headings).difference(headings):
            listed = self._listed(heading)
            del listed[bisect_left(listed, entry.number, key=_number)]
            if not listed:
                del self._under[heading]
        for heading in set(headings).difference(entry.headings):
            insort(self._under.setdefault(heading, (heading, []))[1], entry, key=_number)
        entry.headings = tuple(self._under[heading][0] for heading in headings)


def _headings(context: RequestContext, status: RequestStatus) -> tuple[Heading, ...]:
    """Every value of `RequestFilter.heading` that must find this request."""
    fields: list[tuple[str, object]] = [("", ""), ("status", status)]
    fields += [(name, value) for name, value in LISTED_VALUES.items() if INDEXED_FIELDS[name](context) == value]
    own = [(name, value) for name in TENANT_FIELDS if (value := INDEXED_FIELDS[name](context))]
    return (
        *((None, name, value) for name, value in fields),
        *((context.caller.tenant, name, value) for name, value in [*fields, *own]),
    )


class MemoryEncoderIndex(EncoderIndex):
    """Refs of cached encoder outputs by cache key, the least recently used first."""

    def __init__(self) -> None:
        self._refs: dict[str, ObjectRef] = {}
        self._nbytes = 0

    @override
    async def cache(self, key: str, ref: ObjectRef, room: int) -> None:
        self._remove_ref(key)
        if ref.nbytes > room:
            return
        self._refs[key] = ref
        self._nbytes += ref.nbytes
        while self._nbytes > room or len(self._refs) > MAX_CACHED:
            self._remove_ref(next(iter(self._refs)))

    @override
    async def cached(self, keys: Sequence[str], *, use: bool = True) -> dict[str, ObjectRef]:
        found = {key: self._refs[key] for key in keys if key in self._refs}
        for key in keys:
            if use and key in found:
                self._refs[key] = self._refs.pop(key)
        return found

    @override
    async def cached_bytes(self) -> int:
        return self._nbytes

    @override
    async def uncache(self, key: str, id: str) -> None:
        if key in self._refs and self._refs[key].id == id:
            self._remove_ref(key)

    def _remove_ref(self, key: str) -> None:
        if ref := self._refs.pop(key, None):
            self._nbytes -= ref.nbytes
