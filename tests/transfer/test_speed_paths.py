"""How long an owner holds what is pulled: over tcp until it is sent, by one-sided reads until the reader has it; that
its word waits for the bytes, where it sends any; and how much a call of a one-sided library reads."""

import ctypes
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.transfer.conftest import OPTIONS
from unfuse.core.object_ref import ObjectRef
from unfuse.testing.transfer_owner import ArenaOwner, pattern, soon
from unfuse.transfer import onesided, open_engine
from unfuse.transfer.base import LinkBroken, Ping, Pong, Pull, Ready, TransferEngine, TransferOptions
from unfuse.transfer.onesided import RANGES_PER_CALL, CopyRange, OneSidedEngine
from unfuse.transfer.session import MAX_PULL
from unfuse.transfer.tcp import OwnerClient, OwnerServer, send

MUCH = 40 << 20
"""More than the kernel takes before anybody reads."""


class OwnMemory(OneSidedEngine):
    """Reads from this process: what a library does over a network. Calls of these numbers fail."""

    name = "own"
    fails: Sequence[int] = ()

    def __init__(self, options: TransferOptions) -> None:
        super().__init__(options)
        self.calls: list[list[int]] = []

    def publish(self) -> bytes:
        return b"here"

    def register(self, memory: NDArray[np.uint8]) -> None:
        del memory

    def read(self, name: bytes, ranges: Sequence[CopyRange]) -> None:
        assert name == b"here"
        self.calls.append([one.nbytes for one in ranges])
        if len(self.calls) in self.fails:
            raise LinkBroken("the library failed")
        for one in ranges:
            ctypes.memmove(one.destination, one.address, one.nbytes)


def started(engine: TransferEngine) -> Iterator[tuple[ArenaOwner, str]]:
    owner = ArenaOwner(lambda: engine)
    yield owner, owner.start()
    owner.stop()
    owner.arena.close()


@pytest.fixture
def tcp() -> Iterator[tuple[ArenaOwner, str]]:
    yield from started(open_engine("tcp", OPTIONS))


@pytest.fixture
def one_sided() -> Iterator[tuple[ArenaOwner, str]]:
    yield from started(OwnMemory(OPTIONS))


def all_of(ref: ObjectRef) -> Pull:
    return Pull(ref.id, ref.key, ref.generation, ref.nbytes, 0, ref.nbytes)


def test_tcp_owner_retains_an_object_only_during_the_send(tcp: tuple[ArenaOwner, str]) -> None:
    owner, address = tcp
    ref = owner.put(1, MUCH)
    with closing(OwnerClient(address, OPTIONS)) as reader:
        reader.call(all_of(ref), Ready)
        owner.delete(ref)
        assert owner.used() > 0, "most of it is still to be sent"
        came = np.empty(MUCH, np.uint8)
        assert reader.socket.recv_into(came, 0, socket.MSG_WAITALL) == MUCH
        assert np.array_equal(came, pattern(1, MUCH))
        soon(lambda: owner.used() == 0, "it is held for a reader that has it")
        reader.call(Ping(), Pong)


def test_sent_tcp_bytes_do_not_change_when_memory_is_reused(tcp: tuple[ArenaOwner, str]) -> None:
    """The kernel has a copy of what was sent: nobody needs to hold it until it is read."""
    owner, address = tcp
    ref = owner.put(1, 10_000)
    with closing(OwnerClient(address, OPTIONS)) as reader:
        reader.call(all_of(ref), Ready)
        owner.delete(ref)
        soon(lambda: owner.used() == 0, "it is held though it is sent")
        owner.put(2, 10_000)
        assert reader.socket.recv(10_000, socket.MSG_WAITALL) == bytes(pattern(1, 10_000))


class Peer:
    """Notes how what is sent to it is sent."""

    def __init__(self) -> None:
        self.flags: list[int] = []

    def sendall(self, data: bytes, flags: int = 0) -> None:
        self.flags.append(flags)


def test_owner_reply_is_coalesced_only_with_following_bytes(tcp: tuple[ArenaOwner, str]) -> None:
    owner, address = tcp
    ref, peer = owner.put(1, 100), Peer()
    arena = owner.arena
    sending = OwnerServer(arena, OPTIONS, lambda peer, *_: peer.sendall(b"bytes"), sends=True)
    waiting = OwnerServer(arena, OPTIONS, lambda *_: None)
    sending._serve_pull(peer, all_of(ref))  # type: ignore[arg-type]
    sending._serve_pull(peer, msgspec.structs.replace(all_of(ref), stop=0))  # type: ignore[arg-type]
    waiting._serve_pull(peer, all_of(ref))  # type: ignore[arg-type]
    sending.close()
    waiting.close()
    assert peer.flags == [socket.MSG_MORE, 0, 0, 0, 0]
    with closing(OwnerClient(address, OPTIONS)) as reader:
        send(reader.socket, all_of(ref))
        assert len(reader.socket.recv(1000)) > 100, "they come in one piece"


def test_one_sided_read_retains_the_object_until_acknowledged(one_sided: tuple[ArenaOwner, str]) -> None:
    owner, address = one_sided
    ref, memory = owner.put(1, 1000), np.zeros(1000, np.uint8)
    with closing(OwnMemory(OPTIONS).connect(address)) as link:
        pull = link.pull(ref, 0, 1000, memory)
        assert next(pull) == 1000
        owner.delete(ref)
        link.ping()
        assert owner.used() > 0
        assert list(pull) == [] and np.array_equal(memory, pattern(1, 1000))
        link.ping()  # on the same connection, if the owner knows that the pull is over
        assert owner.used() == 0


def test_abandoned_one_sided_pull_releases_the_object(one_sided: tuple[ArenaOwner, str]) -> None:
    owner, address = one_sided
    ref = owner.put(1, 1000)
    with closing(OwnMemory(OPTIONS).connect(address)) as link:
        with closing(link.pull(ref, 0, 1000, np.zeros(1000, np.uint8))) as pull:
            assert next(pull) == 1000
        owner.delete(ref)
        soon(lambda: owner.used() == 0, "it is held for nobody")


def test_one_sided_reads_batch_ranges_and_restart_with_one_on_failure(
    one_sided: tuple[ArenaOwner, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given an object of more ranges than a call has, of which the second call fails, then what the first one brought
    counts, the next pull begins with a single range, and goes on with many."""
    assert RANGES_PER_CALL * onesided.MAX_RANGE_BYTES <= MAX_PULL, "or no pull would have as many"
    monkeypatch.setattr(onesided, "MAX_RANGE_BYTES", piece := 1 << 16)
    owner, address = one_sided
    nbytes, whole = (2 * RANGES_PER_CALL + 1) * piece + 5, RANGES_PER_CALL * piece
    ref, memory = owner.put(1, nbytes), np.zeros(nbytes, np.uint8)
    engine = OwnMemory(OPTIONS)
    engine.fails = [2]
    with closing(engine.connect(address)) as link:
        pull = link.pull(ref, 0, nbytes, memory)
        assert next(pull) == whole
        with pytest.raises(LinkBroken):
            next(pull)
        rest = nbytes - whole
        assert [*link.pull(ref, whole, nbytes, memory[whole:])] == [piece, piece + whole, rest]
    assert engine.calls == [
        [piece] * RANGES_PER_CALL,
        [piece] * RANGES_PER_CALL,
        [piece],
        [piece] * RANGES_PER_CALL,
        [5],
    ]
    assert np.array_equal(memory, pattern(1, nbytes))
