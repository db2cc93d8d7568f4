"""Peers that mean harm: each gets an error or is dropped, and an honest worker beside it goes on completing tasks."""

from __future__ import annotations

import math
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from tests.scheduler.model import CARD, DECODE, DENOISE, ENCODE, params
from tests.scheduler.test_scheduler import done, info
from tests.wire.zmtp import Peer, message
from tools.addresses import unix_address
from tools.asking import asking
from unfuse.core.clock import SystemClock
from unfuse.core.codec import MAX_BYTES, VERSION, decode, encode
from unfuse.core.messages import (
    Accepted,
    Heartbeat,
    HeartbeatReply,
    LeasesGranted,
    Register,
    Registered,
    Rejected,
    ReportProgress,
    RequestTasks,
    StepProgress,
    StorageLocations,
    TaskCompleted,
    TaskFailed,
    ToWorker,
    TransferStats,
    UnknownWorker,
    Unregister,
)
from unfuse.core.task import Lease
from unfuse.core.worker_status import WorkerStatus
from unfuse.queues.base import QueueLimits
from unfuse.queues.memory import MemoryQueue
from unfuse.scheduler.dispatcher import Dispatcher
from unfuse.scheduler.scheduler import Scheduler
from unfuse.wire.address import INSECURE, endpoint
from unfuse.wire.dealer import Dealer
from unfuse.wire.keys import Keys, create_keys, read_keys
from unfuse.wire.router import Router

ANSWER_S = 60.0
SECRET = b"h" * 16
HELLO = Register(info("honest", ENCODE, DENOISE, DECODE), (CARD,), SECRET)


class Site:
    """A scheduler with its router, and an honest worker at it."""

    def __init__(self, scheduler: Scheduler, router: Router, honest: Dealer) -> None:
        self.scheduler, self.router, self.honest = scheduler, router, honest

    async def say(self, message: object, dealer: Dealer | None = None) -> ToWorker:
        return await (dealer or self.honest).call(message, ANSWER_S)  # type: ignore[arg-type]

    async def lease(self) -> Lease:
        """A task that the honest worker holds."""
        await self.scheduler.submit(*asking(CARD, params()))
        granted = await self.say(RequestTasks(1, None, ANSWER_S))
        assert isinstance(granted, LeasesGranted)
        (lease,) = granted.leases
        return lease

    async def complete(self, count: int = 3) -> None:
        """The honest worker goes on completing tasks."""
        for _ in range(count):
            assert await self.say(done(await self.lease())) == Accepted()
            assert isinstance(await self.say(Heartbeat()), HeartbeatReply)

    @asynccontextmanager
    async def stranger(self) -> AsyncIterator[zmq.asyncio.Socket]:
        """A bare connection: it may send what it likes."""
        peer = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(endpoint(self.router.address))
        try:
            yield peer
        finally:
            peer.close()

    @asynccontextmanager
    async def member(self, identity: str, secret: bytes = b"") -> AsyncIterator[Dealer]:
        """Another worker, properly registered."""
        dealer = Dealer(self.router.address)
        hello = Register(info(identity, ENCODE, DENOISE, DECODE), (CARD,), secret or secrets.token_bytes(16))
        assert isinstance(await self.say(hello, dealer), Registered)
        try:
            yield dealer
        finally:
            await dealer.close()


@asynccontextmanager
async def open_site(keys: Path | None = None, offered: str = "auto") -> AsyncIterator[Site]:
    scheduler = Scheduler(MemoryQueue(SystemClock()), limits=QueueLimits(100_000, 100_000), specs=[CARD])
    dispatcher = Dispatcher(scheduler, [(CARD.name, CARD.source, offered)], StorageLocations("disk:/results"))
    folder, address = str(keys or ""), "tcp://127.0.0.1:0" if keys else unix_address()
    router = Router(address, dispatcher.answer, dispatcher.handle_undelivered, read_keys(folder, "scheduler"))
    await scheduler.start()
    honest = Dealer(router.address, read_keys(folder, "worker"))
    try:
        assert isinstance(await honest.call(HELLO, ANSWER_S), Registered)
        yield Site(scheduler, router, honest)
    finally:
        await honest.close()
        await router.close()
        await scheduler.close()
        await scheduler.queue.close()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with open_site() as found:
        yield found


def body(text: bytes) -> bytes:
    return bytes([VERSION]) + text


def said(message: object) -> bytes:
    """As a peer writes it that checks nothing."""
    return body(msgspec.msgpack.encode(message))


def hello(status: WorkerStatus) -> Register:
    return Register(msgspec.structs.replace(HELLO.worker, status=status))


