"""The leases of a queue in memory, and how often a worker has handed a task back without a step of it."""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from unfuse.core.request import Running
from unfuse.core.task import Claim, Lease
from unfuse.queues.base import MOST_RETURNS, Renewal
from unfuse.queues.pool_queues import Key, Rank


@dataclass(eq=False, slots=True)
class Held:
    """A leased task, its rank in the queue, and its progress. It was leased when so many seconds were `worked`."""

    lease: Lease
    rank: Rank
    running: Running
    began: float


class Leases:
    """All leases, by the task's key. Times are seconds of the queue's clock; `since` is Unix seconds."""

    def __init__(self) -> None:
        self._held: dict[Key, Held] = {}
        self._swept = -math.inf
        self._worked = self._most_between = 0.0

    def give(self, rank: Rank, worker: str, now: float, ttl: float, since: float) -> Lease:
        """Lease a task under a new token."""
        return self.restore(rank, worker, secrets.token_bytes(16), now, ttl, since)

    def restore(self, rank: Rank, worker: str, token: bytes, now: float, ttl: float, since: float) -> Lease:
        """Lease a task under this token."""
        task = rank[3]
        lease = Lease(task, worker, token, now + ttl)
        running = Running(task.stage, task.attempt, worker, since)
        self._held[task.key] = Held(lease, rank, running, self._worked_at(now))
        return lease

    def running(self, held: Held, now: float) -> Running:
        """What is shown of a leased task."""
        return msgspec.structs.replace(held.running, ran_s=self._worked_at(now) - held.began)

    def of(self, key: Key) -> Held | None:
        """The lease of a task, if it is leased."""
        return self._held.get(key)

    def held(self, claim: Claim) -> Held | None:
        """The lease that this claim holds, if it still holds one."""
        held = self._held.get(claim.key)
        return held if held is not None and held.lease.claim == claim else None

    def end(self, key: Key) -> None:
        """End the lease of a task, if there is one."""
        self._held.pop(key, None)

    def renew(self, claims: Sequence[Claim], expires: float) -> Renewal:
        """Extend the leases that are still held."""
        held: list[Claim] = []
        ended: list[Claim] = []
        for claim in claims:
            mine = self.held(claim)
            (ended if mine is None else held).append(claim)
            if mine is not None:
                mine.lease = msgspec.structs.replace(mine.lease, expires=expires)
        return Renewal(tuple(held), tuple(ended))

    def lapse(self, worker: str, now: float) -> None:
        """Have all leases of a worker expire."""
        for held in self._held.values():
            if held.lease.worker == worker:
                held.lease = msgspec.structs.replace(held.lease, expires=min(held.lease.expires, now))

    def expired(self, now: float, ttl: float) -> list[Lease]:
        """Leases that ran out. If the last call was over ttl / 2 ago, none could be renewed: all are extended."""
        if now - self._swept > ttl / 2:
            for held in self._held.values():
                held.lease = msgspec.structs.replace(held.lease, expires=max(held.lease.expires, now + ttl))
        self._worked, self._swept, self._most_between = self._worked_at(now), now, ttl / 2
        return [held.lease for held in self._held.values() if held.lease.expires <= now]

    def _worked_at(self, now: float) -> float:
        """Seconds for which time limits count until now: between two calls of `expired`, ttl / 2 at most."""
        return self._worked + min(max(0.0, now - self._swept), self._most_between)

    def by_worker(self) -> Counter[str]:
        """How many leases each worker holds."""
        return Counter(held.lease.worker for held in self._held.values())


class Returned:
    """Counts by task and worker. A worker with MOST_RETURNS of a task is excluded from it."""

    def __init__(self) -> None:
        self._counts: dict[Key, Counter[str]] = {}
        self._excluded: dict[str, set[Key]] = {}

    def count(self, key: Key, worker: str, times: int = 1) -> None:
        """Count that a worker has returned a task."""
        counts = self._counts.setdefault(key, Counter())
        counts[worker] += times
        if counts[worker] >= MOST_RETURNS:
            self._excluded.setdefault(worker, set()).add(key)

    def counts(self, key: Key) -> Mapping[str, int]:
        """How often each worker has returned a task."""
        return self._counts.get(key, {})

    def count_excluded(self, key: Key) -> int:
        """How many workers are excluded from a task."""
        return sum(times >= MOST_RETURNS for times in self.counts(key).values())

    def excluded_for(self, worker: str) -> frozenset[Key]:
        """The tasks that a worker is excluded from."""
        return frozenset(self._excluded.get(worker, ()))

    def forget(self, key: Key) -> None:
        """Drop the counts of a task that is gone."""
        for worker in self._counts.pop(key, {}):
            if tasks := self._excluded.get(worker):
                tasks.discard(key)
                if not tasks:
                    del self._excluded[worker]
