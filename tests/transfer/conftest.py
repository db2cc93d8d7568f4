"""Two ends of a transfer: in one process, in two, or in two network namespaces."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec
import pytest
import zmq

from tests.netns import SecondHost, second_host
from unfuse.arena.arena import Arena
from unfuse.core.errors import ConfigError
from unfuse.core.object_ref import ObjectRef
from unfuse.testing.transfer_owner import CAPACITY, ArenaOwner
from unfuse.testing.transfer_suite import Pair
from unfuse.transfer import open_engine
from unfuse.transfer.base import TransferEngine, TransferOptions

CHILD = Path(__file__).with_name("owner_child.py")
ROOT = Path(__file__).parents[2]
SECRET = zmq.curve_keypair()[1].decode()
"""What both ends know."""
OPTIONS = TransferOptions(secret=SECRET, trusted_network=True)
Enter = Callable[[list[str]], list[str]]


def needed(name: str) -> None:
    """Skip, on a laptop, where an engine's library is not installed."""
    try:
        open_engine(name, OPTIONS).close()
    except ConfigError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def host() -> Iterator[SecondHost]:
    with second_host() as host:
        yield host


class ChildOwner:
    """An owner in a process of its own, of this host or, by `enter`, of another."""

    def __init__(self, name: str, options: TransferOptions = OPTIONS, enter: Enter = list) -> None:
        self._lock = Lock()
        self.process = subprocess.Popen(
            enter([sys.executable, str(CHILD), name, msgspec.json.encode(options).decode()]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        return lambda *arguments: self._ask(verb, arguments)

    def kill(self) -> None:
        """Kill −9."""
        self.process.kill()
        self.end()

    def end(self) -> None:
        """Have it end, and wait for that."""
        for stream in (self.process.stdin, self.process.stdout):
            assert stream
            stream.close()
        self.process.wait(30)

    def _ask(self, verb: str, arguments: Sequence[Any]) -> Any:
        assert self.process.stdin and self.process.stdout
        sent = [msgspec.msgpack.encode(a).hex() if isinstance(a, ObjectRef) else a for a in arguments]
        with self._lock:
            self.process.stdin.write(json.dumps([verb, sent]) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        assert line, f"the owner is gone at {verb}"
        answer = json.loads(line)
        assert "error" not in answer, answer
        value = answer["answer"]
        is_ref = verb in ("put", "start_output")
        return msgspec.msgpack.decode(bytes.fromhex(value), type=ObjectRef) if is_ref else value


@contextmanager
def reader(name: str, options: TransferOptions = OPTIONS) -> Iterator[tuple[TransferEngine, Arena]]:
    """An engine and the arena it pulls into."""
    arena, engine = Arena(CAPACITY), open_engine(name, options)
    engine.register(arena.memory)
    try:
        yield engine, arena
    finally:
        engine.close()
        arena.close()


@contextmanager
def one_process(name: str, options: TransferOptions = OPTIONS) -> Iterator[Pair]:
    """Both ends here."""
    owner = ArenaOwner(lambda: open_engine(name, options))
    with reader(name, options) as (engine, arena):
        yield Pair(owner, engine, arena)
    owner.stop()
    owner.arena.close()


@contextmanager
def two_processes(
    name: str, options: TransferOptions = OPTIONS, theirs: TransferOptions = OPTIONS, enter: Enter = list
) -> Iterator[Pair]:
    """The owner in a child."""
    owner = ChildOwner(name, theirs, enter)
    try:
        with reader(name, options) as (engine, arena):
            yield Pair(owner, engine, arena)
    finally:
        owner.end()
