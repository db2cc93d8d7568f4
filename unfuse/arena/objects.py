"""Which objects exist, in what state, and who still holds them: the same rules for an arena and for plain memory."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from functools import partial
from itertools import islice
from threading import Condition
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

MOST_IDLE = 256


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
    request: str = ""


@dataclass(slots=True)
class _Entry:
    extent: Extent
    state: State = "writing"
    holds: int = 1
    written: tuple[int, ...] | None = None
    whole: bool = False


class ObjectTable:
    """The objects in one space, the least recently used first. Thread-safe; every method is atomic."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._turn = Turn()
        self._entries: dict[str, _Entry] = {}
        self._generation = 0
        self._changed = Condition()

    def create(self, nbytes: int, request: str) -> Extent:
        """Make room for an object that the caller then writes, and seals or aborts. Raises ArenaFull."""
        with self._turn:
            offset = self._space.allocate(nbytes)
            self._generation += 1
            extent = Extent(secrets.token_hex(16), secrets.token_bytes(16), self._generation, offset, nbytes, request)
            self._entries[extent.id] = _Entry(extent)
            return extent

    def seal(self, id: str) -> None:
        """Make an object readable; it must not change any more. Raises ObjectLost if it was released meanwhile."""
        with self._turn:
            entry = self._entry(id)
            released = entry.state == "deleted"
            if not released:
                self._move(entry, "sealed")
                entry.whole = True
            self._drop(id)
        self._tell()
        if released:
            raise ObjectLost(f"object {id} was released while it was written: its request is over", id)

    def abort(self, id: str) -> None:
        """Give up an object that is being written."""
        with self._turn:
            entry = self._entry(id)
            if entry.state != "deleted":
                self._move(entry, "deleted")
            self._drop(id)
        self._tell()

    def announce(self, id: str, written: tuple[int, ...] = ()) -> None:
        """Let an object be held while it is written: the chunks with these checksums are, and do not change any more.

        Each call names all chunks written so far. Raises ObjectLost if the object was released meanwhile.
        """
        with self._turn:
            entry = self._entry(id)
            if entry.state == "deleted":
                raise _lost(id)
            entry.written = written
        self._tell()

    def written(self, id: str, known: int = 0, wait: float = 0.0) -> tuple[tuple[int, ...], bool]:
        """The checksums of an announced object's chunks, and whether it is whole; of any other none, and that it is.

        Waits up to `wait` seconds for more chunks than `known`. Raises ObjectLost when the writer gave it up.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._news(id, known), wait)
        with self._turn:
            entry = self._entry(id)
            if entry.state == "deleted" and not entry.whole:
                raise ObjectLost(f"object {id} was given up while it was written", id)
            return entry.written or (), entry.whole

    def hold(self, id: str, key: bytes, generation: int, nbytes: int, *, announced: bool = False) -> Extent:
        """Keep a sealed object where it is until `unhold`. Raises ObjectLost unless all of this is its own.

        With `announced`, also one that is announced; what of it may be read is what `written` says.
        """
        with self._turn:
            entry = self._entry(id)
            extent = entry.extent
            known = hmac.compare_digest(extent.key, key) and (extent.generation, extent.nbytes) == (generation, nbytes)
            early = announced and entry.state == "writing" and entry.written is not None
            if not (known and (early or entry.state == "sealed")):
                raise _lost(id)
            entry.holds += 1
            self._entries[id] = self._entries.pop(id)
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
            for entry in [entry for entry in self._entries.values() if entry.extent.request == request]:
                self._delete(entry)

    def requests(self) -> frozenset[str]:
        """Ids of the requests that objects exist for, deleted ones not counted."""
        with self._turn:
            return frozenset(entry.extent.request for entry in self._entries.values() if entry.state != "deleted")

    def idle(self) -> list[Extent]:
        """Sealed objects that nobody holds, least recently used first: the first MOST_IDLE of them."""
        with self._turn:
            idle = (entry for entry in self._entries.values() if entry.state == "sealed" and not entry.holds)
            return [entry.extent for entry in islice(idle, MOST_IDLE)]

    def usage(self) -> Usage:
        """How full the space is."""
        with self._turn:
            return self._space.usage()

    def _news(self, id: str, known: int) -> bool:
        with self._turn:
            entry = self._entries.get(id)
            return entry is None or entry.state != "writing" or len(entry.written or ()) > known

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()

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
