"""A pull between two processes against the plain ways to move the same bytes, 1 MiB … 1 GiB, and many pulls at once.

Ours bring a sealed object from an arena of one process into an arena of the other, verify it and seal it there. The
others verify nothing: a raw socket (sendall, recv_into), pyzmq (one message), Mooncake over TCP and NIXL over UCX on
TCP by one read of registered memory, and Ray's object store between two of its nodes; `raw_checked` is the raw socket
with checksums afterwards. Rounds are interleaved, ratios are of pairs within a round. The threads of NIXL and Ray slow
others down where there are few cores: each is in a run of its own, against the raw socket and tcp.

Ray is installed in `--peers`, once; `--peers none` leaves it out.
`python -m bench.pull [--rounds N] [--largest MIB] [--peers FOLDER]`
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray
from typing_extensions import override
from xxhash import xxh3_64_hexdigest

from bench.report import quantile, ratio, show, table
from bench.tasks import PEERS, peer_python
from unfuse.arena.arena import Arena
from unfuse.core.errors import ConfigError, UnfuseError
from unfuse.core.object_ref import ObjectRef
from unfuse.stores.base import checksums_of
from unfuse.transfer import open_engine
from unfuse.transfer.base import PeerLink, TransferEngine, TransferOptions
from unfuse.transfer.onesided import CopyRange, OneSidedEngine, OwnerInfo
from unfuse.transfer.session import ArenaSink, Transfers
from unfuse.transfer.tcp import OwnerClient, TcpEngine

MIB = 1 << 20
SIZES = (1, 4, 16, 64, 256, 1024)
"""MiB."""
AT_ONCE = (1, 2, 4, 8, 16)
EACH = 16 * MIB
OPTIONS = TransferOptions(insecure=True, trusted_network=True)
PIECE = MIB
WARM = 2
TIME = 5 * 1024
"""MiB a way moves at most in the rounds of one size."""
RUNS = (("tcp", "zmq", "mooncake"), ("tcp", "nixl"), ("tcp", "ray"))

Way = Callable[[ObjectRef], float | None]
"""Brings the object once, and returns the seconds of it if it knows better than who called."""


def engines(names: Sequence[str]) -> dict[str, TransferEngine]:
    """Those that are installed."""
    opened = {}
    for name in names:
        with suppress(ConfigError):
            opened[name] = open_engine(name, OPTIONS)
    return opened


class Owner:
    """The owner's process: one object at a time."""

    def __init__(self, capacity: int, names: Sequence[str]) -> None:
        self.arena = Arena(capacity)
        self.opened = engines(names)
        self.data = self.arena.memory[:0]
        self.raw = socket.create_server(("127.0.0.1", 0))
        self.router = zmq.Context.instance().socket(zmq.ROUTER)
        self.router.bind("tcp://127.0.0.1:*")
        for serve in (self.accept, self.serve_pyzmq):
            Thread(target=serve, daemon=True).start()

    def addresses(self) -> dict[str, str]:
        found = {name: engine.serve(self.arena) for name, engine in self.opened.items()}
        return found | {"raw": str(self.raw.getsockname()[1]), "pyzmq": self.router.get_string(zmq.LAST_ENDPOINT)}

    def put(self, nbytes: int) -> tuple[ObjectRef, int]:
        self.arena.release("bench")
        while self.arena.usage().used:  # the last pull is not over before its reader's word of that is here
            time.sleep(0.001)
        extent = self.arena.create(nbytes, "bench")
        self.data = self.arena.memory[extent.offset : extent.offset + nbytes]
        self.data[:] = np.resize(np.frombuffer(os.urandom(MIB), np.uint8), nbytes)
        self.arena.seal(extent.id)
        sums = checksums_of(self.data)
        key, generation = extent.key, extent.generation
        return ObjectRef(extent.id, "o", "n", "bench", "s", 1, generation, nbytes, (), sums, key, 0), extent.offset

    def accept(self) -> None:
        while True:
            Thread(target=self.serve_raw, args=(self.raw.accept()[0],), daemon=True).start()

    def serve_raw(self, peer: socket.socket) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while peer.recv(1):
            peer.sendall(self.data.data)

    def serve_pyzmq(self) -> None:
        while True:
            who, _ = self.router.recv_multipart()
            self.router.send_multipart([who, self.data.data], copy=False)


