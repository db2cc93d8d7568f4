"""Every second is on a bill, or lost, once, also where the queue is on disk or shared by two schedulers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import HealthCheck, given, settings
from typing_extensions import override

from tests.examples import examples
from tests.queues.conftest import Server
from tests.scheduler.fleet import Fleet, lengths, seeds
from unfuse import queues
from unfuse.queues.sqlite import SqliteQueue
from unfuse.testing.clock import ManualClock


class Restarted(Fleet):
    """Its queue is on disk. A restart forgets what attempts had used that still run; their workers say it again."""

    def __init__(self, file: Path, clock: ManualClock) -> None:
        self.file = file
        queue = SqliteQueue(file, clock)
        super().__init__([queue, queue], clock)

    @override
    async def restart(self) -> None:
        await self.close()
        await self.schedulers[0].queue.close()
        queue = SqliteQueue(self.file, self.clock)
        self.open([queue, queue])
        for claim in self.running:
            if await self.holds(self.leases[claim]):
                self.known[claim] = 0.0


@given(seeds, lengths)
@settings(max_examples=examples(6), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_compute_seconds_are_billed_once_across_sqlite_restarts(seed: int, length: int) -> None:
    async def run(folder: str) -> None:
        fleet = Restarted(Path(folder) / "queue.db", ManualClock())
        await fleet.live(seed, length)
        await fleet.close()
        await fleet.schedulers[0].queue.close()

    with TemporaryDirectory() as folder:
        asyncio.run(run(folder))


def test_compute_seconds_are_billed_once_with_two_redis_schedulers(server: Server) -> None:
    @given(seeds, lengths)
    @settings(max_examples=examples(6), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def holds(seed: int, length: int) -> None:
        async def run() -> None:
            server.client.flushall()
            clock = ManualClock()
            both = [queues.open(server.url, clock) for _ in range(2)]
            fleet = Fleet(both, clock)
            await fleet.live(seed, length)
            await fleet.close()
            for queue in both:
                await queue.close()

        asyncio.run(run())

    holds()