UNCOUNTABLE: list[tuple[str, float]] = [
    ("arena_fragmentation", math.nan),
    ("arena_fragmentation", math.inf),
    ("arena_fragmentation", -0.1),
    ("utilization", 7.0),
    ("arena_used", -1),
    ("arena_used", math.nan),
    ("arena_used", 2**63),
    ("arena_high_water", -1),
    ("load_s", -math.inf),
]
STATUSES = [(name, number, WorkerStatus(**{name: number})) for name, number in UNCOUNTABLE]  # type: ignore[arg-type]
BEAT = body(b"\x82\xa4type\xa4Beat")
BAD = {
    "nothing": b"",
    "a version alone": body(b""),
    "noise": secrets.token_bytes(1000),
    "another version": bytes([VERSION + 1]) + encode(Heartbeat())[1:],
    "version zero": b"\0" + encode(Heartbeat())[1:],
    "unknown tag": body(b"\x81\xa4type\xa6Launch"),
    "an answer": encode(Registered((), StorageLocations("disk:/x"), 1.0, 1.0)),
    "no tag": body(b"\x80"),
    "a number": body(b"\x01"),
    "a list of four thousand million claims": BEAT + b"\xa6claims\xdd\xff\xff\xff\xff",
    "a text of four thousand million bytes": body(b"\x81\xa4type\xdb\xff\xff\xff\xff"),
    "a map of four thousand million": body(b"\xdf\xff\xff\xff\xff"),
    "lists in lists": BEAT + b"\xa5extra" + b"\x91" * 1_000_000,
    "maps in maps": BEAT + b"\xa5extra" + b"\x81\xa1a" * 1_000_000,
    "text that is none": body(b"\x82\xa4type\xa4Beat\xa7holding\x91\xa2\xff\xfe"),
    "a negative number of slots": encode(RequestTasks(-5, None, 0.0))[:-1],
    **{f"a heartbeat with {name} of {number}": said(Heartbeat(status=status)) for name, number, status in STATUSES},
    **{f"a hello with {name} of {number}": said(hello(status)) for name, number, status in STATUSES},
    "a heartbeat that waits for no number": said(Heartbeat(wait=math.nan)),
    "a heartbeat that waits for less than nothing": said(Heartbeat(wait=-math.inf)),
    "seconds that are none": said(Heartbeat(transfers={"tcp": TransferStats(1, math.nan)})),
    "endless seconds": said(Heartbeat(transfers={"tcp": TransferStats(1, math.inf)})),
}


@pytest.mark.parametrize("message", BAD.values(), ids=BAD.keys())
async def test_malformed_message_is_answered_with_rejected(site: Site, message: bytes) -> None:
    async with site.stranger() as peer:
        await peer.send_multipart([b"1", message])
        number, reply = await peer.recv_multipart()
        assert number == b"1"
        assert isinstance(decode(reply, ToWorker), Rejected)
        await site.complete()


@pytest.mark.parametrize(
    "frames",
    [[b"1"], [b""], [b"1", b"", b""], [b"1" * 100_000, encode(Heartbeat())]],
    ids=["one", "empty", "three", "long"],
)
async def test_wrong_number_or_size_of_frames_is_ignored(site: Site, frames: list[bytes]) -> None:
    async with site.stranger() as peer:
        await peer.send_multipart(frames)
        await peer.send_multipart([b"2", encode(Heartbeat())])
        assert (await peer.recv_multipart())[0] == b"2"  # the first thing that it is answered
        await site.complete()


async def test_oversized_frame_closes_its_connection(site: Site) -> None:
    async with site.stranger() as peer:
        events = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        await peer.send_multipart([b"1", bytes(MAX_BYTES + 1)])
        await events.recv_multipart()
        await site.complete()
        peer.disable_monitor()
        events.close()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" * 100_000, b"\0" * 64, b""])
