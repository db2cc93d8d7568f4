"""What clients ask at 100,000 stored requests against 200, through the gateway: submissions with a key, lists, /health.

The queue is in SQLite, then in Redis; gateway and scheduler have a process of their own. All but 100 of what is stored
is over, a quarter are videos, one of a thousand is dead. Answers are as long at both depths.
`python -m bench.stored [DEPTH [TIMES]]`
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import httpx2
import msgspec
import psutil
import uvicorn
import uvloop

from bench.report import quantile, show
from bench.servers import redis_server
from tools.addresses import free_port
from tools.cards import IDLE
from unfuse import queues
from unfuse.core.modalities import IMAGE, VIDEO
from unfuse.core.plan import compile_plan
from unfuse.core.request import GenerationRequest, RequestContext, new_request_id
from unfuse.queues.base import QueueBackend, QueueLimits
from unfuse.scheduler import lifecycle
from unfuse.scheduler.scheduler import Scheduler
from unfuse.server.app import create_app
from unfuse.server.gateway import Gateway as Served
from unfuse.service.logs import Logs
from unfuse.stores.results import open_results
from unfuse.testing.queue_samples import request_context

FEW, MANY, TIMES = 200, 100_000, 300
ACTIVE = 100
LIMITS = QueueLimits(10**7, 10**7)
SUBMITTERS = 64
PARAMS: dict[str, Any] = {"prompt": "a red circle on white", "size": "64x64"}
ROUTES = {
    "list of a status": "/v1/requests?status=failed&limit=20",
    "list of what is in progress": "/v1/requests?status=in_progress&limit=20",
    "videos": "/v1/videos?limit=20",
    "videos, oldest first": "/v1/videos?limit=20&order=asc",
    "dead": "/v1/dead?limit=20",
    "health": "/health",
    "ready": "/ready",
}


def stored(place: int) -> RequestContext:
    """A request of that place: the first ones are active, the others over."""
    params = {"prompt": "a red circle on white", "seed": 1, "height": 64, "width": 64, "num_frames": 1, "fps": 8}
    params["output_format"] = "png"
    plan = compile_plan(IDLE.pipeline, IDLE.pools(), params, [{"seed": 1, "index": 0}])
    request = GenerationRequest(new_request_id(IMAGE if place % 4 else VIDEO), IDLE.name, params)
    own: dict[str, Any] = {"idempotency_key": f"key {place}", "fingerprint": f"{place:064}"}
    context = request_context(request, plan, created_at=time.time(), **own)
    context = lifecycle.admit(context, time.time()).context
    if place < ACTIVE:
        return context
    dead = place % 1000 == 0 or place < ACTIVE + 20
    own = {"status": "failed" if dead else "completed", "is_dead_letter": dead, "completed_at": time.time()}
    return msgspec.structs.replace(context, **own)


async def fill(queue: QueueBackend, depth: int, wanted: int) -> None:
    async def submitter(share: range) -> None:
        for place in share:
            await queue.submit(stored(place), [], [], LIMITS)

    await asyncio.gather(*(submitter(range(depth + n, wanted, SUBMITTERS)) for n in range(SUBMITTERS)))


async def serve(url: str, folder: str, port: int) -> None:
    """The gateway's process. A line on standard input is a depth; the answer is what a request weighs, in bytes."""
    Logs().open_log()
    queue, process, depth = queues.open(url), psutil.Process(), 0
    scheduler = Scheduler(queue, limits=LIMITS, specs=[IDLE])
    await scheduler.start()
    app = create_app(Served(scheduler, open_results(folder)))
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    serving = asyncio.create_task(server.serve())
    while line := await asyncio.to_thread(sys.stdin.readline):
        before, wanted = process.memory_info().rss, int(line)
        await fill(queue, depth, wanted)
        print(json.dumps((process.memory_info().rss - before) / (wanted - depth)), flush=True)
        depth = wanted
    server.should_exit = True
    await serving
    await scheduler.close()
    await queue.close()


class Gateway:
    """The process of one queue, and a client."""

    def __init__(self, url: str, folder: str) -> None:
        port = free_port()
        command = [sys.executable, "-m", "bench.stored", "serve", url, folder, str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.http = httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=600, trust_env=False)
        self._keys = 0

    def to(self, depth: int) -> float:
        """Have that many stored; bytes that each of the new ones weighs."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{depth}\n".encode())
        self._process.stdin.flush()
        return float(json.loads(self._process.stdout.readline()))

    def submit(self) -> None:
        """A request under a new key."""
        self._keys += 1
        headers = {"idempotency-key": f"mine {self._keys}", "prefer": "respond-async"}
        answer = self.http.post("/v1/images/generations", json=PARAMS | {"model": IDLE.name}, headers=headers)
        assert answer.status_code == 202, answer.text

    def get(self, path: str) -> None:
        answer = self.http.get(path)
        assert answer.status_code in (200, 503), answer.text

    def asked(self, times: int) -> dict[str, list[float]]:
        """Milliseconds of each."""
        asks: dict[str, Callable[[], None]] = {"submission with a key": self.submit}
        asks |= {name: lambda path=path: self.get(path) for name, path in ROUTES.items()}  # type: ignore[misc]
        return {name: [milliseconds(ask) for _ in range(times)] for name, ask in asks.items()}

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self.http.close()
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def milliseconds(ask: Callable[[], None]) -> float:
    began = time.perf_counter()
    ask()
    return (time.perf_counter() - began) * 1e3


def compared(few: list[float], many: list[float]) -> dict[str, float]:
    row = {}
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        first, then = quantile(few, share), quantile(many, share)
        row |= {f"{name}_ms_few": round(first, 2), f"{name}_ms_many": round(then, 2)}
        row[f"{name}_ratio"] = round(then / first, 2)
    return row


def measure(depth: int, times: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with redis_server() as server, tempfile.TemporaryDirectory(dir=".") as folder:
        for name, url in (("sqlite", f"sqlite:{folder}/queue.db"), ("redis", server.url)):
            gateway = Gateway(url, f"disk:{folder}/{name}")
            gateway.to(FEW)
            few, used = gateway.asked(times), server.used
            weight = gateway.to(depth)
            many = gateway.asked(times)
            gateway.close()
            found[name] = {ask: compared(few[ask], many[ask]) for ask in few}
            found[name]["kilobytes_a_request_in_process"] = round(weight / 1e3, 2)
            if name == "redis":
                found[name]["kilobytes_a_request_in_server"] = round((server.used - used) / (depth - FEW) / 1e3, 2)
    return found


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        uvloop.run(serve(sys.argv[2], sys.argv[3], int(sys.argv[4])))
        return
    depth, times = (int(text) for text in [*sys.argv[1:], *[str(MANY), str(TIMES)][len(sys.argv) - 1 :]])
    show("stored", few=FEW, many=depth, times=times, queues=measure(depth, times))


if __name__ == "__main__":
    main()
