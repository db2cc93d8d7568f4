"""What comes over the network is believed by nobody: bits that flipped, peers that lie, strangers, and the silent."""

import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import msgspec
import numpy as np
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from tests.transfer.conftest import OPTIONS, SECRET
from unfuse.arena.arena import Arena
from unfuse.arena.protocol import ObjectUnavailable
from unfuse.core.errors import ConfigError, ObjectLost, TransientError
from unfuse.core.object_ref import ObjectRef
from unfuse.testing.transfer_owner import ArenaOwner, pattern, soon
from unfuse.transfer import BACKENDS, open_engine
from unfuse.transfer.base import FromOwner, Got, LinkBroken, Ping, Pong, Pull, Ready, ToOwner, TransferOptions, Watch
from unfuse.transfer.session import ArenaSink, Transfers
from unfuse.transfer.tcp import OwnerClient, OwnerServer, prove, read, send, write

FAKE = "unfuse.testing.fake_transfer:FakeEngine"
QUICK = TransferOptions(secret=SECRET, threads=1, queues=1, attempts=1)
IMPATIENT = msgspec.structs.replace(QUICK, heartbeat_s=0.3, max_missed=1)
SIZE = 20_000


class FlippingProxy:
    """Stands before an owner; of what it sends, flips one bit of byte `at`, counted from the connection's start."""

    def __init__(self, address: str) -> None:
        host, port = address.removeprefix("tcp://").split(":")
        self._owner = host, int(port)
        self.at: int | None = None
        self.bit = 0
        self.passed = 0
        self.flipped = 0
        self._open = [listener := socket.create_server(("127.0.0.1", 0))]
        self._listener = listener
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        for end in [*self._open]:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60)
        for end in self._open:
            end.close()

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                reader, _ = self._listener.accept()
                owner = socket.create_connection(self._owner)
                self._open += [reader, owner]
                for end in (reader, owner):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._start(self._serve, reader, owner)

    def _serve(self, reader: socket.socket, owner: socket.socket) -> None:
        """Pass on what both say, and keep nothing of it: a test has more connections than a process may have files."""
        back = threading.Thread(target=self._pass, args=(owner, reader, True), daemon=True)
        back.start()
        self._pass(reader, owner, False)
        back.join()
        for end in (reader, owner):
            self._open.remove(end)
            end.close()

    def _pass(self, one: socket.socket, other: socket.socket, flips: bool) -> None:
        begin = 0
        with suppress(OSError):
            while data := bytearray(one.recv(65536)):
                if flips and self.at is not None and begin <= self.at < begin + len(data):
                    data[self.at - begin] ^= 1 << self.bit
                    self.flipped += 1
                    self.at = None
                begin += len(data)
                if flips:
                    self.passed = begin
                other.sendall(data)
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def owner() -> Iterator[ArenaOwner]:
    owner = ArenaOwner(lambda: open_engine("tcp", OPTIONS))
    yield owner
    owner.stop()
    owner.arena.close()


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(1 << 20)
    yield arena
    arena.close()


@contextmanager
def reading(address: str, options: TransferOptions = QUICK) -> Iterator[Transfers]:
    """Transfers from there."""
    transfers = Transfers({"tcp": open_engine("tcp", options)}, lambda _: {"tcp": address}, options)
    yield transfers
    transfers.close()


def fetch(transfers: Transfers, ref: ObjectRef, arena: Arena) -> bytes | Exception:
    """One transfer, over a connection of its own if the one before it failed: what came, or why not."""
    try:
        transfers.fetch(ref, sink := ArenaSink(arena, ref)).result(60)
    except TransientError as error:
        return error
    assert sink.extent
    got = bytes(arena.view[sink.extent.offset : sink.extent.offset + ref.nbytes])
    arena.delete(sink.extent.id)
    return got