async def test_peer_that_does_not_speak_zmtp_affects_no_worker(site: Site, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(site.router.address.removeprefix("unix:"))
        raw.sendall(data)
        await site.complete()


async def test_unregistered_peer_gets_unknown_worker_even_with_a_valid_token(site: Site) -> None:
    lease = await site.lease()
    async with site.stranger() as peer:
        for message in (
            RequestTasks(1, None, 0.0),
            Heartbeat((lease.claim,)),
            done(lease),
            TaskFailed(lease.claim, "permanent", "x"),
            Unregister(),
        ):
            await peer.send_multipart([b"1", encode(message)])
            assert decode((await peer.recv_multipart())[1], ToWorker) == UnknownWorker()
    assert await site.say(done(lease)) == Accepted()
    await site.complete()


async def test_forged_lease_token_is_rejected(site: Site) -> None:
    lease = await site.lease()
    forged = Lease(lease.task, lease.worker, secrets.token_bytes(16), lease.expires)
    async with site.member("forger") as forger:
        for message in reports(forged):
            answer = await site.say(message, forger)
            assert isinstance(answer, Rejected)
            assert answer.lease_lost
        assert await site.say(Heartbeat((forged.claim,)), forger) == HeartbeatReply((forged.claim,), ())
    await unharmed(site, lease)


async def test_worker_cannot_end_the_task_of_another_even_with_its_token(site: Site) -> None:
    lease = await site.lease()
    async with site.member("thief") as thief:
        for message in reports(lease):
            answer = await site.say(message, thief)
            assert isinstance(answer, Rejected)
            assert answer.lease_lost
        assert await site.say(ReportProgress((StepProgress(lease.claim, 1, 2, 1),)), thief) == HeartbeatReply(
            (lease.claim,), ()
        )
        assert await site.say(Heartbeat((lease.claim,)), thief) == HeartbeatReply((lease.claim,), ())
    await unharmed(site, lease)


async def test_registration_with_the_id_of_another_worker_needs_its_secret(site: Site) -> None:
    lease = await site.lease()
    for secret in (b"", b"x" * 16, SECRET[:-1]):
        impostor = Dealer(site.router.address)
        answer = await site.say(Register(HELLO.worker, HELLO.model_specs, secret), impostor)
        assert isinstance(answer, Rejected)
        assert await site.say(done(lease), impostor) == UnknownWorker()
        await impostor.close()
    await unharmed(site, lease)


async def test_worker_can_register_again_on_a_new_connection_with_its_secret(site: Site) -> None:
    lease = await site.lease()
    again = Dealer(site.router.address)
    assert isinstance(await site.say(HELLO, again), Registered)
    assert await site.say(done(lease), again) == Accepted()
    await again.close()


async def test_peer_with_thousands_of_pending_messages_is_disconnected(site: Site) -> None:
    async with site.stranger() as peer:
        events = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        await peer.send_multipart([b"hello", encode(Register(info("greedy", ENCODE), (CARD,), b"g" * 16))])
        await peer.recv_multipart()
        for number in range(200_000):  # how many are unanswered at a time depends on how busy the machine is
            await peer.send_multipart([str(number).encode(), encode(Heartbeat(wait=60.0))])
            if number % 1000 == 0 and await events.poll(0):
                break
        else:
            pytest.fail("it was not dropped")
        await events.recv_multipart()
        await site.complete()
        peer.disable_monitor()
        events.close()
    await site.complete()


async def test_peer_that_never_reads_is_dropped_without_blocking_others() -> None:
    """Its answers, 20 kB each, fill every buffer on the way; then it is dropped."""
    async with open_site(offered="x" * 20_000) as site:
        peer = await Peer.at(site.router.address, introduced=True)
        peer.deaf()
        while not peer.ended:
            for _ in range(20):
                peer.say(message(b"1", encode(Register(info("reader-of-nothing")))))
            await site.complete(1)
        await site.complete()


async def test_worker_without_the_right_key_cannot_register(tmp_path: Path) -> None:
    create_keys(tmp_path / "keys")
    create_keys(tmp_path / "other")
    other = read_keys(str(tmp_path / "other"), "worker")
    own = read_keys(str(tmp_path / "keys"), "worker")
    assert own
    assert other
    async with open_site(tmp_path / "keys") as site:
        for keys in (None, other, Keys(other.secret, own.peer)):
            intruder = Dealer(site.router.address, keys or INSECURE)
            with pytest.raises(ConnectionError):
                await site.say(Register(info("intruder", ENCODE), (CARD,), b"i" * 16), intruder)
            await intruder.close()
            await site.complete()
        assert [member.info.id for member in await site.scheduler.registry.workers()] == ["honest"]


def reports(lease: Lease) -> list[TaskCompleted | TaskFailed]:
    """All that can be said of a task's end."""
    kinds = ("transient", "permanent", "crash", "object_lost", "hand_back")
    return [
        done(lease),
        *(TaskFailed(lease.claim, kind, "said by another", object_id="x") for kind in kinds),  # type: ignore[arg-type]
    ]


async def unharmed(site: Site, lease: Lease) -> None:
    """The task is still the honest worker's, who completes it."""
    assert await site.say(Heartbeat((lease.claim,))) == HeartbeatReply((), ())
    assert await site.say(ReportProgress((StepProgress(lease.claim, 1, 2, 1),))) == HeartbeatReply((), ())
    state = (await site.scheduler.queue.load(lease.task.request)).context.stages[lease.task.stage]
    assert (state.attempt, state.failures, state.crashes) == (1, 0, 0)
    assert await site.say(done(lease)) == Accepted()
    await site.complete()
