"""Every engine is one: in one process, between two, and between two hosts. The suite notices what is none."""

import os
import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from numpy.typing import NDArray

from tests.transfer.conftest import OPTIONS, one_process, reader, two_processes
from unfuse.core.errors import ConfigError
from unfuse.core.object_ref import ObjectRef
from unfuse.testing import check_transfer
from unfuse.testing.transfer_suite import ArenaOwner, Pair
from unfuse.transfer import open_engine
from unfuse.transfer.base import Link, TransferEngine
from unfuse.transfer.fake import FakeEngine, FakeLink


def needed(name: str) -> None:
    """Skip, on a laptop, where an engine's library is not installed."""
    try:
        open_engine(name, OPTIONS).close()
    except ConfigError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


nightly = partial(pytest.param, marks=pytest.mark.nightly)


@pytest.mark.parametrize("name", ["fake", "tcp", "zmq", nightly("mooncake"), nightly("nixl")])
def test_an_engine_in_one_process(name: str) -> None:
    needed(name)
    check_transfer(partial(one_process, name))


@pytest.mark.parametrize("name", ["tcp", "zmq", "mooncake", nightly("nixl")])
def test_an_engine_between_processes(name: str) -> None:
    needed(name)
    check_transfer(partial(two_processes, name))


@pytest.fixture(scope="module")
def host() -> Iterator[tuple[str, str, list[str]]]:
    """Another host, made of a network namespace: our address there, its own, and how to start a process on it."""
    name, net = f"unfuse-{os.getpid()}", f"10.213.{os.getpid() % 250}"
    root = [] if os.geteuid() == 0 else ["sudo", "-n"]

    def do(line: str) -> None:
        done = subprocess.run([*root, *line.split()], capture_output=True, text=True)
        if done.returncode:
            if os.environ.get("CI") == "true" and "not permitted" not in done.stderr:
                pytest.fail(f"{line}: {done.stderr}")
            pytest.skip(f"network namespaces cannot be made here: {done.stderr}")

    do(f"ip netns add {name}")
    try:
        do(f"ip link add uf{os.getpid()} type veth peer name far netns {name}")
        do(f"ip addr add {net}.1/30 dev uf{os.getpid()}")
        do(f"ip link set uf{os.getpid()} up")
        for line in (f"addr add {net}.2/30 dev far", "link set far up", "link set lo up"):
            do(f"ip -n {name} {line}")
        yield f"{net}.1", f"{net}.2", [*root, "ip", "netns", "exec", name]
    finally:
        subprocess.run([*root, "ip", "netns", "del", name], capture_output=True)


@pytest.mark.parametrize("name", ["tcp", "zmq", nightly("mooncake"), nightly("nixl")])
def test_an_engine_between_hosts(host: tuple[str, str, list[str]], name: str) -> None:
    needed(name)
    near, far, command = host
    secret = zmq.curve_keypair()[1].decode()
    ours, theirs = (msgspec.structs.replace(OPTIONS, host=at, secret=secret) for at in (near, far))
    path = f"PYTHONPATH={Path(__file__).parents[2]}"
    check_transfer(partial(two_processes, name, ours, theirs, [*command, "env", path]))


class Trusting(FakeEngine):
    """Asks for no key."""

    def connect(self, address: str) -> Link:
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

    def connect(self, address: str) -> Link:
        class Loses(FakeLink):
            def pull(
                self, ref: ObjectRef, start: int, stop: int, into: NDArray[np.uint8]
            ) -> Generator[int, None, None]:
                into = into.copy() if stop - start == 1 else into
                yield from super().pull(ref, start, stop, into)

        return Loses(address)


class Generous(FakeEngine):
    """Writes a byte too many."""

    def connect(self, address: str) -> Link:
        class Writes(FakeLink):
            def pull(
                self, ref: ObjectRef, start: int, stop: int, into: NDArray[np.uint8]
            ) -> Generator[int, None, None]:
                yield from super().pull(ref, start, stop, into)
                beyond = np.lib.stride_tricks.as_strided(into, (into.nbytes + 1,), (1,))
                beyond[-1] ^= 1

        return Writes(address)


@pytest.mark.parametrize("broken", [Trusting, Short, Generous])
def test_the_suite_notices_an_engine_that_breaks_the_contract(broken: type[TransferEngine]) -> None:
    @contextmanager
    def open_pair() -> Iterator[Pair]:
        with reader("fake") as (_, arena):
            yield Pair(ArenaOwner(lambda: broken(OPTIONS)), broken(OPTIONS), arena)

    with pytest.raises(AssertionError):
        check_transfer(open_pair)