def end_first_connection(proxy: FlippingProxy, transfers: Transfers, ref: ObjectRef, arena: Arena) -> None:
    """The first has a ping in it; in those after it, which bring one object each, every byte has its place."""
    proxy.at = 10_000
    assert isinstance(fetch(transfers, ref, arena), ObjectLost)


@pytest.mark.parametrize("times", [200, pytest.param(1000, marks=pytest.mark.nightly)])
def test_every_flipped_payload_bit_is_detected(times: int, owner: ArenaOwner, arena: Arena) -> None:
    address, ref, chance = owner.start(), owner.put(1, SIZE), random.Random(1)
    with closing(FlippingProxy(address)) as proxy:
        with reading(proxy.address) as transfers:
            end_first_connection(proxy, transfers, ref, arena)
            assert fetch(transfers, ref, arena) == bytes(pattern(1, SIZE))
        before, proxy.flipped, detected = proxy.passed - SIZE, 0, 0
        with reading(proxy.address) as transfers:
            end_first_connection(proxy, transfers, ref, arena)
            for _ in range(times):
                proxy.at, proxy.bit = before + chance.randrange(SIZE), chance.randrange(8)
                answer = fetch(transfers, ref, arena)
                detected += isinstance(answer, ObjectLost) and "damaged" in str(answer)
        assert (proxy.flipped, detected) == (times + 1, times)
    assert arena.usage().used == 0


def test_single_bit_flip_is_healed_by_a_second_pull(owner: ArenaOwner, arena: Arena) -> None:
    address, ref = owner.start(), owner.put(1, SIZE)
    options = msgspec.structs.replace(QUICK, attempts=2)
    with closing(FlippingProxy(address)) as proxy, reading(proxy.address, options) as transfers:
        proxy.at = 10_000
        assert fetch(transfers, ref, arena) == bytes(pattern(1, SIZE))
    assert proxy.flipped == 1


def test_protocol_bit_flips_raise_an_error_or_do_no_harm(owner: ArenaOwner, arena: Arena) -> None:
    """Also in greetings, lengths and answers: the right bytes or one error, never wrong ones, never a wait for ever."""
    address, ref = owner.start(), owner.put(1, SIZE)
    with closing(FlippingProxy(address)) as proxy:
        with reading(proxy.address) as transfers:
            fetch(transfers, ref, arena)
        errors = 0
        for number in range(proxy.passed - SIZE):
            proxy.at, proxy.bit = number, number % 8
            with reading(proxy.address, IMPATIENT) as transfers:
                answer = fetch(transfers, ref, arena)
            errors += isinstance(answer, Exception)
            assert isinstance(answer, TransientError) or answer == bytes(pattern(1, SIZE))
    assert errors > 80 and arena.usage().used == 0


