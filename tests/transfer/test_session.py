"""Sessions: from the last good chunk, over another connection, a restarted owner or another engine; or one error."""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.transfer.conftest import OPTIONS, SECRET, ChildOwner
from unfuse.arena.arena import Arena
from unfuse.arena.objects import Extent
from unfuse.core.errors import ArenaFull, IllegalMove, ObjectLost, TransientError
from unfuse.core.object_ref import CHUNK_BYTES, ObjectRef
from unfuse.stores.base import checksums_of
from unfuse.testing.fake_transfer import FakeEngine, FakeLink
from unfuse.testing.transfer_owner import ArenaOwner, pattern, soon
from unfuse.transfer import agree, open_engine
from unfuse.transfer.base import LinkBroken, PeerLink, TransferEngine, TransferOptions
from unfuse.transfer.session import SESSION_MOVES, ArenaSink, RingBuffer, Transfers, TransferSession

QUICK = TransferOptions(secret=SECRET, threads=1, heartbeat_s=0.2, bootstrap_s=60, attempts=4)


class Recording(FakeEngine):
    """Notes which ranges were pulled, and breaks the pulls whose numbers are in `breaks` after so many bytes."""

    def __init__(self, options: TransferOptions = QUICK, breaks: Mapping[int, int] | None = None) -> None:
        super().__init__(options)
        self.pulled: list[tuple[int, int]] = []
        self.breaks = breaks or {}

    def connect(self, address: str) -> PeerLink:
        return RecordingLink(address, self)


class RecordingLink(FakeLink):
    def __init__(self, address: str, engine: Recording) -> None:
        super().__init__(address)
        self._engine = engine

    def pull(self, ref: ObjectRef, start: int, stop: int, into: NDArray[np.uint8]) -> Generator[int, None, None]:
        end = self._engine.breaks.get(len(self._engine.pulled))
        self._engine.pulled.append((start, stop))
        with closing(super().pull(ref, start, stop, into)) as numbers:
            for filled in numbers:
                if end is not None and filled > end:
                    raise LinkBroken("broken for the test")
                yield filled


class Counting(RingBuffer):
    """Also notes how far it was verified."""

    def __init__(self, buffer: NDArray[np.uint8], ref: ObjectRef) -> None:
        super().__init__(buffer, ref)
        self.marks: list[int] = []

    def verified(self, stop: int) -> None:
        self.marks.append(stop)
        super().verified(stop)


@pytest.fixture
def owner() -> Iterator[ArenaOwner]:
    owner = ArenaOwner(lambda: FakeEngine(QUICK))
    yield owner
    owner.stop()
    owner.arena.close()


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(64 << 20)
    yield arena
    arena.close()


@contextmanager
def transfers(
    engines: Mapping[str, TransferEngine], peers: Callable[[str], Mapping[str, str]], options: TransferOptions = QUICK
) -> Iterator[Transfers]:
    opened = Transfers(engines, peers, options)
    yield opened
    opened.close()


def here(arena: Arena, sink: ArenaSink) -> NDArray[np.uint8]:
    extent = sink.extent
    assert extent
    arena.hold(extent.id, extent.key, extent.generation, extent.nbytes)
    arena.unhold(extent.id)
    return arena.view[extent.offset : extent.offset + extent.nbytes]


