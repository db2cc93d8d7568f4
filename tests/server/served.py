"""A gateway on a loopback port, over a real scheduler and queue, with one worker that makes plain squares."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import msgspec
import numpy as np
import uvloop
from numpy.typing import NDArray
from PIL import Image

from tests.core.graphs import object_for
from tools.cards import IDLE, MOVING, PICTURES
from unfuse import queues
from unfuse.core.errors import LeaseLost, NotFound, TransientError
from unfuse.core.messages import TaskCompleted, TaskFailed, WorkerInfo
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import Params
from unfuse.core.request import FLAGGED_TYPE, Event, ResultFile, Timings
from unfuse.core.task import Lease
from unfuse.edge.access import AccessPolicy
from unfuse.edge.connections import ConnectionLimits, HttpServer
from unfuse.edge.keys import ApiKeys
from unfuse.queues.base import QueueLimits as QueueLimits
from unfuse.scheduler.scheduler import Scheduler
from unfuse.server.app import create_app
from unfuse.server.gateway import Gateway
from unfuse.server.webhooks import Webhooks
from unfuse.stages.media import encode
from unfuse.stores.results import ResultStore, open_results
from unfuse.testing.queue_samples import lease_request

T = TypeVar("T")


POOLS = (*PICTURES.pools().values(), *MOVING.pools().values())
WORKER = WorkerInfo("worker-1", "node", "all", POOLS, 4, "", 0)
BROKEN = "a broken circle"
TILED = "a tiled circle"
"""A prompt that the worker cannot draw."""

NAKED = "a naked circle"
"""A prompt whose pictures with an odd seed a safety checker flags."""

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
"""What webhooks are signed with."""

POISON, EVIDENCE = "a poisonous circle", "killed by SIGSEGV\nFatal Python error: Segmentation fault"
"""A prompt that kills the worker's compute process, and what is found then."""


