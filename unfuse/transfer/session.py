"""Transfer sessions: fetch whole, verified objects of other nodes, and continue after failures.

A session ends with success or one error. Each chunk is verified by its XXH3 checksum. After a broken link the session
continues behind the last verified chunk, after a pause (back-off) and with another engine.
"""

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

log = structlog.get_logger(__name__)


class TransferSink(Protocol):
    """The target of a session.

    One thread at a time calls it; the last call is `finish` or `fail`.
    """

    def buffers(self, start: int) -> Sequence[NDArray[np.uint8]]:
        """Return arrays for the bytes from `start` on, in order. Raises ArenaFull.

        Returns arrays without bytes if there is no room now.
        """
        ...

    def verified(self, stop: int) -> None:
        """Called when all bytes before `stop` are received and verified."""
        ...

    def finish(self) -> None:
        """Called when the object is complete. Raises ObjectLost if its request was released."""
        ...

    def fail(self, error: Exception) -> None:
        """Called when the session has failed. No more bytes follow."""
        ...


class ArenaSink(TransferSink):
    """Copies the object into an arena and seals it there.

    `create` allocates the extent; the default is `arena.create`.
    """

    #: The object's place in the arena. None before it is allocated.
    extent: Extent | None = None

    #: Whether the extent is kept when the session fails, for the next session.
    stays = False

    def __init__(
        self, arena: Arena | ArenaClient, ref: ObjectRef, create: Callable[[int, str], Extent] | None = None
    ) -> None:
        self._arena, self._ref = arena, ref
        self._create = create or arena.create

    @override
    def buffers(self, start: int) -> Sequence[NDArray[np.uint8]]:
        if self.extent is None:
            self.extent = self._create(self._ref.nbytes, self._ref.request)
        return (self._arena.writable(self.extent)[start:],)

    @override
    def verified(self, stop: int) -> None:
        """Do nothing: the object is read only after `finish`."""

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
    """A ring buffer for streaming an object of any length.

    Iterating over it yields the bytes. Each yielded array is valid until the next one. `buffer` must have room for one
    chunk, because only verified bytes are yielded. The caller may use it again when the iteration has ended. Iterating
    raises the session's error.
    """

    def __init__(self, buffer: NDArray[np.uint8], ref: ObjectRef) -> None:
        if buffer.nbytes < (needed := min(chunk_bytes(ref.nbytes), ref.nbytes)):
            raise ValueError(f"a buffer of {buffer.nbytes} bytes is too small: {needed} are needed to verify a chunk")
        self._buffer, self._nbytes = buffer, ref.nbytes
        self._consumed = self._verified = 0
        self._error: Exception | None = None
        self._moved = Condition()

    @override
    def buffers(self, start: int) -> Sequence[NDArray[np.uint8]]:
        with self._moved:
            free, size = self._buffer.nbytes - (start - self._consumed), self._buffer.nbytes
        if not size:
            return (self._buffer,)
        # Up to the end of the buffer, then from its beginning.
        offset = start % size
        return self._buffer[offset : offset + free], self._buffer[: max(0, offset + free - size)]

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
        while self._consumed < self._nbytes:
            with self._moved:
                self._moved.wait_for(lambda: self._verified > self._consumed or self._error)
            if self._verified == self._consumed and self._error:
                raise self._error
            start = self._consumed % self._buffer.nbytes
            piece = self._buffer[start : start + self._verified - self._consumed]  # up to the end of the buffer
            yield piece
            with self._moved:
                self._consumed += piece.nbytes