def test_verified_chunks_are_not_pulled_again_after_a_broken_link(owner: ArenaOwner, arena: Arena) -> None:
    address, ref = owner.start(), owner.put(1, 4 * CHUNK_BYTES)
    engine = Recording(breaks={0: CHUNK_BYTES * 5 // 2, 1: 10})
    with transfers({"fake": engine}, lambda _: {"fake": address}) as fetching:
        session = fetching.fetch(ref, sink := ArenaSink(arena, ref))
        session.result(60)
    assert [start for start, _ in engine.pulled] == [0, 2 * CHUNK_BYTES, 2 * CHUNK_BYTES]
    assert session.setbacks == 2 and session.state == "success"
    assert (here(arena, sink) == pattern(1, ref.nbytes)).all()


def test_transfer_resumes_from_the_last_verified_chunk_after_owner_restart(owner: ArenaOwner, arena: Arena) -> None:
    addresses = [owner.start()]
    ref = owner.put(2, 4 * CHUNK_BYTES)
    engine = Recording()
    with transfers({"fake": engine}, lambda _: {"fake": addresses[-1]}) as fetching:
        buffer = np.empty(CHUNK_BYTES, np.uint8)
        fetching.fetch(ref, window := RingBuffer(buffer, ref))
        pieces = iter(window)
        got = [bytes(next(pieces))]
        owner.stop()
        addresses.append(owner.start())
        got += map(bytes, pieces)
    assert b"".join(got) == bytes(pattern(2, ref.nbytes))
    assert [start for start, _ in engine.pulled].count(0) == 1


def test_fallback_engine_pulls_only_the_missing_chunks(owner: ArenaOwner, arena: Arena) -> None:
    address, ref = owner.start(), owner.put(3, 3 * CHUNK_BYTES)
    best, other = Recording(breaks={0: CHUNK_BYTES + 5}), Recording()
    with transfers({"tcp": best, "zmq": other}, lambda _: {"tcp": address, "zmq": address}) as fetching:
        fetching.fetch(ref, sink := ArenaSink(arena, ref)).result(60)
    assert best.pulled == [(0, ref.nbytes), (CHUNK_BYTES, ref.nbytes)][:1]
    assert other.pulled == [(CHUNK_BYTES, ref.nbytes)]
    assert (here(arena, sink) == pattern(3, ref.nbytes)).all()


def test_damaged_object_raises_object_lost_and_frees_its_memory(owner: ArenaOwner, arena: Arena) -> None:
    address, ref = owner.start(), owner.put(4, 2 * CHUNK_BYTES)
    extent = owner._extents[ref.id][0]
    owner.arena.memory[extent.offset + CHUNK_BYTES + 9] ^= 4
    with transfers({"fake": FakeEngine(QUICK)}, lambda _: {"fake": address}) as fetching:
        session = fetching.fetch(ref, sink := ArenaSink(arena, ref))
        with pytest.raises(ObjectLost, match="damaged") as lost:
            session.result(60)
    assert lost.value.object_id == ref.id and session.good == CHUNK_BYTES and session.state == "failed"
    assert sink.extent is None and arena.usage().used == 0


def test_pull_from_a_stopped_owner_raises_object_lost(owner: ArenaOwner, arena: Arena) -> None:
    address, ref = owner.start(), owner.put(5, 100)
    owner.stop()
    with (
        transfers({"fake": FakeEngine(QUICK)}, lambda _: {"fake": address}) as fetching,
        pytest.raises(ObjectLost, match="cannot be fetched from its owner"),
    ):
        fetching.fetch(ref, ArenaSink(arena, ref)).result(60)
    assert arena.usage().used == 0


def test_owner_without_a_common_engine_raises_object_lost(arena: Arena, owner: ArenaOwner) -> None:
    ref = owner.put(5, 100)
    with (
        transfers({"fake": FakeEngine(QUICK)}, lambda _: {"tcp": "tcp://127.0.0.1:1"}) as fetching,
        pytest.raises(ObjectLost, match="none of the transfer engines of this worker"),
    ):
        fetching.fetch(ref, ArenaSink(arena, ref)).result(60)


@pytest.mark.parametrize("change", [{"nbytes": -5}, {"checksums": (1, 2, 3)}])
def test_inconsistent_ref_raises_object_lost_and_allocates_no_memory(
    owner: ArenaOwner, arena: Arena, change: dict[str, object]
) -> None:
    address = owner.start()
    ref = msgspec.structs.replace(owner.put(5, 100), **change)
    with (
        transfers({"fake": FakeEngine(QUICK)}, lambda _: {"fake": address}) as fetching,
        pytest.raises(ObjectLost, match="is inconsistent"),
    ):
        fetching.fetch(ref, ArenaSink(arena, ref)).result(60)
    assert arena.usage().high_water == 0


def test_transfer_waits_for_space_in_a_full_arena(owner: ArenaOwner, arena: Arena) -> None:
    address, ref = owner.start(), owner.put(6, CHUNK_BYTES)
    blocker = arena.create(63 << 20, "r")
    with transfers({"fake": FakeEngine(QUICK)}, lambda _: {"fake": address}) as fetching:
        session = fetching.fetch(ref, sink := ArenaSink(arena, ref))
        soon(lambda: session.state == "waiting_for_input", "it does not wait")
        assert not session.wait(0.1)
        arena.abort(blocker.id)
        session.result(60)
    assert (here(arena, sink) == pattern(6, ref.nbytes)).all()


def test_transfer_into_an_arena_that_stays_full_raises_arena_full(owner: ArenaOwner, arena: Arena) -> None:
    address, ref = owner.start(), owner.put(6, CHUNK_BYTES)
    arena.create(63 << 20, "r")
    options = msgspec.structs.replace(QUICK, bootstrap_s=0.1)
    with (
        transfers({"fake": FakeEngine(options)}, lambda _: {"fake": address}, options) as fetching,
        pytest.raises(ArenaFull),
    ):
        fetching.fetch(ref, ArenaSink(arena, ref)).result(60)


def test_waiting_sessions_do_not_block_other_sessions(owner: ArenaOwner, arena: Arena) -> None:
    """All on one thread: one waits for room, one for its owner to write, one for an owner that never comes."""
    address = owner.start()
    large, growing, good = owner.put(7, CHUNK_BYTES), owner.start_output(8, CHUNK_BYTES), owner.put(9, CHUNK_BYTES + 1)
    owner.write(growing, 0)
    lost = msgspec.structs.replace(good, owner="gone")
    full = Arena(1 << 20)
    options = msgspec.structs.replace(QUICK, attempts=10_000)
    known = {"owner": {"fake": address}, "gone": {"fake": "fake:nowhere"}}
    with transfers({"fake": FakeEngine(options)}, known.__getitem__, options) as fetching:
        stuck = [
            fetching.fetch(large, ArenaSink(full, large)),
            fetching.fetch(growing, ArenaSink(arena, growing)),
            fetching.fetch(lost, ArenaSink(arena, lost)),
        ]
        for _ in range(3):
            fetching.fetch(good, ArenaSink(arena, good)).result(60)
        assert [session.wait(0) for session in stuck] == [False] * 3
        stuck[1].cancel()
        with pytest.raises(TransientError, match="cancelled"):
            stuck[1].result(60)
    for session in stuck:
        assert session.wait(0) and session.state == "failed"
    owner.abort(growing)
    assert full.usage().used == 0


def test_exception_in_a_sink_fails_only_its_session(owner: ArenaOwner, arena: Arena) -> None:
    address, ref = owner.start(), owner.put(10, 100)

    class Broken(ArenaSink):
        def verified(self, stop: int) -> None:
            raise ZeroDivisionError

    with (
        transfers({"fake": FakeEngine(QUICK)}, lambda _: {"fake": address}) as fetching,
        pytest.raises(ZeroDivisionError),
    ):
        fetching.fetch(ref, Broken(arena, ref)).result(60)
        assert arena.usage().used == 0
        fetching.fetch(ref, ArenaSink(arena, ref)).result(60)


def test_session_succeeds_only_after_the_last_chunk_is_verified(owner: ArenaOwner) -> None:
    address, ref = owner.start(), owner.put(11, 3 * CHUNK_BYTES)
    states: list[tuple[str, int]] = []

    class Watching(RingBuffer):
        session: TransferSession | None = None

        def verified(self, stop: int) -> None:
            super().verified(stop)
            assert self.session
            states.append((self.session.state, stop))

        def finish(self) -> None:
            assert self.session
            states.append((self.session.state, self.session.good))

    links = Transfers({"fake": FakeEngine(QUICK)}, lambda _: {"fake": address}, QUICK)
    window = Watching(np.empty(ref.nbytes, np.uint8), ref)
    window.session = session = TransferSession(ref, window, links._links, QUICK)
    while session.step() is not None:
        assert not session.wait(0)
    links.close()
    expected = [("transferring", number * CHUNK_BYTES) for number in (1, 2, 3)]
    assert states == [*expected, ("transferring", ref.nbytes)] and session.state == "success"


@pytest.mark.parametrize("state", SESSION_MOVES)
def test_illegal_session_state_transitions_raise(owner: ArenaOwner, state: str) -> None:
    ref = owner.put(12, 10)
    session = TransferSession(ref, RingBuffer(np.empty(10, np.uint8), ref), None, QUICK)  # type: ignore[arg-type]
    for other in SESSION_MOVES:
        session.state = state  # type: ignore[assignment]
        if other in SESSION_MOVES[state]:  # type: ignore[index]
            session._move(other)
        else:
            with pytest.raises(IllegalMove):
                session._move(other)


def test_fifty_chunks_stream_through_a_two_chunk_ring_buffer(arena: Arena) -> None:
    big = Arena(256 << 20)
    engine = open_engine("tcp", OPTIONS)
    owner = ArenaOwner(lambda: engine)
    owner.arena.close()
    owner.arena = big
    address, ref = owner.start(), owner.put(13, 50 * CHUNK_BYTES + 77)
    with transfers({"tcp": open_engine("tcp", OPTIONS)}, lambda _: {"tcp": address}, OPTIONS) as fetching:
        window = Counting(np.empty(2 * CHUNK_BYTES + 5, np.uint8), ref)
        session, at, whole = fetching.fetch(ref, window), 0, pattern(13, ref.nbytes)
        for piece in window:
            assert (piece == whole[at : at + piece.nbytes]).all()
            at += piece.nbytes
        session.result(60)
    assert at == ref.nbytes and len(window.marks) == 51
    owner.stop()
    big.close()


def test_ring_buffer_of_uneven_size_pulls_no_byte_twice(owner: ArenaOwner) -> None:
    address, ref, engine = owner.start(), owner.put(13, 4 * CHUNK_BYTES + 9), Recording()
    with transfers({"fake": engine}, lambda _: {"fake": address}) as fetching:
        fetching.fetch(ref, window := RingBuffer(np.empty(CHUNK_BYTES * 3 // 2, np.uint8), ref))
        assert b"".join(map(bytes, window)) == bytes(pattern(13, ref.nbytes))
    assert sum(stop - start for start, stop in engine.pulled) == ref.nbytes


def test_ring_buffer_smaller_than_a_chunk_raises_value_error(owner: ArenaOwner) -> None:
    ref = owner.put(14, 2 * CHUNK_BYTES)
    with pytest.raises(ValueError, match="needed to verify"):
        RingBuffer(np.empty(CHUNK_BYTES - 1, np.uint8), ref)


def test_ring_buffer_raises_the_error_after_the_verified_chunks(owner: ArenaOwner) -> None:
    address, ref = owner.start(), owner.put(15, 3 * CHUNK_BYTES)
    extent = owner._extents[ref.id][0]
    owner.arena.memory[extent.offset + 2 * CHUNK_BYTES] ^= 1
    got = []
    with transfers({"fake": FakeEngine(QUICK)}, lambda _: {"fake": address}) as fetching:
        fetching.fetch(ref, window := RingBuffer(np.empty(ref.nbytes, np.uint8), ref))
        with pytest.raises(ObjectLost, match="damaged"):
            for piece in window:
                got.append(bytes(piece))
    assert b"".join(got) == bytes(pattern(15, ref.nbytes)[: 2 * CHUNK_BYTES])


def test_unsealed_object_can_be_referenced_only_as_announced(owner: ArenaOwner) -> None:
    ref = owner.start_output(1, CHUNK_BYTES)
    shown = ref.id, ref.key, ref.generation, ref.nbytes
    with pytest.raises(ObjectLost):
        owner.arena.hold(*shown, announced=True)
    owner.write(ref, 0)
    with pytest.raises(ObjectLost):
        owner.arena.hold(*shown)
    owner.arena.hold(*shown, announced=True)
    owner.arena.release(ref.request)
    with pytest.raises(ObjectLost, match="aborted"):
        owner.arena.written(ref.id)
    with pytest.raises(ObjectLost):
        owner.write(ref, 1)
    owner.abort(ref)
    assert owner.used() > 0, "it is still held"
    owner.arena.unhold(ref.id)
    assert owner.used() == 0


def test_sealed_and_deleted_object_stays_complete_for_its_reader(owner: ArenaOwner) -> None:
    ref = owner.start_output(1, CHUNK_BYTES)
    owner.write(ref, 1)
    owner.arena.hold(ref.id, ref.key, ref.generation, ref.nbytes, announced=True)
    owner.seal(ref)
    owner.delete(ref)
    assert owner.arena.written(ref.id)[1]
    owner.arena.unhold(ref.id)


def test_aborted_or_mismatched_unsealed_object_raises_object_lost(owner: ArenaOwner, arena: Arena) -> None:
    address = owner.start()
    broken, other = owner.start_output(17, 2 * CHUNK_BYTES), owner.start_output(18, 2 * CHUNK_BYTES)
    owner.write(broken, 1)
    owner.write(other, 1)
    changed = msgspec.structs.replace(other, checksums=(5,))
    with transfers({"fake": FakeEngine(QUICK)}, lambda _: {"fake": address}) as fetching:
        session = fetching.fetch(broken, ArenaSink(arena, broken))
        soon(lambda: session.good == CHUNK_BYTES, "the first chunk did not come")
        owner.abort(broken)
        with pytest.raises(ObjectLost):
            session.result(60)
        with pytest.raises(ObjectLost, match="does not match the announced one"):
            fetching.fetch(changed, ArenaSink(arena, changed)).result(60)
    owner.abort(other)
    assert arena.usage().used == owner.used() == 0


@pytest.mark.slow
def test_sigkill_of_the_owner_during_a_transfer_raises_object_lost(arena: Arena) -> None:
    child = ChildOwner("tcp")
    address, ref = child.start(), child.put(19, 12 * CHUNK_BYTES)
    with transfers({"tcp": open_engine("tcp", QUICK)}, lambda _: {"tcp": address}) as fetching:
        session = fetching.fetch(ref, window := RingBuffer(np.empty(CHUNK_BYTES, np.uint8), ref))
        pieces = iter(window)
        assert next(pieces).nbytes == CHUNK_BYTES
        child.kill()
        with pytest.raises(ObjectLost, match="cannot be fetched"):
            for _ in pieces:
                pass
    assert session.good >= CHUNK_BYTES


def test_heartbeat_drops_a_silent_peer_and_another_engine_continues(owner: ArenaOwner, arena: Arena) -> None:
    """The silent peer's link is dropped, which breaks what waits for it; another engine brings the object."""
    address, ref = owner.start(), owner.put(20, 100)
    pinged, dropped = threading.Event(), threading.Event()

    class Silent(FakeEngine):
        def connect(self, address: str) -> PeerLink:
            class Link(FakeLink):
                def pull(self, *_: object) -> Generator[int, None, None]:
                    pinged.set()
                    assert dropped.wait(600), "the heartbeat did not close the link"
                    raise LinkBroken("closed")
                    yield 0

                def ping(self) -> None:
                    if pinged.is_set():
                        raise LinkBroken("silent")

                def close(self) -> None:
                    dropped.set()

            return Link(address)

    engines = {"tcp": Silent(QUICK), "zmq": FakeEngine(QUICK)}
    with transfers(engines, lambda _: {"tcp": address, "zmq": address}) as fetching:
        fetching.fetch(ref, ArenaSink(arena, ref)).result(60)


def test_close_cancels_running_sessions(owner: ArenaOwner, arena: Arena) -> None:
    address, ref = owner.start(), owner.start_output(21, CHUNK_BYTES)
    owner.write(ref, 0)
    fetching = Transfers({"fake": FakeEngine(QUICK)}, lambda _: {"fake": address}, QUICK)
    sessions = [fetching.fetch(ref, ArenaSink(arena, ref)) for _ in range(5)]
    time.sleep(0.05)
    fetching.close()
    for session in sessions:
        with pytest.raises(TransientError, match="cancelled"):
            session.result(0)
    assert arena.usage().used == 0
    owner.abort(ref)


def test_session_result_raises_timeout_error_if_unfinished(owner: ArenaOwner, arena: Arena) -> None:
    address, ref = owner.start(), owner.start_output(22, CHUNK_BYTES)
    owner.write(ref, 0)
    with transfers({"fake": FakeEngine(QUICK)}, lambda _: {"fake": address}) as fetching, pytest.raises(TimeoutError):
        fetching.fetch(ref, ArenaSink(arena, ref)).result(0.01)


def test_peers_agree_on_shared_engines_in_order_of_preference() -> None:
    assert agree(["tcp", "zmq", "mooncake"], ["zmq", "tcp"]) == ["tcp", "zmq"]
    assert agree(["tcp", "mooncake"], {"mooncake": "…", "tcp": "…"}) == ["mooncake", "tcp"]
    assert agree(["mine:engine", "tcp"], ["mine:engine", "tcp"]) == ["tcp", "mine:engine"]
    assert agree(["tcp"], ["zmq"]) == []


def test_equal_leading_chunks_of_an_earlier_transfer_are_reused(owner: ArenaOwner, arena: Arena) -> None:
    """Given a transfer of an announced object that ended when its owner gave it up, and another object made in its
    place, which is equal in its first chunk, when that is fetched into the same place, then only the others are
    pulled, and the bytes are those of the second."""
    address, (first, old) = owner.start(), announced(owner, 4 * CHUNK_BYTES, [1, 2, 3])
    again, new = announced(owner, 4 * CHUNK_BYTES, [1, 5, 3, 4])
    engine = Recording()
    with transfers({"fake": engine}, lambda _: {"fake": address}) as fetching:
        sink = ArenaSink(arena, first)
        sink.stays = True
        session = fetching.fetch(first, sink)
        soon(lambda: session.good == 3 * CHUNK_BYTES, "three chunks to be there")
        owner.arena.abort(old.id)
        with pytest.raises(ObjectLost):
            session.result(60)
        assert sink.extent and len(session.verified) == 3
        owner.arena.seal(new.id)
        engine.pulled.clear()
        other = ArenaSink(arena, again)
        other.extent = sink.extent
        fetching.fetch(again, other, sink_checksums=session.verified).result(60)
    assert engine.pulled[0][0] == CHUNK_BYTES and engine.pulled[-1][1] == again.nbytes
    assert here(arena, other)[::CHUNK_BYTES].tolist() == [1, 5, 3, 4]


def announced(owner: ArenaOwner, nbytes: int, values: list[int]) -> tuple[ObjectRef, Extent]:
    """An object of which these chunks are written, each full of its value."""
    extent = owner.arena.create(nbytes, "req_a")
    memory = owner.arena.writable(extent)
    for at, value in enumerate(values):
        memory[at * CHUNK_BYTES : (at + 1) * CHUNK_BYTES] = value
    owner.arena.announce(extent.id, checksums_of(memory)[: len(values)])
    return ObjectRef(
        extent.id, "owner", "", "req_a", "s", 1, extent.generation, nbytes, (), (), extent.key, 0.0
    ), extent
