"""The part of a queue in memory that knows the workers."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence

import msgspec

from unfuse.core.card import ModelCard
from unfuse.core.clock import Clock
from unfuse.core.messages import WorkerInfo
from unfuse.queues.base import Member
from unfuse.queues.cached import CacheInMemory


class RegistryInMemory(CacheInMemory):
    """Workers in order of arrival."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._members: dict[str, Member] = {}

    async def hello(self, worker: WorkerInfo, cards: Sequence[ModelCard] = ()) -> None:
        """Register a worker; cards it brought before are kept when it brings none."""
        known = self._members.get(worker.id)
        kept = tuple(cards) or (known.cards if known is not None else ())
        self._members[worker.id] = Member(worker, kept, self._clock.now())

    async def bye(self, worker: str) -> None:
        """Forget a worker."""
        self._members.pop(worker, None)

    async def workers(self) -> Sequence[Member]:
        """The registry, in order of arrival."""
        leased = self._leased_by_worker()
        return [msgspec.structs.replace(m, leased=leased[name]) for name, m in self._members.items()]

    @abstractmethod
    def _leased_by_worker(self) -> Counter[str]: ...