@contextmanager
def liar(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """An owner that knows the secret, and then does what it likes."""
    opened = [listener := socket.create_server(("127.0.0.1", 0))]

    def serve() -> None:
        with suppress(OSError):
            while True:
                peer, _ = listener.accept()
                opened.append(peer)
                theirs = read(peer)
                write(peer, bytes(32))
                read(peer)
                write(peer, prove(SECRET, b"owner", bytes(32), theirs))
                write(peer, b"about")
                answer(peer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    thread.join(60)
    for end in opened:
        end.close()


def say(*data: bytes | FromOwner, close: bool = True) -> Callable[[socket.socket], None]:
    """Answer the first question so."""

    def answer(peer: socket.socket) -> None:
        read(peer)
        for item in data:
            peer.sendall(item) if isinstance(item, bytes) else send(peer, item)
        if close:
            peer.close()

    return answer


def header(length: int) -> bytes:
    return length.to_bytes(4, "big")


LIES = {
    "oversize": say(header(1 << 31) + bytes(100)),
    "garbage": say(header(9) + b"\x01 garbage"),
    "another version": say(header(2) + b"\x63\x80"),
    "another answer": say(Pong()),
    "too little": say(Ready(0), bytes(99)),
    "nothing": say(),
    "silence": say(close=False),
    "silence in the middle": say(Ready(0), bytes(50), close=False),
}


@pytest.mark.parametrize("lie", LIES)
def test_invalid_owner_replies_break_the_link_and_stay_in_bounds(owner: ArenaOwner, lie: str) -> None:
    ref, memory = owner.put(1, 100), np.zeros(300, np.uint8)
    with liar(LIES[lie]) as address, closing(open_engine("tcp", IMPATIENT).connect(address)) as link:
        pytest.raises(LinkBroken, list, link.pull(ref, 0, 100, memory[100:200]))
    assert not memory[:100].any() and not memory[200:].any()


def test_excess_bytes_from_an_owner_are_not_written(owner: ArenaOwner) -> None:
    ref, memory = owner.put(1, 100), np.zeros(300, np.uint8)
    many = say(Ready(0), b"\xff" * 10_000)
    with liar(many) as address, closing(open_engine("tcp", QUICK).connect(address)) as link, suppress(LinkBroken):
        list(link.pull(ref, 0, 100, memory[100:200]))
    assert memory[100:200].all() and not memory[:100].any() and not memory[200:].any()


def test_object_lost_has_the_reason_reported_by_the_owner(owner: ArenaOwner) -> None:
    ref = owner.put(1, 100)
    with (
        liar(say(ObjectUnavailable("it was eaten"))) as address,
        closing(open_engine("tcp", QUICK).connect(address)) as link,
    ):
        lost = pytest.raises(ObjectLost, list, link.pull(ref, 0, 100, np.zeros(100, np.uint8)))
    assert str(lost.value) == "it was eaten" and lost.value.object_id == ref.id


STRANGERS = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"",
    bytes(1000),
    header(1 << 30),
    header(17 * 1024) + bytes(17 * 1024),
    header(5) + b"\x01\xc1\xc1\xc1\xc1",
]


@pytest.mark.parametrize("data", STRANGERS)
def test_malformed_client_data_is_disconnected_without_affecting_others(owner: ArenaOwner, data: bytes) -> None:
    address, ref = owner.start(), owner.put(1, 100)
    host, port = address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), 60) as stranger:
        with suppress(OSError):
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1000):
                pass
        with closing(open_engine("tcp", OPTIONS).connect(address)) as link:
            assert list(link.pull(ref, 0, 100, np.zeros(100, np.uint8))) == [100]


