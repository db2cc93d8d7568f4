"""How long a lease takes with 1,000 to 1,000,000 requests queued, and what 10,000 of them weigh, for each queue.

Each queue has a process of its own, filled step by step; at each depth tasks are leased, one and 32 at a time.
The million takes minutes and gigabytes: `--deep`. Depths of the queues are filled in turns, so that all are
measured in the same minutes. `python -m bench.leases [--deep]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import uvloop

from bench.journal import LIMITS, POOLS, admitted
from bench.report import quantile, show
from bench.servers import redis_server
from unfuse import queues
from unfuse.queues.base import QueueBackend
from unfuse.scheduler import lifecycle
from unfuse.testing.queue_samples import lease_request

DEPTHS = (1_000, 10_000, 100_000)
DEEP = (*DEPTHS, 1_000_000)
LEASES = {1: 1000, 32: 200}
"""How often that many tasks are leased together."""

SUBMITTERS = 64
WEIGHED = 10_000


async def fill(queue: QueueBackend, more: int) -> None:
    """Submit requests."""

    async def submitter(share: int) -> None:
        for _ in range(share):
            change = admitted()
            await queue.submit(change.context, change.push, change.events, LIMITS)

    await asyncio.gather(*(submitter(len(range(n, more, SUBMITTERS))) for n in range(SUBMITTERS)))


async def leases(queue: QueueBackend, slots: int, times: int) -> list[float]:
    """Seconds of each lease. Workers say where they are and what they run, as real ones do.

    What was leased is replaced by new requests, so that the queue stays as deep, and its first tasks old.
    """
    takes = lease_request(POOLS["a"], slots=slots, arena_bytes=1 << 40, preferred_node="node", affinity="some")
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        found = await queue.lease("w", takes, 600.0)
        seconds.append(time.perf_counter() - began)
        assert len(found) == slots
        await asyncio.gather(*(forget(queue, lease.task.request) for lease in found))
        await fill(queue, slots)
    return seconds


async def forget(queue: QueueBackend, request: str) -> None:
    change = lifecycle.cancel((await queue.load(request)).context, time.time())
    assert change
    await queue.commit(change)
    await queue.drop(request)


async def serve(url: str, times: dict[int, int]) -> None:
    """One queue. A line on standard input is a depth, its figures are the answer."""
    queue, depth, process = queues.open(url), 0, psutil.Process()
    while line := await asyncio.to_thread(sys.stdin.readline):
        before, began = process.memory_info().rss, time.perf_counter()
        wanted = int(line)
        await fill(queue, wanted - depth)
        found: dict[str, Any] = {"filled_per_s": (wanted - depth) / (time.perf_counter() - began)}
        found["bytes"] = (process.memory_info().rss - before) / (wanted - depth)
        depth = wanted
        for slots, often in times.items():
            found[f"of_{slots}"] = await leases(queue, slots, often)
        print(json.dumps(found), flush=True)
    await queue.close()


class Filled:
    """The process of one queue."""

    def __init__(self, url: str, quick: bool) -> None:
        command = [sys.executable, "-m", "bench.leases", "serve", url, "quick" if quick else ""]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def to(self, depth: int) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{depth}\n".encode())
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def milliseconds(seconds: list[float]) -> dict[str, float]:
    return {
        name: round(quantile(seconds, share) * 1e3, 3) for name, share in (("p50", 0.5), ("p99", 0.99), ("most", 1.0))
    }


def row(found: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """The figures at one depth, over those at the first."""
    figures: dict[str, Any] = {"filled_per_s": round(found["filled_per_s"])}
    for slots in LEASES:
        mine, least = milliseconds(found[f"of_{slots}"]), milliseconds(first[f"of_{slots}"])
        growth = {f"{name}_over_first": round(mine[name] / least[name], 2) for name in ("p50", "p99")}
        figures[f"lease_of_{slots}_ms"] = mine | growth
    return figures


def measure(depths: Sequence[int], quick: bool = False) -> dict[str, Any]:
    table: dict[str, Any] = {}
    with redis_server() as server, tempfile.TemporaryDirectory(dir=".") as folder:
        file = Path(folder) / "queue.db"
        filled = {name: Filled(url, quick) for name, url in _urls(server.url, file).items()}
        first: dict[str, Any] = {}
        before = server.used
        for depth in depths:
            for name, queue in filled.items():
                found = queue.to(depth)
                table.setdefault(name, {})[str(depth)] = row(found, first.setdefault(name, found))
                table[name]["megabytes_per_10000_in_process"] = round(found["bytes"] * WEIGHED / 1e6, 1)
        table["redis"]["megabytes_per_10000_in_server"] = round((server.used - before) / depths[-1] * WEIGHED / 1e6, 1)
        for queue in filled.values():
            queue.close()
        table["sqlite"]["megabytes_per_10000_in_file"] = round(file.stat().st_size / depths[-1] * WEIGHED / 1e6, 1)
    return table


def _urls(redis: str, file: Path) -> dict[str, str]:
    return {"memory": "memory", "sqlite": f"sqlite:{file}", "redis": redis}


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        times = {slots: 20 if sys.argv[3:] == ["quick"] else often for slots, often in LEASES.items()}
        uvloop.run(serve(sys.argv[2], times))
        return
    options = argparse.ArgumentParser()
    options.add_argument("--deep", action="store_true", help="queue up to a million tasks")
    depths = DEEP if options.parse_args().deep else DEPTHS
    show("leases", depths=depths, queues=measure(depths))


if __name__ == "__main__":
    main()
