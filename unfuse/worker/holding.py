"""The tasks that a worker holds, and what it may take beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from unfuse.core.messages import Ask
from unfuse.core.task import Claim, Lease

WAIT_S = 20.0  # seconds that an Ask waits at the scheduler for tasks
WITHDRAW = Ask(0, 0, 0.0)  # an Ask for nothing: it replaces an Ask that waits at the scheduler


class Holding:
    """The leases of a worker with so many `slots`, and such `resources`, for all tasks together.

    A task whose input is still written elsewhere takes its share of a resource, and no slot until that is whole. One
    that needs no resource takes a slot at once, or nothing would bound how many there are.
    """

    def __init__(self, slots: int, resources: Mapping[str, int]) -> None:
        self.slots, self.resources = slots, dict(resources)
        self.leases: dict[Claim, Lease] = {}
        self._arriving: set[Claim] = set()
        self._placed: set[Claim] = set()

    @property
    def arriving(self) -> int:
        """How many tasks wait for their inputs, which are still written, or on their way."""
        return len(self._arriving)

    def take(self, lease: Lease) -> None:
        """A task was leased to the worker."""
        self.leases[lease.claim] = lease
        if lease.task.planned.needs and not all(ref.whole for ref in lease.task.inputs):
            self._arriving.add(lease.claim)

    def arrived(self, claim: Claim) -> None:
        """All inputs of a task are here, or will not come."""
        self._arriving.discard(claim)

    def placed(self, claim: Claim) -> None:
        """A task has its room in the arena already, and writes there."""
        self._placed |= {claim} & self.leases.keys()

    def end(self, claim: Claim) -> Lease | None:
        """A task has ended; None if it was known to."""
        self._arriving.discard(claim)
        self._placed.discard(claim)
        return self.leases.pop(claim, None)

    def room(self, free: int | None, used: int) -> int | None:
        """Bytes that new outputs may take; None if the arena is empty, so that a task that is too large fails."""
        if free is None or (not used and not self.leases):
            return None
        unplaced = self.leases.keys() - self._placed
        return max(0, free - sum(self.leases[claim].task.planned.room for claim in unplaced))

    def ask(self, room: int | None, loaded: str, holds: str = "", after: str = "") -> Ask:
        """The next Ask, of what it `holds`: for free slots, or one more urgent task; or one `after` a task's end."""
        held = [lease.task for lease in self.leases.values()]
        if any(task.alone for task in held):
            return WITHDRAW
        affinity = next((task.affinity for task in held if task.affinity), loaded)
        slots = self.slots - len(held) + len(self._arriving)
        above = None if slots > 0 else max(task.priority for task in held)
        taken = Counter[str]()
        for task in held:
            taken.update(task.planned.needs)
        amounts = {name: max(0, amount - taken[name]) for name, amount in self.resources.items()}
        return Ask(1 if after else max(1, slots), room, WAIT_S, above, affinity, amounts, holds, after)
