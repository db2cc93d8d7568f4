"""Transfers: fetch objects of other nodes, whole and verified, over failures on the way; or end with one error."""

from __future__ import annotations

import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, suppress
from threading import Condition, Event, Lock, Thread
from typing import Literal, Protocol

import numpy as np
import structlog
import xxhash
from numpy.typing import NDArray
from typing_extensions import override

from unfuse.arena.arena import Arena
from unfuse.arena.client import ArenaClient
from unfuse.arena.objects import Extent
from unfuse.core.errors import ArenaFull, IllegalMove, ObjectLost, TransientError, UnfuseError
from unfuse.core.messages import TransferStats
from unfuse.core.object_ref import ObjectRef, chunk_bytes
from unfuse.transfer import agree
from unfuse.transfer.base import LinkBroken, PeerLink, TransferEngine, TransferOptions
from unfuse.transfer.movers import SessionThreads


class TransferSink(Protocol):
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


class ArenaSink(TransferSink):
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


class RingBuffer(TransferSink):
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


class TransferCounters:
    """Sums since the last `take`, by engine. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._moved: dict[str, TransferStats] = {}

    def add(self, engine: str, moved: TransferStats) -> None:
        """Add to the sums of an engine."""
        with self._lock:
            self._moved[engine] = self._moved.get(engine, TransferStats()) + moved

    def take(self) -> dict[str, TransferStats]:
        """Return the sums, and reset them."""
        with self._lock:
            taken, self._moved = self._moved, {}
            return taken

    def put_back(self, taken: Mapping[str, TransferStats]) -> None:
        """Add sums that were taken and could not be reported."""
        for engine, moved in taken.items():
            self.add(engine, moved)


State = Literal["bootstrapping", "waiting_for_input", "transferring", "success", "failed"]

SESSION_MOVES: dict[State, frozenset[State]] = {
    "bootstrapping": frozenset({"waiting_for_input", "failed"}),
    "waiting_for_input": frozenset({"transferring", "bootstrapping", "failed"}),
    "transferring": frozenset({"waiting_for_input", "bootstrapping", "success", "failed"}),
    "success": frozenset(),
    "failed": frozenset(),
}
"""Legal moves of a session: back to bootstrapping when a link breaks, to waiting when room or input runs out."""

BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
MAX_PULL = 64 * 1024 * 1024  # the most bytes of one pull (or one larger chunk); then the thread serves other sessions
LOOK_AGAIN_S = 0.01  # seconds between two looks of a session that waits for room, or for its object to be written

Peers = Callable[[str], Mapping[str, str]]
"""Returns an owner's engines with their addresses, {"tcp": "tcp://…"}, as far as they are known now."""

log = structlog.get_logger(__name__)


