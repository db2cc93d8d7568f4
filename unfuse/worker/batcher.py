"""Finds how many tasks should share a forward: as many as make each task cheaper, and fit in memory."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from statistics import median

GAIN = 0.95
"""A larger batch pays off if a task takes at most this share of its time in the smaller one."""

SAMPLES, FRESH_S = 5, 10.0
"""How many forwards of a size are remembered, the latest, and for how many seconds beside a later one."""

RETRY_S, RETRY_FORWARDS = 1.0, 20
"""When a size that is not used is tried again: after so many seconds, and as many times as long as it takes."""

MAX_KEYS = 256


@dataclass
class _Key:
    most: int
    taken: dict[int, deque[tuple[float, float]]] = field(default_factory=dict)
    """By batch size: when a forward ended, and the seconds that it took for each task."""

    def seconds(self, size: int) -> float:
        """What a task takes in a forward of this size: the median."""
        return median(seconds for _, seconds in self.taken[size])

    def is_stale(self, size: int, now: float) -> bool:
        """Whether this size should be tried again, since the device's load changes."""
        at, seconds = self.taken[size][-1]
        return now - at > max(RETRY_S, RETRY_FORWARDS * size * seconds)


class BatchSizes:
    """The best batch size of each key, at most `most`: of single, double, fourfold size and so on, by medians."""

    def __init__(self, most: int, now: Callable[[], float] = time.monotonic) -> None:
        self._most, self._now = most, now
        self._keys: dict[Hashable, _Key] = {}

    def size(self, key: Hashable, waiting: int) -> int:
        """How many of the tasks of this key that wait should share the next forward."""
        found, now = self._of(key), self._now()
        most = min(waiting, found.most)
        best, below = 1, 1
        for size in (*(1 << power for power in range(most.bit_length()) if 1 << power < most), most):
            if size not in found.taken:
                return size if below == best else best
            if size == 1 or found.seconds(size) <= GAIN * found.seconds(best):
                best = size
            elif below == best and found.is_stale(size, now):
                return size
            below = size
        smaller = max((size for size in found.taken if size < best), default=best)
        return smaller if found.is_stale(smaller, now) else best

    def measured(self, key: Hashable, size: int, seconds: float) -> None:
        """Learn that a batch of this size took so many seconds."""
        now, taken = self._now(), self._of(key).taken.setdefault(size, deque(maxlen=SAMPLES))
        while taken and now - taken[0][0] > FRESH_S:
            taken.popleft()
        taken.append((now, seconds / size))

    def too_large(self, key: Hashable, size: int) -> None:
        """Learn that a batch of this size did not fit in memory: from now on use at most half of it."""
        found = self._of(key)
        found.most = max(1, min(found.most, size // 2))

    def _of(self, key: Hashable) -> _Key:
        found = self._keys.pop(key, None) or _Key(self._most)
        self._keys[key] = found
        if len(self._keys) > MAX_KEYS:
            del self._keys[next(iter(self._keys))]
        return found


def out_of_memory(error: BaseException) -> bool:
    """Whether the error means that a device, or the host, had not enough memory."""
    torch = sys.modules.get("torch")  # without torch, there is no device whose memory could be full
    on_device = torch is not None and isinstance(error, torch.OutOfMemoryError)
    return on_device or isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
