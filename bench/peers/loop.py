"""Clients that each wait for their task before they submit the next; the same code for every side, and no libraries.

Workers say through a named pipe which task is complete, once its result is stored: nobody polls for results.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import uuid
from collections.abc import Awaitable, Callable

PARAMS = {"prompt": "a red circle on white", "seed": 1}
"""What a task is given."""

ID = 32
"""Letters of a task's id."""


async def closed_loop(one: Callable[[], Awaitable[None]], seconds: float, callers: int) -> dict[str, object]:
    """How long it took in all, and each task from submit to complete, when so many callers go on for some seconds."""
    began, each = time.perf_counter(), []

    async def caller() -> None:
        while (submitted := time.perf_counter()) < began + seconds:
            await one()
            each.append(round(time.perf_counter() - submitted, 6))

    await asyncio.gather(*(caller() for _ in range(callers)))
    return {"wall": time.perf_counter() - began, "each": each}


async def obey(one: Callable[[], Awaitable[None]]) -> None:
    """Answer every line "SECONDS CALLERS" of standard input with what was measured."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        seconds, callers = line.split()
        print(json.dumps(await closed_loop(one, float(seconds), int(callers))), flush=True)


class Ear:
    """Hears which tasks are complete."""

    def __init__(self, pipe: str) -> None:
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._rest = b""
        self._end = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        asyncio.get_running_loop().add_reader(self._end, self._hear)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._end)
        os.close(self._end)

    async def one(self, submit: Callable[[str], Awaitable[object]]) -> None:
        """Submit a task under a new id, and wait until it is complete."""
        name = uuid.uuid4().hex
        complete = self._waiting[name] = asyncio.get_running_loop().create_future()
        await submit(name)
        await complete

    def _hear(self) -> None:
        said = self._rest + os.read(self._end, 1 << 16)
        for start in range(0, len(said) - ID + 1, ID):
            self._waiting.pop(said[start : start + ID].decode()).set_result(None)
        self._rest = said[len(said) - len(said) % ID :]


class Mouth:
    """A worker's end of the pipe; what is written at once arrives at once."""

    def __init__(self, pipe: str) -> None:
        self._pipe, self._end = pipe, -1

    def close(self) -> None:
        os.close(self._end)

    def say(self, name: str) -> None:
        if self._end < 0:
            self._end = os.open(self._pipe, os.O_WRONLY)
        os.write(self._end, name.encode())
