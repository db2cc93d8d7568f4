"""Under what a queue in memory finds requests, so that a question costs what it answers, whatever else is stored."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any

from unfuse.core.request import RequestContext, RequestStatus
from unfuse.queues.base import ONES_OWN, TELLING, Filter, Heading
from unfuse.queues.history import History

BLOCK = 512
"""Entries that are moved when one comes or goes."""


@dataclass(eq=False, slots=True)
class Entry:
    """A request and its history. `stages` are the names it ever had a task under, `left` is what it
    adds to the sum of what is left; the index keeps the rest.
    """

    context: RequestContext
    number: int
    stages: dict[str, None] = field(default_factory=dict)
    history: History = field(default_factory=History)
    status: RequestStatus = "queued"
    headings: tuple[Heading, ...] = ()
    ended: float | None = None
    left: dict[str, int] = field(default_factory=dict)

    def fits(self, which: Filter) -> bool:
        """Whether it is one of those."""
        asked = which.asked().items()
        return all(getattr(self if name == "status" else self.context, name) == value for name, value in asked)


Key = Callable[[Entry], Any]


class Ordered:
    """Entries by a key, in blocks: one comes or goes in microseconds, at any place, among 100,000 too."""

    __slots__ = ("_blocks", "_key")

    def __init__(self, key: Key) -> None:
        self._key = key
        self._blocks: list[list[Entry]] = []

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def add(self, entry: Entry) -> None:
        """Put an entry in its place."""
        at = min(self._block_of(self._key(entry)), len(self._blocks) - 1)
        if at < 0:
            self._blocks.append([entry])
            return
        block = self._blocks[at]
        insort(block, entry, key=self._key)
        if len(block) > 2 * BLOCK:
            self._blocks[at : at + 1] = [block[:BLOCK], block[BLOCK:]]

    def remove(self, entry: Entry) -> None:
        """Take an entry out, whose key has not changed since it came."""
        at = self._block_of(self._key(entry))
        block = self._blocks[at]
        del block[bisect_left(block, self._key(entry), key=self._key)]
        if not block:
            del self._blocks[at]

    def after(self, key: Any = None) -> Iterator[Entry]:
        """Those behind a key, or all."""
        at = 0 if key is None else self._block_of(key)
        for number, block in enumerate(islice(self._blocks, at, None)):
            skipped = bisect_right(block, key, key=self._key) if key is not None and number == 0 else 0
            yield from islice(block, skipped, None)

    def before(self, key: Any = None) -> Iterator[Entry]:
        """Those before a key, or all, the last first."""
        for block in reversed(self._blocks if key is None else self._blocks[: self._block_of(key) + 1]):
            kept = len(block) if key is None else bisect_left(block, key, key=self._key)
            yield from reversed(block[:kept])

    def _block_of(self, key: Any) -> int:
        """The first block that does not end before a key."""
        return bisect_left(self._blocks, key, key=lambda block: self._key(block[-1]))


class Index:
    """Every stored request under each of its headings, by number; those that are over also by when that was."""

    def __init__(self) -> None:
        self._under: dict[Heading, tuple[Heading, Ordered]] = {}
        self._over = Ordered(_end)

    def __len__(self) -> int:
        return len(self._under)

    def put(self, entry: Entry, status: RequestStatus) -> None:
        """List an entry as it stands, shown with that status."""
        context, entry.status = entry.context, status
        self._list(entry, _headings(context, status), (context.completed_at or 0.0) if context.over else None)

    def remove(self, entry: Entry) -> None:
        """List an entry nowhere."""
        self._list(entry, (), None)

    def find(self, which: Filter, behind: Entry | None = None, oldest_first: bool = False) -> Iterator[Entry]:
        """Those that a filter asks for whose turn comes behind an entry, newest first unless it is said otherwise."""
        if which.heading not in self._under:
            return iter(())
        _, listed = self._under[which.heading]
        found = listed.after(behind and behind.number) if oldest_first else listed.before(behind and behind.number)
        return (entry for entry in found if entry.fits(which))

    def repeated(self, context: RequestContext) -> Entry | None:
        """The request that came under the same idempotency key, if any."""
        key = context.idempotency_key
        return next(self.find(Filter(tenant=context.tenant, idempotency_key=key)), None) if key else None

    def over_before(self, time: float) -> list[Entry]:
        """Those that were over before that time, in the order in which they were."""
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
            self._under.setdefault(heading, (heading, Ordered(_number)))[1].add(entry)
        entry.headings = tuple(self._under[heading][0] for heading in headings)


def _number(entry: Entry) -> int:
    return entry.number


def _end(entry: Entry) -> tuple[float, int]:
    return entry.ended or 0.0, entry.number


def _headings(context: RequestContext, status: RequestStatus) -> tuple[Heading, ...]:
    """All that `Filter.heading` may ask for this request under."""
    fields: list[tuple[str, object]] = [("", ""), ("status", status)]
    fields += [(name, value) for name, value in TELLING.items() if getattr(context, name) == value]
    own = [(name, value) for name in ONES_OWN if (value := getattr(context, name))]
    return (
        *((None, name, value) for name, value in fields),
        *((context.tenant, name, value) for name, value in [*fields, *own]),
    )