class TransferCounters:
    """Transfer statistics by engine, summed since the last `take_counts`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._moved: dict[str, TransferStats] = {}

    def add(self, engine: str, stats: TransferStats) -> None:
        """Add to the sums of an engine."""
        with self._lock:
            self._moved[engine] = self._moved.get(engine, TransferStats()) + stats

    def take_counts(self) -> dict[str, TransferStats]:
        """Return the sums and reset them."""
        with self._lock:
            sums, self._moved = self._moved, {}
            return sums

    def put_back(self, counts: Mapping[str, TransferStats]) -> None:
        """Add sums of `take_counts` again, because they could not be reported."""
        for engine, stats in counts.items():
            self.add(engine, stats)


State = Literal["bootstrapping", "waiting_for_input", "transferring", "success", "failed"]

#: Legal moves of a session: back to bootstrapping when a link breaks, to waiting when room or input runs out.
SESSION_MOVES: dict[State, frozenset[State]] = {
    "bootstrapping": frozenset({"waiting_for_input", "failed"}),
    "waiting_for_input": frozenset({"transferring", "bootstrapping", "failed"}),
    "transferring": frozenset({"waiting_for_input", "bootstrapping", "success", "failed"}),
    "success": frozenset(),
    "failed": frozenset(),
}

#: The first and the longest pause after a broken link, in seconds.
BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0

#: Most bytes of one pull, or one chunk if that is larger. Then the thread serves other sessions.
MAX_PULL = 64 * 1024 * 1024

#: Seconds between two checks of a session that waits for room, or for its object to be written.
RECHECK_S = 0.01

#: Returns the known engines of an owner with their addresses, as in {"tcp": "tcp://…"}.
Peers = Callable[[str], Mapping[str, str]]


class TransferSession:
    """One transfer of an object, run step by step.

    `sink_checksums` are those of the first chunks that an earlier transfer left in the sink, perhaps of another object.
    Chunks with equal checksums are not pulled again.
    """

    def __init__(
        self,
        ref: ObjectRef,
        sink: TransferSink,
        links: PeerLinks,
        options: TransferOptions,
        sink_checksums: tuple[int, ...] = (),
    ) -> None:
        self.id, self.ref = secrets.token_hex(8), ref

        #: Number of first bytes that are received and verified: whole chunks, or everything.
        self.good = 0

        self.state: State = "bootstrapping"

        #: Why the transfer failed. None if it did not.
        self.error: Exception | None = None

        #: Number of broken links so far.
        self.setbacks = 0

        #: Whether `cancel` was called.
        self.cancelled = False

        #: Done when the transfer has ended. The future itself cannot be cancelled.
        self.over: Future[None] = Future()
        self.over.set_running_or_notify_cancel()

        self._sink, self._links = sink, links
        self._options = options
        self._chunk, self._checksums = chunk_bytes(ref.nbytes), ref.checksums
        self._sink_checksums = sink_checksums
        self._failures = 0  # broken links since the last verified chunk
        self._stalled_since: float | None = None  # monotonic time, in seconds

    @property
    def verified(self) -> tuple[int, ...]:
        """The checksums of the chunks that are received and verified."""
        return self._checksums[: -(-self.good // self._chunk)]

    @property
    def is_complete(self) -> bool:
        """Whether all bytes are received and verified."""
        return self.good == self.ref.nbytes

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds. Returns whether the transfer has ended, with or without success."""
        return bool(wait([self.over], timeout).done)

    def result(self, timeout: float | None = None) -> None:
        """Wait until all bytes are received.

        Raises the transfer's error (ObjectLost, ArenaFull, …), or TimeoutError after `timeout` seconds.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"object {self.ref.id} did not arrive within {timeout} s")
        if self.error:
            raise self.error

    def cancel(self) -> None:
        """Make the transfer fail soon, unless it has ended."""
        self.cancelled = True

    def step(self) -> float | None:
        """Do one step.

        Returns the seconds until the next is due, or None at the end. Never raises.
        """
        try:
            self._check_wanted()
            return self._connect() if self.state == "bootstrapping" else self._fetch()
        except LinkBroken as error:
            return self._set_back(error)
        except ArenaFull as error:
            return self._wait_for_room(error)
        except Exception as error:  # the thread serves other sessions, too
            if not isinstance(error, UnfuseError):
                log.exception("a transfer failed with an unexpected error", object=self.ref.id)
            return self._end(error)

    def _connect(self) -> float:
        """Get a link to the owner."""
        if self.ref.nbytes < 0 or len(self._checksums) > -(-self.ref.nbytes // self._chunk):
            raise ObjectLost(f"object {self.ref.id} cannot be read: its ref is inconsistent", self.ref.id)
        self._engine, self._link = self._links.find(self.ref, self._failures)
        self._move("waiting_for_input")
        return 0

    def _fetch(self) -> float | None:
        """Pull the next chunks, as far as there is room and they are written."""
        pieces = self._free_memory()
        if not pieces:
            return RECHECK_S

        self._move("transferring")
        started_at, good_before = time.monotonic(), self.good
        try:
            self._pull(pieces)
        except LinkBroken:
            self._links.counters.add(self._engine, TransferStats(failures=1))
            raise
        finally:
            self._links.counters.add(
                self._engine, TransferStats(self.good - good_before, time.monotonic() - started_at)
            )

        if self.is_complete:
            self._sink.finish()
            return self._end(None)
        self._move("waiting_for_input")
        return 0

    def _pull(self, pieces: Iterable[NDArray[np.uint8]]) -> None:
        """Fill these arrays with the next bytes and verify them."""
        position, hasher = self.good, xxhash.xxh3_64()
        for piece in pieces:
            with closing(self._link.pull(self.ref, position, position + piece.nbytes, piece)) as pull:
                view, verified = piece.data, 0
                for filled in pull:
                    self._verify(hasher, position + verified, view[verified:filled])
                    self._check_wanted()
                    verified = filled
            position += piece.nbytes

    def _free_memory(self) -> list[NDArray[np.uint8]]:
        """Return memory for the bytes that can be pulled now: whole chunks with known checksums."""
        readable = self._readable_bytes()
        self._skip_stored_chunks(readable)
        buffers = self._sink.buffers(self.good)
        budget = min(sum(buffer.nbytes for buffer in buffers), max(MAX_PULL, self._chunk))
        stop = min(self.good + budget, readable)
        if stop < self.ref.nbytes:
            stop -= stop % self._chunk
        if stop <= self.good < self.ref.nbytes:
            return []

        pieces, remaining = [], stop - self.good
        for buffer in buffers:
            pieces.append(buffer[:remaining])
            remaining -= pieces[-1].nbytes
        # Without bytes to pull, one empty pull still asks the owner whether the object can be read.
        return [piece for piece in pieces if piece.nbytes] or pieces[:1]

    def _skip_stored_chunks(self, readable: int) -> None:
        """Skip chunks that an earlier transfer left in the sink."""
        while self.good < readable:
            index = self.good // self._chunk
            if index >= len(self._sink_checksums) or self._sink_checksums[index] != self._checksums[index]:
                # The next pull overwrites the sink's bytes from here on.
                self._sink_checksums = ()
                return
            self.good = min(self.good + self._chunk, self.ref.nbytes)
            self._sink.verified(self.good)

    def _readable_bytes(self) -> int:
        """Return the number of bytes that can be pulled: all, or those written so far."""
        if len(self._checksums) * self._chunk < self.ref.nbytes:
            checksums, is_whole = self._link.written(self.ref, len(self._checksums), RECHECK_S)
            known = len(self._checksums)
            if checksums[:known] != self._checksums or (is_whole and len(checksums) * self._chunk < self.ref.nbytes):
                raise ObjectLost(f"object {self.ref.id} does not match the announced one", self.ref.id)
            self._checksums = checksums
        return min(len(self._checksums) * self._chunk, self.ref.nbytes)

    def _verify(self, hasher: xxhash.xxh3_64, position: int, data: memoryview) -> None:
        """Hash the bytes from `position` on. Each complete chunk advances `good`.

        Raises LinkBroken for a damaged chunk.
        """
        while data:
            end = min(self.good + self._chunk, self.ref.nbytes)
            part, data = data[: end - position], data[end - position :]
            hasher.update(part)
            position += len(part)
            if position == end:
                if hasher.intdigest() != self._checksums[self.good // self._chunk]:
                    raise LinkBroken(f"its bytes {self.good} to {end} are damaged")
                hasher.reset()
                self.good = end
                self._failures, self._stalled_since = 0, None
                self._sink.verified(end)

    def _set_back(self, error: LinkBroken) -> float | None:
        """Handle a broken link: pause before the next try, or end the session (retry policy)."""
        self._failures += 1
        self.setbacks += 1
        if self._failures >= self._options.attempts or self._is_stalled():
            message = f"object {self.ref.id} cannot be fetched from its owner {self.ref.owner}: {error}"
            return self._end(ObjectLost(message, self.ref.id))
        if self.state != "bootstrapping":
            self._move("bootstrapping")
        # Random, so that the sessions of a failed owner do not all try again at one time.
        return min(BACKOFF_S * 2.0 ** (self._failures - 1), MAX_BACKOFF_S) * random.uniform(0.5, 1)

    def _wait_for_room(self, error: ArenaFull) -> float | None:
        """Wait for room in the sink, or end the session."""
        if self._is_stalled():
            return self._end(error)
        if self.state != "waiting_for_input":
            self._move("waiting_for_input")
        return RECHECK_S

    def _is_stalled(self) -> bool:
        """Whether no chunk was verified for `bootstrap_s` seconds."""
        now = time.monotonic()
        if self._stalled_since is None:
            self._stalled_since = now
        return now - self._stalled_since > self._options.bootstrap_s

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
    """The links to peers, shared by sessions.

    Links are pinged (heartbeat), and dropped if their owner does not answer.
    """

    def __init__(self, engines: Mapping[str, TransferEngine], peers: Peers, options: TransferOptions) -> None:
        self._engines, self._peers = engines, peers
        self._options = options
        self.counters = TransferCounters()
        self._links: dict[tuple[str, str], PeerLink] = {}
        self._missed: Counter[tuple[str, str]] = Counter()
        self._pinged: dict[tuple[str, str], Thread] = {}
        self._lock = Lock()
        self._stop = Event()
        self._thread = Thread(target=self._ping_all, name="transfer-heartbeat", daemon=True)
        self._thread.start()

    def find(self, ref: ObjectRef, failures: int) -> tuple[str, PeerLink]:
        """Return a link to the owner of an object, with the name of its engine.

        The engine is the best one that both have; after failures, the next one. A new link, or one after a failure,
        is pinged first. Raises ObjectLost if there is no way to the owner, and LinkBroken if it does not answer.
        """
        addresses = self._peers(ref.owner)
        names = agree(self._engines, addresses)
        if not names:
            reason = f"its owner {ref.owner} is unknown, or has none of the transfer engines of this worker"
            raise ObjectLost(f"object {ref.id} cannot be reached: {reason} ({', '.join(self._engines)})", ref.id)
        name = names[failures % len(names)]
        key = name, addresses[name]
        with self._lock:
            link = self._links.get(key)
            if link and not failures:
                return name, link
            link = self._links[key] = link or self._engines[name].connect(addresses[name])
        # Without the lock, because a silent owner takes long and must not delay the links to others.
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
        # The running pings fail now, because their links are closed.
        for thread in self._pinged.values():
            thread.join()

    def _ping_all(self) -> None:
        """Ping all links, each in its own thread: a silent owner takes long."""
        while not self._stop.wait(self._options.heartbeat_s):
            self._pinged = {key: thread for key, thread in self._pinged.items() if thread.is_alive()}
            for key, link in list(self._links.items()):
                if key not in self._pinged:
                    thread = Thread(target=self._ping, args=(key, link), name="transfer-ping", daemon=True)
                    self._pinged[key] = thread
                    thread.start()

    def _ping(self, key: tuple[str, str], link: PeerLink) -> None:
        """Ping a link, and drop it after too many missed answers."""
        try:
            link.ping()
            self._missed.pop(key, None)
        except LinkBroken:
            if self._links.get(key) is link:  # otherwise a newer link replaced it
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
    """Fetches objects of other nodes, each in a session.

    Up to `threads` threads for each owner run the sessions. A session that waits (for room, for its object to be
    written, or after a failure) delays no other one. A silent or slow owner delays no session of another owner.
    """

    def __init__(self, engines: Mapping[str, TransferEngine], peers: Peers, options: TransferOptions) -> None:
        self._options = options
        self._links = PeerLinks(engines, peers, options)
        #: The statistics of each engine.
        self.counters = self._links.counters
        self._threads = SessionThreads(options.threads)

    def fetch(self, ref: ObjectRef, sink: TransferSink, sink_checksums: tuple[int, ...] = ()) -> TransferSession:
        """Start to fetch an object into `sink`. Returns the session.

        `sink_checksums` are those of the first chunks that the sink has already. Chunks of the object with the same
        checksums are not fetched.
        """
        session = TransferSession(ref, sink, self._links, self._options, sink_checksums)
        self._threads.add(ref.owner, session)
        return session

    def close(self) -> None:
        """End every session and close all links."""
        self._threads.stop()
        self._links.close()  # running pulls fail, so that their threads end soon
        self._threads.join()