def serve(capacity: int, names: Sequence[str]) -> None:
    """Addresses to standard output, then a ref, its place and a digest for every length from standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries log to standard output
    owner = Owner(capacity, names)
    print(json.dumps(owner.addresses()), file=answers, flush=True)
    for line in sys.stdin:
        ref, offset = owner.put(int(line))
        digest = xxh3_64_hexdigest(owner.data.data)
        print(msgspec.msgpack.encode(ref).hex(), offset, digest, file=answers, flush=True)


class Slow(TcpEngine):
    """Brings `rate` MB/s at most, as a network would; 0: as fast as it goes."""

    rate = 0

    @override
    def connect(self, address: str) -> PeerLink:
        link, engine = super().connect(address), self
        pull = link.pull

        def slowly(ref: ObjectRef, start: int, stop: int, into: NDArray[np.uint8]) -> Generator[int, None, None]:
            began = time.monotonic()
            with closing(pull(ref, start, stop, into)) as numbers:
                for filled in numbers:
                    if engine.rate:
                        time.sleep(max(0.0, began + filled / engine.rate / 1e6 - time.monotonic()))
                    yield filled

        link.pull = slowly  # type: ignore[method-assign]
        return link


class Child:
    """Another process that answers lines."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, "the process ended"
        return line.strip()

    def ask(self, line: object) -> str:
        assert self.process.stdin
        print(line, file=self.process.stdin, flush=True)
        return self.answer()

    def end(self) -> None:
        self.process.communicate()


class Reader:
    """The other process. `target` is where ways without an arena put what they bring, and where sessions put it, too:

    in an arena of a power of two that is else empty, what is made comes to lie at its beginning.
    """

    def __init__(self, names: Sequence[str], largest: int) -> None:
        capacity = 1 << (max(largest, AT_ONCE[-1] * EACH) - 1).bit_length()
        self.owner = Child(sys.executable, "-m", "bench.pull", "serve", str(capacity), *names)
        self.addresses = json.loads(self.owner.answer())
        self.arena = Arena(capacity)
        self.target = self.arena.memory
        self.engines = engines(names)
        for engine in self.engines.values():
            engine.register(self.arena.memory)
        self.transfers = {
            name: Transfers({name: engine}, lambda _: self.addresses, OPTIONS) for name, engine in self.engines.items()
        }
        self.raw = [socket.create_connection(("127.0.0.1", int(self.addresses["raw"]))) for _ in range(AT_ONCE[-1])]
        self.dealer = zmq.Context.instance().socket(zmq.DEALER)
        self.dealer.connect(self.addresses["pyzmq"])
        self.pool = ThreadPoolExecutor(AT_ONCE[-1])
        self.offset, self.digest = 0, ""

    def put(self, nbytes: int) -> ObjectRef:
        """Have the owner make another object."""
        ref, offset, self.digest = self.owner.ask(nbytes).split()
        self.offset = int(offset)
        return msgspec.msgpack.decode(bytes.fromhex(ref), type=ObjectRef)

    def by_raw(self, ref: ObjectRef, number: int = 0) -> None:
        """sendall and recv_into."""
        begin, peer = number * ref.nbytes, self.raw[number]
        view, done = self.target[begin : begin + ref.nbytes].data, 0
        peer.sendall(b"x")
        while done < ref.nbytes:
            done += peer.recv_into(view[done : done + PIECE], 0, socket.MSG_WAITALL)

    def by_raw_checked(self, ref: ObjectRef) -> None:
        """The same, then checksums like ours."""
        self.by_raw(ref)
        assert checksums_of(self.target[: ref.nbytes]) == ref.checksums

    def by_pyzmq(self, ref: ObjectRef) -> None:
        """One message, copied to its place."""
        self.dealer.send(b"")
        self.target[: ref.nbytes] = np.frombuffer(self.dealer.recv(copy=False).buffer, np.uint8)

    def by_library(self, name: str) -> Way:
        """A read by the library of an engine, nothing else."""
        engine, connection = self.engines[name], OwnerClient(self.addresses[name], OPTIONS)
        assert isinstance(engine, OneSidedEngine)
        owner = msgspec.msgpack.decode(connection.about, type=OwnerInfo)
        connection.close()
        at, to = owner.base + self.offset, self.target.ctypes.data
        return lambda ref: engine.read(owner.name, [CopyRange(at, to, ref.nbytes)])

    def by(self, name: str, at_once: int = 1) -> Way:
        """Sessions."""

        def pull(ref: ObjectRef) -> None:
            sinks = [ArenaSink(self.arena, ref) for _ in range(at_once)]
            sessions = [self.transfers[name].fetch(ref, sink) for sink in sinks]
            for session in sessions:
                session.result(120)
            self.arena.release(ref.request)

        return pull

    def raws(self, at_once: int) -> Way:
        """As many raw sockets, each with a thread at both ends."""

        def pull(ref: ObjectRef) -> None:
            list(self.pool.map(self.by_raw, [ref] * at_once, range(at_once)))

        return pull

    def close(self) -> None:
        for transfers in self.transfers.values():
            transfers.close()
        for engine in self.engines.values():
            engine.close()
        for peer in self.raw:
            peer.close()
        self.dealer.close(linger=0)
        self.pool.shutdown()
        self.owner.end()


