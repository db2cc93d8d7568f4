"""The conformance suite of transfer engines: run `check_transfer` on a new engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from unfuse.arena.arena import Arena
from unfuse.core.errors import ObjectLost, UnfuseError
from unfuse.core.object_ref import CHUNK_BYTES, ObjectRef
from unfuse.core.request import new_request_id
from unfuse.stores.base import checksums_of
from unfuse.testing.transfer_faults import Faults, FaultyEngine
from unfuse.testing.transfer_owner import CAPACITY, WITHIN_S, ServingEnd, pattern, soon
from unfuse.transfer.base import LinkBroken, PeerLink, TransferEngine
from unfuse.transfer.session import ArenaSink, RingBuffer, Transfers

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Pair(msgspec.Struct):
    """A serving end, and an engine that pulls from it."""

    #: The end that serves its objects.
    owner: ServingEnd
    #: The engine of the reading end.
    engine: TransferEngine
    #: The arena that the engine pulls into. Its memory is registered with the engine.
    arena: Arena


#: Opens a pair of ends.
OpenPair = Callable[[], AbstractContextManager[Pair]]


def check_transfer(open_pair: OpenPair) -> None:
    """Check a transfer engine. Raises AssertionError where it breaks the contract.

    `open_pair` opens two ends, each with an empty arena of 64 MiB, for the suite to use and close.
    """
    with open_pair() as pair:
        address = pair.owner.start()
        for check in CHECKS:
            try:
                with closing(pair.engine.connect(address)) as link:
                    check(pair, link, address)
            except UnfuseError as error:
                raise AssertionError(f"{check.__name__}: {error}") from error
            soon(lambda: pair.owner.used() == 0, f"{check.__name__}: the owner still has objects in use")
            assert pair.arena.usage().used == 0, f"{check.__name__} did not free all memory: {pair.arena.usage()}"
        pair.owner.stop()


@contextmanager
def allocated_range(pair: Pair, nbytes: int) -> Iterator[NDArray[np.uint8]]:
    """Allocate memory of the reader's arena for pulls. A context manager."""
    extent = pair.arena.create(nbytes, new_request_id())
    try:
        yield pair.arena.memory[extent.offset : extent.offset + nbytes]
    finally:
        pair.arena.abort(extent.id)


@contextmanager
def expect_error(kind: type[UnfuseError], what: str) -> Iterator[None]:
    """Require this error inside the block. A context manager."""
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised: {what}")


def pull_range(pair: Pair, link: PeerLink, ref: ObjectRef, start: int, stop: int) -> bytes:
    """Pull a range of an object, and check that no byte around it is written."""
    with allocated_range(pair, stop - start + 128) as memory:
        memory[:] = 0xA5
        numbers = list(link.pull(ref, start, stop, memory[64 : 64 + stop - start]))
        assert numbers == sorted(set(numbers)) and (numbers or [0])[-1] == stop - start, numbers
        assert (memory[:64] == 0xA5).all() and (memory[64 + stop - start :] == 0xA5).all(), (
            "the pull wrote outside of its memory"
        )
        return bytes(memory[64 : 64 + stop - start])


def expect_refused(pair: Pair, link: PeerLink, ref: ObjectRef, start: int, stop: int) -> None:
    """Check that pulling this range raises ObjectLost."""
    with expect_error(ObjectLost, f"bytes {start} to {stop} of {ref}"):
        pull_range(pair, link, ref, start, stop)


