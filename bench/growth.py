"""How often a second the pieces of running tasks are recorded, beside commits, in each queue.

A call records three pieces of each of sixteen tasks, as a worker does every 50 ms that decodes sixteen texts at 60
tokens a second. A commit completes the first of three stages of a request, as the scheduler makes it. Both are done by
one caller, in turns, so that each pair of numbers is of one moment; and so is reading the last pieces of one text, as a
gateway does after an event. `python -m bench.growth [ROUNDS]`
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from statistics import median

import uvloop

from bench.hop import POOLS
from bench.journal import admitted, rate, submit
from bench.report import ratio, show
from bench.servers import redis_server
from unfuse import queues
from unfuse.core.messages import TaskCompleted
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import Timings
from unfuse.core.task import Lease, OutputDeltas
from unfuse.queues.base import QueueBackend, QueueLimits
from unfuse.scheduler import lifecycle
from unfuse.testing.queue_samples import lease_request

TASKS, PIECES = 16, 3
PIECE = b"\x92\xcd\x12\x34\xa6 token"
CALLS = 100


async def grow(queue: QueueBackend, leases: list[Lease], said: list[int]) -> None:
    """One call: the next pieces of all."""
    held = await queue.append_deltas([OutputDeltas(lease.claim, said[0], (PIECE,) * PIECES) for lease in leases])
    assert all(held)
    said[0] += PIECES


async def read(queue: QueueBackend, lease: Lease, said: list[int]) -> None:
    """What a gateway reads after an event: the last pieces of one task."""
    assert len(await queue.read_deltas(lease.task.request, lease.task.stage, said[0] - PIECES)) == PIECES


async def commits(queue: QueueBackend) -> list[Callable[[], Awaitable[object]]]:
    """Commits that are ready to be made, each of another request."""
    await rate(partial(submit, queue), 1, CALLS)
    ready: list[Callable[[], Awaitable[object]]] = []
    for lease in await queue.lease("w", lease_request(POOLS["a"], slots=CALLS), 3600.0):
        task = lease.task
        ref = ObjectRef("o", "w", "n", task.request, task.stage, task.attempt, 1, 0, (), (), b"key", 0.0)
        record = await queue.load(task.request)
        done = TaskCompleted(lease.claim, ref, (), Timings())
        ready.append(partial(queue.commit, lifecycle.complete_stage(record.context, done, "w", time.time())))
    return ready


async def commit(ready: list[Callable[[], Awaitable[object]]]) -> None:
    """The next of these."""
    await ready.pop()()


async def measured(url: str, rounds: int) -> dict[str, object]:
    queue = queues.open(url)
    for _ in range(TASKS):
        change = admitted()
        await queue.submit(change.context, change.push, change.events, QueueLimits(10**6, 10**6))
    leases, said = await queue.lease("w", lease_request(POOLS["a"], slots=TASKS), 3600.0), [0]
    calls, committed, reads = list[float](), list[float](), list[float]()
    for _ in range(rounds):
        ready = await commits(queue)
        calls.append(await rate(partial(grow, queue, leases, said), 1, CALLS))
        committed.append(await rate(partial(commit, ready), 1, CALLS))
        reads.append(await rate(partial(read, queue, leases[0], said), 1, CALLS))
    await queue.close()
    return {
        "calls/s": round(median(calls)),
        "pieces/s": round(median(calls) * TASKS * PIECES),
        "commits/s": round(median(committed)),
        "reads/s": round(median(reads)),
        "calls ÷ commits": ratio(calls, committed),
    }


async def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory(dir=".") as folder, redis_server() as server:
        found = {"memory": "memory", "sqlite": f"sqlite:{folder}/queue.db", "redis": server.url}
        rows = {name: await measured(url, rounds) for name, url in found.items()}
        server.sync("always")
        rows["redis, appendfsync always"] = await measured(f"{server.url}?prefix=synced", rounds)
    show("growth", rounds=rounds, tasks=TASKS, pieces=PIECES, **rows)


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 15))
