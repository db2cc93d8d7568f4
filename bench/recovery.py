"""How long a transfer that fails takes to go on, and what that costs beside one that begins again.

Embeddings of 3584 values in bfloat16 are pulled by tcp from another process. On the way the connection is cut, a bit is
wrong, or the owner is stopped until its reader has given it up. Measured are the milliseconds from the fault to
the next verified chunk, the bytes that came twice, and the whole transfer: undisturbed, with the fault, and begun again
from the first byte when half is there, as without resuming. With two engines, the next one goes on. What came is
compared by a digest that the owner took.
`python -m bench.recovery [ROUNDS]`
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override
from xxhash import xxh3_64_hexdigest

from bench.blocks import TOKEN
from bench.pull import OPTIONS, Reader
from bench.report import quantile, ratio, show, table
from unfuse.core.object_ref import ObjectRef
from unfuse.testing.transfer_faults import Faults, FaultyEngine, FaultyLink
from unfuse.transfer import open_engine
from unfuse.transfer.base import LinkBroken, PeerLink, TransferEngine, TransferOptions
from unfuse.transfer.session import ArenaSink, Transfers

K, MIB = 1024, 1 << 20
LENGTHS = (1, 4, 16)
"""Thousands of tokens."""
CUT, WRONG, SILENT = "cut", "a wrong bit", "owner stopped"
ENGINES = {CUT: ("tcp",), f"{CUT}, another engine": ("tcp", "zmq"), WRONG: ("tcp",), SILENT: ("tcp",)}
"""The faults, and the engines that both sides have."""
ROUNDS, FEW, LONG = 15, 3, 4
"""A stopped owner is given up after ten seconds: of these transfers there are few, and none shorter than so many
thousands of tokens, of which the second half may be in the sockets' buffers already."""


class Breaking(FaultyEngine):
    """An engine whose next pull of a byte fails once, `at` a time; `noticed` when bytes had `reached` a place."""

    def __init__(self, engine: TransferEngine, owner: int) -> None:
        super().__init__(engine, Faults())
        self.owner = owner
        self.at, self.noticed, self.reached = 0.0, 0.0, 0
        self._kind, self._place = "", 0

    def arm(self, kind: str, place: int) -> None:
        """Have that happen at a byte of the next object."""
        self.at, self.noticed, self._kind, self._place = 0.0, 0.0, kind, place

    def due(self, stop: int) -> str:
        """The fault that happens now that all bytes before `stop` are there, or ""."""
        if not self._kind or stop <= self._place:
            return ""
        self.at, kind, self._kind = time.monotonic(), self._kind, ""
        return kind

    @override
    def connect(self, address: str) -> PeerLink:
        return BreakingLink(self._engine.connect(address), self)


class BreakingLink(FaultyLink):
    """A link to one owner that fails as its engine was told."""

    _engine: Breaking

    @override
    def pull(self, ref: ObjectRef, start: int, stop: int, into: NDArray[np.uint8]) -> Generator[int, None, None]:
        engine, stopped, whole = self._engine, False, False
        try:
            with closing(self._link.pull(ref, start, stop, into)) as pull:
                for filled in pull:
                    if not engine.noticed:
                        engine.reached = start + filled
                    kind = engine.due(start + filled)
                    if kind == CUT:
                        raise LinkBroken("cut on purpose")
                    if kind == WRONG:
                        into[filled - 1] ^= 1
                    if kind == SILENT:
                        os.kill(engine.owner, signal.SIGSTOP)
                        stopped = True
                    yield filled
            whole = True
        finally:
            if engine.at and not engine.noticed and not whole:
                engine.noticed = time.monotonic()
            if stopped:
                os.kill(engine.owner, signal.SIGCONT)


