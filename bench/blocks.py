"""Buffer memory for embeddings of mixed lengths: the longest reserved for each, blocks by actual length, and a buddy.

One trace of arrivals and departures, the same for all; token counts are log-normal, from 64 to 8K, of 3584 values in
bfloat16. Mean is over time. `python -m bench.blocks [REQUESTS]`
"""

from __future__ import annotations

import heapq
import random
import sys
from collections.abc import Callable, Iterator
from typing import Protocol

from bench.report import show
from unfuse.arena.blocks import Blocks
from unfuse.arena.buddy import Buddy, Usage
from unfuse.core.errors import ArenaFull

TOKEN = 3584 * 2
LONGEST = 8192
BLOCK = 64
ALIVE = 32
CAPACITY = 3 * ALIVE * LONGEST * TOKEN
TIGHT = ALIVE // 4 * LONGEST * TOKEN
MIXES = {"short": (512, 1.0), "mixed": (1024, 1.2), "long": (4096, 0.6)}
"""Median tokens, and sigma of their logarithm."""


class Space(Protocol):
    def allocate(self, nbytes: int) -> int: ...
    def free(self, place: int) -> None: ...
    def usage(self) -> Usage: ...


class Fixed:
    """Room for the longest, whatever comes."""

    def __init__(self, capacity: int) -> None:
        self._blocks = Blocks(capacity, LONGEST * TOKEN)
        self.allocate, self.free, self.usage = self._blocks.allocate, self._blocks.free, self._blocks.usage


SPACES: dict[str, Callable[[int], Space]] = {
    "fixed": Fixed,
    "blocks": lambda capacity: Blocks(capacity, BLOCK * TOKEN),
    "buddy": Buddy,
}


def trace(requests: int, median: float, sigma: float, seed: int = 11) -> Iterator[tuple[float, float, int]]:
    """When each request comes, when it goes, and its tokens: ALIVE of them at a time on average."""
    rng, now = random.Random(seed), 0.0
    for _ in range(requests):
        now += rng.expovariate(ALIVE)
        tokens = int(median * rng.lognormvariate(0, sigma))
        yield now, now + rng.expovariate(1), min(LONGEST, max(64, tokens))


def play(space: Space, events: list[tuple[float, float, int]]) -> dict[str, float]:
    """What a space needs for a trace; a request that finds no room goes away."""
    leaving: list[tuple[float, int]] = []
    last = area = asked = waste = gaps = 0.0
    refused = 0
    for now, end, tokens in events:
        while leaving and leaving[0][0] <= now:
            when, place = heapq.heappop(leaving)
            area += space.usage().used * (when - last)
            last = when
            space.free(place)
        usage = space.usage()
        area, asked, last = area + usage.used * (now - last), asked + usage.requested, now
        waste, gaps = waste + usage.waste, gaps + usage.fragmentation
        try:
            heapq.heappush(leaving, (end, space.allocate(tokens * TOKEN)))
        except ArenaFull:
            refused += 1
    mean, peak = area / last, space.usage().high_water
    return {
        "mean_MiB": round(mean / 2**20, 1),
        "peak_MiB": round(peak / 2**20, 1),
        "waste": round(waste / len(events), 4),
        "fragmentation": round(gaps / len(events), 4),
        "refused": round(refused / len(events), 4),
    }


def measure(requests: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, (median, sigma) in MIXES.items():
        events = list(trace(requests, median, sigma))
        ample = {kind: play(make(CAPACITY), events) for kind, make in SPACES.items()}
        tight = {kind: play(make(TIGHT), events)["refused"] for kind, make in SPACES.items()}
        found[name] = {
            "mean_tokens": round(sum(tokens for *_, tokens in events) / requests),
            **ample,
            "saved_mean": round(1 - ample["blocks"]["mean_MiB"] / ample["fixed"]["mean_MiB"], 3),
            "saved_peak": round(1 - ample["blocks"]["peak_MiB"] / ample["fixed"]["peak_MiB"], 3),
            f"refused_in_{TIGHT >> 20}_MiB": tight,
        }
    return found


def main() -> None:
    requests = int(sys.argv[1]) if sys.argv[1:] else 20_000
    show("blocks", requests=requests, block_tokens=BLOCK, longest_tokens=LONGEST, mixes=measure(requests))


if __name__ == "__main__":
    main()
