"""The actor on a node of Ray: it holds the process of one worker."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TextIO, cast

from unfuse.launch.base import WorkerSpec
from unfuse.launch.local import LocalLauncher
from unfuse.launch.output import WAITING
from unfuse.worker.records import write_records


class RayWorker:
    """A worker as this machine's launcher keeps it. Ray carries how it is started and its lines, never a tensor."""

    def __init__(self) -> None:
        self._lines, self._news = deque[bytes](maxlen=WAITING), asyncio.Event()
        self._launcher: LocalLauncher | None = None
        self._over: str | None = None
        self._ending, self._loop = asyncio.Lock(), asyncio.get_running_loop()

    async def node(self) -> str:
        """The id of its node."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    async def begin(self, spec: WorkerSpec) -> None:
        """Start the worker. What this process logs is told as its lines are."""
        write_records(cast(TextIO, self))
        self._launcher = LocalLauncher([spec], self._hear)
        self._launcher.failed.add_done_callback(lambda _: self._news.set())
        self._launcher.start()

    async def heard(self) -> tuple[list[bytes], str | None]:
        """Lines since the last call, once there are some; with the last ones why it is over, "" after `stop`."""
        await self._news.wait()
        self._news.clear()
        failed = self._launcher.failed if self._launcher else None
        if failed and failed.done() and not failed.cancelled():
            await self.stop(0, str(failed.exception()))
        return [self._lines.popleft() for _ in range(len(self._lines))], self._over

    def write(self, text: str) -> None:
        """Hear a line of this process's log, as a stream does."""
        self._hear(0, text.rstrip().encode())

    def flush(self) -> None:
        """Nothing is held back."""

    async def stop(self, drain_timeout: float, why: str = "") -> None:
        """End the worker as a launcher does."""
        async with self._ending:
            if self._launcher and self._over is None:
                await self._launcher.stop(drain_timeout)
                self._over = why
        self._news.set()

    def _hear(self, _: int, line: bytes) -> None:
        self._lines.append(line)
        self._loop.call_soon_threadsafe(self._news.set)
