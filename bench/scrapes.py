"""What a scrape of /metrics and a heartbeat ask of a queue: by counting, and by loading the records as it was before.

In memory, in SQLite and in Redis, with 256 requests of three stages in progress, and heartbeats that name all of them.
`python -m bench.scrapes [ACTIVE [TIMES]]`
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from statistics import median
from typing import Any

from bench.report import show
from bench.servers import redis_server
from unfuse import queues
from unfuse.core.request import Event
from unfuse.queues.base import QueueBackend, QueueLimits, RequestFilter
from unfuse.testing.queue_samples import count_waiting, plan_with_costs, request, task

ACTIVE, TIMES = 256, 200
POOLS = ("encode", "denoise", "vae_decode")
MANY = QueueLimits(10**6, 10**6)


async def by_records(queue: QueueBackend) -> dict[str, float]:
    """What a scrape did: records of all that is active, and of the first four of each line."""
    left = dict.fromkeys(POOLS, 0.0)
    for record in await queue.list(RequestFilter(is_over=False), limit=1000):
        for stage in record.context.plan.stages:
            left[POOLS[ord(stage.pool) - ord("a")]] += stage.cost
    for pool in POOLS:
        await count_waiting(queue, pool)
        for one in await queue.peek(pool, 4):
            await queue.load(one.request)
    return left


async def by_loading(queue: QueueBackend, names: Sequence[str]) -> list[str]:
    """What a heartbeat did."""
    records = await asyncio.gather(*(queue.load(name) for name in names))
    return [record.context.id for record in records if record.context.is_over]


async def milliseconds(ask: Callable[[], Awaitable[object]], times: int) -> float:
    """The median of so many."""
    spent = []
    for _ in range(times):
        began = time.perf_counter()
        await ask()
        spent.append((time.perf_counter() - began) * 1e3)
    return median(spent)


async def measure(url: str, active: int, times: int) -> dict[str, float]:
    """Medians in milliseconds, and ratios, of one queue."""
    queue = queues.open(url)
    names = [f"{number:06}" for number in range(active)]
    plan = plan_with_costs(a=0.1, b=2.0, c=0.3)
    for name in names:
        pool = POOLS[int(name) % 3]
        await queue.submit(request(name, plan=plan), [task(name, pool=pool)], [Event("queued")], MANY)
    await queue.stats(POOLS)
    row = {}
    asks: dict[str, tuple[Callable[[], Awaitable[object]], Callable[[], Awaitable[object]]]] = {
        "scrape": (lambda: by_records(queue), lambda: queue.stats(POOLS)),
        "heartbeat": (lambda: by_loading(queue, names), lambda: queue.ended_among(names)),
    }
    for name, (before, after) in asks.items():
        was, is_now = await milliseconds(before, times), await milliseconds(after, times)
        row |= {
            f"{name}_ms_before": round(was, 3),
            f"{name}_ms": round(is_now, 3),
            f"{name}_ratio": round(was / is_now),
        }
    await queue.close()
    return row


def main() -> None:
    active, times = (int(text) for text in [*sys.argv[1:], *[str(ACTIVE), str(TIMES)][len(sys.argv) - 1 :]])
    found: dict[str, Any] = {}
    with redis_server() as server, tempfile.TemporaryDirectory(dir=".") as folder:
        for name, url in (("memory", "memory"), ("sqlite", f"sqlite:{folder}/queue.db"), ("redis", server.url)):
            found[name] = asyncio.run(measure(url, active, times))
    show("scrapes", active=active, times=times, queues=found)


if __name__ == "__main__":
    main()
