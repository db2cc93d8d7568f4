"""The table of objects: their states and holds, for an arena or plain memory."""

from __future__ import annotations

import hmac
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from threading import Condition, Lock
from typing import Literal, Protocol

import msgspec

from unfuse.arena.extents import BLOCK, MemoryUsage
from unfuse.core.errors import ArenaFull, ObjectLost, ProtocolError

State = Literal["writing", "sealed", "spilled", "deleted"]


class FinalizerLock:
    """A lock (`with lock:`) to which finalizers post work instead of waiting for it.

    A finalizer may run at any point of any thread, even inside the lock, so it must not wait for it. Posted work runs
    under the lock: soon, and before the next `with lock:` body that starts after the post. It must not raise.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._posted: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._run()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._run_posted()

    def post(self, work: Callable[[], None]) -> None:
        """Run `work` under the lock, at once or when the lock is released."""
        self._posted.append(work)
        self._run_posted()

    def _run_posted(self) -> None:
        """Run the posted work, unless another thread has the lock; that thread then runs it."""
        while self._posted and self._lock.acquire(blocking=False):
            try:
                self._run()
            finally:
                self._lock.release()

    def _run(self) -> None:
        while self._posted:
            self._posted.popleft()()


#: Legal moves of an object. A deleted object keeps its bytes until its last hold ends; its writer holds it until seal
#: or abort. A spilled object has no bytes here: they are in the store that it was moved to.
OBJECT_MOVES: dict[State, frozenset[State]] = {
    "writing": frozenset({"sealed", "deleted"}),
    "sealed": frozenset({"spilled", "deleted"}),
    "spilled": frozenset({"sealed", "deleted"}),
    "deleted": frozenset(),
}

#: Most objects that `idle` returns.
MAX_IDLE_OBJECTS = 256


class Allocator(Protocol):
    """An allocator of room for objects."""

    def allocate(self, nbytes: int) -> int:
        """Allocate `nbytes` bytes. Returns their offset. Raises ArenaFull."""
        ...

    def free(self, offset: int) -> None:
        """Free the allocation at this offset."""
        ...

    def usage(self) -> MemoryUsage:
        """Return how full the room is."""
        ...


class Extent(msgspec.Struct, frozen=True):
    """The place of an object."""

    #: Id of the object: 32 random hex digits.
    id: str

    #: The secret that readers must show.
    key: bytes

    #: Number of the object among all that the table created. A later object in the same place has a higher one.
    generation: int

    #: Offset of the object's first byte in the arena.
    offset: int

    #: Size of the object.
    nbytes: int

    #: The request that the object belongs to, or another name that keeps it (see `ObjectTable.retain`).
    request: str = ""


@dataclass(slots=True)
class _Entry:
    """An object in the table."""

    extent: Extent
    state: State = "writing"

    #: Number of holds, the writer's included.
    holds: int = 1

    #: Checksums of the complete chunks. None if the object was not announced.
    written: tuple[int, ...] | None = None

    #: Whether the object was sealed.
    whole: bool = False

    #: Further names that keep the object, also after its request is released.
    shared: list[str] = field(default_factory=list)

    #: Whether the request is released and only shared names keep the object.
    spare: bool = False

    #: Whether the writer has not sealed or aborted the object, though it may be deleted meanwhile.
    unfinished: bool = True


class ObjectTable:
    """The objects in one space, least recently used first. Thread-safe; every method is atomic."""

    #: Loads a spilled object again, by `restore`, and raises the errors of that. None if no object is spilled.
    recall: Callable[[Extent], Extent] | None = None

    def __init__(self, space: Allocator) -> None:
        self._space = space
        self._lock = FinalizerLock()
        self._entries: dict[str, _Entry] = {}
        self._restoring = 0  # bytes of room for spilled objects that are being loaded
        self._generation = 0
        self._changed = Condition()

    def create(self, nbytes: int, request: str) -> Extent:
        """Allocate an object that the caller then writes, and seals or aborts. Raises ArenaFull."""
        with self._lock:
            offset = self._allocate(nbytes)
            self._generation += 1
            extent = Extent(secrets.token_hex(16), secrets.token_bytes(16), self._generation, offset, nbytes, request)
            self._entries[extent.id] = _Entry(extent)
            return extent

    def seal(self, id: str) -> None:
        """Make an object readable. It must not change from now on.

        Raises ObjectLost if it was released meanwhile.
        """
        with self._lock:
            entry = self._entry(id)
            is_released = entry.state == "deleted"
            if not is_released:
                self._move(entry, "sealed")
                entry.whole = True
            entry.unfinished = False
            self._end_hold(id)
        self._wake_waiters()
        if is_released:
            raise ObjectLost(f"object {id} was released while it was written, because its request has ended", id)

    def abort(self, id: str) -> None:
        """Drop an object that is being written."""
        with self._lock:
            entry = self._entry(id)
            if entry.state != "deleted":
                self._move(entry, "deleted")
            entry.unfinished = False
            self._end_hold(id)
        self._wake_waiters()

    def announce(self, id: str, written: tuple[int, ...] = ()) -> None:
        """Let an object be read while it is written.

        `written` has the checksums of all complete chunks, which must not change from now on. Raises ObjectLost if
        the object was released meanwhile.
        """
        with self._lock:
            entry = self._entry(id)
            if entry.state == "deleted":
                raise _lost(id)
            entry.written = written
        self._wake_waiters()

    def written(self, id: str, known: int = 0, wait: float = 0.0) -> tuple[tuple[int, ...], bool]:
        """Return the checksums of an object's complete chunks, and whether it is whole.

        For objects that were not announced the checksums are empty. Waits up to `wait` seconds for more chunks than
        `known`. Raises ObjectLost if the writer aborted the object.
        """
        # `_changed` is acquired before `_lock` here, so no thread may notify while it has `_lock`.
        with self._changed:
            self._changed.wait_for(lambda: self._has_news(id, known), wait)
        with self._lock:
            entry = self._entry(id)
            if entry.state == "deleted" and not entry.whole:
                raise ObjectLost(f"object {id} was aborted while it was written", id)
            return entry.written or (), entry.whole

    def watch(self, id: str, key: bytes, generation: int, nbytes: int) -> tuple[tuple[int, ...], bool]:
        """Return `written` of an object that can be read. Raises ObjectLost, as `hold`."""
        with self._lock:
            entry = self._entry(id)
            is_known = hmac.compare_digest(entry.extent.key, key)
            is_readable = entry.state in ("sealed", "spilled") or (
                entry.state == "writing" and entry.written is not None
            )
            if not (
                is_known and is_readable and (entry.extent.generation, entry.extent.nbytes) == (generation, nbytes)
            ):
                raise _lost(id)
            return entry.written or (), entry.whole

    def hold(self, id: str, key: bytes, generation: int, nbytes: int, *, announced: bool = False) -> Extent:
        """Hold a sealed object in its place until `unhold`. Raises ObjectLost.

        ObjectLost is also raised unless key, generation and size match. With `announced`, an announced object can be
        held, too; `written` returns how much of it can be read. With `announced`, a spilled object is loaded first,
        which raises ArenaFull while there is no room for it.
        """
        with self._lock:
            entry = self._entry(id)
            extent = entry.extent
            is_known = hmac.compare_digest(extent.key, key) and (extent.generation, extent.nbytes) == (
                generation,
                nbytes,
            )
            is_announced = announced and entry.state == "writing" and entry.written is not None
            recall = self.recall if announced and entry.state == "spilled" else None
            if not (is_known and (is_announced or recall or entry.state == "sealed")):
                raise _lost(id)
            if not recall:
                entry.holds += 1
                self._entries[id] = self._entries.pop(id)  # now the most recently used
                return extent
        # Without the lock, because loading takes long. `restore` acquires it.
        return recall(extent)

    def unhold(self, id: str) -> None:
        """End one hold. Never waits and never fails, so finalizers may call it."""
        self._lock.post(partial(self._end_hold, id))

    def spill(self, id: str) -> None:
        """Free the room of a sealed object that was copied elsewhere, unless it is held.

        Raises ObjectLost.
        """
        with self._lock:
            entry = self._entry(id)
            if entry.state == "deleted":
                raise _lost(id)
            if entry.state == "sealed" and not entry.holds:
                self._move(entry, "spilled")
                self._space.free(entry.extent.offset)

    def restore(self, id: str, fill: Callable[[int], None]) -> Extent:
        """Allocate room for a spilled object, fill it, and hold the object.

        `fill` writes its bytes at the offset. Raises, with nothing changed, ArenaFull, the error of `fill`, or
        ObjectLost if the object was deleted meanwhile.
        """
        with self._lock:
            nbytes = self._entry(id).extent.nbytes
            offset = self._allocate(nbytes)
            self._restoring += _room(nbytes)
        try:
            fill(offset)
            with self._lock:
                entry = self._entry(id)
                self._move(entry, "sealed")
                entry.holds, entry.extent = 1, msgspec.structs.replace(entry.extent, offset=offset)
                self._entries[id] = self._entries.pop(id)
                self._restoring -= _room(nbytes)
                return entry.extent
        except BaseException:
            with self._lock:
                self._space.free(offset)
                self._restoring -= _room(nbytes)
            raise

    def delete(self, id: str) -> None:
        """Delete an object. Idempotent. Its room is free when its last hold ends.

        It cannot be held anew.
        """
        with self._lock:
            if id in self._entries:
                self._delete(self._entries[id])
        self._wake_waiters()

    def retain(self, id: str, name: str) -> None:
        """Keep an object until this name is released, too. Raises ObjectLost.

        When its request is released, the object is spare: when room is short, spare objects are deleted, least
        recently used first.
        """
        with self._lock:
            entry = self._entry(id)
            if entry.state == "deleted":
                raise _lost(id)
            if name not in (entry.extent.request, *entry.shared):
                entry.shared.append(name)

    def release(self, request: str) -> None:
        """Delete every object of a request, also unsealed ones, unless another name keeps it.

        A spilled object is deleted in any case, because it was moved under the name of that request.
        """
        with self._lock:
            for entry in [*self._entries.values()]:
                if request in entry.shared:
                    entry.shared.remove(request)
                elif entry.extent.request == request and entry.shared and entry.state != "spilled":
                    entry.extent, entry.spare = msgspec.structs.replace(entry.extent, request=entry.shared.pop(0)), True
                elif entry.extent.request == request:
                    self._delete(entry)
        self._wake_waiters()

    def requests(self) -> frozenset[str]:
        """Return the requests, and other names, that keep objects."""
        with self._lock:
            alive = [entry for entry in self._entries.values() if entry.state != "deleted"]
            return frozenset(name for entry in alive for name in (entry.extent.request, *entry.shared))

    def idle(self) -> list[Extent]:
        """Return the first MAX_IDLE_OBJECTS sealed objects without a hold, least recently used first.

        Spare objects are left out.
        """
        with self._lock:
            idle = (e for e in self._entries.values() if e.state == "sealed" and not (e.holds or e.spare))
            return [entry.extent for entry in islice(idle, MAX_IDLE_OBJECTS)]

    def unfinished(self) -> list[Extent]:
        """Return the objects that are being written, also those of requests that are over."""
        with self._lock:
            return [entry.extent for entry in self._entries.values() if entry.unfinished]

    def unaccounted(self) -> int:
        """Return the allocated bytes that belong to no object."""
        with self._lock:
            sizes = (entry.extent.nbytes for entry in self._entries.values() if entry.state != "spilled")
            return self._space.usage().used - sum(map(_room, sizes)) - self._restoring

    def usage(self) -> MemoryUsage:
        """Return how full the space is.

        Room of spare objects counts as free, though it may not be contiguous.
        """
        with self._lock:
            usage, sizes = self._space.usage(), [entry.extent.nbytes for entry in self._spare()]
        spare_bytes, spare_requested = sum(map(_room, sizes)), sum(sizes)
        fields = {
            "used": usage.used - spare_bytes,
            "requested": usage.requested - spare_requested,
            "free": usage.free + spare_bytes,
        }
        return msgspec.structs.replace(usage, **fields) if sizes else usage

    def _spare(self) -> Iterator[_Entry]:
        """Yield the spare objects without a hold, least recently used first."""
        return (e for e in self._entries.values() if e.spare and e.state == "sealed" and not e.holds)

    def _allocate(self, nbytes: int) -> int:
        """Allocate room. Deletes spare objects while there is none. Raises ArenaFull."""
        while True:
            try:
                return self._space.allocate(nbytes)
            except ArenaFull as full:
                entry = next(self._spare(), None)
                if entry is None or nbytes > full.capacity:  # deleting objects cannot help
                    raise
                self._delete(entry)

    def _has_news(self, id: str, known: int) -> bool:
        """Whether an object has more chunks than `known`, or is not being written any more."""
        with self._lock:
            entry = self._entries.get(id)
            return entry is None or entry.state != "writing" or len(entry.written or ()) > known

    def _wake_waiters(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _entry(self, id: str) -> _Entry:
        """Return the entry of an object. Raises ObjectLost."""
        try:
            return self._entries[id]
        except KeyError:
            raise _lost(id) from None

    def _move(self, entry: _Entry, state: State) -> None:
        """Change the state of an object. Raises ProtocolError for an illegal move."""
        if state not in OBJECT_MOVES[entry.state]:
            raise ProtocolError(f"object {entry.extent.id} cannot change from {entry.state} to {state}")
        entry.state = state

    def _delete(self, entry: _Entry) -> None:
        """Delete an object under the lock."""
        if entry.state == "spilled":
            del self._entries[entry.extent.id]
        elif entry.state != "deleted":
            self._move(entry, "deleted")
            self._free_if_unused(entry)

    def _end_hold(self, id: str) -> None:
        """End one hold under the lock."""
        entry = self._entries[id]
        entry.holds -= 1
        self._free_if_unused(entry)

    def _free_if_unused(self, entry: _Entry) -> None:
        if entry.state == "deleted" and not entry.holds:
            del self._entries[entry.extent.id]
            self._space.free(entry.extent.offset)


def _room(nbytes: int) -> int:
    """Return the bytes of whole blocks that an object takes."""
    return max(1, -(-nbytes // BLOCK)) * BLOCK


def _lost(id: str) -> ObjectLost:
    """Return the error for an object that cannot be read here."""
    return ObjectLost(
        f"object {id} does not exist here: it was released, its owner was restarted, or the ref is wrong", id
    )
