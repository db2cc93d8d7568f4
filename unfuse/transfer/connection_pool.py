"""Links that are a few connections, each used by one pull at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import BoundedSemaphore, Lock
from typing import Generic, Protocol, TypeVar

from typing_extensions import override

from unfuse.core.errors import ArenaFull, ObjectLost, ProtocolError
from unfuse.core.object_ref import ObjectRef
from unfuse.transfer.base import Link, LinkBroken, TransferOptions
from unfuse.transfer.owner_messages import FromOwner, Ping, Pong, ToOwner, Watch, Written

Reply = TypeVar("Reply", bound=FromOwner)


class OwnerConnection(Protocol):
    """One connection to an owner. What goes wrong is one of its link's `errors`."""

    def ask(self, message: ToOwner, kind: type[Reply], id: str = "") -> Reply:
        """The answer to a question about object `id`. Raises ObjectLost or ArenaFull when the owner says so."""
        ...

    def is_alive(self) -> bool:
        """Whether it is worth using again, as far as can be seen without asking."""
        ...

    def interrupt(self) -> None:
        """Have what another thread waits for here fail soon."""
        ...

    def close(self) -> None:
        """End it."""
        ...


C = TypeVar("C", bound=OwnerConnection)


class PooledLink(Link, Generic[C]):
    """At most `queues` connections to one owner, opened when they are needed and kept while they work."""

    errors: tuple[type[Exception], ...] = (OSError, ProtocolError)

    def __init__(self, open: Callable[[], C], address: str, options: TransferOptions) -> None:
        self._open, self._address, self._queues = open, address, options.queues
        self._room = BoundedSemaphore(options.queues)
        self._lock = Lock()
        self._idle: list[C] = []
        self._busy: set[C] = set()
        self._closed = False

    @contextmanager
    def one(self) -> Iterator[C]:
        """A connection of one's own; it is not used again unless the body ends well, or with what the owner said."""
        with self._room:
            try:
                connection = self._take()
                well = False
                try:
                    yield connection
                    well = True
                except (ObjectLost, ArenaFull):
                    well = True
                    raise
                finally:
                    self._leave(connection, well)
            except self.errors as error:
                raise LinkBroken(f"the owner at {self._address} is not reached: {error}") from error

    @override
    def written(self, ref: ObjectRef, known: int, wait: float) -> tuple[tuple[int, ...], bool]:
        with self.one() as connection:
            answer = connection.ask(Watch(ref.id, ref.key, ref.generation, ref.nbytes, known, wait), Written, ref.id)
        return answer.checksums, answer.whole

    @override
    def ping(self) -> None:
        if len(self._busy) < self._queues:
            with self.one() as connection:
                connection.ask(Ping(), Pong)

    @override
    def close(self) -> None:
        with self._lock:
            self._closed = True
            for connection in self._busy:
                connection.interrupt()
            while self._idle:
                self._idle.pop().close()

    def _take(self) -> C:
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("it is given up")
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

    def _leave(self, connection: C, well: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if well and not self._closed:
                self._idle.append(connection)
            else:
                connection.close()
