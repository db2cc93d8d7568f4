"""A store made of two: what nobody reads at the moment moves from the fast one to the slow one when room is short."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from threading import Lock
from time import time
from typing import TypeVar

import msgspec
from typing_extensions import override

from unfuse.arena.buddy import Usage
from unfuse.arena.objects import Extent
from unfuse.core.errors import ArenaFull, ConfigError, NotFound, ObjectLost, TransientError
from unfuse.core.object_ref import ObjectRef
from unfuse.stores.base import Draft, Hold, StorageBackend, StoreOptions, open_backend
from unfuse.stores.keyed import KeyedBackend, open_keyed

SPILLED_S = 24 * 3600
"""After this long whoever moved an object is over, however that one ended."""

Place = TypeVar("Place")


class SpillBackend(StorageBackend):
    """Objects are put into `fast`; above the share `threshold` of it, the least recently used idle ones go to `slow`.

    From there they are read where they are, verified; for other nodes' transfers, which verify what they bring
    themselves, the owner's process takes them back into its arena.
    """

    bounded = False

    def __init__(self, fast: StorageBackend, slow: KeyedBackend, options: StoreOptions) -> None:
        self._fast, self._slow, self._options = fast, slow, options
        self.address, self.write_token, self.arena = fast.address, fast.write_token, fast.arena
        self._recalling = Lock()
        if self.arena:
            self.arena.recall = self._recall

    @override
    def create(self, nbytes: int, request: str) -> Draft:
        """Raises TransientError when there is no room because the slow store takes no more."""
        return self._place(nbytes, partial(self._fast.create, nbytes, request))

    @override
    def reserve(self, nbytes: int, request: str) -> Extent:
        assert self.arena
        return self._place(nbytes, partial(self.arena.create, nbytes, request))

    @override
    def seal(self, id: str) -> None:
        self._fast.seal(id)

    @override
    def abort(self, id: str) -> None:
        self._fast.abort(id)

    @override
    def hold(self, ref: ObjectRef) -> Hold:
        try:
            return self._fast.hold(ref)
        except ObjectLost:
            return self._slow.hold(ref)

    @override
    def learn(self, peers: Mapping[str, tuple[str, str]]) -> None:
        self._fast.learn(peers)

    @override
    def reaches(self, owner: str) -> bool:
        return self._fast.reaches(owner)

    @override
    def delete(self, ref: ObjectRef) -> None:
        self._fast.delete(ref)
        self._slow.delete(ref)

    @override
    def release(self, request: str) -> None:
        """The fast one first: what is on its way to the slow one is then not left there."""
        self._fast.release(request)
        self._slow.release(request)

    @override
    def holding(self) -> frozenset[str]:
        return self._fast.holding() | self._slow.holding()

    @override
    def usage(self) -> Usage:
        """Both together."""
        fast, slow = (msgspec.structs.astuple(store.usage()) for store in (self._fast, self._slow))
        return Usage(*map(sum, zip(fast, slow, strict=True)))

    @override
    def close(self) -> None:
        """With its owner's arena, what was moved out of it goes, too."""
        if self.arena:
            self.arena.recall = None
        self._fast.close()
        if not self._options.address:
            with suppress(TransientError):
                self._slow.clear()

    def _place(self, nbytes: int, find: Callable[[], Place]) -> Place:
        """The room that `find` finds once enough is moved."""
        usage, idle = self._fast.usage(), self._idle()
        excess = usage.used + nbytes - self._options.threshold * usage.capacity
        with suppress(TransientError):  # until the fast one is full it does not matter that the slow one fails
            while excess > 0 and (moved := self._move(idle)):
                excess -= moved
        while True:
            try:
                return find()
            except ArenaFull:
                if nbytes > usage.capacity or not self._move(idle):
                    raise

    def _idle(self) -> Iterator[Extent]:
        yield from self._fast.idle()  # asked only when the first is wanted

    def _move(self, idle: Iterator[Extent]) -> int:
        """Move the next of `idle` that is still there, and return its bytes, at least 1; 0 if there is none."""
        for extent in idle:
            with suppress(ObjectLost):  # it was released meanwhile
                self._move_one(extent)
                return max(extent.nbytes, 1)
        return 0

    def _move_one(self, extent: Extent) -> None:
        id, nbytes = extent.id, extent.nbytes
        ref = ObjectRef(
            id, self._options.owner, "", extent.request, "", 0, extent.generation, nbytes, (), (), extent.key, 0.0
        )
        hold = self._fast.hold(ref)
        self._slow.keep(ref, hold.bytes())
        hold.release()
        try:
            self._fast.spill(ref)
        except ObjectLost:
            self._slow.delete(ref)
            raise

    def _recall(self, extent: Extent) -> Extent:
        """Take a spilled object back into the arena, held. Raises ArenaFull while there is no room for it."""
        arena = self.arena
        assert arena

        def fill(offset: int) -> None:
            self._slow.load(extent, arena.memory[offset : offset + extent.nbytes])

        with self._recalling:
            with suppress(ObjectLost):  # whoever wanted it, too, has brought it back
                return arena.hold(extent.id, extent.key, extent.generation, extent.nbytes)
            try:
                return self._place(extent.nbytes, partial(arena.restore, extent.id, fill))
            except (ArenaFull, ObjectLost):
                raise
            except (NotFound, TransientError) as error:
                raise ObjectLost(f"object {extent.id} is lost: {error}", extent.id) from error


def open_spill(options: StoreOptions) -> SpillBackend:
    """`spill:FAST+SLOW`, say `spill:auto+disk:/scratch`: the two stores. Raises ConfigError."""
    fast, _, slow = options.url.removeprefix("spill:").partition("+")
    if not slow or not 0 < options.threshold <= 1:
        raise ConfigError(f"{options.url!r}: give spill:FAST+SLOW, like spill:auto+disk:/scratch; threshold is 0 to 1")
    below = open_keyed(
        msgspec.structs.replace(options, url=slow, capacity=options.spill_capacity), "set spill.capacity higher"
    )
    if not options.address:
        below.forget(time() - SPILLED_S)
    return SpillBackend(open_backend(fast, options), below, options)
