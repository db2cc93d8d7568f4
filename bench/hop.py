"""Hop overhead: from one worker's completion to the next worker holding the lease, tensors excluded.

Scheduler and queue in one process, two workers' ends of the wire in another: worker A completes a stage at t0, worker
B, which waits, holds the next stage's lease at t1, with the ref of A's output. The queues take turns.
`python -m bench.hop [HOPS]`
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict

import uvloop

from bench.report import show, spread
from bench.servers import redis_server
from tools.addresses import unix_address
from tools.asking import asking
from unfuse.core.messages import (
    Accepted,
    LeasesGranted,
    Register,
    Registered,
    RequestTasks,
    StorageLocations,
    TaskCompleted,
    WorkerInfo,
)
from unfuse.core.model_spec import ModelSpec
from unfuse.core.object_ref import ObjectRef, layout_tensors
from unfuse.core.plan import Pipeline, StageSpec
from unfuse.core.request import ResultFile, Timings
from unfuse.core.task import Lease
from unfuse.queues import open as open_queue
from unfuse.queues.base import QueueLimits
from unfuse.scheduler.dispatcher import Dispatcher
from unfuse.scheduler.scheduler import Scheduler
from unfuse.service.logs import Logs
from unfuse.wire.dealer import Dealer
from unfuse.wire.router import Router

STAGES = (
    StageSpec("a", "text_encode", ("a",), (), ("x",)),
    StageSpec("b", "denoise", ("b",), ("x",), ("y",)),
    StageSpec("c", "vae_decode", ("c",), ("y",), ()),
)
NAMES = dict.fromkeys("abc", "0" * 12)
CARD = ModelSpec("bench", "", "", Pipeline(STAGES), {}, {}, NAMES, dict.fromkeys("abc", "float32"))
POOLS = CARD.pools()
TURNS = 4
TENSORS = layout_tensors(
    [("prompt_embeds", "bfloat16", (1, 512, 4096)), ("negative_prompt_embeds", "bfloat16", (1, 512, 4096))]
)


async def control(url: str, card: ModelSpec) -> tuple[Scheduler, Router]:
    """A scheduler over that queue, and where its workers come in; what it logs goes to standard error."""
    Logs().open_log()
    scheduler = Scheduler(open_queue(url), limits=QueueLimits(10**6, 10**6), specs=[card])
    dispatcher = Dispatcher(scheduler, [], StorageLocations(""))
    router = Router(unix_address(), dispatcher.answer, dispatcher.handle_undelivered)
    await scheduler.start()
    return scheduler, router


async def serve(url: str) -> None:
    """The scheduler's process; a line on standard input is a request, the address goes to standard output."""
    scheduler, router = await control(url, CARD)
    sys.stdout.write(router.address + "\n")
    sys.stdout.flush()
    while await asyncio.to_thread(sys.stdin.readline):
        await scheduler.submit(*asking(CARD, {"prompt": "a red circle on white", "seed": 1}))


async def worker(address: str, name: str, card: ModelSpec, *stages: str, slots: int = 1) -> Dealer:
    dealer = Dealer(address)
    pools = tuple(card.pools()[stage] for stage in stages)
    info = WorkerInfo(name, "node", "all", pools, slots, f"unix:@{name}", 1 << 30)
    welcome = await dealer.call(Register(info, (card,), os.urandom(16)), 5)
    assert isinstance(welcome, Registered), welcome
    return dealer


async def take(dealer: Dealer) -> tuple[Lease, float]:
    granted = await dealer.call(RequestTasks(1, 1 << 30, 20), 30)
    assert isinstance(granted, LeasesGranted), granted
    return granted.leases[0], time.perf_counter()


async def finish(dealer: Dealer, lease: Lease) -> None:
    task = lease.task
    ref = ObjectRef(
        "o" * 32,
        lease.worker,
        "node",
        task.request,
        task.stage,
        task.attempt,
        1,
        TENSORS[1],
        TENSORS[0],
        (1, 2),
        b"k" * 16,
        0.0,
    )
    results = (ResultFile(0, "image/png", 1000, "0" * 64),) if task.planned.final else ()
    answer = await dealer.call(TaskCompleted(lease.claim, None if task.planned.final else ref, results, Timings()), 30)
    assert isinstance(answer, Accepted), answer


async def measure(url: str, hops: int, warm: int = 100) -> list[float]:
    scheduler = subprocess.Popen(
        [sys.executable, "-m", "bench.hop", "serve", url], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert scheduler.stdin and scheduler.stdout
    address = scheduler.stdout.readline().decode().strip()
    first, second = await worker(address, "a", CARD, "a", "c"), await worker(address, "b", CARD, "b")
    seconds = []
    for _ in range(hops // 2 + warm):
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
    for dealer in (first, second):
        await dealer.close()
    for stream in (scheduler.stdin, scheduler.stdout):
        stream.close()
    scheduler.wait()
    return seconds[2 * warm :]


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        uvloop.run(serve(sys.argv[2]))
        return
    hops = int(sys.argv[1]) if sys.argv[1:] else 2000
    seconds: dict[str, list[float]] = defaultdict(list)
    with redis_server() as server, tempfile.TemporaryDirectory(dir=".") as folder:
        for turn in range(TURNS):
            for url in ("memory", f"sqlite:{folder}/{turn}.db", f"{server.url}?prefix=turn-{turn}"):
                seconds[url.partition(":")[0]] += uvloop.run(measure(url, hops // TURNS))
    show("hop", milliseconds={queue: spread([s * 1e3 for s in found]) for queue, found in seconds.items()})


if __name__ == "__main__":
    main()
