"""Finds how many tasks should share a forward: as many as make each task cheaper, and fit in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from statistics import median

from unfuse.core.retries import MEMORY, rule_of

GAIN = 0.95  # a larger batch pays off if a task takes at most this share of its time in the smaller one
SAMPLES = 5  # how many forwards of a size are remembered, the latest
CHANGED = 1.5  # a forward so many times longer, or shorter, than is usual for its size may mean another load

RETRY_S, RETRY, LEAST = 1.0, 1.6, 0.5
"""A size that is not used is tried again after so many seconds of forwards, and not before so many times what it loses,
times the square of how many forwards of it are remembered: soon at first, and once it is known for a fortieth of the
time. It loses what its tasks take longer than in the best size, and counts for at least this share of a forward: what
is level needs no haste.
"""

MAX_KEYS = 256


@dataclass
class _Key:
    most: int
    taken: dict[int, deque[tuple[float, float]]] = field(default_factory=dict)
    """By batch size: `spent` after a forward, and the seconds that it took for each task."""
    spent: float = 0.0  # seconds of all forwards
    odd: dict[int, int] = field(default_factory=dict)
    """The sizes whose last forward took much longer than usual (1), or much shorter (-1)."""

    def seconds(self, size: int) -> float:
        """What a task takes in a forward of this size: the median."""
        return median(seconds for _, seconds in self.taken[size])

    def best(self, sizes: list[int]) -> int:
        """The best of these sizes, of those that were tried."""
        best, *larger = [size for size in sizes if size in self.taken] or sizes[-1:]
        for size in larger:
            if self.seconds(size) <= GAIN * self.seconds(best):
                best = size
        return best

    def is_due(self, size: int, best: int) -> bool:
        """Whether this size should be tried beside the best one."""
        if size not in self.taken:
            return True
        taken, seconds = self.taken[size], self.seconds(size)
        lost = size * max(seconds - self.seconds(best), LEAST * seconds)
        return self.spent - taken[-1][0] > max(RETRY_S, RETRY * len(taken) ** 2 * lost)

    def add(self, size: int, seconds: float) -> None:
        """Take in a forward. One of another load does not count; of two of a size in turn, the second alone is kept."""
        usual = self.seconds(size) if size in self.taken else seconds
        way = (seconds > CHANGED * usual) - (CHANGED * seconds < usual)
        self.spent += size * seconds
        if way and way == self.odd.get(size):
            self.taken.clear()
            self.odd.clear()
        elif way:
            self.odd[size] = way
            return
        self.odd.pop(size, None)
        self.taken.setdefault(size, deque(maxlen=SAMPLES)).append((self.spent, seconds))


class BatchSizes:
    """The best batch size of each key, at most `most`: of single, double, fourfold size and so on, by medians.

    Sizes are compared by what they took under one load. Once two forwards of a size in turn say that it is another one,
    the sizes next to the one in use are tried again, and from the better one those next to that.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: dict[Hashable, _Key] = {}

    def size(self, key: Hashable, waiting: int) -> int:
        """How many of the tasks of this key that wait should share the next forward."""
        found = self._of(key)
        most = min(waiting, found.most)
        if not found.taken:
            return 1
        sizes = [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]
        if odd := found.odd.keys() & sizes:  # once more, to see whether it is another load
            return min(odd)
        best = found.best(sizes)
        place = sizes.index(best)
        beside = (*sizes[place + 1 : place + 2], *sizes[max(0, place - 1) : place])
        return next((size for size in beside if best in found.taken and found.is_due(size, best)), best)

    def all(self, key: Hashable, waiting: int, most: int) -> int:
        """How many of these tasks can share a forward, up to `most`: where it pays to have all in each."""
        return min(waiting, self._of(key, most).most)

    def measured(self, key: Hashable, size: int, seconds: float) -> None:
        """Learn that a batch of this size took so many seconds."""
        self._of(key).add(size, seconds / size)

    def too_large(self, key: Hashable, size: int) -> None:
        """No batch of this size, for want of memory or because mates change bytes: halve it from now on."""
        found = self._of(key)
        found.most = max(1, min(found.most, size // 2))

    def _of(self, key: Hashable, most: int = 0) -> _Key:
        found = self._keys.pop(key, None) or _Key(most or self._most)
        self._keys[key] = found
        if len(self._keys) > MAX_KEYS:
            del self._keys[next(iter(self._keys))]
        return found


def out_of_memory(error: BaseException) -> bool:
    """Whether the error means that a device, or the host, had not enough memory."""
    return rule_of(error) is MEMORY
