"""What workers cost a scheduler and Redis while they do nothing: a heartbeat each second, and a look at all of them.

Processor time of this process, which is the scheduler, and of Redis: other load of the machine hardly shows in it.
`python -m bench.beats [WORKERS …]`
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil

import unfuse.models
from bench.report import show, table
from bench.servers import redis_server
from unfuse import queues
from unfuse.core.clock import SystemClock
from unfuse.core.messages import Heartbeat, HeartbeatReply, Register, StorageLocations, WorkerInfo
from unfuse.models import read_model_spec
from unfuse.scheduler.dispatcher import Dispatcher
from unfuse.scheduler.scheduler import Scheduler

WORKERS = (10, 100, 1000)
AT_ONCE = 32


async def of_each(redis: psutil.Process, count: int, work: Callable[[int], Awaitable[object]]) -> tuple[float, float]:
    """Milliseconds of processor time that each of so many calls took, here and in Redis."""
    begun, before = time.process_time(), sum(redis.cpu_times()[:2])
    for first in range(0, count, AT_ONCE):
        await asyncio.gather(*(work(number) for number in range(first, min(count, first + AT_ONCE))))
    return (
        round(1000 * (time.process_time() - begun) / count, 3),
        round(1000 * (sum(redis.cpu_times()[:2]) - before) / count, 3),
    )


async def costs(url: str, pid: int, workers: int, calls: int = 1000) -> dict[str, object]:
    """What so many workers cost."""
    redis, queue = psutil.Process(pid), queues.open(url)
    card = read_model_spec("shapes", Path(unfuse.models.__file__).with_name("shapes"), "auto")
    pools = tuple(card.pools().values())
    scheduler = Scheduler(queue, specs=[card], clock=SystemClock(), lease_ttl=3600.0)
    dispatcher = Dispatcher(scheduler, [(card.name, card.source, "auto")], StorageLocations("memory:"))
    for number in range(workers):
        hello = Register(WorkerInfo(f"w-{number}", f"n-{number}", "all", pools, 2, "unix:@w", 1 << 30), (card,))
        await dispatcher.answer(f"{number}".encode(), hello)

    async def beat(number: int) -> None:
        """Of one of those that came last: the others have been silent for too long by then."""
        answer = await dispatcher.answer(f"{workers - 1 - number % min(workers, 10)}".encode(), Heartbeat(wait=0.0))
        assert isinstance(answer, HeartbeatReply)

    beats = await of_each(redis, calls, beat)
    looks = await of_each(redis, max(4, calls // workers), lambda _: scheduler.registry.workers())
    await scheduler.close()
    await queue.close()
    return {
        "a heartbeat: scheduler ms": beats[0],
        "Redis ms": beats[1],
        "a look at all: scheduler, ms": looks[0],
        "Redis, ms": looks[1],
    }


def main() -> None:
    found: dict[str, dict[str, object]] = {}
    for workers in [int(word) for word in sys.argv[1:]] or WORKERS:
        with redis_server() as server:
            found[str(workers)] = asyncio.run(costs(server.url, server.pid, workers))
    table("workers", found)
    show("beats", processor_ms=found)


if __name__ == "__main__":
    main()
