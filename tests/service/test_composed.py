"""What `serve` composes for its settings, whole, in this process, on each queue: a prompt that comes again is found."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, MutableMapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from structlog.testing import capture_logs

from tests.worker import outside
from tools.addresses import a_worker
from tools.redis_server import RedisServer
from unfuse.service.logs import Logs
from unfuse.service.options import plan_service, serve_options
from unfuse.service.service import Service
from unfuse.service.settings import load
from unfuse.worker.worker import Worker

PROMPT = "turn this"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        outside.install(patch)
        yield outside.model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@asynccontextmanager
async def serving(model: Path, folder: Path, queue: str) -> AsyncIterator[tuple[str, str]]:
    """A `serve` with every setting that a test does not need otherwise at its default: its URL, and where workers go.

    Its workers are not processes of their own: they are `working`.
    """
    flags = {"serve.models": (str(model),), "serve.queue": queue, "serve.workers": "none", "serve.port": 0}
    environment = {"UNFUSE_DATA_DIR": str(folder), "UNFUSE_RUN_DIR": os.environ["UNFUSE_RUN_DIR"]}
    chosen = serve_options(load(flags, None, environment))
    service = Service(chosen, plan_service(chosen), Logs())
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(service.run(url.set_result))
    try:
        await asyncio.wait([running, url], return_when=asyncio.FIRST_COMPLETED)
        yield url.result() if url.done() else str(await running), service.addresses[0]
    finally:
        service.stop()
        service.stop()
        await running


@asynccontextmanager
async def working(*schedulers: str) -> AsyncIterator[None]:
    """A worker of all stages as `unfuse worker` makes it when it is told nothing else."""
    worker = Worker(a_worker(*schedulers))
    running = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        worker.drain()
        await running


async def made(url: str) -> dict[str, Any]:
    """The request object of a picture of the prompt, once it is over."""
    async with httpx2.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        while (await http.get("/ready")).status_code != 200:
            await asyncio.sleep(0.05)
        asked = {"prompt": PROMPT, "response_format": "url"}
        answer = (await http.post("/v1/images/generations", json=asked)).json()
        found: dict[str, Any] = (await http.get(f"/v1/requests/{answer['id']}")).json()
        return found


def untroubled(logs: list[MutableMapping[str, Any]]) -> bool:
    """Whether nothing was logged that tells of a defect."""
    return not [line for line in logs if "exc_info" in line or line["log_level"] in ("error", "critical")]


def encoded(request: dict[str, Any]) -> tuple[str, bool]:
    (stage,) = [stage for stage in request["stages"] if stage["name"] == "text_encode"]
    return request["status"], stage["cached"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "sqlite", "redis"])
async def test_repeated_prompt_is_read_from_the_encoder_cache(
    kind: str, model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Given as many gateways over the queue as it takes, with the cache at its default size, when each is asked for the
    same twice, then all but the first request find what was encoded, and nobody logs an exception."""
    url = {"memory": "memory", "sqlite": f"sqlite:{tmp_path}/queue.db"}.get(kind)
    queue = url or request.getfixturevalue("redis").url
    with capture_logs() as logs:
        async with AsyncExitStack() as stack:
            many = 1 if url else 2
            gateways = [await stack.enter_async_context(serving(model, tmp_path, queue)) for _ in range(many)]
            await stack.enter_async_context(working(*(address for _, address in gateways)))
            found = [encoded(await made(url)) for url, _ in gateways * 2]
    assert found == [("completed", False), *[("completed", True)] * (len(found) - 1)]
    assert untroubled(logs), logs