def check_bytes(pair: Pair, link: PeerLink, address: str) -> None:
    """Any range of objects of any size arrives unchanged, and nothing beyond it is written."""
    for nbytes in (0, 1, 4097, CHUNK_BYTES + 1, 3 * CHUNK_BYTES):
        ref, data = pair.owner.put(nbytes, nbytes), bytes(pattern(nbytes, nbytes))
        for start, stop in ((0, nbytes), (0, nbytes // 2), (nbytes // 3, nbytes), (nbytes // 2, nbytes // 2)):
            assert pull_range(pair, link, ref, start, stop) == data[start:stop], f"{start} to {stop} of {nbytes}"
        pair.owner.delete(ref)


def check_refs(pair: Pair, link: PeerLink, address: str) -> None:
    """A ref that differs in any field, or a range beyond the object, is refused.

    The link works on afterwards. A deleted object is refused too.
    """
    other, ref = pair.owner.put(1, 5000), pair.owner.put(2, 5000)
    changes: list[dict[str, Any]] = [
        {"key": other.key},
        {"key": b""},
        {"generation": ref.generation + 1},
        {"id": other.id},
        {"id": "x" * 100},
        {"nbytes": 4096},
        {"nbytes": 1 << 62},
    ]
    for change in changes:
        expect_refused(pair, link, msgspec.structs.replace(ref, **change), 0, 100)
    for start, stop in ((0, 5001), (4999, 5002), (-1, 10)):
        expect_refused(pair, link, ref, start, stop)
    assert pull_range(pair, link, ref, 0, 5000) == bytes(pattern(2, 5000))
    pair.owner.delete(ref)
    expect_refused(pair, link, ref, 0, 5000)
    pair.owner.delete(other)


def check_unsealed(pair: Pair, link: PeerLink, address: str) -> None:
    """An object that is neither announced nor sealed is refused."""
    ref = pair.owner.start_output(1, 5000)
    expect_refused(pair, link, ref, 0, 1)
    pair.owner.abort(ref)
    expect_refused(pair, link, ref, 0, 1)


def check_partial_objects(pair: Pair, link: PeerLink, address: str) -> None:
    """The written chunks of an announced object can be read, and no others.

    `written` waits for more chunks. It raises ObjectLost after an abort.
    """
    nbytes = 3 * CHUNK_BYTES - 7
    whole, data = checksums_of(pattern(4, nbytes)), bytes(pattern(4, nbytes))
    ref = pair.owner.start_output(4, nbytes)
    pair.owner.write(ref, 0)
    expect_refused(pair, link, ref, 0, 1)
    for chunks in (1, 3):
        pair.owner.write(ref, chunks)
        assert link.written(ref, chunks - 1, WITHIN_S) == (whole[:chunks], False)
        end = min(chunks * CHUNK_BYTES, nbytes)
        assert pull_range(pair, link, ref, 0, end) == data[:end]
        if end < nbytes:
            expect_refused(pair, link, ref, 0, end + 1)
    pair.owner.seal(ref)
    assert link.written(ref, 3, 0) == (whole, True)
    pair.owner.delete(ref)
    with ThreadPoolExecutor(1) as pool:
        ref = pair.owner.start_output(4, nbytes)
        pair.owner.write(ref, 1)
        written = pool.submit(until_written, link, ref, 1)
        pair.owner.write(ref, 2)
        assert written.result(WITHIN_S) == whole[:2], "it does not wait for more chunks than known"
        pair.owner.abort(ref)
    broken = pair.owner.start_output(5, nbytes)
    pair.owner.write(broken, 1)
    pair.owner.abort(broken)
    with expect_error(ObjectLost, "the writer aborted the object"):
        link.written(broken, 1, 0)


def until_written(link: PeerLink, ref: ObjectRef, known: int) -> tuple[int, ...]:
    """Return the checksums once more than `known` chunks are written.

    One call of `written` may return earlier.
    """
    while len(checksums := link.written(ref, known, WITHIN_S)[0]) == known:
        pass
    return checksums


def check_closed_pull(pair: Pair, link: PeerLink, address: str) -> None:
    """Closing a pull releases its hold on the object, and the next pull is complete."""
    ref = pair.owner.put(6, 3 * CHUNK_BYTES)
    with allocated_range(pair, ref.nbytes) as memory:
        for _ in range(8):
            with closing(link.pull(ref, 0, ref.nbytes, memory)) as numbers:
                next(numbers)
    assert pull_range(pair, link, ref, 0, ref.nbytes) == bytes(pattern(6, ref.nbytes))
    pair.owner.delete(ref)


def check_threads(pair: Pair, link: PeerLink, address: str) -> None:
    """More threads than connections pull over one link, and each gets its own bytes."""

    def work(number: int) -> None:
        ref = pair.owner.put(number, 300_000 * number + 17)
        for turn in range(6):
            start = turn * 1000
            assert pull_range(pair, link, ref, start, ref.nbytes) == bytes(pattern(number, ref.nbytes)[start:])
        pair.owner.delete(ref)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(1, 9)))


def check_restarted_owner(pair: Pair, link: PeerLink, address: str) -> None:
    """A stopped owner breaks the link, and serves its objects again after a restart."""
    ref = pair.owner.put(7, CHUNK_BYTES)
    link.ping()
    assert len(pull_range(pair, link, ref, 0, 10)) == 10
    pair.owner.stop()
    with expect_error(LinkBroken, "a ping after the owner stopped"):
        link.ping()
    with expect_error(LinkBroken, "a pull after the owner stopped"):
        pull_range(pair, link, ref, 0, 10)
    with closing(pair.engine.connect(pair.owner.start())) as again:
        assert pull_range(pair, again, ref, 0, ref.nbytes) == bytes(pattern(7, ref.nbytes))
    pair.owner.delete(ref)


