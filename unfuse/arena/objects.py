"""Which objects exist, in what state, and who still holds them: the same rules for an arena and for plain memory."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import msgspec

from unfuse.arena.buddy import Usage
from unfuse.arena.turn import Turn
from unfuse.core.errors import ObjectLost, ProtocolError

State = Literal["writing", "sealed", "deleted"]

OBJECT_MOVES: dict[State, frozenset[State]] = {
    "writing": frozenset({"sealed", "deleted"}),
    "sealed": frozenset({"deleted"}),
    "deleted": frozenset(),
}
"""Legal moves of an object. A deleted one keeps its bytes until nobody holds it; a writer does until seal or abort."""


class Space(Protocol):
    """Room for objects."""

    def allocate(self, nbytes: int) -> int:
        """Return the place of `nbytes` bytes. Raises ArenaFull."""
        ...

    def free(self, offset: int) -> None:
        """Take a place back."""
        ...

    def usage(self) -> Usage:
        """The counters now."""
        ...


class Extent(msgspec.Struct, frozen=True):
    """Where an object lies. `key` must be shown to read it; `generation` tells it from what was there before."""

    id: str
    key: bytes
    generation: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class _Entry:
    extent: Extent
    request: str
    state: State = "writing"
    holds: int = 1


class ObjectTable:
    """The objects in one space. Thread-safe; every method is atomic."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._turn = Turn()
        self._entries: dict[str, _Entry] = {}
        self._generation = 0

    def create(self, nbytes: int, request: str) -> Extent:
        """Make room for an object that the caller then writes, and seals or aborts. Raises ArenaFull."""
        with self._turn:
            offset = self._space.allocate(nbytes)
            self._generation += 1
            extent = Extent(secrets.token_hex(16), secrets.token_bytes(16), self._generation, offset, nbytes)
            self._entries[extent.id] = _Entry(extent, request)
            return extent

    def seal(self, id: str) -> None:
        """Make an object readable; it must not change any more. Raises ObjectLost if it was released meanwhile."""
        with self._turn:
            entry = self._entry(id)
            released = entry.state == "deleted"
            if not released:
                self._move(entry, "sealed")
            self._drop(id)
        if released:
            raise ObjectLost(f"object {id} was released while it was written: its request is over", id)

    def abort(self, id: str) -> None:
        """Give up an object that is being written."""
        with self._turn:
            entry = self._entry(id)
            if entry.state != "deleted":
                self._move(entry, "deleted")
            self._drop(id)

    def hold(self, id: str, key: bytes, generation: int, nbytes: int) -> Extent:
        """Keep a sealed object where it is until `unhold`. Raises ObjectLost unless all of this is its own."""
        with self._turn:
            entry = self._entry(id)
            extent = entry.extent
            known = hmac.compare_digest(extent.key, key) and (extent.generation, extent.nbytes) == (generation, nbytes)
            if entry.state != "sealed" or not known:
                raise _lost(id)
            entry.holds += 1
            return extent

    def unhold(self, id: str) -> None:
        """End one hold. Never waits and never fails, so that finalizers may call it."""
        self._turn.post(partial(self._drop, id))

    def delete(self, id: str) -> None:
        """No new holds from now on; the room is free when the last hold ends. An unknown id changes nothing."""
        with self._turn:
            if id in self._entries:
                self._delete(self._entries[id])

    def release(self, request: str) -> None:
        """Delete every object of a request, those being written included."""
        with self._turn:
            for entry in [entry for entry in self._entries.values() if entry.request == request]:
                self._delete(entry)

    def requests(self) -> frozenset[str]:
        """Ids of the requests that objects exist for, deleted ones not counted."""
        with self._turn:
            return frozenset(entry.request for entry in self._entries.values() if entry.state != "deleted")

    def usage(self) -> Usage:
        """How full the space is."""
        with self._turn:
            return self._space.usage()

    def _entry(self, id: str) -> _Entry:
        try:
            return self._entries[id]
        except KeyError:
            raise _lost(id) from None

    def _move(self, entry: _Entry, state: State) -> None:
        if state not in OBJECT_MOVES[entry.state]:
            raise ProtocolError(f"object {entry.extent.id} is {entry.state}: it cannot become {state}")
        entry.state = state

    def _delete(self, entry: _Entry) -> None:
        if entry.state == "deleted":
            return
        self._move(entry, "deleted")
        self._sweep(entry)

    def _drop(self, id: str) -> None:
        entry = self._entries[id]
        entry.holds -= 1
        self._sweep(entry)

    def _sweep(self, entry: _Entry) -> None:
        if entry.state == "deleted" and not entry.holds:
            del self._entries[entry.extent.id]
            self._space.free(entry.extent.offset)


def _lost(id: str) -> ObjectLost:
    return ObjectLost(
        f"object {id} is not here: it was released, its owner was restarted, or the ref is not its own", id
    )
