"""Stored requests in memory: their histories, and an index whose lookups cost what they find."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any

import msgspec

from unfuse.core.event import Event
from unfuse.core.request import RequestContext, RequestStatus
from unfuse.queues.base import INDEXED_FIELDS, LISTED_VALUES, TENANT_FIELDS, Filter, Heading

MAX_EVENTS = 512  # events kept of one request
PASSING = ("progress", "preview")  # events that may be dropped, because a later one replaces them
APPENDED = "appended"  # the event of which only the last one of each stage is kept


class History:
    """Numbered events. Above MAX_EVENTS the oldest is dropped: progress first, then any."""

    def __init__(self, events: Iterable[Event] = (), last: int = 0) -> None:
        self._events = {event.seq: event for event in events}
        self._droppable: deque[int] = deque()
        self._appended: dict[str, int] = {}
        self.last = last  # the highest number that an event has got
        self.ended = False  # whether no more events will come
        self._listeners: dict[Callable[[], None], None] = {}

    def publish(self, event: Event, wall: float) -> None:
        """Give an event its number, and a time if it has none, then call the listeners."""
        self.last += 1
        self._events[self.last] = msgspec.structs.replace(event, seq=self.last, at=event.at or wall)
        if event.type in PASSING:
            self._droppable.append(self.last)
        elif event.type == APPENDED:
            self._events.pop(self._appended.get(event.stage, 0), None)
            self._appended[event.stage] = self.last
        if len(self._events) > MAX_EVENTS:
            del self._events[self._droppable.popleft() if self._droppable else next(iter(self._events))]
        self._call_listeners()

    def above(self, after: int) -> list[Event]:
        """The events with a number above `after`."""
        return list(takewhile(lambda event: event.seq > after, reversed(self._events.values())))[::-1]

    def lasting(self) -> tuple[Event, ...]:
        """The events that must not be lost: all but the PASSING ones, and those that only count pieces."""
        return tuple(event for event in self._events.values() if event.type not in (*PASSING, APPENDED))

    def end(self) -> None:
        """No more events will come: call the listeners."""
        self.ended = True
        self._call_listeners()

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """A context in which `listener` is called after each event and at the end."""
        self._listeners[listener] = None
        try:
            yield
        finally:
            del self._listeners[listener]

    def _call_listeners(self) -> None:
        for listener in self._listeners:
            listener()


BLOCK = 512  # the usual size of a block: adding or removing an entry moves the others of its block


@dataclass(eq=False, slots=True)
class Entry:
    """A stored request and its history. `stages` has the names of all its tasks so far, `left` the predicted
    nanoseconds by pool that it adds to the sums, `appended` how many pieces of each stage are recorded. The index
    maintains the other fields.
    """

    context: RequestContext
    number: int
    stages: dict[str, None] = field(default_factory=dict)
    history: History = field(default_factory=History)
    status: RequestStatus = "queued"
    headings: tuple[Heading, ...] = ()
    ended: float | None = None
    left: dict[str, int] = field(default_factory=dict)
    appended: dict[str, int] = field(default_factory=dict)

    def fits(self, which: Filter) -> bool:
        """Whether the filter selects this request."""
        return all(
            (self.status if name == "status" else INDEXED_FIELDS[name](self.context)) == value
            for name, value in which.asked().items()
        )


SortKey = Callable[[Entry], Any]


class SortedEntries:
    """Entries sorted by a key, in blocks: adding or removing takes microseconds, also with 100,000 entries."""

    __slots__ = ("_blocks", "_key")

    def __init__(self, key: SortKey) -> None:
        self._key = key
        self._blocks: list[list[Entry]] = []

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def add(self, entry: Entry) -> None:
        """Insert an entry."""
        if not self._blocks:
            self._blocks.append([])
        at = len(self._blocks) - 1
        if not self._blocks[at] or self._key(self._blocks[at][-1]) < self._key(entry):  # so for most: the newest
            self._blocks[at].append(entry)
        else:
            at = self._block_of(self._key(entry))
            insort(self._blocks[at], entry, key=self._key)
        block = self._blocks[at]
        if len(block) > 2 * BLOCK:
            self._blocks[at : at + 1] = [block[:BLOCK], block[BLOCK:]]

    def remove(self, entry: Entry) -> None:
        """Remove an entry. Its key must not have changed since `add`."""
        at = self._block_of(self._key(entry))
        block = self._blocks[at]
        del block[bisect_left(block, self._key(entry), key=self._key)]
        if not block:
            del self._blocks[at]

    def after(self, key: Any = None) -> Iterator[Entry]:
        """The entries with a key above this one (None: all), in order."""
        at = 0 if key is None else self._block_of(key)
        for number, block in enumerate(islice(self._blocks, at, None)):
            skipped = bisect_right(block, key, key=self._key) if key is not None and number == 0 else 0
            yield from islice(block, skipped, None)

    def before(self, key: Any = None) -> Iterator[Entry]:
        """The entries with a key below this one (None: all), in reverse order."""
        for block in reversed(self._blocks if key is None else self._blocks[: self._block_of(key) + 1]):
            kept = len(block) if key is None else bisect_left(block, key, key=self._key)
            yield from reversed(block[:kept])

    def _block_of(self, key: Any) -> int:
        """The index of the first block whose last entry has this key or a higher one."""
        return bisect_left(self._blocks, key, key=lambda block: self._key(block[-1]))


class Index:
    """Every stored request under each of its headings, sorted by number; ended ones also by the time of their end."""

    def __init__(self) -> None:
        self._under: dict[Heading, tuple[Heading, SortedEntries]] = {}
        self._over = SortedEntries(_end)

    def __len__(self) -> int:
        return len(self._under)

    def put(self, entry: Entry, status: RequestStatus) -> None:
        """Index an entry by its present context, and by the status that is shown for it."""
        context, entry.status = entry.context, status
        self._list(entry, _headings(context, status), (context.completed_at or 0.0) if context.over else None)

    def remove(self, entry: Entry) -> None:
        """Remove an entry from the index."""
        self._list(entry, (), None)

    def find(self, which: Filter, behind: int | None = None, oldest_first: bool = False) -> Iterator[Entry]:
        """The entries that the filter selects, newest or oldest first, starting behind the number `behind`."""
        if which.heading not in self._under:
            return iter(())
        _, listed = self._under[which.heading]
        found = listed.after(behind) if oldest_first else listed.before(behind)
        return (entry for entry in found if entry.fits(which))

    def repeated(self, context: RequestContext) -> Entry | None:
        """The stored request of the same tenant and idempotency key, if any."""
        tenant, key = context.caller.tenant, context.caller.idempotency_key
        return next(self.find(Filter(tenant=tenant, idempotency_key=key)), None) if key else None

    def over_before(self, time: float) -> list[Entry]:
        """The requests that ended before this Unix time, in the order of their ends."""
        return list(takewhile(lambda entry: _end(entry) < (time,), self._over.after()))

    def _list(self, entry: Entry, headings: tuple[Heading, ...], ended: float | None) -> None:
        if ended != entry.ended:
            if entry.ended is not None:
                self._over.remove(entry)
            entry.ended = ended
            if entry.ended is not None:
                self._over.add(entry)
        if headings == entry.headings:
            return
        for heading in set(entry.headings).difference(headings):
            _, listed = self._under[heading]
            listed.remove(entry)
            if not listed:
                del self._under[heading]
        for heading in set(headings).difference(entry.headings):
            self._under.setdefault(heading, (heading, SortedEntries(_number)))[1].add(entry)
        entry.headings = tuple(self._under[heading][0] for heading in headings)


def _number(entry: Entry) -> int:
    return entry.number


def _end(entry: Entry) -> tuple[float, int]:
    return entry.ended or 0.0, entry.number


def _headings(context: RequestContext, status: RequestStatus) -> tuple[Heading, ...]:
    """Every value of `Filter.heading` that must find this request."""
    fields: list[tuple[str, object]] = [("", ""), ("status", status)]
    fields += [(name, value) for name, value in LISTED_VALUES.items() if INDEXED_FIELDS[name](context) == value]
    own = [(name, value) for name in TENANT_FIELDS if (value := INDEXED_FIELDS[name](context))]
    return (
        *((None, name, value) for name, value in fields),
        *((context.caller.tenant, name, value) for name, value in [*fields, *own]),
    )
