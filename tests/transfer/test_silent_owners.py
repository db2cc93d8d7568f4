"""Owners that are silent, slow or not there keep nobody waiting but who wants something of them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from unittest.mock import MagicMock

import msgspec
import pytest

from tests.transfer.conftest import OPTIONS
from unfuse.arena.arena import Arena
from unfuse.core.object_ref import CHUNK_BYTES, ObjectRef
from unfuse.testing.transfer_owner import ArenaOwner, pattern
from unfuse.transfer import movers as movers_module, open_engine
from unfuse.transfer.base import LinkBroken, TransferOptions
from unfuse.transfer.movers import SessionThreads
from unfuse.transfer.session import ArenaSink, Transfers
from unfuse.transfer.tcp import OwnerConnection, PooledLink

Kind = Callable[[], AbstractContextManager[str]]

PATIENT = msgspec.structs.replace(OPTIONS, threads=4, heartbeat_s=15.0, max_missed=4, bootstrap_s=600.0)
"""A silent owner is given up after a minute, long after what must not wait for it is over."""


@contextmanager
def silent() -> Iterator[str]:
    """Connections are taken, and nothing is said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def black_hole() -> Iterator[str]:
    """Nobody answers who wants to connect."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, ExitStack() as filling:
        port = listener.getsockname()[1]
        for _ in range(4):
            filler = filling.enter_context(socket.socket())
            filler.setblocking(False)
            with suppress(BlockingIOError):
                filler.connect(("127.0.0.1", port))
        yield f"tcp://127.0.0.1:{port}"


@contextmanager
def trickling() -> Iterator[str]:
    """A byte comes each second, of a message that is never whole."""
    over = threading.Event()

    def trickle(peer: socket.socket) -> None:
        with peer, suppress(OSError):
            peer.sendall(b"\0\0\x20\0")
            while not over.wait(1):
                peer.sendall(b"x")

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=trickle, args=(listener.accept()[0],)).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=accept)
        accepting.start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join()


@pytest.mark.parametrize(("name", "kinds"), [("tcp", (silent, black_hole, trickling)), ("zmq", (silent, black_hole))])
def test_silent_owners_do_not_delay_transfers_from_live_ones(name: str, kinds: tuple[Kind, ...]) -> None:
    """More of each kind of them than there are threads; not one of their sessions has even failed once."""
    owner = ArenaOwner(lambda: open_engine(name, PATIENT))
    known = {"live": {name: owner.start()}}
    refs = [msgspec.structs.replace(owner.put(n, CHUNK_BYTES), owner="live") for n in range(8)]
    arena = Arena(256 << 20)
    engine = open_engine(name, PATIENT)
    engine.register(arena.memory)
    with ExitStack() as stack:
        fetching = Transfers({name: engine}, known.__getitem__, PATIENT)
        stack.callback(fetching.close)
        waiting = []
        for number in range(2 * PATIENT.threads):
            for kind in kinds:
                gone = f"{kind.__name__}-{number}"
                known[gone] = {name: stack.enter_context(kind())}
                lost = msgspec.structs.replace(refs[0], owner=gone)
                waiting.append(fetching.fetch(lost, ArenaSink(arena, lost)))
        for number, ref in enumerate(refs):
            sink = ArenaSink(arena, ref)
            fetching.fetch(ref, sink).result(50)
            assert sink.extent
            assert bytes(arena.view[sink.extent.offset :][: ref.nbytes]) == bytes(pattern(number, ref.nbytes))
        assert [(session.wait(0), session.setbacks) for session in waiting] == [(False, 0)] * len(waiting)
    assert all(session.wait(0) for session in waiting)
    engine.close()
    owner.stop()
    owner.arena.close()
    arena.close()


class Walk:
    """Something that takes steps, each said to `took`."""

    def __init__(self, took: Callable[[], object], steps: int) -> None:
        self._took, self._left = took, steps

    def step(self) -> float | None:
        self._took()
        self._left -= 1
        return 0 if self._left else None

    def cancel(self) -> None:
        self._left = 1


def test_sessions_of_an_owner_run_round_robin_and_idle_threads_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movers_module, "IDLE_THREAD_S", 0.01)
    movers, order, over = SessionThreads(1), list[str](), threading.Event()
    gate = threading.Event()
    movers.add("owner", Walk(lambda: gate.wait(60), 1))
    for name in "abc":
        movers.add("owner", Walk(lambda name=name: order.append(name), 3))  # type: ignore[misc]
    movers.add("owner", Walk(over.set, 1))
    gate.set()
    assert over.wait(60)
    movers.add("another", Walk(over.set, 1))
    while movers._owners:
        pass
    assert order == list("abc" * 3)
    movers.stop()
    movers.join()


def test_threads_per_owner_are_capped_by_the_limit_and_its_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(movers_module, "IDLE_THREAD_S", 0.01)
    movers, gate, begun = SessionThreads(2), threading.Event(), threading.Semaphore(0)

    def step() -> None:
        begun.release()
        assert gate.wait(60)

    for owner, count in (("one", 1), ("many", 5)):
        for _ in range(count):
            movers.add(owner, Walk(step, 1))
    for _ in range(3):
        assert begun.acquire(timeout=60)
    assert {owner: len(threads.running) for owner, threads in movers._owners.items()} == {"one": 1, "many": 2}
    assert not begun.acquire(blocking=False)
    gate.set()
    while movers._owners:
        pass
    movers.stop()
    movers.join()


def test_idle_session_thread_is_reused_and_exits_on_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movers_module, "IDLE_THREAD_S", 600.0)
    movers, who, done = SessionThreads(2), list[threading.Thread](), threading.Semaphore(0)

    def step() -> None:
        who.append(threading.current_thread())
        done.release()

    for number in range(1, 6):
        movers.add("owner", Walk(step, 1))
        assert done.acquire(timeout=60)
        while movers._owners["owner"].sessions:
            pass
        assert len(who) == number
    assert len(set(who)) == 1
    movers.stop()
    movers.join()
    assert not who[0].is_alive()


def test_session_added_while_a_thread_exits_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movers_module, "IDLE_THREAD_S", 0.001)
    movers, done = SessionThreads(1), threading.Semaphore(0)
    for number in range(500):
        time.sleep(0.0008 + number % 9 * 0.0001)
        movers.add("owner", Walk(done.release, 1))
        assert done.acquire(timeout=60)
    movers.stop()
    movers.join()


def test_stop_cancels_unfinished_sessions() -> None:
    movers, taken = SessionThreads(1), list[ObjectRef | None]()
    walks = [Walk(lambda: taken.append(None), 10**9) for _ in range(3)]
    for walk in walks:
        movers.add("owner", walk)
    movers.stop()
    movers.join()
    assert [walk._left for walk in walks] == [0, 0, 0]


def test_connection_that_opens_while_its_link_is_closed_is_closed() -> None:
    opens, go_on = threading.Event(), threading.Event()
    connection = MagicMock()

    def open_slowly() -> OwnerConnection:
        opens.set()
        assert go_on.wait(20)
        return connection

    class Link(PooledLink[OwnerConnection]):
        pull = MagicMock()

    link = Link(open_slowly, "tcp://owner", TransferOptions())
    with ThreadPoolExecutor(1) as threads:
        ping = threads.submit(link.ping)
        assert opens.wait(20)
        link.close()
        go_on.set()
        with pytest.raises(LinkBroken, match="closed"):
            ping.result(20)
    assert [call[0] for call in connection.method_calls] == ["close"]
