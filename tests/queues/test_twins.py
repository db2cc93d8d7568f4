"""Every backend beside the memory queue: random histories of all verbs, with the same answers."""

import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.queues.conftest import Server
from tests.queues.twins import Twins
from unfuse import queues
from unfuse.core.clock import Clock
from unfuse.core.task import SLOTS
from unfuse.queues.base import LeaseRequest, PoolOffer, QueueBackend
from unfuse.queues.memory import MemoryQueue
from unfuse.queues.sqlite import SqliteQueue

FEW = settings(
    max_examples=15, stateful_step_count=30, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
MANY = settings(FEW, max_examples=1200, stateful_step_count=60)
"""At least 1,000 of them have 50 steps or more; hypothesis makes a few that are shorter."""

Record = Callable[[str, object], None]


def compared(machine: type[Twins], how: settings, backend: str, record_property: Record) -> None:
    """Run the machine, and have it said how much it ran."""
    try:
        run_state_machine_as_test(machine, settings=how)
    finally:
        count, long, steps = len(machine.lengths), sum(n >= 50 for n in machine.lengths), sum(machine.lengths)
        told = f"{backend} beside memory: {count} histories, {long} of them of 50 steps or more, {steps} steps"
        record_property("counted", told)
    assert how is FEW or long >= 1000


def sqlite_twins(folder: str) -> type[Twins]:
    numbers = count()

    class SqliteTwins(Twins):
        lengths: list[int] = []

        def opened(self) -> QueueBackend:
            return SqliteQueue(Path(folder) / f"{next(numbers)}.db", self.clock)

    return SqliteTwins


def shared_twins(server: Server) -> type[Twins]:
    class SharedTwins(Twins):
        """Every verb goes through another of two queues over one server."""

        lengths: list[int] = []

        def opened(self) -> QueueBackend:
            server.client.flushall()
            self.over_one = [queues.open(server.url, self.clock) for _ in range(2)]
            return self.over_one[0]

        def both(self, ask):  # type: ignore[no-untyped-def]
            self.over_one.reverse()
            self.sides[1].queue = self.over_one[0]
            return super().both(ask)

        def close(self, *queues: QueueBackend) -> None:
            super().close(*queues, self.over_one[1])

    return SharedTwins


def test_sqlite_matches_the_memory_queue_in_random_histories(record_property: Record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        compared(sqlite_twins(folder), FEW, "sqlite", record_property)


def test_redis_and_valkey_match_the_memory_queue_in_random_histories(server: Server, record_property: Record) -> None:
    compared(shared_twins(server), FEW, server.name, record_property)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_sqlite_matches_the_memory_queue_in_long_random_histories(record_property: Record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        compared(sqlite_twins(folder), MANY, "sqlite", record_property)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_redis_and_valkey_match_the_memory_queue_in_long_histories(server: Server, record_property: Record) -> None:
    compared(shared_twins(server), MANY, server.name, record_property)


def test_random_histories_detect_a_queue_that_ignores_backpressure() -> None:
    """Given a queue that forgets to leave room for other pools, then a history tells it from one that does not."""

    class Careless(MemoryQueue):
        async def lease(self, worker, wanted, ttl, wait=0.0):  # type: ignore[no-untyped-def]
            careless = {pool: PoolOffer({SLOTS: wanted.slots}) for pool in wanted.pools}
            return await super().lease(worker, LeaseRequest(careless), ttl, wait)

    class CarelessTwins(Twins):
        lengths: list[int] = []

        def opened(self) -> QueueBackend:
            clock: Clock = self.clock
            return Careless(clock)

    with pytest.raises(AssertionError):
        run_state_machine_as_test(CarelessTwins, settings=settings(FEW, max_examples=200, phases=[Phase.generate]))