def timed(ways: dict[str, Way], ref: ObjectRef, rounds: int, warm: int = WARM) -> dict[str, list[float]]:
    """Seconds of every way in every round; of those that fail, nothing."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + warm):
        for name in list(seconds):
            began = time.perf_counter()
            try:
                took = ways[name](ref) or time.perf_counter() - began
            except UnfuseError as error:
                print(f"{name} failed: {error}", file=sys.stderr)
                del seconds[name]
                continue
            if number >= warm:
                seconds[name].append(took)
    return seconds


def figures(seconds: dict[str, list[float]], nbytes: int) -> dict[str, Any]:
    """GB/s by way, and how fast tcp is against each, and against the fastest of the plain ones."""
    against = {way: round(ratio(times, seconds["tcp"])["p50"], 2) for way, times in seconds.items() if way != "tcp"}
    best = min(value for way, value in against.items() if way in ("raw", "Mooncake", "NIXL"))
    return {
        "rounds": len(seconds["tcp"]),
        "GB/s": {way: round(nbytes / quantile(times, 0.5) / 1e9, 2) for way, times in seconds.items()},
        "tcp_over": against | {"the best": best},
    }


def ways_of(reader: Reader, names: Sequence[str], peers: str) -> tuple[dict[str, Way], Child | None]:
    """The ways of a run, and the process behind one of them."""
    ways: dict[str, Way] = {"raw": reader.by_raw}
    if "zmq" in names:
        ways |= {"raw_checked": reader.by_raw_checked, "pyzmq": reader.by_pyzmq}
    for name, library in (("mooncake", "Mooncake"), ("nixl", "NIXL")):
        if name in reader.engines:
            ways[library] = reader.by_library(name)
    ways |= {name: reader.by(name) for name in reader.transfers}
    if "ray" not in names:
        return ways, None
    ray = Child(peer_python(Path(peers), "ray"), "-m", "bench.peers.with_ray")
    return {"Ray": lambda ref: float(ray.ask(ref.nbytes))} | ways, ray


def measure(names: Sequence[str], rounds: int, sizes: Sequence[int], peers: str) -> dict[str, Any]:
    """One run: sizes, then pulls at once by the first engine."""
    reader = Reader(names, max(sizes) * MIB)
    ways, child = ways_of(reader, names, peers)
    found = {}
    for size in sizes:
        many = min(rounds, max(3, TIME // size))
        found[f"{size} MiB"] = figures(timed(ways, reader.put(size * MIB), many), size * MIB)
    if "zmq" in names:
        for number in AT_ONCE:
            both: dict[str, Way] = {"raw": reader.raws(number), "tcp": reader.by("tcp", number)}
            seconds = timed(both, reader.put(EACH), rounds)
            found[f"{number} × {EACH // MIB} MiB"] = figures(seconds, EACH * number)
    reader.close()
    if child:
        child.end()
    return found


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        serve(int(sys.argv[2]), sys.argv[3:])
        return
    options = argparse.ArgumentParser()
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--largest", type=int, default=SIZES[-1], help="size of the largest object in MiB")
    options.add_argument("--peers", default=str(PEERS))
    options.add_argument("--run", nargs="+", help="measure only these engines, in one run")
    given = options.parse_args()
    sizes = [size for size in SIZES if size <= given.largest]
    if given.run:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        print(json.dumps(measure(given.run, given.rounds, sizes, given.peers)), file=answers, flush=True)
        os._exit(0)  # a process that has used NIXL 1.5 ends by SIGSEGV when Python does
    found = {}
    for names in RUNS:
        if "ray" in names and given.peers == "none":
            continue
        command = [sys.executable, "-m", "bench.pull", *sys.argv[1:], "--run", *names]
        ended = subprocess.run(command, stdout=subprocess.PIPE, env=os.environ | {"UCX_TLS": "tcp,self"}, text=True)
        found[" ".join(names)] = json.loads(ended.stdout) if ended.returncode == 0 else "failed: see standard error"
    show("pull", rounds=given.rounds, runs=found)
    for run, rows in found.items():
        if isinstance(rows, dict):
            for what in ("GB/s", "tcp_over"):
                table(f"{run}: {what}", {size: row[what] for size, row in rows.items()})


if __name__ == "__main__":
    main()
