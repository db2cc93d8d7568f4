"""The pools that a worker registers."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from tools.addresses import unix_address
from tools.server import environment, unfuse
from unfuse.core.clock import SystemClock
from unfuse.core.messages import StorageLocations, WorkerInfo
from unfuse.core.plan import declared_pool
from unfuse.queues.memory import MemoryQueue
from unfuse.scheduler.dispatcher import Dispatcher
from unfuse.scheduler.scheduler import Scheduler
from unfuse.wire.router import Router


@pytest.mark.nightly
async def test_worker_registers_pools_with_its_numerics(tmp_path: Path) -> None:
    queue = MemoryQueue(SystemClock())
    scheduler = Scheduler(queue)
    dispatcher = Dispatcher(
        scheduler, [("unfuse/shapes", "unfuse/shapes", "auto")], StorageLocations(f"disk:{tmp_path}/results")
    )
    router = Router(unix_address(), dispatcher.answer, dispatcher.handle_undelivered)
    command = unfuse("worker", "--role", "encoder", "--scheduler", router.address, "--arena", "8MiB")
    process = subprocess.Popen(command, env=environment(tmp_path), stdout=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(300):
            while not (members := await queue.workers()):
                await asyncio.sleep(0.1)
        worker: WorkerInfo = members[0].info
        (card,) = members[0].models
        assert [declared_pool(pool) for pool in worker.pools] == [card.pools()["text_encode"]]
        assert worker.pools[0] != declared_pool(worker.pools[0])
        assert worker.numerics.keys() >= {
            "batching",
            "vae",
            "noise-device",
            "torch",
            "diffusers",
            "device",
            "threads",
        }
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)
        await router.close()
        await scheduler.close()
