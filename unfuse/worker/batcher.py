"""Finds how many tasks should share a forward: as many as make each task cheaper, and fit in memory."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from dataclasses import dataclass, field

GAIN = 0.95
"""A batch of twice the size pays off if a task takes at most this share of its time in the smaller one."""

SMOOTHING = 0.5
RETRY = 256
"""The number of batches after which a size that did not pay off is tried again, since the device's load changes."""

MAX_KEYS = 256


@dataclass
class _Key:
    sizes: list[int]
    place: int = 0
    seconds: dict[int, float] = field(default_factory=dict)
    """Smoothed seconds per task, by batch size."""
    batches: int = 0


class BatchSizes:
    """The batch size of each key, at most `most`. It starts at 1 and doubles as long as that pays off."""

    def __init__(self, most: int) -> None:
        self._sizes = [*(2**power for power in range(most.bit_length()) if 2**power < most), most]
        self._keys: dict[Hashable, _Key] = {}

    def size(self, key: Hashable) -> int:
        """The most tasks of this key that should share the next forward."""
        found = self._of(key)
        return found.sizes[found.place]

    def measured(self, key: Hashable, size: int, seconds: float) -> None:
        """Learn that a batch of this size took so many seconds."""
        found = self._of(key)
        found.batches += 1
        per_task, known = seconds / size, found.seconds.get(size)
        found.seconds[size] = per_task if known is None else known + SMOOTHING * (per_task - known)
        if size != found.sizes[found.place]:
            return
        smaller = found.seconds.get(found.sizes[found.place - 1]) if found.place else None
        if smaller is not None and found.seconds[size] > GAIN * smaller:
            found.place -= 1
        elif found.place + 1 < len(found.sizes):
            above = found.seconds.get(found.sizes[found.place + 1])
            if above is None or above <= GAIN * found.seconds[size] or found.batches % RETRY == 0:
                found.place += 1

    def too_large(self, key: Hashable, size: int) -> None:
        """Learn that a batch of this size did not fit in memory: from now on use at most half of it."""
        found = self._of(key)
        found.sizes = [smaller for smaller in found.sizes if smaller <= size // 2] or [1]
        found.place = min(found.place, len(found.sizes) - 1)

    def _of(self, key: Hashable) -> _Key:
        found = self._keys.pop(key, None) or _Key(self._sizes)
        self._keys[key] = found
        if len(self._keys) > MAX_KEYS:
            del self._keys[next(iter(self._keys))]
        return found


def out_of_memory(error: BaseException) -> bool:
    """Whether the error means that a device, or the host, had not enough memory."""
    torch = sys.modules.get("torch")  # without torch, there is no device whose memory could be full
    on_device = torch is not None and isinstance(error, torch.OutOfMemoryError)
    return on_device or isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