def test_silent_unauthenticated_connections_do_not_block_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many connections they open, who has proved the secret keeps its own, and another one gets in."""
    monkeypatch.setattr("unfuse.transfer.tcp.MAX_STRANGERS", 4)
    owner = ArenaOwner(lambda: open_engine("tcp", msgspec.structs.replace(OPTIONS, heartbeat_s=1000.0)))
    address, ref = owner.start(), owner.put(1, 100)
    host, port = address.removeprefix("tcp://").split(":")
    first = OwnerClient(address, OPTIONS)
    silent = [socket.create_connection((host, int(port)), 30) for _ in range(40)]
    for peer in silent[:36]:
        assert peer.recv(1) == b"", "it is hung up on"
    with closing(OwnerClient(address, OPTIONS)) as other, closing(first):
        for reader in (first, other):
            reader.call(Pull(ref.id, ref.key, ref.generation, ref.nbytes, 0, 10), Ready)
            assert len(reader.socket.recv(10, socket.MSG_WAITALL)) == 10
    for peer in silent:
        peer.close()
    owner.stop()


@pytest.mark.parametrize("first", [Ping(), Pull("a", b"", 1, 1, 0, 1), Watch("a", b"", 1, 1, 0, 1.0)])
def test_requests_before_authentication_are_disconnected(owner: ArenaOwner, first: ToOwner) -> None:
    host, port = owner.start().removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), 60) as stranger:
        send(stranger, first)
        read(stranger)
        send(stranger, first)
        with suppress(ConnectionResetError):
            assert stranger.recv(1000) == b""


@pytest.mark.parametrize(("ours", "theirs"), [("", "x"), ("x", ""), ("x", "y")])
def test_peers_with_different_secrets_cannot_connect(ours: str, theirs: str) -> None:
    owner = ArenaOwner(lambda: open_engine("tcp", msgspec.structs.replace(QUICK, secret=theirs, insecure=not theirs)))
    engine = open_engine("tcp", msgspec.structs.replace(QUICK, secret=ours, insecure=not ours))
    with closing(engine.connect(owner.start())) as link, pytest.raises(LinkBroken):
        link.ping()
    owner.stop()


def test_reader_rejects_an_owner_without_the_secret() -> None:
    options = msgspec.structs.replace(QUICK, secret="x")
    with liar(lambda peer: None) as address, closing(open_engine("tcp", options).connect(address)) as link:
        broken = pytest.raises(LinkBroken, link.ping)
    assert "same --keys" in str(broken.value)


def test_stalled_reader_times_out_and_releases_the_object() -> None:
    owner = ArenaOwner(lambda: open_engine("tcp", IMPATIENT))
    address, ref = owner.start(), owner.put(1, 40 << 20)
    reader = OwnerClient(address, OPTIONS)
    reader.call(Pull(ref.id, ref.key, ref.generation, ref.nbytes, 0, ref.nbytes), Ready)
    owner.delete(ref)
    assert owner.used() > 0
    soon(lambda: owner.used() == 0, "it is still held")
    reader.close()
    owner.stop()


def test_one_sided_object_is_retained_until_acknowledged(owner: ArenaOwner) -> None:
    """As with mooncake and nixl, which read the owner's memory behind its back."""
    ref, serving = owner.put(1, 1000), OwnerServer(owner.arena, OPTIONS, lambda peer, *_: read(peer))
    with closing(serving), closing(OwnerClient(serving.address, OPTIONS)) as reader:
        reader.call(Pull(ref.id, ref.key, ref.generation, ref.nbytes, 0, ref.nbytes), Ready)
        owner.delete(ref)
        assert owner.used() > 0
        send(reader.socket, Got())
        reader.call(Ping(), Pong)
        assert owner.used() == 0


def test_disconnected_reader_releases_the_object_being_sent() -> None:
    """Nor until the owner gives up sending: the object may be large, and others want its room."""
    owner = ArenaOwner(lambda: open_engine("tcp", msgspec.structs.replace(OPTIONS, heartbeat_s=1000.0)))
    address, ref = owner.start(), owner.put(1, 40 << 20)
    reader = OwnerClient(address, OPTIONS)
    reader.call(Pull(ref.id, ref.key, ref.generation, ref.nbytes, 0, ref.nbytes), Ready)
    owner.delete(ref)
    assert owner.used() > 0
    reader.interrupt()
    with suppress(ConnectionResetError):  # the owner may end it so
        while reader.socket.recv(1 << 20):
            pass
    reader.close()
    soon(lambda: owner.used() == 0, "it is still held")
    owner.stop()


@pytest.mark.parametrize("name", ["tcp", "zmq", FAKE])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_engine_without_secret_requires_insecure_option(name: str, host: str) -> None:
    with pytest.raises(ConfigError, match="--keys"):
        open_engine(name, TransferOptions(host=host))
    owner = ArenaOwner(lambda: open_engine(name, TransferOptions(insecure=True)))
    address, ref = owner.start(), owner.put(1, 10)
    reader = open_engine(name, TransferOptions(insecure=True))
    with closing(reader.connect(address)) as link:
        assert list(link.pull(ref, 0, 10, np.zeros(10, np.uint8))) == [10]
    reader.close()
    owner.stop()


def test_non_local_listen_address_raises_config_error(arena: Arena) -> None:
    engine = open_engine("tcp", msgspec.structs.replace(OPTIONS, host="192.0.2.1", secret="x"))
    with pytest.raises(ConfigError, match="cannot listen on 192.0.2.1"):
        engine.serve(arena)