class TransferSession:
    """One transfer. The first `good` bytes are here and verified: whole chunks, or everything.
    `cancelled` says whether `cancel` was called.

    `kept` are checksums of the first chunks that an earlier transfer has left in the sink, perhaps of another object:
    those that are equal are not pulled again.
    """

    def __init__(
        self,
        ref: ObjectRef,
        sink: TransferSink,
        links: PeerLinks,
        options: TransferOptions,
        kept: tuple[int, ...] = (),
    ) -> None:
        self.id, self.ref, self.good = secrets.token_hex(8), ref, 0
        self.state: State = "bootstrapping"
        self.error: Exception | None = None
        self.setbacks = 0
        self._sink, self._links, self._options = sink, links, options
        self._chunk, self._checksums = chunk_bytes(ref.nbytes), ref.checksums
        self._kept = kept
        self._failures = 0
        self._trouble_since: float | None = None
        self.cancelled = False
        self.over: Future[None] = Future()  # done when the transfer has ended; it cannot be cancelled
        self.over.set_running_or_notify_cancel()

    @property
    def verified(self) -> tuple[int, ...]:
        """The checksums of the chunks that are here."""
        return self._checksums[: -(-self.good // self._chunk)]

    @property
    def whole(self) -> bool:
        """Whether all bytes are here."""
        return self.good == self.ref.nbytes

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds. Returns whether the transfer has ended, with success or not."""
        return bool(wait([self.over], timeout).done)

    def result(self, timeout: float | None = None) -> None:
        """Wait until everything is here. Raises the transfer's error (ObjectLost, ArenaFull, …), or TimeoutError."""
        if not self.wait(timeout):
            raise TimeoutError(f"object {self.ref.id} is not here after {timeout} s")
        if self.error:
            raise self.error

    def cancel(self) -> None:
        """Make the transfer fail soon, unless it has ended."""
        self.cancelled = True

    def step(self) -> float | None:
        """Do a piece of work. Returns the seconds until the next step is due, None at the end. Never raises."""
        try:
            self._check_wanted()
            return self._connect() if self.state == "bootstrapping" else self._fetch()
        except LinkBroken as error:
            return self._set_back(error)
        except ArenaFull as error:
            return self._wait_for_room(error)
        except Exception as error:  # a session that fails must not end the thread
            if not isinstance(error, UnfuseError):
                log.exception("a transfer failed because of a defect", object=self.ref.id)
            return self._end(error)

    def _connect(self) -> float:
        if self.ref.nbytes < 0 or len(self._checksums) > -(-self.ref.nbytes // self._chunk):
            raise ObjectLost(f"object {self.ref.id} cannot be read: its ref contradicts itself", self.ref.id)
        self._engine, self._link = self._links.find(self.ref, self._failures)
        self._move("waiting_for_input")
        return 0

    def _fetch(self) -> float | None:
        pieces = self._room()
        if not pieces:
            return LOOK_AGAIN_S
        self._move("transferring")
        began, good = time.monotonic(), self.good
        try:
            self._pull(pieces)
        except LinkBroken:
            self._links.counters.add(self._engine, TransferStats(failures=1))
            raise
        finally:
            self._links.counters.add(self._engine, TransferStats(self.good - good, time.monotonic() - began))
        if self.whole:
            self._sink.finish()
            return self._end(None)
        self._move("waiting_for_input")
        return 0

    def _pull(self, pieces: Iterable[NDArray[np.uint8]]) -> None:
        """Fill these arrays with the next bytes, and verify them."""
        at, hasher = self.good, xxhash.xxh3_64()
        for piece in pieces:
            with closing(self._link.pull(self.ref, at, at + piece.nbytes, piece)) as pull:
                view, before = piece.data, 0
                for filled in pull:
                    self._verify(hasher, at + before, view[before:filled])
                    self._check_wanted()
                    before = filled
            at += piece.nbytes

    def _room(self) -> list[NDArray[np.uint8]]:
        """Memory for what can be pulled now: whole chunks whose checksums are known, as far as there is room."""
        written = self._written()
        self._skip_kept(written)
        room = self._sink.room(self.good)
        most = min(sum(piece.nbytes for piece in room), max(MAX_PULL, self._chunk))
        stop = min(self.good + most, written)
        if stop < self.ref.nbytes:
            stop -= stop % self._chunk
        if stop <= self.good < self.ref.nbytes:
            return []
        pieces, left = [], stop - self.good
        for piece in room:
            pieces.append(piece[:left])
            left -= pieces[-1].nbytes
        return [piece for piece in pieces if piece.nbytes] or pieces[:1]

    def _skip_kept(self, written: int) -> None:
        """Go on behind chunks that are there from an earlier transfer."""
        while self.good < written:
            at = self.good // self._chunk
            if at >= len(self._kept) or self._kept[at] != self._checksums[at]:
                self._kept = ()
                return
            self.good = min(self.good + self._chunk, self.ref.nbytes)
            self._sink.verified(self.good)

    def _written(self) -> int:
        """How many bytes can be pulled: all, or what is written so far of an announced object."""
        if len(self._checksums) * self._chunk < self.ref.nbytes:
            checksums, whole = self._link.written(self.ref, len(self._checksums), LOOK_AGAIN_S)
            known = len(self._checksums)
            if checksums[:known] != self._checksums or (whole and len(checksums) * self._chunk < self.ref.nbytes):
                raise ObjectLost(f"object {self.ref.id} is not the one that was announced", self.ref.id)
            self._checksums = checksums
        return min(len(self._checksums) * self._chunk, self.ref.nbytes)

    def _verify(self, hasher: xxhash.xxh3_64, at: int, data: memoryview) -> None:
        """Hash the bytes from `at` on. Each complete chunk advances `good`. Raises LinkBroken for a damaged one."""
        while data:
            end = min(self.good + self._chunk, self.ref.nbytes)
            part, data = data[: end - at], data[end - at :]
            hasher.update(part)
            at += len(part)
            if at == end:
                if hasher.intdigest() != self._checksums[self.good // self._chunk]:
                    raise LinkBroken(f"its bytes {self.good} to {end} are damaged")
                hasher.reset()
                self.good, self._failures, self._trouble_since = end, 0, None
                self._sink.verified(end)

    def _set_back(self, error: LinkBroken) -> float | None:
        self._failures += 1
        self.setbacks += 1
        if self._failures >= self._options.attempts or self._in_trouble():
            text = f"object {self.ref.id} cannot be fetched from its owner {self.ref.owner}: {error}"
            return self._end(ObjectLost(text, self.ref.id))
        if self.state != "bootstrapping":
            self._move("bootstrapping")
        return min(BACKOFF_S * 2.0 ** (self._failures - 1), MAX_BACKOFF_S) * random.uniform(0.5, 1)

    def _wait_for_room(self, error: ArenaFull) -> float | None:
        if self._in_trouble():
            return self._end(error)
        if self.state != "waiting_for_input":
            self._move("waiting_for_input")
        return LOOK_AGAIN_S

    def _in_trouble(self) -> bool:
        """Whether no chunk has come for `bootstrap_s`."""
        now = time.monotonic()
        if self._trouble_since is None:
            self._trouble_since = now
        return now - self._trouble_since > self._options.bootstrap_s

    def _check_wanted(self) -> None:
        if self.cancelled:
            raise TransientError(f"the transfer of object {self.ref.id} was cancelled")

    def _move(self, state: State) -> None:
        if state not in SESSION_MOVES[self.state]:
            raise IllegalMove(f"a transfer that is {self.state} cannot become {state}")
        self.state = state

    def _end(self, error: Exception | None) -> None | float:
        if error:
            with suppress(UnfuseError):
                self._sink.fail(error)
        self.error = error
        self._move("failed" if error else "success")
        if error:
            self.over.set_exception(error)
        else:
            self.over.set_result(None)
        return None


class PeerLinks:
    """The links to peers, which sessions share. Links are pinged, and dropped if their owner does not answer."""

    def __init__(self, engines: Mapping[str, TransferEngine], peers: Peers, options: TransferOptions) -> None:
        self._engines, self._peers, self._options = engines, peers, options
        self.counters = TransferCounters()
        self._links: dict[tuple[str, str], PeerLink] = {}
        self._missed: Counter[tuple[str, str]] = Counter()
        self._pinged: dict[tuple[str, str], Thread] = {}
        self._lock = Lock()
        self._stop = Event()
        self._thread = Thread(target=self._beat, name="transfer-heartbeat", daemon=True)
        self._thread.start()

    def find(self, ref: ObjectRef, failures: int) -> tuple[str, PeerLink]:
        """A link to the owner of an object, by the best engine that both have; after failures, by the next one.

        A new link, or one after a failure, is pinged first. Raises ObjectLost if there is no way to the owner,
        LinkBroken if it does not answer.
        """
        addresses = self._peers(ref.owner)
        names = agree(self._engines, addresses)
        if not names:
            text = f"its owner {ref.owner} is not known here, or has none of our transfer engines"
            raise ObjectLost(f"object {ref.id} cannot be reached: {text} ({', '.join(self._engines)})", ref.id)
        name = names[failures % len(names)]
        key = name, addresses[name]
        with self._lock:
            link = self._links.get(key)
            if link and not failures:
                return name, link
            link = self._links[key] = link or self._engines[name].connect(addresses[name])
        try:
            link.ping()
        except LinkBroken:
            self.counters.add(name, TransferStats(failures=1))
            raise
        return name, link

    def close(self) -> None:
        """Close all links."""
        self._stop.set()
        self._thread.join()
        for key in list(self._links):
            self._drop(key)
        for thread in self._pinged.values():
            thread.join()

    def _beat(self) -> None:
        """Ping all links, each in a thread of its own, because a silent owner takes long."""
        while not self._stop.wait(self._options.heartbeat_s):
            self._pinged = {key: thread for key, thread in self._pinged.items() if thread.is_alive()}
            for key, link in list(self._links.items()):
                if key not in self._pinged:
                    thread = Thread(target=self._ping, args=(key, link), name="transfer-ping", daemon=True)
                    self._pinged[key] = thread
                    thread.start()

    def _ping(self, key: tuple[str, str], link: PeerLink) -> None:
        try:
            link.ping()
            self._missed.pop(key, None)
        except LinkBroken:
            if self._links.get(key) is link:
                self._missed[key] += 1
        if self._missed[key] >= self._options.max_missed:
            self._drop(key)

    def _drop(self, key: tuple[str, str]) -> None:
        with self._lock:
            link = self._links.pop(key, None)
            self._missed.pop(key, None)
        if link:
            link.close()


class Transfers:
    """Fetches objects of other nodes, each in a session; up to `threads` threads for each owner run the sessions.

    A session that waits (for room, for its object to be written, or after a failure) holds up no other one. A silent or
    slow owner holds up no session of another owner.
    """

    def __init__(self, engines: Mapping[str, TransferEngine], peers: Peers, options: TransferOptions) -> None:
        self._options = options
        self._links = PeerLinks(engines, peers, options)
        self.counters = self._links.counters  # how much each engine has brought
        self._movers = SessionThreads(options.threads)

    def fetch(self, ref: ObjectRef, sink: TransferSink, kept: tuple[int, ...] = ()) -> TransferSession:
        """Begin to fetch an object into `sink`.

        The sink has chunks with the checksums `kept` already; those that the object has too are not fetched again.
        """
        session = TransferSession(ref, sink, self._links, self._options, kept)
        self._movers.add(ref.owner, session)
        return session

    def close(self) -> None:
        """End every session, and close all links."""
        self._movers.stop()
        self._links.close()
        self._movers.join()
