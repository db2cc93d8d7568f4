"""Buffer memory for embeddings of mixed lengths (3584 values in bfloat16), by how room is given, over one trace.

`fixed` reserves 8K tokens for each, as SGLang's embedding buffers do by default; `blocks` and `buddy` take the actual
length, which a ref says; `p90` and `p99` take room before the length is known, that share of the last lengths, and
blocks for the rest when more comes. Arrivals are random, 32 are alive on average; lengths are log-normal and cut off
at 64 and 8K tokens, which favours `fixed`: it cannot take longer ones at all. Means are over time.
`python -m bench.blocks [REQUESTS]`
"""

from __future__ import annotations

import heapq
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from bench.block_allocator import Blocks
from bench.report import quantile, show, table
from unfuse.arena.extents import BuddyAllocator, MemoryUsage
from unfuse.core.errors import ArenaFull

REQUESTS = 8_000
TOKEN = 3584 * 2
LONGEST = 8192
BLOCK = 64
ALIVE = 32
RECENT = 128
CAPACITY = 3 * ALIVE * LONGEST * TOKEN
TIGHT = ALIVE // 4 * LONGEST * TOKEN
"""Room in which `fixed` has place for a quarter of what is alive."""
MIXES = {"short": (512, 1.0), "mixed": (1024, 1.2), "long": (4096, 0.6)}
"""Median tokens, and sigma of their logarithm: prompts and thumbnails; images of any size; pages and short videos."""


class Space(Protocol):
    def allocate(self, nbytes: int) -> int: ...
    def free(self, place: int) -> None: ...
    def usage(self) -> MemoryUsage: ...


class Fixed:
    """Room for the longest, whatever comes."""

    def __init__(self, capacity: int) -> None:
        self._blocks = Blocks(capacity, LONGEST * TOKEN)
        self.allocate, self.free, self.usage = self._blocks.allocate, self._blocks.free, self._blocks.usage


class Recent:
    """Room for a share of the last lengths, then for the rest if there is one."""

    def __init__(self, capacity: int, share: float) -> None:
        self._blocks, self._share = Blocks(capacity, BLOCK * TOKEN), share
        self._lengths: deque[int] = deque([LONGEST * TOKEN], RECENT)
        self.free, self.usage = self._blocks.free, self._blocks.usage
        self.grown = 0

    def allocate(self, nbytes: int) -> int:
        room = int(quantile(list(self._lengths), self._share))  # type: ignore[arg-type]
        self._lengths.append(nbytes)
        place = self._blocks.allocate(room)
        if nbytes > room:
            self.grown += 1
            try:
                self._blocks.grow(place, nbytes)
            except ArenaFull:
                self.free(place)
                raise
        return place


SPACES: dict[str, Callable[[int], Space]] = {
    "fixed": Fixed,
    "blocks": lambda capacity: Blocks(capacity, BLOCK * TOKEN),
    "buddy": BuddyAllocator,
    "p90": lambda capacity: Recent(capacity, 0.9),
    "p99": lambda capacity: Recent(capacity, 0.99),
}


def trace(requests: int, median: float, sigma: float, seed: int = 11) -> Iterator[tuple[float, float, int]]:
    """When each request comes, when it goes, and its tokens: ALIVE of them at a time on average."""
    rng, now = random.Random(seed), 0.0
    for _ in range(requests):
        now += rng.expovariate(ALIVE)
        tokens = int(median * rng.lognormvariate(0, sigma))
        yield now, now + rng.expovariate(1), min(LONGEST, max(64, tokens))


def play(space: Space, events: list[tuple[float, float, int]]) -> dict[str, float]:
    """What a space needs for a trace, and the share of requests that found no room and went away."""
    leaving: list[tuple[float, int, int]] = []
    last = area = full = 0.0
    refused = held = 0
    for now, end, tokens in [*events, (events[-1][0], 0.0, 0)]:
        while leaving and leaving[0][0] <= now:
            when, place, gone = heapq.heappop(leaving)
            area, full, last = area + space.usage().used * (when - last), full + held * (when - last), when
            space.free(place)
            held -= gone
        area, full, last = area + space.usage().used * (now - last), full + held * (now - last), now
        if not tokens:
            break
        try:
            heapq.heappush(leaving, (end, space.allocate(tokens * TOKEN), tokens * TOKEN))
            held += tokens * TOKEN
        except ArenaFull:
            refused += 1
    return {
        "mean MiB": round(area / last / 2**20, 1),
        "peak MiB": round(space.usage().high_water / 2**20, 1),
        "share in use": round(full / area, 3),
        "refused": round(refused / len(events), 4),
    }


def measure(requests: int) -> dict[str, dict[str, dict[str, object]]]:
    """For each mix, a row for each way."""
    found = {}
    for name, (median, sigma) in MIXES.items():
        events = list(trace(requests, median, sigma))
        mean = sum(tokens for *_, tokens in events) // requests
        rows: dict[str, dict[str, object]] = {}
        for kind, make in SPACES.items():
            space = make(CAPACITY)
            row = play(space, events)
            fixed = rows.get("fixed", row)
            rows[kind] = {
                **{column: row[column] for column in ("mean MiB", "peak MiB", "share in use")},
                "mean saved": f"{1 - row['mean MiB'] / fixed['mean MiB']:.0%}",  # type: ignore[operator]
                "peak saved": f"{1 - row['peak MiB'] / fixed['peak MiB']:.0%}",  # type: ignore[operator]
                f"refused in {TIGHT >> 20} MiB": f"{play(make(TIGHT), events)['refused']:.1%}",
                "asked twice": f"{getattr(space, 'grown', 0) / requests:.1%}",
            }
        found[f"{name}, {mean} tokens on average"] = rows
    return found


def main() -> None:
    requests = int(sys.argv[1]) if sys.argv[1:] else REQUESTS
    found = measure(requests)
    show("blocks", requests=requests, block_tokens=BLOCK, longest_tokens=LONGEST, mixes=found)
    for name, rows in found.items():
        table(name, rows)


if __name__ == "__main__":
    main()
