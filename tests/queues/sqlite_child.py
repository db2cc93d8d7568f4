"""A scheduler that its test kills: random transitions on one file, each told on standard output once it is done."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from contextlib import suppress
from pathlib import Path

from tests.core.graphs import object_for, request_for
from unfuse.core.clock import SystemClock
from unfuse.core.errors import Conflict, LeaseLost
from unfuse.core.messages import TaskCompleted, TaskFailed
from unfuse.core.plan import Pipeline, StageSpec
from unfuse.core.request import Change, RequestRecord, ResultFile, Timings
from unfuse.core.task import Lease
from unfuse.queues.base import QueueLimits
from unfuse.queues.sqlite import SqliteQueue
from unfuse.scheduler import lifecycle
from unfuse.testing.queue_samples import append, lease_request

PIPELINE = Pipeline(
    (
        StageSpec("a", "text_encode", ("a",), (), ("x",)),
        StageSpec("b", "denoise", ("b",), ("x",), ("y",), True),
        StageSpec("c", "vae_decode", ("c",), ("y",), (), True),
    )
)
POOLS = frozenset({"pool0", "pool1"})
CALLERS = 4


def say(record: RequestRecord) -> None:
    """One line, written at once: what the caller of the queue was told."""
    os.write(1, f"{record.context.id} {record.context.version} {record.context.status}\n".encode())


async def caller(queue: SqliteQueue, chance: random.Random) -> None:
    while True:
        if chance.random() < 0.3:
            admitted = lifecycle.admit(request_for(PIPELINE, chance.randint(1, 3)), 1.0)
            say(await queue.submit(admitted.context, admitted.push, admitted.events, QueueLimits(10**6, 10**6)))
        for lease in await queue.lease("w", lease_request(*POOLS, slots=chance.randint(1, 3)), 60.0):
            with suppress(Conflict, LeaseLost):
                await transition(queue, chance, lease)
        await asyncio.sleep(0)


async def transition(queue: SqliteQueue, chance: random.Random, lease: Lease) -> None:
    task, now = lease.task, await queue.now()
    pieces = [b"%d" % number for number in range(lease.recorded_deltas, lease.recorded_deltas + chance.randint(0, 3))]
    if await append(queue, lease.claim, lease.recorded_deltas, pieces):
        os.write(1, f"{task.request} {task.stage} +{lease.recorded_deltas + len(pieces)}\n".encode())
    record = await queue.load(task.request)
    change: Change | None = None
    match chance.choice("dddddfbc"):
        case "d":
            results = (ResultFile(task.params["index"], "image/png", 1, "hash"),) if task.planned.final else ()
            done = TaskCompleted(lease.claim, None if task.planned.final else object_for(task), results, Timings())
            change = lifecycle.complete_stage(record.context, done, "w", 1.0, record.running)
        case "f":
            change = lifecycle.fail_stage(record.context, TaskFailed(lease.claim, "transient", "so"), "w", 1.0, now)
        case "b":
            await queue.hand_back(lease.claim)
        case "c":
            change = lifecycle.cancel(record.context, 1.0)
    if change is not None:
        say(await queue.commit(change))


async def main(path: str, seed: str) -> None:
    queue = SqliteQueue(Path(path), SystemClock())
    await asyncio.gather(*(caller(queue, random.Random(f"{seed} {number}")) for number in range(CALLERS)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
