"""What a worker would take: a table with a line for each of its pools."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from unfuse.core.task import SLOTS

PREFERENCE_AMONG = 16
PREFERENCE_S = 0.02
"""Among how many tasks a preference chooses, and how long one that may be leased can be passed over for it."""


class Offer(msgspec.Struct, frozen=True):
    """What tasks of one pool may take: of each resource that they draw on so much, of any other whatever they need.

    Of one priority, tasks of pools that are `later` (have a higher number) go first. `behind` names pools that this one
    feeds and how many tasks may wait there: while more do, its own tasks wait too.
    """

    amounts: dict[str, int]
    later: int = 0
    behind: dict[str, int] = {}

    def lacks(self, needs: Mapping[str, int], used: Mapping[str, int]) -> set[str]:
        """The resources of which a task needs more than is left of them when so much is used."""
        return {name for name, most in self.amounts.items() if used.get(name, 0) + needs.get(name, 0) > most}


class Wanted(msgspec.Struct, frozen=True):
    """What a worker would take, by pool. What it takes of one, it has less for all of them.

    With `above`, only tasks of a higher priority than that: for a worker whose slots are taken by less urgent ones.
    A task `near` this node, then one of this `affinity`, goes before others (see `TaskQueue.lease`). Of those who wait,
    lower `rank`s are served first.
    """

    pools: dict[str, Offer]
    above: int | None = None
    near: str = ""
    affinity: str = ""
    rank: float = 0.0

    @property
    def slots(self) -> int:
        """The most tasks that it can get."""
        return max((offer.amounts.get(SLOTS, 0) for offer in self.pools.values()), default=0)

    def concerned(self) -> frozenset[str]:
        """The pools whose changes may let such a worker take something."""
        return frozenset(self.pools).union(*(offer.behind for offer in self.pools.values()))
