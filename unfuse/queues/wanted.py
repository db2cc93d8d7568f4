"""What a worker would take: one table, with an entry for each of its pools."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from unfuse.core.task import SLOTS

PREFERENCE_AMONG = 16
PREFERENCE_S = 0.02  # a preference chooses among so many tasks; a task can be passed over for so many seconds


class Offer(msgspec.Struct, frozen=True):
    """What tasks of one pool may take. `amounts` bounds resources by name; a resource that it lacks is unbounded.

    Among tasks of equal priority, those of the pool with the highest `later` go first. `behind` maps the pools that
    this pool feeds to numbers of tasks: while more tasks wait in one of them, tasks of this pool are held back.
    """

    amounts: dict[str, int]
    later: int = 0
    behind: dict[str, int] = {}

    def lacks(self, needs: Mapping[str, int], used: Mapping[str, int]) -> set[str]:
        """The names of the resources of which less than `needs` is left, after `used` is taken."""
        return {name for name, most in self.amounts.items() if used.get(name, 0) + needs.get(name, 0) > most}


class Wanted(msgspec.Struct, frozen=True):
    """What a worker would take, by pool. All pools draw on the same resources.

    With `above`, the worker takes only tasks of a higher priority than that: its slots are taken by less urgent ones.
    It prefers tasks with inputs on the node `near`, then tasks of this `affinity` (see `TaskQueue.lease`). Among
    workers that wait, the one with the lowest `rank` is served first.
    """

    pools: dict[str, Offer]
    above: int | None = None
    near: str = ""
    affinity: str = ""
    rank: float = 0.0

    @property
    def slots(self) -> int:
        """The most tasks that the worker can get."""
        return max((offer.amounts.get(SLOTS, 0) for offer in self.pools.values()), default=0)

    def watched_pools(self) -> frozenset[str]:
        """The pools whose changes may let the worker take a task."""
        return frozenset(self.pools).union(*(offer.behind for offer in self.pools.values()))