def picture(seed: int, size: int = 64, form: str = "png") -> bytes:
    """A square whose colour is told by the seed."""
    file = BytesIO()
    Image.new("RGB", (size, size), (seed % 256, seed // 256 % 256, 9)).save(file, form)
    return file.getvalue()


def film(seed: int, frames: int = 17, first: bytes = b"") -> tuple[NDArray[np.uint8], bytes]:
    """The square getting brighter, as frames and as their mp4; `first` is a picture to begin with."""
    pictures = [Image.new("RGB", (64, 64), (seed % 256, 10 * frame, 9)) for frame in range(frames)]
    if first:
        pictures[0] = Image.open(BytesIO(first)).convert("RGB").resize((64, 64))
    array = np.stack([np.asarray(one) for one in pictures])
    return array, encode(array, {"output_format": "mp4", "fps": 8})[0].data


def preview(step: int) -> bytes:
    """What the worker shows of a picture after a step."""
    return picture(step, 16, "jpeg")


class Worker:
    """Does every task at once, unless it is held: tasks wait before their first step, or after their last one."""

    def __init__(self, scheduler: Scheduler, results: ResultStore) -> None:
        self._scheduler, self.results = scheduler, results
        self.starting, self.ending = asyncio.Event(), asyncio.Event()
        self.starting.set()
        self.ending.set()

    async def run(self, cards: Sequence[ModelSpec]) -> None:
        queue = self._scheduler.queue
        await queue.register(WORKER, cards)
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    for lease in await queue.lease(WORKER.id, lease_request(*WORKER.pools, slots=4), 60.0, wait=60.0):
                        tasks.create_task(self._do(lease))
                except TransientError:
                    await asyncio.sleep(0.05)

    async def _do(self, lease: Lease) -> None:
        await self.starting.wait()
        with suppress(LeaseLost, NotFound):
            await self._work(lease)

    async def _work(self, lease: Lease) -> None:
        params, claim = lease.task.params, lease.claim
        if params["prompt"] == BROKEN:
            await self._scheduler.fail(TaskFailed(claim, "permanent", "the circle is broken"), WORKER.id)
            return
        if params["prompt"] == POISON:
            await self._scheduler.fail(TaskFailed(claim, "crash", "the compute process died", EVIDENCE), WORKER.id)
            return
        if lease.task.planned.kind == "denoise":
            await self._scheduler.queue.progress(claim, list(self._steps(lease)))
            await self.ending.wait()
        files = tuple(self._draw(lease)) if lease.task.planned.final else ()
        timings = Timings(0.0, 0.1, 0.2, 0.3, steps=4, batch=2.0, share_s=0.15)
        output = None if lease.task.planned.final else msgspec.structs.replace(object_for(claim), owner=WORKER.id)
        vae: Any = "tiled" if params["prompt"] == TILED and files else ""
        await self._scheduler.complete(TaskCompleted(claim, output, files, timings, vae=vae), WORKER.id)

    def _steps(self, lease: Lease) -> Iterator[Event]:
        claim, params = lease.claim, lease.task.params
        steps, every = int(str(params["num_inference_steps"])), int(str(params.get("preview_every", 0)))
        for step in range(1, steps + 1):
            yield Event("progress", 0.0, claim.stage, claim.attempt, WORKER.id, step, steps)
            if every and step % every == 0 and step < steps:
                self.results.attach(claim.request, f"preview-{claim.stage}-{step}", preview(step), durable=False)
                yield Event("preview", 0.0, claim.stage, claim.attempt, WORKER.id, step, steps)

    def _draw(self, lease: Lease) -> Iterator[ResultFile]:
        """A picture; or a video, whose frames are files if it is asked for as png."""
        params, request = lease.task.params, lease.task.request
        form, seed, index = str(params["output_format"]), int(str(params["seed"])), int(str(params["index"]))
        if params["prompt"] == NAKED and seed % 2:
            yield self.results.put(request, index, FLAGGED_TYPE, b"{}")
            return
        if request.startswith("req_"):
            yield self.results.put(request, index, f"image/{form}", picture(seed, int(str(params["width"])), form))
            return
        first = self.results.attached(request, "image") if lease.task.derived.image_hashes else b""
        frames, data = film(seed, int(str(params["num_frames"])), first)
        if form == "mp4":
            yield self.results.put(request, 0, "video/mp4", data)
            return
        for media in encode(frames, {"output_format": "png"}):
            yield self.results.put(request, index, media.content_type, media.data)
            index += 1


def until(condition: Callable[[], bool]) -> None:
    """Wait for something to hold."""
    limit = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


class Served:
    """A running gateway. `url` is where, `folder` holds its results."""

    def __init__(
        self,
        url: str,
        folder: Path,
        scheduler: Scheduler,
        worker: Worker,
        loop: asyncio.AbstractEventLoop,
        server: HttpServer,
    ) -> None:
        self.url, self.folder, self.scheduler, self.queue = url, folder, scheduler, scheduler.queue
        self.results, self.server = worker.results, server
        self._worker, self._loop = worker, loop

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Run something on the gateway's loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    @contextmanager
    def held(self, *, after_steps: bool = False) -> Iterator[None]:
        """The worker finishes nothing inside the block: it begins nothing, or ends no denoising."""
        gate = self._worker.ending if after_steps else self._worker.starting
        self._loop.call_soon_threadsafe(gate.clear)
        try:
            yield
        finally:
            self.let_go()

    def let_go(self) -> None:
        """The worker goes on."""
        for gate in (self._worker.starting, self._worker.ending):
            self._loop.call_soon_threadsafe(gate.set)

    def next_event(self, request: str, kind: str) -> Event:
        """Wait until a request has had an event of that kind."""
        return self.run(self._next(request, kind))

    async def _next(self, request: str, kind: str) -> Event:
        async for event in self.queue.watch(request):
            if event.type == kind:
                return event
        raise AssertionError(f"{request} ended without {kind}")


class _Often(HttpServer):
    """Looks at its connections, and whether it should end, ten times as often as `serve`: what a test waits for."""

    async def main_loop(self) -> None:
        """Until it should end."""
        counter = 0
        while not await self.on_tick(counter):
            await asyncio.sleep(0.01)
            counter += 1


async def _looking(keys: ApiKeys) -> None:
    while True:
        await keys.reload_if_changed()


@contextmanager
def _key_files(keys: Sequence[str] | Path) -> Iterator[list[str]]:
    """Key files with these lines, or that file; none without keys."""
    if not keys or isinstance(keys, Path):
        yield [str(keys)] if keys else []
        return
    with TemporaryDirectory() as folder:
        (file := Path(folder, "keys")).write_text("\n".join(keys) + "\n")
        yield [str(file)]


@contextmanager
def serve(
    folder: Path,
    *,
    keys: Sequence[str] | Path = (),
    names: Mapping[str, str] | None = None,
    idle: bool = True,
    cards: Sequence[ModelSpec] = (PICTURES,),
    limits: QueueLimits | None = None,
    queue: str = "memory",
    works: bool = True,
    lease_ttl: float = 600.0,
    cache_bytes: int = 0,
    standard: Params | None = None,
    loras: str = "",
    store: str = "shared_memory",
    access: AccessPolicy | None = None,
    bounds: ConnectionLimits | None = None,
    cancels: bool = False,
    reuses: bool = False,
    public_url: str = "",
    webhook_hosts: Sequence[str] = (),
    webhook_secrets: Sequence[str] = (SECRET,),
    open_metrics: bool = False,
) -> Iterator[Served]:
    """A gateway in a thread of its own, until the block ends; without a worker unless it `works`.

    `keys` are the lines of a key file, or a key file.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    ready: Future[Served] = Future()
    stop: Future[None] = Future()

    async def main() -> None:
        tasks = queues.open(queue)
        known = (IDLE,) if idle else ()
        scheduler = Scheduler(tasks, limits=limits, lease_ttl=lease_ttl, specs=known, cache_bytes=cache_bytes)
        results = open_results(f"disk:{folder}")
        worker, shown = Worker(scheduler, results), ApiKeys(files=files)
        webhooks = Webhooks(webhook_hosts, webhook_secrets)
        gateway = Gateway(
            scheduler,
            results,
            keys=shown,
            names=names,
            default_params=standard,
            loras=loras,
            store=store,
            cancel_on_disconnect=cancels,
            cache_results=reuses,
            webhooks=webhooks,
            public_url=public_url,
            open_metrics=open_metrics,
        )
        await scheduler.start()
        webhooks.start(scheduler, gateway.links)
        server = _Often(create_app(gateway, access), bounds or ConnectionLimits(8192, 2048), access or AccessPolicy())
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        working = asyncio.create_task(worker.run(cards) if works else asyncio.sleep(0))
        looking = asyncio.create_task(_looking(shown))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        ready.set_result(Served(url, folder, scheduler, worker, asyncio.get_running_loop(), server))
        await asyncio.wrap_future(stop)
        scheduler.draining = True
        working.cancel()
        looking.cancel()
        await webhooks.close()
        await scheduler.close()
        await tasks.close()
        server.should_exit = True
        await asyncio.gather(serving, working, looking, return_exceptions=True)

    with _key_files(keys) as files:
        thread = threading.Thread(target=uvloop.run, args=(main(),))
        thread.start()
        try:
            yield ready.result(30)
        finally:
            stop.set_result(None)
            thread.join()
