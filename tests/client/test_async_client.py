"""The asynchronous client against a real gateway: what it gives is what the other one gives."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.server.served import BROKEN, IDLE, MOVING, Served, picture, serve
from unfuse.client import AsyncChat, AsyncClient, AsyncRequest, aconnect, connect
from unfuse.core.errors import (
    ConfigError,
    InvalidParameter,
    NotFound,
    Overloaded,
    PermanentError,
    TransientError,
    UnknownModel,
)
from unfuse.queues.base import QueueLimits

MODEL = "test/pictures"


async def test_concurrent_generate_calls_return_their_own_images(served: Served) -> None:
    async with aconnect(served.url) as client:
        results = await asyncio.gather(*(client.generate("a ring", model=MODEL, seed=seed, n=2) for seed in range(4)))
        assert [result.data for result in results] == [[picture(seed), picture(seed + 1)] for seed in range(4)]
        with connect(served.url) as other:
            assert other.request(results[0].id).result().data == results[0].data
        assert {row["id"] for row in await client.requests(limit=4)} >= {result.id for result in results}
        assert [model["id"] for model in await client.list("/v1/models")]
        assert repr(client) == f"<AsyncClient of {served.url}>"


async def test_events_are_streamed_and_a_request_is_cancelled(served: Served) -> None:
    async with aconnect(served.url) as client:
        with served.held():
            request = await client.submit("a ring", model=MODEL, seed=5)
            assert repr(request).startswith("<AsyncRequest req_")
            assert (await request.cancel())["status"] == "cancelled"
        names = [event.type async for event in request.events()]
        assert (names[0], names[-1]) == ("queued", "cancelled")
        assert [event.type async for event in request.events(after=1)] == names[1:]
        with pytest.raises(PermanentError, match="was cancelled"):
            await request.result()
        assert (await request.stop()).data == []


async def test_generate_uploads_an_input_image(studio: Served, tmp_path: Path) -> None:
    (tmp_path / "in.png").write_bytes(picture(9))
    async with aconnect(studio.url) as client:
        for image in (picture(9), tmp_path / "in.png"):
            made = await client.generate("a red circle", model=MOVING.name, seed=5, image=image)
            assert made.data == [picture(5)]


async def test_server_errors_are_raised_as_their_exception_types(served: Served) -> None:
    async with aconnect(served.url) as client:
        with pytest.raises(UnknownModel):
            await client.submit("a ring", model="nobody/knows")
        with pytest.raises(InvalidParameter, match="size"):
            await client.submit("a ring", model=MODEL, size="1x1")
        with pytest.raises(NotFound):
            await client.request("req_" + "0" * 32)
        with pytest.raises(PermanentError, match="has no result"):
            await client.generate(BROKEN, model=MODEL)
    with pytest.raises(InvalidParameter, match="did you mean http://localhost:8000"):
        aconnect("localhost:8000")


async def test_unreachable_server_raises_transient_error_with_a_hint() -> None:
    async with AsyncClient("http://127.0.0.1:9", reconnect_delay=0.0) as client:
        with pytest.raises(TransientError, match="is `unfuse serve` running there"):
            await client.list("/v1/models")
        request = AsyncRequest(client, {"id": "req_0", "status": "queued"})
        with pytest.raises(TransientError):
            await request.result()


async def test_overload_and_wrong_api_key_raise_different_errors(tmp_path: Path) -> None:
    with serve(tmp_path, keys=["anna key"], limits=QueueLimits(max_active=1)) as guarded:
        async with aconnect(guarded.url, "wrong") as stranger:
            with pytest.raises(ConfigError):
                await stranger.requests()
        async with aconnect(guarded.url, "key") as anna:
            await anna.submit("a", model=IDLE.name)
            with pytest.raises(Overloaded):
                await anna.submit("a", model=MODEL)


async def test_async_chat_yields_deltas_and_assembles_the_message() -> None:
    async def choices() -> Any:
        for text in ("a ", "ring"):
            yield {"delta": {"content": text}, "finish_reason": None}
        yield {"delta": {"tool_calls": [{"index": 0, "id": "call"}]}, "finish_reason": "stop"}

    chat = AsyncChat(choices())
    assert [part async for part in chat] == ["a ", "ring", ""]
    assert (chat.text, chat.finish_reason) == ("a ring", "stop")
    assert chat.message == {"role": "assistant", "content": "a ring", "tool_calls": [{"id": "call"}]}


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OF_SERVERS:
            raise ImportError(f"{name} is not installed")

OF_SERVERS = {
    "torch", "diffusers", "transformers", "accelerate", "safetensors", "tokenizers", "fastapi", "starlette", "uvicorn",
    "uvloop", "zmq", "apsw", "redis", "obstore", "prometheus_client", "standardwebhooks", "structlog", "typer", "av",
    "huggingface_hub", "llguidance", "jinja2", "numpy", "PIL", "xxhash",
}
sys.meta_path.insert(0, Blocked())
"""


@pytest.mark.slow
def test_both_clients_work_without_server_packages(served: Served) -> None:
    code = (
        BLOCKED
        + f"""
import asyncio, unfuse
with unfuse.connect("{served.url}") as client:
    one = client.generate("a ring", model="{MODEL}", seed=3)

async def other():
    async with unfuse.aconnect("{served.url}") as client:
        return await client.generate("a ring", model="{MODEL}", seed=3)

assert asyncio.run(other()).data == one.data
print(len(one.data[0]))
"""
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == (f"{len(picture(3))}\n", "")