class Timed(ArenaSink):
    """Notes when bytes were verified: seconds, and how many there were."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.seen: list[tuple[float, int]] = []

    @override
    def verified(self, stop: int) -> None:
        self.seen.append((time.monotonic(), stop))


class Bench:
    """A reader of another process, by engines of which the first one fails when it is told to."""

    def __init__(self, reader: Reader, names: Sequence[str], options: TransferOptions = OPTIONS) -> None:
        self._reader = reader
        self._breaking = Breaking(open_engine(names[0], options), reader.owner.process.pid)
        others = {name: open_engine(name, options) for name in names[1:]}
        self._engines: dict[str, TransferEngine] = {names[0]: self._breaking, **others}
        self._transfers = Transfers(self._engines, lambda _: reader.addresses, options)

    def pulled(self, ref: ObjectRef, kind: str = "") -> dict[str, float]:
        """Seconds of a transfer; of one with a fault also until it went on, and the bytes that came twice."""
        self._breaking.arm(kind, ref.nbytes // (4 if kind == SILENT else 2))
        sink, began = Timed(self._reader.arena, ref), time.monotonic()
        self._transfers.fetch(ref, sink).result(120)
        found = {"in all": time.monotonic() - began}
        if kind:
            noticed = self._breaking.noticed
            assert noticed, "the transfer was over before the fault was noticed"
            there = max((stop for when, stop in sink.seen if when <= noticed), default=0)
            found |= {"going on": min(when for when, _ in sink.seen if when > noticed) - self._breaking.at}
            found |= {"twice": float(self._breaking.reached - there)}
        assert sink.extent
        came = self._reader.arena.memory[sink.extent.offset : sink.extent.offset + ref.nbytes]
        assert xxh3_64_hexdigest(came.data) == self._reader.digest, "the received bytes differ"
        self._reader.arena.release(ref.request)
        return found

    def begun_again(self, ref: ObjectRef) -> dict[str, float]:
        """Seconds of a transfer that ends when half is there, and of one that begins then."""
        sink, began = Timed(self._reader.arena, ref), time.monotonic()
        session = self._transfers.fetch(ref, sink)
        while not session.wait(0.0005) and (not sink.seen or sink.seen[-1][1] < ref.nbytes // 2):
            pass
        session.cancel()
        session.wait(120)
        self._reader.arena.release(ref.request)
        return {"in all": time.monotonic() - began + self.pulled(ref)["in all"]}

    def close(self) -> None:
        self._transfers.close()
        for engine in self._engines.values():
            engine.close()


def ms(seconds: Sequence[float], share: float = 0.5) -> float:
    return round(quantile([*seconds], share) * 1e3, 1)


def row(bench: Bench, ref: ObjectRef, kind: str, rounds: int) -> dict[str, Any]:
    """Interleaved: without a fault, with it, and begun again; after one that warms up."""
    bench.pulled(ref)
    found = defaultdict[str, list[float]](list)
    for _ in range(rounds):
        found["undisturbed"].append(bench.pulled(ref)["in all"])
        for name, seconds in bench.pulled(ref, kind).items():
            found[name].append(seconds)
        found["begun again"].append(bench.begun_again(ref)["in all"])
    return {
        "MiB": ref.nbytes >> 20,
        "going on after, ms": ms(found["going on"]),
        "at most": ms(found["going on"], 1.0),
        "came twice, MiB": round(quantile(found["twice"], 0.5) / MIB, 1),
        "in all, ms": ms(found["in all"]),
        "undisturbed": ms(found["undisturbed"]),
        "begun again": ms(found["begun again"]),
        "÷ begun again": round(ratio(found["in all"], found["begun again"])["p50"], 2),
    }


def measure(
    reader: Reader,
    lengths: Sequence[int],
    rounds: int,
    faults: Sequence[str] = tuple(ENGINES),
    options: TransferOptions = OPTIONS,
) -> dict[str, dict[str, Any]]:
    """A row for each length and fault."""
    rows = {}
    for fault in faults:
        bench, kind = Bench(reader, ENGINES[fault], options), fault.partition(",")[0]
        for length in (one for one in lengths if kind != SILENT or one >= LONG):
            times = min(rounds, FEW) if kind == SILENT else rounds
            rows[f"{length}K, {fault}"] = row(bench, reader.put(length * K * TOKEN), kind, times)
        bench.close()
    return rows


def main() -> None:
    rounds = int(sys.argv[1]) if sys.argv[1:] else ROUNDS
    reader = Reader(["tcp", "zmq"], LENGTHS[-1] * K * TOKEN)
    rows = measure(reader, LENGTHS, rounds)
    reader.close()
    show("recovery", rounds=rounds, token_bytes=TOKEN, silence_s=OPTIONS.silence_s, rows=rows)
    table("a transfer that fails", rows)


if __name__ == "__main__":
    main()
