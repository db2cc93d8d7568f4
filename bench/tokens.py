"""Embeddings of 3584 values in bfloat16 by their length in tokens: time on the wire, refills of a small buffer, memory.

Transfer: 1K … 64K tokens from another process by tcp, into room of their actual length, against a raw socket that
checks nothing, in pairs. Windows: 20K … 100K tokens through a buffer of 8K, taken out at once, against the same object
into room of its own; what came is compared by a digest that the owner took. Memory: see bench/blocks.py.
`python -m bench.tokens [ROUNDS]`
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from bench import blocks
from bench.blocks import TOKEN
from bench.pull import Reader, timed
from bench.report import quantile, ratio, show, table
from unfuse.core.object_ref import ObjectRef
from unfuse.transfer.session import RingBuffer

K = 1024
LENGTHS = (1, 4, 16, 32, 64)
"""Thousands of tokens."""
LONG = (20, 50, 100)
WINDOW = 8
ROUNDS = 15


class Counted(RingBuffer):
    """Counts how often more is asked for."""

    def __init__(self, buffer: NDArray[np.uint8], ref: ObjectRef) -> None:
        super().__init__(buffer, ref)
        self.asked = 0

    def buffers(self, start: int) -> Sequence[NDArray[np.uint8]]:
        pieces = super().buffers(start)
        self.asked += any(piece.nbytes for piece in pieces)
        return pieces


def ms(seconds: list[float]) -> float:
    return round(quantile(seconds, 0.5) * 1e3, 2)


def transfers(reader: Reader, lengths: Sequence[int], rounds: int) -> dict[str, dict[str, Any]]:
    rows = {}
    for length in lengths:
        ref = reader.put(length * K * TOKEN)
        seconds = timed({"raw": reader.by_raw, "tcp": reader.by("tcp")}, ref, rounds)
        rows[f"{length}K"] = {
            "MiB": ref.nbytes >> 20,
            "ms": ms(seconds["tcp"]),
            "GB/s": round(ref.nbytes / quantile(seconds["tcp"], 0.5) / 1e9, 2),
            "raw socket, ms": ms(seconds["raw"]),
            "share of its bandwidth": f"{ratio(seconds['raw'], seconds['tcp'])['p50']:.0%}",
        }
    return rows


def windows(reader: Reader, lengths: Sequence[int], window: int, rounds: int) -> dict[str, dict[str, Any]]:
    rows = {}
    for length in lengths:
        ref = reader.put(length * K * TOKEN)
        through = drain(reader, np.empty(window * K * TOKEN, np.uint8))
        digest = xxh3_64()
        through(ref, digest.update)
        asked: list[int] = []
        ways = {"whole": reader.by("tcp"), "window": lambda ref: asked.append(through(ref))}  # noqa: B023
        seconds = timed(ways, ref, rounds)
        resumes = quantile([float(number - 1) for number in asked], 0.5)
        more = quantile([a - b for a, b in zip(seconds["window"], seconds["whole"], strict=True)], 0.5)
        rows[f"{length}K"] = {
            "MiB": ref.nbytes >> 20,
            "resumes": int(resumes),
            "ms": ms(seconds["window"]),
            "into room for all, ms": ms(seconds["whole"]),
            "ms more for each resume": round(more * 1e3 / max(1.0, resumes), 2),
            "the same bytes": digest.hexdigest() == reader.digest,
        }
    return rows


def drain(reader: Reader, buffer: NDArray[np.uint8]) -> Callable[..., int]:
    """Brings an object through a buffer; returns how often it asked for more."""

    def through(ref: ObjectRef, take: Callable[[memoryview], object] = len) -> int:
        window = Counted(buffer, ref)
        session = reader.transfers["tcp"].fetch(ref, window)
        for piece in window:
            take(piece.data)
        session.result(60)
        return window.asked

    return through


def main() -> None:
    rounds = int(sys.argv[1]) if sys.argv[1:] else ROUNDS
    reader = Reader(["tcp"], LONG[-1] * K * TOKEN)
    found = {
        "transfer": transfers(reader, LENGTHS, rounds),
        f"through {WINDOW}K tokens": windows(reader, LONG, WINDOW, rounds),
    }
    reader.close()
    mixes = blocks.measure(blocks.REQUESTS)
    show("tokens", rounds=rounds, token_bytes=TOKEN, **found, **mixes)
    for name, rows in (found | mixes).items():
        table(name, rows)


if __name__ == "__main__":
    main()
