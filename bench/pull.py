"""A pull between two processes against the plain ways: a raw socket, pyzmq, and each engine; 1 MiB … 256 MiB.

Every way brings the same sealed object from an arena of one process into memory of the other; ours also verify it
and seal it there. Rounds are interleaved, ratios are of pairs within a round. `python -m bench.pull [ROUNDS [ENGINE…]]`

NIXL's threads never sleep: it slows the others down where there are few cores, so measure it in a run of its own.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import zmq

from bench.report import quantile, ratio, show
from unfuse.arena.arena import Arena
from unfuse.core.errors import ConfigError
from unfuse.core.object_ref import ObjectRef
from unfuse.stores.checksums import checksums_of
from unfuse.transfer import open_engine
from unfuse.transfer.base import TransferEngine, TransferOptions
from unfuse.transfer.session import Transfers
from unfuse.transfer.sinks import ArenaSink

MIB = 1 << 20
SIZES = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
ENGINES = ("tcp", "zmq", "mooncake")
OPTIONS = TransferOptions(trusted_network=True)
CAPACITY = 768 * MIB
PIECE = MIB


def engines(names: Sequence[str]) -> dict[str, TransferEngine]:
    """Those that are installed."""
    opened = {}
    for name in names:
        with suppress(ConfigError):
            opened[name] = open_engine(name, OPTIONS)
    return opened


def serve(names: Sequence[str]) -> None:
    """The owner's process: its addresses and refs to standard output, then it serves until standard input closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries log to standard output
    arena = Arena(CAPACITY)
    opened = engines(names)  # served as long as it lives
    addresses = {name: engine.serve(arena) for name, engine in opened.items()}
    raw = socket.create_server(("127.0.0.1", 0))
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind("tcp://127.0.0.1:*")
    refs, places = [], {}
    for nbytes in SIZES:
        extent = arena.create(nbytes, "bench")
        data = arena.memory[extent.offset : extent.offset + nbytes]
        data[:] = np.frombuffer(os.urandom(MIB) * (nbytes // MIB), np.uint8)
        arena.seal(extent.id)
        ref = ObjectRef(
            extent.id, "owner", "n", "bench", "s", 1, extent.generation, nbytes, (), checksums_of(data), extent.key, 0
        )
        refs.append(msgspec.msgpack.encode(ref).hex())
        places[nbytes] = data
    where = {"raw": raw.getsockname()[1], "pyzmq": router.get_string(zmq.LAST_ENDPOINT)}
    print(json.dumps({"addresses": addresses, "refs": refs, **where}), file=answers, flush=True)
    peer, _ = raw.accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for line in sys.stdin:
        way, nbytes = line.split()
        data = places[int(nbytes)]
        if way == "raw":
            peer.sendall(data.data)
        else:
            who, _ = router.recv_multipart()
            router.send_multipart([who, data.data], copy=False)


class Reader:
    """The other process."""

    def __init__(self, names: Sequence[str]) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", "bench.pull", "serve", *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.child.stdout
        said = json.loads(self.child.stdout.readline())
        self.arena = Arena(CAPACITY)
        self.target = self.arena.memory[: SIZES[-1]]
        self.refs = [msgspec.msgpack.decode(bytes.fromhex(ref), type=ObjectRef) for ref in said["refs"]]
        self.raw = socket.create_connection(("127.0.0.1", said["raw"]))
        self.dealer = zmq.Context.instance().socket(zmq.DEALER)
        self.dealer.connect(said["pyzmq"])
        self.transfers = {}
        for name, engine in engines(names).items():
            engine.register(self.arena.memory)
            self.transfers[name] = Transfers({name: engine}, lambda _: said["addresses"], OPTIONS)

    def ask(self, way: str, ref: ObjectRef) -> None:
        """Have the owner send by a plain way."""
        assert self.child.stdin
        self.child.stdin.write(f"{way} {ref.nbytes}\n")
        self.child.stdin.flush()

    def by_raw(self, ref: ObjectRef) -> None:
        """sendall and recv_into."""
        self.ask("raw", ref)
        view, done = self.target[: ref.nbytes].data, 0
        while done < ref.nbytes:
            done += self.raw.recv_into(view[done : done + PIECE], 0, socket.MSG_WAITALL)

    def by_raw_checked(self, ref: ObjectRef) -> None:
        """The same, then checksums like ours."""
        self.by_raw(ref)
        assert checksums_of(self.target[: ref.nbytes]) == ref.checksums

    def by_pyzmq(self, ref: ObjectRef) -> None:
        """One message, copied to its place."""
        self.dealer.send(b"")
        self.ask("pyzmq", ref)
        self.target[: ref.nbytes] = np.frombuffer(self.dealer.recv(copy=False).buffer, np.uint8)

    def by(self, name: str) -> Callable[[ObjectRef], None]:
        """A session."""

        def pull(ref: ObjectRef) -> None:
            sink = ArenaSink(self.arena, ref)
            self.transfers[name].fetch(ref, sink).result(120)
            assert sink.extent
            self.arena.delete(sink.extent.id)

        return pull


def figures(seconds: dict[str, list[float]], nbytes: int) -> dict[str, Any]:
    """Speeds by way, and ours against the others."""
    speeds = {way: round(nbytes / quantile(times, 0.5) / 1e9, 2) for way, times in seconds.items()}
    best = [min(times) for times in zip(*(seconds[way] for way in ("raw", "mooncake") if way in seconds), strict=True)]
    against = {way: ratio(times, seconds["tcp"])["p50"] for way, times in seconds.items() if way != "tcp"}
    return {
        "GB/s": speeds,
        "tcp_speed_against": {way: round(value, 3) for way, value in against.items()},
        "tcp_speed_against_best_of_raw_and_mooncake": round(ratio(best, seconds["tcp"])["p50"], 3),
    }


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2:])
        return
    rounds, reader = int(sys.argv[1]) if sys.argv[1:] else 15, Reader(sys.argv[2:] or ENGINES)
    ways = {"raw": reader.by_raw, "raw_checked": reader.by_raw_checked, "pyzmq": reader.by_pyzmq} | {
        name: reader.by(name) for name in reader.transfers
    }
    table = {}
    for ref in reader.refs:
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds + 2):
            for way, pull in ways.items():
                began = time.perf_counter()
                pull(ref)
                if number >= 2:
                    seconds[way].append(time.perf_counter() - began)
        table[f"{ref.nbytes // MIB} MiB"] = figures(seconds, ref.nbytes)
    show("pull", rounds=rounds, sizes=table)
    for transfers in reader.transfers.values():
        transfers.close()
    assert reader.child.stdin
    reader.child.stdin.close()
    reader.child.wait()


if __name__ == "__main__":
    main()