def check_closed(pair: Pair, link: PeerLink, address: str) -> None:
    """Closing a link breaks a running pull and all later calls.

    The bytes that the pull has reported are valid.
    """
    ref = pair.owner.put(8, CAPACITY // 4)
    with allocated_range(pair, ref.nbytes) as memory:
        with closing(link.pull(ref, 0, ref.nbytes, memory)) as numbers:
            received = next(numbers)
            link.close()
            with expect_error(LinkBroken, "the link was closed during a pull"):
                for received in numbers:  # noqa: B007
                    pass
        assert (memory[:received] == pattern(8, ref.nbytes)[:received]).all()
    with expect_error(LinkBroken, "a pull on a closed link"):
        pull_range(pair, link, ref, 0, 10)
    with expect_error(LinkBroken, "a ping on a closed link"):
        link.ping()
    pair.owner.delete(ref)


def check_sessions(pair: Pair, link: PeerLink, address: str) -> None:
    """A session verifies and seals an object, or leaves nothing.

    The object may still be written meanwhile.
    """
    with open_sessions(pair, address) as transfers:
        for nbytes in (0, 100, 2 * CHUNK_BYTES + 5):
            ref = pair.owner.put(nbytes, nbytes)
            sink = ArenaSink(pair.arena, ref)
            transfers.fetch(ref, sink).result(WITHIN_S)
            check_arrival(pair, sink, nbytes)
            damaged = msgspec.structs.replace(ref, checksums=tuple(value ^ 1 for value in ref.checksums))
            if nbytes:
                with expect_error(ObjectLost, "the bytes do not match the checksums of the ref"):
                    transfers.fetch(damaged, ArenaSink(pair.arena, damaged)).result(WITHIN_S)
            pair.owner.delete(ref)
        ref = pair.owner.start_output(9, 2 * CHUNK_BYTES + 5)
        pair.owner.write(ref, 0)
        session = transfers.fetch(ref, sink := ArenaSink(pair.arena, ref))
        for chunks in (1, 2, 3):
            pair.owner.write(ref, chunks)
            soon(lambda: session.good >= min(chunks * CHUNK_BYTES, ref.nbytes), f"{chunks} chunks did not arrive")  # noqa: B023
        session.result(WITHIN_S)
        check_arrival(pair, sink, 9)
        pair.owner.seal(ref)
        pair.owner.delete(ref)


def check_window(pair: Pair, link: PeerLink, address: str) -> None:
    """An object of any length is streamed through a buffer of about one chunk."""
    ref = pair.owner.put(10, 6 * CHUNK_BYTES + 3)
    with open_sessions(pair, address) as transfers, allocated_range(pair, CHUNK_BYTES + 1000) as buffer:
        session = transfers.fetch(ref, window := RingBuffer(buffer, ref))
        assert b"".join(map(bytes, window)) == bytes(pattern(10, ref.nbytes))
        session.result(WITHIN_S)
    pair.owner.delete(ref)


def check_faults(pair: Pair, link: PeerLink, address: str) -> None:
    """Whatever fault is injected, a session ends with the right bytes or ObjectLost."""
    faults = Faults(seed=11, drop=0.1, cut=0.2, corrupt=0.2, delay=0.1, slow=0.1, refuse=0.02, full=0.05, dead=0.0)
    ref = pair.owner.put(11, 3 * CHUNK_BYTES // 2)
    engine = FaultyEngine(pair.engine, faults)
    with open_sessions(pair, address, engine) as transfers:
        for _ in range(12):
            sink = ArenaSink(pair.arena, ref)
            session = transfers.fetch(ref, sink)
            try:
                session.result(WITHIN_S)
            except ObjectLost as error:
                assert error.object_id == ref.id
            else:
                check_arrival(pair, sink, 11)
    assert {"drop", "cut", "corrupt"} <= set(engine.injected)
    pair.owner.delete(ref)


@contextmanager
def open_sessions(pair: Pair, address: str, engine: TransferEngine | None = None) -> Iterator[Transfers]:
    """Open transfers from the owner. A context manager."""
    engine = engine or pair.engine
    options = msgspec.structs.replace(pair.engine.options, bootstrap_s=float(WITHIN_S), attempts=4)
    transfers = Transfers({engine.name: engine}, lambda owner: {engine.name: address}, options)
    try:
        yield transfers
    finally:
        transfers.close()


def check_arrival(pair: Pair, sink: ArenaSink, seed: int) -> None:
    """Check that a session's object is sealed in the reader's arena, then delete it."""
    extent = sink.extent
    assert extent is not None
    pair.arena.hold(extent.id, extent.key, extent.generation, extent.nbytes)
    assert (pair.arena.view[extent.offset : extent.offset + extent.nbytes] == pattern(seed, extent.nbytes)).all()
    pair.arena.unhold(extent.id)
    pair.arena.delete(extent.id)


CHECKS = (
    check_bytes,
    check_refs,
    check_unsealed,
    check_partial_objects,
    check_closed_pull,
    check_threads,
    check_closed,
    check_sessions,
    check_window,
    check_faults,
    check_restarted_owner,
)
