"""Links made of a few connections, each used by one pull at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import BoundedSemaphore, Lock
from typing import Generic, Protocol, TypeVar

from typing_extensions import override

from unfuse.arena.protocol import Written
from unfuse.core.errors import ArenaFull, ObjectLost, ProtocolError
from unfuse.core.object_ref import ObjectRef
from unfuse.transfer.base import LinkBroken, PeerLink, TransferOptions
from unfuse.transfer.owner_messages import FromOwner, Ping, Pong, ToOwner, Watch

Reply = TypeVar("Reply", bound=FromOwner)


class OwnerConnection(Protocol):
    """One connection to an owner. Its failures are the `errors` of its link."""

    def ask(self, message: ToOwner, kind: type[Reply], id: str = "") -> Reply:
        """Send a message about object `id`; returns the answer. Raises ObjectLost or ArenaFull if the owner says so."""
        ...

    def is_alive(self) -> bool:
        """Whether it can be used again, as far as can be seen without asking the owner."""
        ...

    def interrupt(self) -> None:
        """Make calls of other threads that wait here fail soon."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...


C = TypeVar("C", bound=OwnerConnection)


class PooledLink(PeerLink, Generic[C]):
    """At most `queues` connections to one owner; they are opened when they are needed, and kept while they work."""

    errors: tuple[type[Exception], ...] = (OSError, ProtocolError)

    def __init__(self, open: Callable[[], C], address: str, options: TransferOptions) -> None:
        self._open, self._address, self._queues = open, address, options.queues
        self._room = BoundedSemaphore(options.queues)
        self._lock = Lock()
        self._idle: list[C] = []
        self._busy: set[C] = set()
        self._closed = False

    @contextmanager
    def connection(self) -> Iterator[C]:
        """A context with a connection. It is used again if the body succeeds, or raises the owner's answer."""
        with self._room:
            try:
                connection = self._borrow()
                reusable = False
                try:
                    yield connection
                    reusable = True
                except (ObjectLost, ArenaFull):
                    reusable = True
                    raise
                finally:
                    self._return(connection, reusable)
            except self.errors as error:
                raise LinkBroken(f"the owner at {self._address} is not reached: {error}") from error

    @override
    def written(self, ref: ObjectRef, known: int, wait: float) -> tuple[tuple[int, ...], bool]:
        with self.connection() as connection:
            answer = connection.ask(Watch(ref.id, ref.key, ref.generation, ref.nbytes, known, wait), Written, ref.id)
        return answer.checksums, answer.whole

    @override
    def ping(self) -> None:
        if len(self._busy) < self._queues:
            with self.connection() as connection:
                connection.ask(Ping(), Pong)

    @override
    def close(self) -> None:
        with self._lock:
            self._closed = True
            for connection in self._busy:
                connection.interrupt()
            while self._idle:
                self._idle.pop().close()

    def _borrow(self) -> C:
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("the link is closed")
            while self._idle:
                connection = self._idle.pop()
                if connection.is_alive():
                    self._busy.add(connection)
                    return connection
                connection.close()
        connection = self._open()
        with self._lock:
            self._busy.add(connection)
        return connection

    def _return(self, connection: C, reusable: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if reusable and not self._closed:
                self._idle.append(connection)
            else:
                connection.close()
