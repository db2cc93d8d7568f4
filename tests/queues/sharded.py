"""Queues over several, for the suite, whose requests have names that say nothing, and of which some do not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import count
from typing import Any

import msgspec

from tests.queues.twins import POOLS, Side, Twins
from unfuse.core.clock import Clock, SystemClock
from unfuse.core.errors import ConfigError, TransientError
from unfuse.core.request import Caller, TenantLimits
from unfuse.core.task import Task
from unfuse.queues.base import LeaseRequest, QueueBackend, QueueLimits, QueueStats
from unfuse.queues.memory import MemoryQueue
from unfuse.queues.shards import ShardedQueue
from unfuse.testing import ManualClock


def in_pool(task: Task, pool: str) -> Task:
    return msgspec.structs.replace(task, planned=msgspec.structs.replace(task.planned, pool=pool))


class TickingClock(ManualClock):
    """Each reading of the wall clock is a microsecond later, as if time passed between two that arrive."""

    def __init__(self) -> None:
        super().__init__()
        self._ticks = count(1)

    def wall(self) -> float:
        return super().wall() + next(self._ticks) / 1e6


class Spread(ShardedQueue):
    """Requests whose names follow one another in the alphabet live in different shards."""

    def shard_of(self, name: str) -> int:
        return ord(name[-1:] or "\0") % self._count


class Together(ShardedQueue):
    """All requests live in the last shard."""

    def shard_of(self, name: str) -> int:
        return self._count - 1


class Cut(MemoryQueue):
    """A queue that answers nothing while it is `gone`, hangs while it is `frozen`, or is another than was asked for."""

    gone = frozen = False
    other = ""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or not asyncio.iscoroutinefunction(found) or name == "close":
            return found

        async def asked(*args: Any, **kwargs: Any) -> Any:
            if self.frozen:
                await asyncio.Event().wait()
            if self.gone:
                raise TransientError("it does not answer")
            if self.other:
                raise ConfigError(self.other)
            return await found(*args, **kwargs)

        return asked


class ShardedTwins(Twins):
    """Each request has pools of its own, so that what holds of one shard is all that is asked: its order is the same
    wherever others live. Names are placed as those of the service are."""

    shards = 3

    def opened(self) -> QueueBackend:
        return ShardedQueue([MemoryQueue(self.clock) for _ in range(self.shards)])

    def named(self, name: str, tenant: str, key: str, limits: QueueLimits) -> tuple[str, QueueLimits]:
        self.clock.advance(1 / 64)
        may = limits.tenant if limits.tenant != TenantLimits() else TenantLimits(50)
        limits = QueueLimits(10**6, 10**6, tenant=may if tenant == "u" else TenantLimits())
        if name in self.sides[0].queue._requests:  # type: ignore[attr-defined]
            return name, limits
        names = (f"{name}.{number}" for number in count())
        return self.sides[1].queue.choose_id(names, Caller(tenant, key, limits=limits.tenant)), limits

    def pushed(self, side: Side, name: str, pushed: dict[str, Any]) -> list[Task]:
        tasks = super().pushed(side, name, pushed)
        return [in_pool(task, f"{name}/{task.planned.pool}") for task in tasks]

    def asked(self, wanted: LeaseRequest, with_outcome_of: str = "") -> LeaseRequest:
        """With an outcome, what lives in its shard: where that has nothing one other shard is asked, and not all."""
        name, home = self.chosen(int(1000 * abs(wanted.rank))), self.sides[1].queue.shard_of  # type: ignore[attr-defined]
        if with_outcome_of and home(name) != home(with_outcome_of):
            name = with_outcome_of
        offers = {
            f"{name}/{pool}": msgspec.structs.replace(
                offer, backpressure={f"{name}/{fed}": most for fed, most in offer.backpressure.items()}
            )
            for pool, offer in wanted.pools.items()
        }
        return msgspec.structs.replace(wanted, pools=offers)

    def pools(self) -> list[str]:
        return [*POOLS, *(f"{name}/{pool}" for name in self.names[-1:] for pool in POOLS)]

    async def stats(self, side: Side) -> QueueStats:
        """Sums that are made in another order are equal but for the last digit."""
        found = await super().stats(side)
        pools = {n: msgspec.structs.replace(one, left_s=round(one.left_s, 6)) for n, one in found.pools.items()}
        return msgspec.structs.replace(found, pools=pools)


def memories(number: int, clock: ManualClock, kind: type[MemoryQueue] = MemoryQueue) -> list[Any]:
    return [kind(clock) for _ in range(number)]


def ids(first: str = "r") -> Iterable[str]:
    return (f"{first}{number}" for number in count())


class CutShards(ShardedQueue):
    """Three shards in memory, by an address."""

    @classmethod
    def open(cls, url: str, clock: Clock | None = None) -> CutShards:
        return cls([Cut(clock or SystemClock()) for _ in range(3)])
