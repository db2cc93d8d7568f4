"""Readers and writers at an arena's socket, honest and otherwise."""

import mmap
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.descriptors import descriptors, settled
from tests.examples import examples
from unfuse.arena.arena import Arena
from unfuse.arena.client import ArenaClient
from unfuse.arena.objects import Extent
from unfuse.arena.protocol import (
    Abort,
    Acknowledged,
    Create,
    Delete,
    FromOwner,
    GetOwner,
    GetState,
    HoldObject,
    ObjectPlace,
    ObjectUnavailable,
    OwnerReply,
    Release,
    Seal,
    ToOwner,
    Unhold,
    Write,
    frame,
    socket_name,
)
from unfuse.arena.server import AT_A_TIME, MAX_CLIENTS, ArenaServer
from unfuse.core.codec import decode
from unfuse.core.errors import ArenaFull, ObjectLost, ProtocolError, TransientError

TOKEN = b"t" * 16
REQUEST = "req_" + "a" * 32


class Owner:
    """An arena that is served."""

    def __init__(self, name: str = "w") -> None:
        self.arena = Arena(1 << 20)
        self.server = ArenaServer(self.arena, TOKEN, Path(os.environ["UNFUSE_RUN_DIR"]), name)
        self.address = self.server.address

    def put(self, text: bytes = b"hello") -> Extent:
        extent = self.arena.create(len(text), REQUEST)
        self.arena.memory[extent.offset : extent.offset + len(text)] = list(text)
        self.arena.seal(extent.id)
        return extent

    def settled(self) -> "Owner":
        """This owner, once its server has seen everything that happened so far."""
        ArenaClient(self.address, TOKEN).close()
        return self

    def close(self) -> None:
        self.server.close()
        self.arena.close()


