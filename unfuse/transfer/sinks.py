"""Where pulled bytes go: a whole object into an arena, or one range after the other through a small buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Condition
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from unfuse.arena.arena import Arena
from unfuse.arena.client import ArenaClient
from unfuse.arena.objects import Extent
from unfuse.core.errors import ObjectLost
from unfuse.core.object_ref import ObjectRef, chunk_bytes


class Sink(Protocol):
    """The target of a session. One thread at a time calls it; `finish` or `fail` is the last call."""

    def room(self, start: int) -> Sequence[NDArray[np.uint8]]:
        """Memory for the bytes from `start` on, in order; empty if there is none now. Raises ArenaFull."""
        ...

    def verified(self, stop: int) -> None:
        """All bytes before `stop` are here, and verified."""
        ...

    def finish(self) -> None:
        """The object is complete. Raises ObjectLost if its request was released meanwhile."""
        ...

    def fail(self, error: Exception) -> None:
        """The session has failed: no more bytes come."""
        ...


class ArenaSink(Sink):
    """Copies the object into an arena and seals it there; `extent` is its place.

    `create` allocates the room (default: `arena.create`). One that `stays` keeps it when the session fails, for the
    next.
    """

    extent: Extent | None = None
    stays = False

    def __init__(
        self, arena: Arena | ArenaClient, ref: ObjectRef, create: Callable[[int, str], Extent] | None = None
    ) -> None:
        self._arena, self._ref, self._create = arena, ref, create or arena.create

    @override
    def room(self, start: int) -> Sequence[NDArray[np.uint8]]:
        if self.extent is None:
            self.extent = self._create(self._ref.nbytes, self._ref.request)
        return (self._arena.writable(self.extent)[start:],)

    @override
    def verified(self, stop: int) -> None:
        """Do nothing: the object is read only when it is whole."""

    @override
    def finish(self) -> None:
        assert self.extent
        try:
            self._arena.seal(self.extent.id)
        except ObjectLost:
            self.extent = None
            raise

    @override
    def fail(self, error: Exception) -> None:
        if self.extent and not self.stays:
            self._arena.abort(self.extent.id)
            self.extent = None


class Window(Sink):
    """A ring buffer for an object of any length. Iterating gives its bytes in pieces, each valid until the next one.

    `buffer` must have room for one chunk, because only verified bytes are given out; the caller may use it again when
    the iteration has ended. Iterating raises what the session failed with.
    """

    def __init__(self, buffer: NDArray[np.uint8], ref: ObjectRef) -> None:
        if buffer.nbytes < (needed := min(chunk_bytes(ref.nbytes), ref.nbytes)):
            raise ValueError(f"a window of {buffer.nbytes} bytes: {needed} are needed to verify what comes")
        self._buffer, self._nbytes = buffer, ref.nbytes
        self._taken = self._verified = 0
        self._error: Exception | None = None
        self._moved = Condition()

    @override
    def room(self, start: int) -> Sequence[NDArray[np.uint8]]:
        with self._moved:
            free, size = self._buffer.nbytes - (start - self._taken), self._buffer.nbytes
        if not size:
            return (self._buffer,)
        place = start % size
        return self._buffer[place : place + free], self._buffer[: max(0, place + free - size)]

    @override
    def verified(self, stop: int) -> None:
        with self._moved:
            self._verified = stop
            self._moved.notify_all()

    @override
    def finish(self) -> None:
        pass

    @override
    def fail(self, error: Exception) -> None:
        with self._moved:
            self._error = error
            self._moved.notify_all()

    def __iter__(self) -> Iterator[NDArray[np.uint8]]:
        while self._taken < self._nbytes:
            with self._moved:
                self._moved.wait_for(lambda: self._verified > self._taken or self._error)
            if self._verified == self._taken and self._error:
                raise self._error
            place = self._taken % self._buffer.nbytes
            piece = self._buffer[place : place + self._verified - self._taken]
            yield piece
            with self._moved:
                self._taken += piece.nbytes