@pytest.mark.parametrize("address", ["", "unix:@x", "tcp://127.0.0.1", "tcp://127.0.0.1:1", "fake:nowhere"])
@pytest.mark.parametrize("name", ["tcp", FAKE, "zmq"])
def test_unreachable_address_raises_link_broken(name: str, address: str) -> None:
    engine = open_engine(name, QUICK)
    with closing(engine.connect(address)) as link, pytest.raises(LinkBroken):
        link.ping()
    engine.close()


def test_tcp_engine_works_over_ipv6() -> None:
    owner = ArenaOwner(lambda: open_engine("tcp", msgspec.structs.replace(OPTIONS, host="::1")))
    try:
        address = owner.start()
    except ConfigError:
        pytest.skip("no IPv6 here")
    ref = owner.put(1, 10)
    with closing(open_engine("tcp", OPTIONS).connect(address)) as link:
        assert list(link.pull(ref, 0, 10, np.zeros(10, np.uint8))) == [10]
    owner.stop()


@pytest.mark.parametrize(("ours", "theirs"), [(True, False), (False, True), (True, True)])
def test_zmq_peers_need_the_same_key(ours: bool, theirs: bool) -> None:
    """`True` for both: a pair each, and not the same."""
    secrets = [zmq.curve_keypair()[1].decode() if has else "" for has in (ours, theirs)]
    options = (msgspec.structs.replace(QUICK, secret=secret, insecure=not secret) for secret in secrets)
    reader, other = (open_engine("zmq", each) for each in options)
    owner = ArenaOwner(lambda: other)
    with closing(reader.connect(owner.start())) as link, pytest.raises(LinkBroken):
        link.ping()
    owner.stop()
    reader.close()


def test_zmq_rejects_clients_that_know_only_the_public_key() -> None:
    secret = zmq.curve_keypair()[1]
    owner = ArenaOwner(lambda: open_engine("zmq", msgspec.structs.replace(QUICK, secret=secret.decode())))
    address = owner.start()
    for mine, answered in ((zmq.curve_keypair(), False), ((zmq.curve_public(secret), secret), True)):
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(secret))
            stranger.setsockopt(zmq.CURVE_PUBLICKEY, mine[0])
            stranger.setsockopt(zmq.CURVE_SECRETKEY, mine[1])
            stranger.setsockopt(zmq.LINGER, 0)
            refused = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
            stranger.connect(address)
            assert refused.poll(60_000), "neither let in nor refused"
            event = recv_monitor_message(refused)["event"]
            assert event == (zmq.EVENT_HANDSHAKE_SUCCEEDED if answered else zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            stranger.disable_monitor()
            refused.close()
    owner.stop()


def test_invalid_zmq_key_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="unfuse keys new"):
        open_engine("zmq", msgspec.structs.replace(OPTIONS, secret="short"))


@pytest.mark.parametrize("name", ["mooncake", "nixl"])
def test_engine_without_ref_enforcement_requires_trusted_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Open:
        enforces_refs = False

    monkeypatch.setattr("unfuse.testing.fake_transfer.FakeEngine", Open)
    monkeypatch.setitem(BACKENDS, name, FAKE)
    with pytest.raises(ConfigError, match="--trusted-network"):
        open_engine(name, TransferOptions())


def test_missing_engine_library_error_names_the_pip_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name, library in (("mooncake", "mooncake.engine"), ("nixl", "nixl")):
        monkeypatch.setitem(sys.modules, library, None)
        monkeypatch.delitem(sys.modules, f"unfuse.transfer.{name}", raising=False)
        with pytest.raises(ConfigError, match=rf"pip install 'unfuse\[{name}\]'"):
            open_engine(name, OPTIONS)


def test_unknown_engine_error_suggests_a_known_one() -> None:
    with pytest.raises(ConfigError, match="unknown transfer engine 'tcpp': did you mean tcp"):
        open_engine("tcpp", OPTIONS)
