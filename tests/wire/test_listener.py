"""The door in front of the router: who does not keep the bounds is dropped, and nobody else notices."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from structlog.testing import capture_logs

from tests.wire.test_wire import Answers
from tests.wire.zmtp import COMMAND, GREETING, MORE, PING, PONG, SIGNATURE, Peer, frame, header, message
from tools.addresses import unix_address
from unfuse.core.codec import MAX_BYTES, decode, encode
from unfuse.core.errors import ConfigError
from unfuse.core.messages import Heartbeat, HeartbeatReply, LeasesGranted, RequestTasks, ToWorker
from unfuse.wire.address import INSECURE, UNIX
from unfuse.wire.bounded_connection import OVERHEAD, Bounds
from unfuse.wire.dealer import Dealer
from unfuse.wire.keys import create_keys, read_keys
from unfuse.wire.listener import BoundedListener, listen
from unfuse.wire.router import Router

BEAT = encode(Heartbeat())


@asynccontextmanager
async def routed(keys: str = "") -> AsyncIterator[tuple[Router, Answers, Dealer]]:
    """A router, what it was asked, and an honest worker at it, one of whose questions waits throughout."""
    answers = Answers()
    router = Router(
        "tcp://127.0.0.1:0", answers.answer, answers.undeliverable, read_keys(keys, "scheduler") or INSECURE
    )
    honest = Dealer(router.address, read_keys(keys, "worker") or INSECURE)
    waiting = asyncio.create_task(honest.call(RequestTasks(1, None, 60.0), 100))
    await answers.waiting.wait()
    try:
        yield router, answers, honest
        assert isinstance(await honest.call(Heartbeat(), 60), HeartbeatReply)
        answers.released.set()
        assert await waiting == LeasesGranted((), {})
    finally:
        await honest.close()
        await router.close()


@asynccontextmanager
async def echoing(tmp_path: Path, bounds: Bounds, address: str = "tcp://127.0.0.1:0") -> AsyncIterator[str]:
    """The address of a door with such bounds, behind which every message is answered by itself."""
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{tmp_path}/inside")

    async def echo() -> None:
        while True:
            await router.send_multipart(await router.recv_multipart())

    answering = asyncio.create_task(echo())
    listener, at = listen(address)
    door = BoundedListener(listener, tmp_path / "inside", bounds)
    try:
        yield at
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        door.close()
        context.destroy(linger=0)


async def speaks(peer: Peer, times: int = 1) -> None:
    """It is let through, and answered."""
    for _ in range(times):
        peer.say(message(b"1", b"body"))
        assert [await peer.hear(), await peer.hear()] == [b"1", b"body"]


UNSPOKEN = {
    "another protocol": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(64),
    "the protocol's first version": b"\x01\x00",
    "its second": SIGNATURE + b"\x01\x05",
    "a message before the handshake": GREETING + message(b"1", BEAT),
    "a handshake without end": GREETING + frame(b"\x04PING" + bytes(200), COMMAND) * 1000,
    "a command of 2^63 bytes": GREETING + b"\x06" + (1 << 63).to_bytes(8, "big"),
}
SPOKEN = {
    "a frame of 2^63 bytes": b"\x02" + (1 << 63).to_bytes(8, "big"),
    "a frame that is one byte too large": header(MAX_BYTES + OVERHEAD + 1),
    "a flag that there is not": b"\x10\x00",
    "parts without end": frame(b"", MORE) * 100_000,
    "large parts without end": frame(bytes(1 << 20), MORE) * 10,
    "parts without end between pings": (frame(b"", MORE) + PING) * 10_000,
    "tiny messages, answers unread": frame(b"x") * 200_000,
    "pongs that nobody asked for": PONG * 10_000,
    "large messages": message(b"1", bytes(MAX_BYTES)) * 10,
}


@pytest.mark.parametrize("data", UNSPOKEN.values(), ids=UNSPOKEN.keys())
async def test_peer_that_breaks_the_zmtp_handshake_is_disconnected(data: bytes) -> None:
    async with routed() as (router, answers, _):
        peer = await Peer.at(router.address)
        peer.say(data)
        assert await peer.gone()
        assert len(answers.seen) == 1


@pytest.mark.parametrize("data", SPOKEN.values(), ids=SPOKEN.keys())
async def test_peer_that_exceeds_protocol_bounds_is_dropped_before_decoding(data: bytes) -> None:
    async with routed() as (router, answers, _):
        peer = await Peer.at(router.address, introduced=True)
        peer.say(data)
        assert await peer.gone()
        assert len(answers.seen) == 1


async def test_declared_frame_length_counts_before_its_bytes_arrive(tmp_path: Path) -> None:
    bounds = Bounds(pending_bytes=1 << 30, total_pending_bytes=10_000_000, bytes_per_s=1e9)
    async with echoing(tmp_path, bounds) as address:
        small = await Peer.at(address, introduced=True)
        greedy = [await Peer.at(address, introduced=True) for _ in range(5)]
        for number, peer in enumerate(greedy):
            peer.say(header(3_000_000 + number, MORE) + bytes(1000))
        assert await greedy[3].gone()  # who takes most, when it is too much
        await speaks(small)
        for peer in (small, *greedy):
            peer.close()


async def test_worker_can_send_any_number_of_calls_while_one_is_pending() -> None:
    async with routed() as (_, answers, honest):
        for _ in range(2000):
            assert isinstance(await honest.call(Heartbeat(), 60), HeartbeatReply)
        assert len(answers.seen) == 2001


async def test_ping_is_answered_and_does_not_count_as_unanswered(tmp_path: Path) -> None:
    async with echoing(tmp_path, Bounds(pending_frames=4)) as address:
        peer = await Peer.at(address, introduced=True)
        for _ in range(20):
            peer.say(PING)
            assert await peer.hear() == b"\x04PONGcontext"
        await speaks(peer, 20)
        peer.close()


async def test_peer_above_the_rate_limit_is_dropped_even_if_it_reads(tmp_path: Path) -> None:
    async with echoing(tmp_path, Bounds(frames_per_s=1e-3, burst_s=20e3)) as address:
        peer, other = await Peer.at(address, introduced=True), await Peer.at(address, introduced=True)
        await speaks(peer, 10)
        peer.say(message(b"1", b"body"))
        assert await peer.gone()
        await speaks(other)
        other.close()


async def test_unfinished_handshake_times_out(tmp_path: Path) -> None:
    async with echoing(tmp_path, Bounds(handshake_s=1.0)) as address:
        quick = await Peer.at(address, introduced=True)
        silent, slow = await Peer.at(address), await Peer.at(address)

        async def drip() -> None:
            for byte in GREETING:
                slow.say(bytes([byte]))
                await asyncio.sleep(0.1)

        dripping = asyncio.create_task(drip())
        assert await silent.gone()
        assert await slow.gone()
        await speaks(quick)
        dripping.cancel()
        quick.close()


async def test_oldest_unfinished_handshakes_are_dropped_over_the_limit(tmp_path: Path) -> None:
    async with echoing(tmp_path, Bounds(handshakes=10, accept_burst=10_000)) as address:
        honest = await Peer.at(address, introduced=True)
        silent = [await Peer.at(address) for _ in range(300)]
        for peer in silent[:290]:
            assert await peer.gone()
        late = await Peer.at(address, introduced=True)
        await speaks(honest)
        await speaks(late)
        for peer in (honest, late, *silent):
            peer.close()


async def test_new_connections_over_the_limit_are_dropped(tmp_path: Path) -> None:
    async with echoing(tmp_path, Bounds(connections=3)) as address:
        inside = [await Peer.at(address, introduced=True) for _ in range(3)]
        assert await (await Peer.at(address)).gone()
        inside.pop().close()
        for peer in inside:
            await speaks(peer)
        while True:  # until the one that left is seen to be gone
            try:
                inside.append(await Peer.at(address, introduced=True))
                break
            except (OSError, asyncio.IncompleteReadError):
                await asyncio.sleep(0)
        for peer in inside:
            await speaks(peer)
            peer.close()


async def test_connections_above_the_accept_rate_are_delayed_not_dropped(tmp_path: Path) -> None:
    async with echoing(tmp_path, Bounds(accepts_per_s=100, accept_burst=5)) as address:
        peers = await asyncio.gather(*(Peer.at(address, introduced=True) for _ in range(50)))
        for peer in peers:
            await speaks(peer)
            peer.close()


async def test_thousand_silent_connections_do_not_block_workers() -> None:
    async with routed() as (router, _, honest):
        silent = [await Peer.at(router.address) for _ in range(1000)]
        late = Dealer(router.address, INSECURE)
        assert isinstance(await late.call(Heartbeat(), 60), HeartbeatReply)
        assert isinstance(await honest.call(Heartbeat(), 60), HeartbeatReply)
        await late.close()
        for peer in silent:
            peer.close()


async def test_peer_that_does_not_read_its_replies_is_dropped(tmp_path: Path) -> None:
    """What is said comes back; both buffers on the way are full long before the bound on what is unanswered."""
    async with echoing(tmp_path, Bounds(bytes_per_s=1e9)) as address:
        deaf, other = await Peer.at(address, introduced=True), await Peer.at(address, introduced=True)
        deaf.deaf()
        for _ in range(1000):
            deaf.say(message(b"1", bytes(1 << 20)))
        while not deaf.ended:
            await speaks(other)
        other.close()


async def test_bounds_also_apply_to_peers_with_the_worker_key(tmp_path: Path) -> None:
    create_keys(tmp_path / "keys")
    key = read_keys(str(tmp_path / "keys"), "worker")
    assert key
    async with routed(str(tmp_path / "keys")) as (router, answers, _):
        for body, count in ((b"", 5000), (bytes(MAX_BYTES), 6)):
            attacker = zmq.asyncio.Context.instance().socket(zmq.DEALER)
            attacker.setsockopt(zmq.LINGER, 0)
            attacker.setsockopt(zmq.SNDHWM, 0)
            key.secure(attacker, server=False)
            events = attacker.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            attacker.connect(router.address)
            for _ in range(count):
                await attacker.send_multipart([b"1", body])
            await events.recv_multipart()
            attacker.disable_monitor()
            events.close()
            attacker.close()
        assert len(answers.seen) == 1


async def test_drop_reason_is_logged_at_most_once_a_second(tmp_path: Path) -> None:
    async with echoing(tmp_path, Bounds(accept_burst=10_000)) as address:
        began = asyncio.get_running_loop().time()
        with capture_logs() as logged:
            peers = [await Peer.at(address) for _ in range(200)]
            for peer in peers:
                peer.say(b"GET / HTTP/1.1\r\n\r\n")
            for peer in peers:
                await peer.gone()
        seconds = asyncio.get_running_loop().time() - began
        assert 1 <= len(logged) <= seconds + 1
        assert {entry["reason"] for entry in logged} == {"it does not speak ZMTP"}


async def test_unix_socket_accepts_only_its_own_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = unix_address()
    path = Path(address.removeprefix(UNIX))
    async with echoing(tmp_path, Bounds(), address) as at:
        assert at == address
        assert path.stat().st_mode & 0o077 == 0
        peer = await Peer.at(at, introduced=True)
        await speaks(peer)
        user = os.geteuid()
        with monkeypatch.context() as patch:
            patch.setattr("unfuse.wire.listener.os.geteuid", lambda: user + 1)
            assert await (await Peer.at(at)).gone()
        await speaks(peer)
        with pytest.raises(ConfigError, match="cannot listen at .*it is taken"):
            listen(at)
        peer.close()
    assert not path.exists()


async def test_last_message_arrives_if_the_worker_disconnects_at_once() -> None:
    async with routed() as (router, answers, _):
        for _ in range(20):
            peer = await Peer.at(router.address, introduced=True)
            peer.say(message(b"1", BEAT))
            peer.close()
        while len(answers.seen) < 21:
            await asyncio.sleep(0)


async def test_inner_router_socket_is_removed_on_close(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    answers = Answers()
    router = Router("tcp://127.0.0.1:0", answers.answer, answers.undeliverable, INSECURE, folder)
    assert len(list(folder.iterdir())) == 1
    dealer = Dealer(router.address, INSECURE)
    assert isinstance(await dealer.call(Heartbeat(), 60), HeartbeatReply)
    await dealer.close()
    await router.close()
    assert list(folder.iterdir()) == []


async def test_message_sent_byte_by_byte_is_reassembled(tmp_path: Path) -> None:
    async with routed() as (router, _, __):
        peer = await Peer.at(router.address, introduced=True)
        body = encode(Heartbeat(stored_requests=tuple(secrets.token_hex(16) for _ in range(50))))
        for byte in message(b"1", body):
            peer.say(bytes([byte]))
            await asyncio.sleep(0)
        assert await peer.hear() == b"1"
        assert isinstance(decode(await peer.hear(), ToWorker), HeartbeatReply)
        peer.close()
