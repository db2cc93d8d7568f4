"""Waiting that takes no time. A loop that did not jump would be ended by the tests' timeout: these wait for years."""

from __future__ import annotations

import asyncio
import threading

import pytest

from unfuse.testing import VirtualClock, VirtualTimeLoop, in_virtual_time
from unfuse.testing.virtual_time import START, WALL

YEAR = 365 * 86_400.0


@in_virtual_time
async def test_idle_virtual_loop_jumps_to_the_next_timer() -> None:
    loop, rung = asyncio.get_running_loop(), list[float]()
    for after in (3 * YEAR, YEAR, 2 * YEAR):
        loop.call_later(after, lambda: rung.append(loop.time()))
    await asyncio.sleep(10 * YEAR)
    assert rung == pytest.approx([START + years * YEAR for years in (1, 2, 3)])
    assert loop.time() == pytest.approx(START + 10 * YEAR)


@in_virtual_time
async def test_virtual_time_stands_still_while_tasks_are_ready() -> None:
    for _ in range(1000):
        await asyncio.sleep(0)
    assert asyncio.get_running_loop().time() == START


@in_virtual_time
async def test_virtual_timeout_cancels_only_longer_waits() -> None:
    async with asyncio.timeout(2 * YEAR):
        await asyncio.sleep(YEAR)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(YEAR):
            await asyncio.sleep(2 * YEAR)
    assert asyncio.get_running_loop().time() == pytest.approx(START + 2 * YEAR)


@in_virtual_time
async def test_virtual_time_does_not_jump_while_a_thread_runs() -> None:
    """Given a thread that goes on when others have run for a while, then no time has passed for who waits for it."""
    on, began = threading.Event(), threading.Event()

    def work() -> str:
        began.set()
        assert on.wait(600)
        return "done"

    async def let_go() -> None:
        while not began.is_set():
            await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(YEAR, on.set)  # never: the thread is let go by another one
        threading.Timer(0.05, on.set).start()

    async with asyncio.timeout(1.0):
        done, _ = await asyncio.gather(asyncio.to_thread(work), let_go())
    assert (done, asyncio.get_running_loop().time()) == ("done", START)


@in_virtual_time
async def test_virtual_time_jumps_after_a_thread_call_is_cancelled() -> None:
    on = threading.Event()
    working = asyncio.create_task(asyncio.to_thread(on.wait, 600))
    await asyncio.sleep(0)
    working.cancel()
    await asyncio.sleep(YEAR)
    assert working.cancelled()
    on.set()


@in_virtual_time
async def test_virtual_loop_serves_sockets_before_time_advances() -> None:
    """Given a server and a client on one loop, each with a timeout, when they talk, then none of it was late."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await asyncio.wait_for(reader.readline(), 0.001):
            writer.write(line)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server, asyncio.timeout(0.001):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        for number in range(100):
            writer.write(b"%d\n" % number)
            assert await reader.readline() == b"%d\n" % number
        writer.close()
        await writer.wait_closed()
    assert asyncio.get_running_loop().time() == START


@in_virtual_time
async def test_virtual_clock_follows_the_loop_and_calls_timers() -> None:
    clock, rung = VirtualClock(), list[float]()
    clock.call_at(clock.now() + 5, lambda: rung.append(clock.wall()))
    clock.call_at(clock.now() + 6, lambda: rung.append(0.0))()
    await asyncio.sleep(10)
    assert rung == pytest.approx([WALL + 5])
    assert clock.wall() == pytest.approx(WALL + 10)


def test_each_virtual_loop_has_its_own_time() -> None:
    for _ in range(2):
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(asyncio.sleep(YEAR))
            assert runner.get_loop().time() == pytest.approx(START + YEAR)
