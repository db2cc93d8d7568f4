"""A registry in memory of who works for a queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from unfuse.core.card import ModelCard
from unfuse.core.messages import WorkerInfo
from unfuse.queues.base import Declaration, Member


class Registry:
    """Workers in order of arrival, and what was declared by whom."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self.declared: dict[str, Declaration] = {}

    def hello(self, worker: WorkerInfo, cards: Sequence[ModelCard], now: float) -> None:
        """Register a worker; cards it brought before are kept when it brings none."""
        known = self._members.get(worker.id)
        kept = tuple(cards) or (known.cards if known is not None else ())
        self._members[worker.id] = Member(worker, kept, now)

    def bye(self, worker: str) -> None:
        """Forget a worker."""
        self._members.pop(worker, None)

    def members(self, leased: Mapping[str, int]) -> list[Member]:
        """All of them, with how many tasks each holds."""
        return [msgspec.structs.replace(m, leased=leased.get(name, 0)) for name, m in self._members.items()]
