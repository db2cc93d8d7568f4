"""The registry of workers, in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from unfuse.core.card import ModelCard
from unfuse.core.messages import WorkerInfo
from unfuse.queues.base import Declaration, Member


class Members:
    """Registered workers in order of arrival, and declarations by the name of their author."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self.declared: dict[str, Declaration] = {}

    def hello(self, worker: WorkerInfo, cards: Sequence[ModelCard], now: float) -> None:
        """Register a worker. One that brings no cards keeps those that it brought before."""
        known = self._members.get(worker.id)
        kept = tuple(cards) or (known.cards if known is not None else ())
        self._members[worker.id] = Member(worker, kept, now)

    def bye(self, worker: str) -> None:
        """Forget a worker."""
        self._members.pop(worker, None)

    def members(self, leased: Mapping[str, int]) -> list[Member]:
        """All workers, each with the number of tasks that it holds."""
        return [msgspec.structs.replace(m, leased=leased.get(name, 0)) for name, m in self._members.items()]
