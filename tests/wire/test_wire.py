"""Router and dealer over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from tools.addresses import unix_address
from unfuse.core.codec import MAX_BYTES, decode, encode
from unfuse.core.errors import ConfigError
from unfuse.core.messages import (
    Accepted,
    Heartbeat,
    HeartbeatReply,
    LeasesGranted,
    Rejected,
    RequestTasks,
    ToScheduler,
    ToWorker,
    Unregister,
)
from unfuse.wire.address import INSECURE, endpoint, is_loopback, keys_for
from unfuse.wire.dealer import Dealer
from unfuse.wire.keys import Keys
from unfuse.wire.router import MAX_PENDING, Router


class Answers:
    """An answering side that keeps what it saw; an Ask waits until `released`."""

    def __init__(self) -> None:
        self.seen: list[tuple[bytes, ToScheduler]] = []
        self.undelivered: asyncio.Queue[ToWorker] = asyncio.Queue()
        self.released = asyncio.Event()
        self.waiting = asyncio.Event()

    async def answer(self, peer: bytes, message: ToScheduler) -> ToWorker | None:
        self.seen.append((peer, message))
        match message:
            case RequestTasks():
                self.waiting.set()
                await self.released.wait()
                return LeasesGranted((), {})
            case Heartbeat():
                return HeartbeatReply((), ("req_" + str(message.stored_requests),))
            case Unregister():
                raise RuntimeError("the service must survive this")
            case _:
                return Accepted()

    async def undeliverable(self, peer: bytes, reply: ToWorker) -> None:
        await self.undelivered.put(reply)


@asynccontextmanager
async def wire(address: str = "") -> AsyncIterator[tuple[Router, Answers]]:
    answers = Answers()
    router = Router(address or unix_address(), answers.answer, answers.undeliverable, INSECURE)
    try:
        yield router, answers
    finally:
        await router.close()


async def raw(address: str) -> zmq.asyncio.Socket:
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(endpoint(address))
    return socket


async def test_each_call_gets_its_own_reply_while_an_earlier_one_is_pending() -> None:
    async with wire() as (router, answers):
        dealer = Dealer(router.address)
        waiting = asyncio.create_task(dealer.call(RequestTasks(1, None, 9.0), 10))
        await answers.waiting.wait()
        replies = await asyncio.gather(*(dealer.call(Heartbeat(stored_requests=(str(n),)), 10) for n in range(30)))
        assert [reply.ended_requests for reply in replies if isinstance(reply, HeartbeatReply)] == [
            (f"req_('{n}',)",) for n in range(30)
        ]
        assert not waiting.done()
        answers.released.set()
        assert await waiting == LeasesGranted((), {})
        await dealer.close()


async def test_missing_reply_raises_timeout_error_and_a_late_one_is_ignored() -> None:
    async with wire() as (router, answers):
        dealer = Dealer(router.address)
        with pytest.raises(TimeoutError):
            await dealer.call(RequestTasks(1, None, 9.0), 0.05)
        answers.released.set()
        assert isinstance(await dealer.call(Heartbeat(), 10), HeartbeatReply)
        await dealer.close()


@pytest.mark.parametrize("body", [b"", b"\x01", b"\x07garbage", b"\x01\x81\xa4type\xa3Foo", b"\x01" + b"\x91" * 5000])
async def test_garbage_is_rejected_and_other_peers_are_still_served(body: bytes) -> None:
    async with wire() as (router, answers):
        stranger = await raw(router.address)
        await stranger.send_multipart([b"12345678", body])
        number, reply = await stranger.recv_multipart()
        assert number == b"12345678"
        assert isinstance(decode(reply, ToWorker), Rejected)
        assert not answers.seen
        dealer = Dealer(router.address)
        assert isinstance(await dealer.call(Heartbeat(), 10), HeartbeatReply)
        await dealer.close()
        stranger.close()


async def test_an_oversized_frame_ends_only_its_own_connection() -> None:
    async with wire() as (router, answers):
        stranger = await raw(router.address)
        await stranger.send_multipart([b"1", b"\x01" + bytes(MAX_BYTES + 1)])
        dealer = Dealer(router.address)
        assert isinstance(await dealer.call(Heartbeat(), 10), HeartbeatReply)
        assert len(answers.seen) == 1
        await dealer.close()
        stranger.close()


async def test_a_message_with_too_few_or_many_frames_is_ignored() -> None:
    async with wire() as (router, answers):
        stranger = await raw(router.address)
        await stranger.send_multipart([encode(Heartbeat())])
        await stranger.send_multipart([b"1", encode(Heartbeat()), b"more"])
        await stranger.send_multipart([b"2", encode(Heartbeat())])
        assert (await stranger.recv_multipart())[0] == b"2"
        assert len(answers.seen) == 1
        stranger.close()


async def test_handler_exception_is_answered_with_rejected() -> None:
    async with wire() as (router, _):
        dealer = Dealer(router.address)
        reply = await dealer.call(Unregister(), 10)
        assert isinstance(reply, Rejected)
        assert "must survive" in reply.message
        assert isinstance(await dealer.call(Heartbeat(), 10), HeartbeatReply)
        await dealer.close()


async def test_calls_of_one_worker_over_max_pending_are_rejected() -> None:
    async with wire() as (router, answers):
        dealer = Dealer(router.address)
        asks = [asyncio.create_task(dealer.call(RequestTasks(1, None, 9.0), 10)) for _ in range(MAX_PENDING + 5)]
        done, _ = await asyncio.wait(asks, return_when=asyncio.FIRST_COMPLETED)
        assert all(isinstance(task.result(), Rejected) for task in done)
        answers.released.set()
        replies = await asyncio.gather(*asks)
        assert sum(isinstance(reply, LeasesGranted) for reply in replies) == MAX_PENDING
        await dealer.close()


async def test_undeliverable_reply_is_reported_to_the_handler() -> None:
    async with wire() as (router, answers):
        dealer = Dealer(router.address)
        ask = asyncio.create_task(dealer.call(RequestTasks(1, None, 9.0), 10))
        await answers.waiting.wait()
        ask.cancel()
        await dealer.close()
        other = Dealer(router.address)
        for _ in range(100):  # until the router has seen the disconnection
            await other.call(Heartbeat(), 10)
        answers.released.set()
        assert await asyncio.wait_for(answers.undelivered.get(), 10) == LeasesGranted((), {})
        await other.close()


@pytest.mark.parametrize("address", ["", "tcp://127.0.0.1:0"], ids=["unix", "tcp"])
async def test_closed_or_absent_router_raises_connection_error_at_once(address: str) -> None:
    async with wire(address) as (router, answers):
        dealer = Dealer(router.address, INSECURE)
        waiting = [asyncio.create_task(dealer.call(RequestTasks(1, None, 9.0), 600)) for _ in range(3)]
        await answers.waiting.wait()
    for task in waiting:
        with pytest.raises(ConnectionError, match="closed"):
            await task
    with pytest.raises(ConnectionError):  # and it stays lost
        await dealer.call(Heartbeat(), 600)
    await dealer.close()

    nobody = Dealer(router.address, INSECURE)
    with pytest.raises(ConnectionError, match="nobody listens"):
        await nobody.call(Heartbeat(), 600)
    await nobody.close()


async def test_port_in_use_raises_config_error() -> None:
    async with wire("tcp://127.0.0.1:0") as (router, answers):
        with pytest.raises(ConfigError, match="cannot listen on .*choose another --listen"):
            Router(router.address, answers.answer, answers.undeliverable, INSECURE)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "0.0.0.0", "192.0.2.1", "[::]", "example.org"])
def test_tcp_requires_keys_even_on_loopback_unless_insecure(host: str) -> None:
    keys, address = Keys("s" * 40, "p" * 40), f"tcp://{host}:8001"
    with pytest.raises(ConfigError, match="can be reached by others: make keys by `unfuse keys new DIR`"):
        keys_for(address)
    assert keys_for(address, keys) == keys
    assert keys_for(address, INSECURE) is None


def test_unix_socket_uses_no_keys() -> None:
    assert keys_for("unix:/run/x", None) is keys_for("unix:/run/x", Keys("s" * 40, "p" * 40)) is None


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("", "tcp://127.0.0.1:8001"),
        ("10.0.0.1:8001", "tcp://10.0.0.1:8001"),
        ("ipc:///tmp/x", "tcp://127.0.0.1:8001"),
        ("tcp://127.0.0.1", "tcp://127.0.0.1:8001"),
        ("tcp://127.0.0.1:http", "tcp://127.0.0.1:8001"),
        ("unix:relative", "unix:/PATH"),
        ("unix:/" + "x" * 100, "at most 100 bytes"),
    ],
)
def test_invalid_control_address_error_shows_a_valid_one(address: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"is not a control address: write .*{hint}"):
        keys_for(address, INSECURE)


def test_loopback_hosts_are_recognized_by_address() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "10.0.0.1", "localhost.example.org", "::"))
