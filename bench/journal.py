"""What durability costs: the SQLite queue's submits and commits a second, beside the disk's own syncs, and its size.

Requests of three stages as the scheduler makes them. `python -m bench.journal [QUEUED]`
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import psutil
import uvloop

from bench.hop import CARD, POOLS
from bench.report import show, spread
from unfuse import queues
from unfuse.core.messages import TaskCompleted
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import compile_plan
from unfuse.core.request import Change, GenerationRequest, Timings, new_request_id
from unfuse.queues.base import QueueBackend, QueueLimits
from unfuse.scheduler import lifecycle
from unfuse.testing.queue_samples import lease_request, request_context

LIMITS = QueueLimits(10**7, 10**7)
COUNT = 400
LEASES = 2000


def admitted() -> Change:
    params = {"prompt": "a red circle on white, " * 8, "seed": 1, "height": 1024, "width": 1024}
    plan = compile_plan(CARD.pipeline, POOLS, params, [{"seed": 1, "index": 0}])
    return lifecycle.admit(request_context(GenerationRequest(new_request_id(), "bench", params), plan), time.time())


async def submit(queue: QueueBackend) -> None:
    change = admitted()
    await queue.submit(change.context, change.push, change.events, LIMITS)


async def complete(queue: QueueBackend) -> None:
    (lease,) = await queue.lease("w", lease_request(POOLS["a"]), 60.0)
    task = lease.task
    ref = ObjectRef("o", "w", "n", task.request, task.stage, task.attempt, 1, 0, (), (), b"key", 0.0)
    record = await queue.load(task.request)
    await queue.commit(
        lifecycle.complete_stage(record.context, TaskCompleted(lease.claim, ref, (), Timings()), "w", time.time())
    )


async def rate(work: Callable[[], Awaitable[None]], callers: int, count: int = COUNT) -> float:
    """How often a second it is done."""

    async def caller() -> None:
        for _ in range(count):
            await work()

    begun = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return callers * count / (time.perf_counter() - begun)


def syncs(folder: str) -> float:
    """Appends of 8 KiB, each synced, a second."""
    with open(Path(folder) / "sync", "wb", buffering=0) as file:
        begun = time.perf_counter()
        for _ in range(COUNT):
            file.write(bytes(8192))
            os.fdatasync(file)
    return COUNT / (time.perf_counter() - begun)


def resident() -> float:
    return psutil.Process().memory_info().rss / 1e6


async def main(queued: int) -> None:
    rows: dict[str, object] = {}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        url = f"sqlite:{folder}/queue.db"
        rows["syncs/s"] = round(syncs(folder))
        for name in ("memory", url):
            for callers in (1, 8):
                queue = queues.open(name)
                for work in (submit, complete):
                    done = await rate(partial(work, queue), callers)
                    rows[f"{name[:6]} {work.__name__}/s, {callers} callers"] = round(done)
                await queue.close()
        Path(url.partition(":")[2]).unlink()
        queue = queues.open(url)
        before = resident()
        await rate(partial(submit, queue), 64, queued // 64)
        rows["MB a 10,000 queued"] = round((resident() - before) / queued * 10_000, 1)
        times = []
        for _ in range(LEASES):
            begun = time.perf_counter()
            await queue.lease("w", lease_request(POOLS["a"]), 60.0)
            times.append(time.perf_counter() - begun)
            await asyncio.sleep(0)
        rows["lease_s"] = spread(times)
        await queue.close()
        rows["file in MB"] = round(sum(file.stat().st_size for file in Path(folder).iterdir()) / 1e6)
        begun = time.perf_counter()
        queue = queues.open(url)
        rows["start_s"] = round(time.perf_counter() - begun, 2)
        await queue.close()
    show("journal", queued=queued, **rows)


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000))
