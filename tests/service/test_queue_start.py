"""Waiting for a queue at the start: how long, what is said, and what ends it."""

from __future__ import annotations

import asyncio
import math

import pytest
from structlog.testing import capture_logs

from unfuse.core.errors import ConfigError, TransientError
from unfuse.service.service import RETRY_S, QueueStart, ServiceStopped
from unfuse.testing.virtual_time import in_virtual_time


class Work:
    """Fails with each of these reasons, then succeeds."""

    def __init__(self, *reasons: str) -> None:
        self.reasons = list(reasons)

    async def __call__(self) -> str:
        if self.reasons:
            raise TransientError(self.reasons.pop(0))
        return "done"


@in_virtual_time
async def test_start_waits_for_the_queue_and_logs_it_once() -> None:
    """Given a queue that is away, then loads, then answers, then one line says that the start waits and one that it
    goes on; whoever asks meanwhile gets the last reason."""
    reasons: list[str] = []
    start = QueueStart(math.inf, asyncio.Event(), reasons.append)
    with capture_logs() as logs:
        assert await start.until_done(Work("it is away", "it loads")) == "done"
        assert await start.until_done(Work()) == "done"
    assert reasons == ["it is away", "it loads"]
    assert [(line["log_level"], line.get("reason")) for line in logs] == [("warning", "it is away"), ("info", None)]


@in_virtual_time
@pytest.mark.parametrize(("longest_s", "tries"), [(0.0, 1), (4 * RETRY_S, 5)])
async def test_start_fails_if_the_queue_is_unreachable_for_too_long(longest_s: float, tries: int) -> None:
    reasons = [str(number) for number in range(9)]
    work, start = Work(*reasons), QueueStart(longest_s, asyncio.Event(), lambda reason: None)
    with pytest.raises(TransientError):
        await start.until_done(work)
    assert 9 - len(work.reasons) in (tries, tries + 1 if longest_s else tries)


@in_virtual_time
async def test_waiting_for_the_queue_ends_when_the_service_is_stopped() -> None:
    """While it pauses, and while a queue that is silent is asked."""
    for work in (Work(*"a" * 99), asyncio.Event().wait):
        stop = asyncio.Event()
        waiting = asyncio.create_task(QueueStart(math.inf, stop, lambda reason: None).until_done(work))
        await asyncio.sleep(10 * RETRY_S)
        began = asyncio.get_running_loop().time()
        stop.set()
        with pytest.raises(ServiceStopped):
            await waiting
        assert asyncio.get_running_loop().time() == began


async def test_unknown_queue_url_raises_config_error() -> None:
    start = QueueStart(math.inf, asyncio.Event(), lambda reason: None)
    with pytest.raises(ConfigError):
        await start.open("nosuch:queue")


async def test_start_waits_while_redis_is_loading() -> None:
    """Given a server that answers that it loads, then the start waits, with that as the reason."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            writer.write(b"-LOADING Redis is loading the dataset in memory\r\n" * 3)
            await writer.drain()
        writer.close()

    stop = asyncio.Event()
    reasons: list[str] = []

    def waits(reason: str) -> None:
        reasons.append(reason)
        stop.set()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ServiceStopped):
            await QueueStart(math.inf, stop, waits).open(f"redis://127.0.0.1:{port}/0")
    assert "loading the dataset" in reasons[0]
