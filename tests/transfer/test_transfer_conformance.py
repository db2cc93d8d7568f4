"""Every engine is one: in one process, between two, and between two hosts. The suite notices what is none."""

import multiprocessing
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np
import psutil
import pytest
import zmq
from numpy.typing import NDArray

from tests.netns import SecondHost
from tests.transfer.conftest import OPTIONS, ChildOwner, needed, one_process, reader, two_processes
from unfuse.core.object_ref import ObjectRef
from unfuse.testing import ArenaOwner, Pair, check_transfer
from unfuse.testing.fake_transfer import FakeEngine, FakeLink
from unfuse.testing.transfer_owner import pattern
from unfuse.transfer import open_engine
from unfuse.transfer.base import LinkBroken, PeerLink, TransferEngine

FAKE = "unfuse.testing.fake_transfer:FakeEngine"
GLOO = "tests.transfer.local_pairs:LocalGloo"
nightly = partial(pytest.param, marks=pytest.mark.nightly)


@pytest.mark.parametrize("name", [FAKE, "tcp", "zmq", nightly(GLOO), nightly("mooncake"), nightly("nixl")])
def test_engines_pass_the_transfer_suite_in_one_process(name: str) -> None:
    needed(name)
    check_transfer(partial(one_process, name))


@pytest.mark.parametrize("name", ["tcp", "zmq", nightly(GLOO), nightly("mooncake"), nightly("nixl")])
def test_engines_pass_the_transfer_suite_between_processes(name: str) -> None:
    needed(name)
    check_transfer(partial(two_processes, name))


@pytest.mark.parametrize("name", ["tcp", "zmq", nightly(GLOO), nightly("mooncake"), nightly("nixl")])
def test_engines_pass_the_transfer_suite_between_hosts(
    host: SecondHost, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed(name)
    monkeypatch.setenv("UCX_NET_DEVICES", f"{host.link},lo")  # NIXL takes any device, also one that leads nowhere
    secret = zmq.curve_keypair()[1].decode()
    ours, theirs = (msgspec.structs.replace(OPTIONS, host=at, secret=secret) for at in (host.near, host.far))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:  # NIXL's transport reads routes once
        fresh.submit(check_transfer, partial(two_processes, name, ours, theirs, host.enter)).result()


@pytest.mark.parametrize("name", ["tcp", "zmq"])
def test_remote_peers_without_the_secret_receive_no_data(host: SecondHost, name: str) -> None:
    known, other = (zmq.curve_keypair()[1].decode() for _ in range(2))
    theirs = msgspec.structs.replace(OPTIONS, host=host.far, secret=known)
    owner = ChildOwner(name, theirs, host.enter)
    address, ref = owner.start(), owner.put(1, 1000)
    for secret, comes in ((other, False), ("", False), (known, True)):
        asking = msgspec.structs.replace(OPTIONS, secret=secret, insecure=not secret, heartbeat_s=1.0)
        engine = open_engine(name, asking)
        memory = np.zeros(1000, np.uint8)
        with closing(engine.connect(address)) as link, nullcontext() if comes else pytest.raises(LinkBroken):
            list(link.pull(ref, 0, 1000, memory))
        assert memory.any() == comes
        engine.close()
    owner.end()


@pytest.mark.parametrize("name", ["tcp", "zmq", nightly(GLOO), nightly("mooncake")])
def test_owner_paused_by_sigstop_breaks_links_and_recovers_on_sigcont(name: str) -> None:
    """As by SIGSTOP, a debugger, or a machine that swaps: its connections stay, but nothing comes."""
    needed(name)
    with two_processes(name, msgspec.structs.replace(OPTIONS, heartbeat_s=0.3, max_missed=1)) as pair:
        assert isinstance(pair.owner, ChildOwner)
        ref, memory = pair.owner.put(1, 12 << 20), pair.arena.memory[: 12 << 20]
        with closing(pair.engine.connect(pair.owner.start())) as link:
            link.ping()
            with stopped(pair.owner.process.pid):
                for asked in (
                    link.ping,
                    lambda: list(link.pull(ref, 0, ref.nbytes, memory)),
                    lambda: link.written(ref, 9, 0),
                ):
                    with pytest.raises(LinkBroken):
                        asked()
            heard(link.ping)
            assert heard(lambda: list(link.pull(ref, 0, ref.nbytes, memory)))[-1] == ref.nbytes
            assert (memory == pattern(1, ref.nbytes)).all()


Answer = TypeVar("Answer")


def heard(ask: Callable[[], Answer]) -> Answer:
    """What an owner answers in the end: on a busy machine it is a while before one that goes on is in time again."""
    until = time.monotonic() + 600
    while True:
        try:
            return ask()
        except LinkBroken:
            assert time.monotonic() < until
            time.sleep(0.1)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that stands still: a signal is sent before it has been taken."""
    process = psutil.Process(pid)
    process.suspend()
    try:
        until = time.monotonic() + 600
        while process.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < until, process.status()
            time.sleep(0.01)
        yield
    finally:
        process.resume()


class Trusting(FakeEngine):
    """Asks for no key."""

    def connect(self, address: str) -> PeerLink:
        class Any(FakeLink):
            def pull(
                self, ref: ObjectRef, start: int, stop: int, into: NDArray[np.uint8]
            ) -> Generator[int, None, None]:
                entry = self._owner().arena._entries.get(ref.id)
                key = entry.extent.key if entry else b""
                yield from super().pull(msgspec.structs.replace(ref, key=key), start, stop, into)

        return Any(address)


class Short(FakeEngine):
    """Loses the last byte."""

    def connect(self, address: str) -> PeerLink:
        class Loses(FakeLink):
            def pull(
                self, ref: ObjectRef, start: int, stop: int, into: NDArray[np.uint8]
            ) -> Generator[int, None, None]:
                into = into.copy() if stop - start == 1 else into
                yield from super().pull(ref, start, stop, into)

        return Loses(address)


class Generous(FakeEngine):
    """Writes a byte too many."""

    def connect(self, address: str) -> PeerLink:
        class Writes(FakeLink):
            def pull(
                self, ref: ObjectRef, start: int, stop: int, into: NDArray[np.uint8]
            ) -> Generator[int, None, None]:
                yield from super().pull(ref, start, stop, into)
                beyond = np.lib.stride_tricks.as_strided(into, (into.nbytes + 1,), (1,))
                beyond[-1] ^= 1

        return Writes(address)


@pytest.mark.parametrize("broken", [Trusting, Short, Generous])
def test_transfer_suite_detects_contract_violations(broken: type[TransferEngine]) -> None:
    @contextmanager
    def open_pair() -> Iterator[Pair]:
        with reader(FAKE) as (_, arena):
            yield Pair(ArenaOwner(lambda: broken(OPTIONS)), broken(OPTIONS), arena)

    with pytest.raises(AssertionError):
        check_transfer(open_pair)