class Raw:
    """A client that sends what it likes."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(10)
        self.socket.connect(socket_name(address))

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def ask(self, message: ToOwner) -> tuple[FromOwner, list[int]]:
        self.socket.sendall(frame(message))
        data, fds, _, _ = socket.recv_fds(self.socket, 65536, 4)
        return decode(data[4:], FromOwner), fds

    def is_disconnected(self) -> bool:
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.close()


def hold(client: ArenaClient, extent: Extent) -> Extent:
    return client.hold(extent.id, extent.key, extent.generation, extent.nbytes)


def as_hold(extent: Extent) -> HoldObject:
    return HoldObject(extent.id, extent.key, extent.generation, extent.nbytes)


def test_reader_maps_objects_of_the_owner_without_a_copy(owner: Owner) -> None:
    extent = owner.put(b"hello")
    reader = ArenaClient(owner.address)
    where = hold(reader, extent)
    assert bytes(reader.view[where.offset : where.offset + 5]) == b"hello"
    owner.arena.memory[where.offset] = ord("j")
    assert bytes(reader.view[where.offset : where.offset + 5]) == b"jello", "it is a copy"
    owner.arena.delete(extent.id)
    assert owner.settled().arena.usage().used > 0
    reader.unhold(extent.id)
    reader.close()
    assert owner.settled().arena.usage().used == 0


def test_closed_connection_drops_only_its_own_holds(owner: Owner) -> None:
    extent = owner.put()
    one, two = ArenaClient(owner.address), ArenaClient(owner.address)
    for reader in (one, one, two):
        hold(reader, extent)
    owner.arena.delete(extent.id)
    one.close()
    assert owner.settled().arena.usage().used > 0
    two.close()
    assert owner.settled().arena.usage().used == 0


def test_read_only_descriptor_is_sent_with_the_first_hold_only(owner: Owner) -> None:
    extent = owner.put()
    with Raw(owner.address) as raw:
        refused, none = raw.ask(msgspec.structs.replace(as_hold(extent), key=bytes(16)))
        assert isinstance(refused, ObjectUnavailable) and none == []
        placed, fds = raw.ask(as_hold(extent))
        assert isinstance(placed, ObjectPlace) and len(fds) == 1
        with pytest.raises(PermissionError):
            mmap.mmap(fds[0], 4096, mmap.MAP_SHARED, mmap.PROT_WRITE)
        os.close(fds[0])
        assert raw.ask(as_hold(extent)) == (placed, [])


@pytest.mark.parametrize("change", [{"key": b"k" * 16}, {"id": "0" * 32}, {"generation": 7}, {"nbytes": 4}])
def test_hold_with_a_forged_ref_raises_object_lost(owner: Owner, change: dict[str, object]) -> None:
    extent = owner.put()
    reader = ArenaClient(owner.address)
    with pytest.raises(ObjectLost):
        hold(reader, msgspec.structs.replace(extent, **change))
    assert not hasattr(reader, "view")
    hold(reader, extent)
    reader.close()


def test_readers_can_hold_an_object_only_after_sealing(owner: Owner) -> None:
    writer, reader = ArenaClient(owner.address, TOKEN), ArenaClient(owner.address)
    extent = writer.create(5, REQUEST)
    writer.writable(extent)[:] = list(b"hello")
    with pytest.raises(ObjectLost):
        hold(reader, extent)
    writer.seal(extent.id)
    where = hold(reader, extent)
    assert bytes(reader.view[where.offset : where.offset + 5]) == b"hello"
    assert writer.requests() == {REQUEST} and writer.usage() == owner.arena.usage()
    reader.close()
    writer.delete(extent.id)
    assert owner.settled().arena.usage().used == 0
    writer.close()


def test_disconnect_of_a_writer_aborts_only_its_unsealed_objects(owner: Owner) -> None:
    writer = ArenaClient(owner.address, TOKEN)
    half, whole, given_up = (writer.create(5000, REQUEST) for _ in range(3))
    writer.seal(whole.id)
    writer.abort(given_up.id)
    writer.close()
    assert owner.settled().arena.usage().requested == 5000
    hold(reader := ArenaClient(owner.address), whole)
    with pytest.raises(ObjectLost):
        hold(reader, half)
    reader.close()


def test_release_waits_for_objects_that_another_writer_writes(owner: Owner) -> None:
    one, two = ArenaClient(owner.address, TOKEN), ArenaClient(owner.address, TOKEN)
    extent = one.create(10, REQUEST)
    two.release(REQUEST)
    assert two.usage().used > 0
    with pytest.raises(ObjectLost, match="its request has ended") as lost:
        one.seal(extent.id)
    assert lost.value.object_id == extent.id and two.usage().used == 0
    one.close()
    two.close()


def test_full_arena_raises_arena_full_in_the_writer_client(owner: Owner) -> None:
    writer = ArenaClient(owner.address, TOKEN)
    with pytest.raises(ArenaFull) as full:
        writer.create(2 << 20, REQUEST)
    assert (full.value.needed, full.value.free, full.value.capacity) == (2 << 20, 1 << 20, 1 << 20)
    writer.seal(writer.create(10, REQUEST).id)
    writer.close()


FOR_WRITERS = [Create(1, REQUEST), Seal("a"), Abort("a"), Delete("a"), Release(REQUEST), GetState()]


@pytest.mark.parametrize("message", [*FOR_WRITERS, Write(b"wrong"), Unhold("a")], ids=repr)
def test_client_without_token_is_disconnected_by_writer_messages(owner: Owner, message: ToOwner) -> None:
    with Raw(owner.address) as raw:
        raw.socket.sendall(frame(message))
        assert raw.is_disconnected()


@pytest.mark.parametrize("message", [Seal, Abort])
def test_writer_cannot_seal_or_abort_an_object_of_another_writer(
    owner: Owner, message: type[Seal] | type[Abort]
) -> None:
    writer = ArenaClient(owner.address, TOKEN)
    extent = writer.create(10, REQUEST)
    with Raw(owner.address) as raw:
        done, (fd,) = raw.ask(Write(TOKEN))
        os.close(fd)
        assert done == Acknowledged()
        raw.socket.sendall(frame(message(extent.id)))
        assert raw.is_disconnected()
    writer.seal(extent.id)
    writer.close()


def test_wrong_token_raises_transient_error(owner: Owner) -> None:
    with pytest.raises(TransientError, match="closed the connection"):
        ArenaClient(owner.address, b"wrong")


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(64),
        struct.pack("!I", 1 << 31),
        struct.pack("!I", 3) + b"\x01ab",
        frame(GetState())[:4] + b"\x63" + frame(GetState())[5:],
        struct.pack("!I", 12) + b"\x01\x82\xa4type\xa4Gone",
    ],
)
def test_garbage_disconnects_its_client_and_no_other_client(owner: Owner, garbage: bytes) -> None:
    extent = owner.put()
    reader = ArenaClient(owner.address)
    hold(reader, extent)
    with Raw(owner.address) as raw:
        raw.socket.sendall(garbage)
        raw.socket.shutdown(socket.SHUT_WR)
        assert raw.is_disconnected()
    hold(reader, extent)
    reader.close()


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300))
def test_arbitrary_bytes_do_not_stop_the_server(owner: Owner, data: bytes) -> None:
    with Raw(owner.address) as raw:
        raw.socket.sendall(data)
    owner.settled()


def test_a_client_that_never_reads_is_disconnected(owner: Owner) -> None:
    with Raw(owner.address) as raw:
        lost = frame(HoldObject("0" * 32, b"", 0, 0)) * 1000
        with pytest.raises(ConnectionError):
            while True:
                raw.socket.sendall(lost)
    owner.settled()


def test_fragmented_messages_are_reassembled(owner: Owner) -> None:
    message = frame(as_hold(owner.put()))
    with Raw(owner.address) as raw:
        for byte in message[:-1]:
            raw.socket.sendall(bytes([byte]))
        raw.socket.sendall(message[-1:] + message)
        data, (fd,), _, _ = socket.recv_fds(raw.socket, 65536, 1)
        os.close(fd)
        assert isinstance(decode(data[4:], FromOwner), ObjectPlace)


def test_closed_owner_raises_transient_error() -> None:
    owner = Owner()
    extent = owner.put()
    reader = ArenaClient(owner.address)
    where = hold(reader, extent)
    owner.close()
    with pytest.raises(TransientError, match="does not answer"):
        hold(reader, extent)
    reader.unhold(extent.id)
    reader.close()
    assert bytes(reader.view[where.offset : where.offset + 5]) == b"hello"
    with pytest.raises(TransientError, match="does not answer"):
        ArenaClient(owner.address)


@pytest.mark.parametrize(
    "address",
    [
        "tcp://127.0.0.1:80",
        "",
        "unix:",
        "unix:/run/docker.sock",
        "unix:/tmp/arena-x",
        "unix:/tmp/arena-" + "0" * 24 + "/x",
    ],
)
def test_invalid_arena_address_raises_protocol_error(address: str) -> None:
    with pytest.raises(ProtocolError, match="not the address of an arena"):
        ArenaClient(address)


def test_arena_client_is_thread_safe(owner: Owner) -> None:
    extents = [owner.put(str(number).encode()) for number in range(20)]
    reader = ArenaClient(owner.address)
    wrong: list[Extent] = []

    def read(extent: Extent, text: bytes) -> None:
        for _ in range(30):
            where = hold(reader, extent)
            if bytes(reader.view[where.offset : where.offset + where.nbytes]) != text:
                wrong.append(extent)
            reader.unhold(extent.id)

    threads = [Thread(target=read, args=(extent, str(n).encode())) for n, extent in enumerate(extents)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for extent in extents:
        owner.arena.delete(extent.id)
    reader.close()
    assert wrong == [] and owner.settled().arena.usage().used == 0


def test_client_rejects_an_owner_with_another_name() -> None:
    """A path may lead to another one than was meant."""
    owner = Owner("one")
    with pytest.raises(TransientError, match="does not belong to another"):
        ArenaClient(owner.address, owner="another")
    reader = ArenaClient(owner.address, owner="one")
    hold(reader, owner.put())
    reader.close()
    owner.close()


@pytest.mark.parametrize("said", [frame(Acknowledged())[:2], frame(Acknowledged())[:-1], struct.pack("!I", 1 << 31)])
def test_partial_reply_raises_an_error_and_leaks_no_descriptor(said: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"arena-{'0' * 24}"
    with socket.socket(socket.AF_UNIX) as listener, tempfile.TemporaryFile() as memory:
        listener.bind(os.fspath(path))
        listener.listen()

        def die() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(1000)
                socket.send_fds(peer, [said], [memory.fileno()])

        client, owner = ArenaClient(f"unix:{path}"), Thread(target=die)
        settled()
        before = descriptors()
        owner.start()
        with pytest.raises((TransientError, ProtocolError), match="closed the connection|exceeds the limit"):
            client.usage()
        owner.join()
        assert descriptors() <= before
        client.close()


def test_flooding_client_does_not_starve_other_clients(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    answered: list[ToOwner] = []
    began, go_on = Event(), Event()
    answer = owner.server._answer

    def noting(connection: Any, message: ToOwner) -> None:
        began.set()
        assert go_on.wait(60)
        answered.append(message)
        answer(connection, message)

    monkeypatch.setattr(owner.server, "_answer", noting)
    with Raw(owner.address) as flood, Raw(owner.address) as other:
        flood.socket.sendall(frame(GetOwner()) * 120)
        assert began.wait(60)
        other.socket.sendall(frame(GetState()))
        go_on.set()
        assert other.is_disconnected(), "it may not ask that"
        before = answered.index(GetState())
        left = 120 * len(frame(OwnerReply("w")))
        while left:
            left -= len(flood.socket.recv(left))
    assert before <= 3 * AT_A_TIME and answered.count(GetOwner()) == 120


FLOOD = """
import socket, sys
name, count = sys.argv[1], int(sys.argv[2])
ends = [socket.socket(socket.AF_UNIX) for _ in range(count)]
for end in ends:
    end.connect(name)
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_connection_limit_disconnects_process_with_most_connections(owner: Owner) -> None:
    """Given a reader that holds an object, one that does not, and a process that opens connection after connection,
    then the readers stay, and others come in."""
    extent = owner.put()
    holder, idle = ArenaClient(owner.address), ArenaClient(owner.address)
    hold(holder, extent)
    command = [sys.executable, "-c", FLOOD, socket_name(owner.address), str(2 * MAX_CLIENTS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as flood:
        assert flood.stdout and flood.stdin
        flood.stdout.readline()
        late = ArenaClient(owner.settled().address)
        for reader in (holder, idle, late):
            hold(reader, extent)
        assert len(owner.server._connections()) <= MAX_CLIENTS
        flood.stdin.close()
    for reader in (holder, idle, late):
        reader.close()
    owner.arena.delete(extent.id)
    assert owner.settled().arena.usage().used == 0


def test_socket_is_removed_at_close_and_stale_ones_at_the_next_start(owner: Owner) -> None:
    path = Path(socket_name(owner.address))
    other = Owner()
    other.server._path.rename(stale := path.with_name("arena-" + "0" * 24))
    other.close()
    assert path.is_socket() and stale.is_socket()
    Owner().close()
    assert path.is_socket() and not stale.exists()
