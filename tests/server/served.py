"""A gateway on a loopback port, over a real scheduler and memory queue, with one worker that draws plain squares."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TypeVar

import uvicorn
from PIL import Image

from unfuse.core.card import Limits, ModelCard
from unfuse.core.clock import SystemClock
from unfuse.core.event import Event
from unfuse.core.messages import Done, Failed, WorkerInfo
from unfuse.core.plan import Pipeline, StageSpec
from unfuse.core.request import ResultFile, Timings
from unfuse.core.task import Lease
from unfuse.queues.base import Limits as QueueLimits
from unfuse.queues.memory import MemoryQueue
from unfuse.scheduler.scheduler import Scheduler
from unfuse.server import create_app
from unfuse.stores.results import ResultStore, open_results

T = TypeVar("T")

PIPELINE = Pipeline(
    (
        StageSpec("text_encode", "text_encode", ("text_encoder",), (), ("embeds",)),
        StageSpec("denoise", "denoise", ("transformer",), ("embeds",), ("latents",), True),
        StageSpec("vae_decode", "vae_decode", ("vae",), ("latents",), (), True),
    )
)
DEFAULTS = {"width": 64, "height": 64, "num_inference_steps": 4, "guidance_scale": 3.0, "max_sequence_length": 16}
LIMITS = Limits(min_size=32, max_size=128, max_frames=17, max_steps=100, max_prompt_chars=2000)


def card(name: str) -> ModelCard:
    """A model of that name, with weights of its own."""
    weights = {part: f"{name.replace('/', '')}{part}"[-32:] for part in ("text_encoder", "transformer", "vae")}
    dtypes = dict.fromkeys(weights, "float32")
    return ModelCard(name, "/nowhere", "test", PIPELINE, LIMITS, DEFAULTS, weights, dtypes, created=7)


PICTURES, IDLE = card("test/pictures"), card("test/idle")
"""One model with a worker, and one without: what is asked of it stays queued."""

WORKER = WorkerInfo("worker-1", "node", "all", tuple(PICTURES.pools().values()), 4, "", 0)
BROKEN = "a broken circle"
"""A prompt that the worker cannot draw."""


def picture(seed: int, size: int = 64, form: str = "png") -> bytes:
    """A square whose colour is told by the seed."""
    file = BytesIO()
    Image.new("RGB", (size, size), (seed % 256, seed // 256 % 256, 9)).save(file, form)
    return file.getvalue()


class Worker:
    """Does every task at once, unless it is held: then leased tasks wait until it is let go."""

    def __init__(self, scheduler: Scheduler, results: ResultStore) -> None:
        self._scheduler, self._results = scheduler, results
        self.going = asyncio.Event()
        self.going.set()

    async def run(self) -> None:
        queue = self._scheduler.queue
        await queue.hello(WORKER, (PICTURES,))
        async with asyncio.TaskGroup() as tasks:
            while True:
                for lease in await queue.lease(WORKER.id, WORKER.pools, 4, 60.0, wait=60.0):
                    tasks.create_task(self._do(lease))

    async def _do(self, lease: Lease) -> None:
        await self.going.wait()
        params, claim = lease.task.params, lease.claim
        if params["prompt"] == BROKEN:
            await self._scheduler.fail(Failed(claim, "permanent", "the circle is broken"), WORKER.id)
            return
        steps = int(str(params["num_inference_steps"])) if lease.task.kind == "denoise" else 0
        told = [Event("progress", 0.0, claim.stage, claim.attempt, WORKER.id, at, steps) for at in range(1, steps + 1)]
        await self._scheduler.queue.progress(claim, told)
        files = (self._draw(lease),) if lease.task.final else ()
        await self._scheduler.complete(Done(claim, None, files, Timings(0.0, 0.1, 0.2, 0.3)), WORKER.id)

    def _draw(self, lease: Lease) -> ResultFile:
        params = lease.task.params
        form, seed, index = str(params["output_format"]), int(str(params["seed"])), int(str(params["index"]))
        data = picture(seed, int(str(params["width"])), form)
        return self._results.put(lease.task.request, index, f"image/{form}", data)


class Served:
    """A running gateway. `url` is where."""

    def __init__(self, url: str, scheduler: Scheduler, worker: Worker, loop: asyncio.AbstractEventLoop) -> None:
        self.url, self.scheduler, self.queue = url, scheduler, scheduler.queue
        self._worker, self._loop = worker, loop

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Run something on the gateway's loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The worker finishes nothing inside the block."""
        self._loop.call_soon_threadsafe(self._worker.going.clear)
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._worker.going.set)

    def next_event(self, request: str, kind: str) -> Event:
        """Wait until a request has had an event of that kind."""
        return self.run(self._next(request, kind))

    async def _next(self, request: str, kind: str) -> Event:
        async for event in self.queue.watch(request):
            if event.type == kind:
                return event
        raise AssertionError(f"{request} ended without {kind}")


@contextmanager
def serve(
    folder: Path,
    *,
    keys: Mapping[str, str] | None = None,
    names: Mapping[str, str] | None = None,
    idle: bool = True,
    limits: QueueLimits | None = None,
) -> Iterator[Served]:
    """A gateway in a thread of its own, until the block ends."""
    listener = socket.create_server(("127.0.0.1", 0))
    ready: Future[Served] = Future()
    stop: Future[None] = Future()

    async def main() -> None:
        queue = MemoryQueue(SystemClock())
        scheduler = Scheduler(queue, limits=limits, lease_ttl=600.0, cards=(IDLE,) if idle else ())
        results = open_results(f"disk:{folder}")
        worker = Worker(scheduler, results)
        app = create_app(scheduler, results, keys=keys, names=names)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        working = asyncio.create_task(worker.run())
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        ready.set_result(Served(url, scheduler, worker, asyncio.get_running_loop()))
        await asyncio.wrap_future(stop)
        await queue.close()
        server.should_exit = True
        working.cancel()
        await asyncio.gather(serving, working, return_exceptions=True)

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        yield ready.result(30)
    finally:
        stop.set_result(None)
        thread.join()
