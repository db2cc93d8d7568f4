"""Hop overhead: from one worker's completion to the next worker holding the lease, tensors excluded.

Scheduler and memory queue in one process, two workers' ends of the wire in another: worker A completes a stage at t0,
worker B, which waits, holds the next stage's lease at t1. `python -m bench.hop [HOPS]`
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import uvloop

from bench.report import show, spread
from unfuse.core.card import Limits as CardLimits, ModelCard
from unfuse.core.messages import Ask, Done, Granted, Hello, WorkerInfo
from unfuse.core.object_ref import ObjectRef, lay_out
from unfuse.core.plan import Pipeline, StageSpec
from unfuse.core.request import ResultFile, Timings
from unfuse.core.task import Lease
from unfuse.queues import open as open_queue
from unfuse.queues.base import Limits
from unfuse.scheduler.desk import Desk
from unfuse.scheduler.scheduler import Scheduler
from unfuse.wire.dealer import Dealer
from unfuse.wire.router import Router

STAGES = (
    StageSpec("a", "text_encode", ("a",), (), ("x",)),
    StageSpec("b", "denoise", ("b",), ("x",), ("y",)),
    StageSpec("c", "vae_decode", ("c",), ("y",), ()),
)
NAMES = dict.fromkeys("abc", "0" * 12)
CARD = ModelCard("bench", "", "", Pipeline(STAGES), CardLimits(), {}, NAMES, dict.fromkeys("abc", "float32"))
POOLS = CARD.pools()
TENSORS = lay_out(
    [("prompt_embeds", "bfloat16", (1, 512, 4096)), ("negative_prompt_embeds", "bfloat16", (1, 512, 4096))]
)


async def serve() -> None:
    """The scheduler's process; a line on standard input is a request, the address goes to standard output."""
    queue = open_queue("memory")
    scheduler = Scheduler(queue, limits=Limits(10**6, 10**6), cards=[CARD])
    desk = Desk(scheduler, [], "")
    router = Router("tcp://127.0.0.1:0", desk.answer, desk.undelivered)
    await scheduler.start()
    sys.stdout.write(router.address + "\n")
    sys.stdout.flush()
    while await asyncio.to_thread(sys.stdin.readline):
        await scheduler.submit(CARD, {"prompt": "a red circle on white", "seed": 1})


async def worker(address: str, name: str, *stages: str) -> Dealer:
    dealer = Dealer(address)
    pools = tuple(POOLS[stage] for stage in stages)
    await dealer.call(Hello(WorkerInfo(name, "node", "all", pools, 1, f"unix:@{name}", 1 << 30), (CARD,)), 5)
    return dealer


async def take(dealer: Dealer) -> tuple[Lease, float]:
    granted = await dealer.call(Ask(1, None, 20), 30)
    assert isinstance(granted, Granted)
    return granted.leases[0], time.perf_counter()


async def finish(dealer: Dealer, lease: Lease) -> None:
    task = lease.task
    ref = ObjectRef(
        "o" * 32, "w", "node", task.request, task.stage, task.attempt, 1, TENSORS[1], TENSORS[0], (1, 2), b"k" * 16, 0.0
    )
    results = (ResultFile(0, "image/png", 1000, "0" * 64),) if task.final else ()
    await dealer.call(Done(lease.claim, None if task.final else ref, results, Timings()), 5)


async def measure(hops: int) -> list[float]:
    scheduler = subprocess.Popen(
        [sys.executable, "-m", "bench.hop", "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert scheduler.stdin and scheduler.stdout
    address = scheduler.stdout.readline().decode().strip()
    first, second = await worker(address, "a", "a", "c"), await worker(address, "b", "b")
    seconds = []
    for _ in range(hops // 2 + 100):
        scheduler.stdin.write(b"\n")
        scheduler.stdin.flush()
        lease, _ = await take(first)
        for ours, theirs in ((first, second), (second, first)):
            waiting = asyncio.create_task(take(theirs))
            await asyncio.sleep(0.002)
            began = time.perf_counter()
            await finish(ours, lease)
            lease, held = await waiting
            seconds.append(held - began)
        await finish(first, lease)
    scheduler.stdin.close()
    scheduler.wait()
    return seconds[200:]


def main() -> None:
    if sys.argv[1:] == ["serve"]:
        uvloop.run(serve())
    else:
        seconds = uvloop.run(measure(int(sys.argv[1]) if sys.argv[1:] else 4000))
        show(
            "hop",
            queue="memory",
            milliseconds={k: round(v * 1e3, 3) if k != "n" else v for k, v in spread(seconds).items()},
        )


if __name__ == "__main__":
    main()
