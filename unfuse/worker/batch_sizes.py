"""The best batch size of each key, measured and stored for the next start."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec

from unfuse.weights.fingerprints import MAX_ENTRIES
from unfuse.worker.results_file import ResultsFile

#: A larger batch is better if a task takes at most this share of its time in the smaller one.
GAIN = 0.95

#: Number of latest forwards of each size that are remembered.
SAMPLES = 5

#: A forward this many times longer or shorter than the median of its size may mean another load.
CHANGED = 1.5

#: When an unused size is tried again. The wait, in seconds of forwards, is at least RETRY_S and at least RETRY × loss ×
#: (remembered forwards)². So a size is tried again soon at first, and for a fortieth of the time once it is known.
#: The loss is what the size's tasks take longer than in the best size, and at least the share LEAST of their forward:
#: sizes that are about equal are not tried often.
RETRY_S = 1.0
RETRY = 1.6
LEAST = 0.5

#: Most keys whose batch sizes are remembered.
MAX_KEYS = 256


#: A batch size in the file, and the seconds of a task in it.
Size = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class MeasuredSizes(msgspec.Struct, frozen=True):
    """What was measured of one key, for the next start."""

    #: By batch size, the median seconds of a task.
    seconds: dict[Size, Seconds]


class BatchSizesFile:
    """The measured batch sizes of one worker's keys, in a file shared with other processes.

    - `file`: None keeps nothing.
    - `scope`: the device, versions and settings under which sizes were measured. Others have entries of their own.
    """

    def __init__(self, file: Path | None = None, scope: str = "") -> None:
        self._file, self._scope = ResultsFile(file, MeasuredSizes), scope
        self._entries = self._file.read()

    def read(self, key: Hashable) -> Mapping[int, float]:
        """Return the median seconds of a task in each measured size of a key."""
        entry = self._entries.get(self._name(key))
        return entry.seconds if entry else {}

    def write(self, key: Hashable, seconds: Mapping[int, float]) -> None:
        """Store the median seconds of a task in each measured size of a key."""
        name, entry = self._name(key), MeasuredSizes({**seconds})
        self._entries.pop(name, None)  # to the end, so that the first one is the oldest
        self._entries[name] = entry
        if len(self._entries) > MAX_ENTRIES:  # clients choose image sizes, and so the number of keys
            del self._entries[next(iter(self._entries))]
        self._file.write(name, entry)

    def _name(self, key: Hashable) -> str:
        return f"{self._scope} {key!r}".strip()


@dataclass
class _Key:
    """The measured batch sizes of one key."""

    #: The largest size that is tried.
    most: int

    #: By batch size, the latest forwards: (`spent` after it, its seconds for each task).
    samples: dict[int, deque[tuple[float, float]]] = field(default_factory=dict)

    #: Seconds of all forwards so far.
    spent: float = 0.0

    #: Sizes whose last forward took much longer than usual (1) or much shorter (-1).
    odd: dict[int, int] = field(default_factory=dict)

    #: The best size in the file.
    stored_best: int = 1

    @classmethod
    def restored(cls, most: int, seconds: Mapping[int, float]) -> _Key:
        """Return a key with one forward of each size that an earlier process measured."""
        sizes = sorted(size for size in seconds if size <= most)
        entry = cls(most, {size: deque([(0.0, seconds[size])], maxlen=SAMPLES) for size in sizes})
        entry.stored_best = entry.best(sizes) if sizes else 1
        return entry

    def medians(self) -> dict[int, float]:
        """Return the median seconds of a task by batch size."""
        return {size: self.seconds(size) for size in sorted(self.samples)}

    def seconds(self, size: int) -> float:
        """Return the median seconds that a task takes in a forward of this size."""
        return median(seconds for _, seconds in self.samples[size])

    def best(self, sizes: list[int]) -> int:
        """Return the best measured size of these ascending sizes, or the last one."""
        best, *larger = [size for size in sizes if size in self.samples] or sizes[-1:]
        for size in larger:
            if self.seconds(size) <= GAIN * self.seconds(best):
                best = size
        return best

    def is_due(self, size: int, best: int) -> bool:
        """Return whether to try this size next instead of the best one.

        A size that was not measured yet is always due.
        """
        if size not in self.samples:
            return True
        samples, seconds = self.samples[size], self.seconds(size)
        loss = size * max(seconds - self.seconds(best), LEAST * seconds)
        return self.spent - samples[-1][0] > max(RETRY_S, RETRY * len(samples) ** 2 * loss)

    def add(self, size: int, seconds: float) -> None:
        """Add a forward of this size with its seconds for each task.

        An unusual forward is ignored. A second one in the same direction means that the load has changed. Then all
        samples of all sizes are dropped, except this one.
        """
        usual = self.seconds(size) if size in self.samples else seconds
        direction = (seconds > CHANGED * usual) - (CHANGED * seconds < usual)
        self.spent += size * seconds

        if direction and direction == self.odd.get(size):
            self.samples.clear()
            self.odd.clear()
        elif direction:
            self.odd[size] = direction
            return

        self.odd.pop(size, None)
        self.samples.setdefault(size, deque(maxlen=SAMPLES)).append((self.spent, seconds))


class BatchSizes:
    """The best batch size of each key, by median seconds for a task.

    Sizes are 1, 2, 4, … and `max_batch`, the largest. They are compared under one load. When two forwards of a size in
    a row show that the load has changed, all medians are dropped, and the sizes next to the one in use are tried again.

    A key begins with the sizes that an earlier process measured, if `file` has them. They are written there whenever
    another size is found to be the best.
    """

    def __init__(self, max_batch: int, file: BatchSizesFile | None = None) -> None:
        self._max_batch, self._file = max_batch, file or BatchSizesFile()
        self._keys: dict[Hashable, _Key] = {}

    def size(self, key: Hashable, waiting: int) -> int:
        """Return how many of the `waiting` tasks of this key should share the next forward."""
        sizes_of_key = self._of(key)
        max_size = min(waiting, sizes_of_key.most)
        if not sizes_of_key.samples:
            return 1

        sizes = [*(1 << power for power in range(max_size.bit_length()) if 1 << power < max_size), max_size]
        if odd := sizes_of_key.odd.keys() & sizes:  # once more, to see whether it is another load
            return min(odd)

        # Only neighbors are tried, the larger first: after a change that does not matter, this costs two forwards.
        best = sizes_of_key.best(sizes)
        index = sizes.index(best)
        neighbors = (*sizes[index + 1 : index + 2], *sizes[max(0, index - 1) : index])
        return next(
            (size for size in neighbors if best in sizes_of_key.samples and sizes_of_key.is_due(size, best)), best
        )

    def all(self, key: Hashable, waiting: int, max_batch: int) -> int:
        """Return how many of the `waiting` tasks can share a forward, at most `max_batch`.

        It is for stages with `all_together`: nothing is measured, and only memory limits the size.
        """
        return min(waiting, self._of(key, max_batch).most)

    def measured(self, key: Hashable, size: int, seconds: float) -> None:
        """Record the seconds that a batch of this size took."""
        sizes_of_key = self._of(key)
        sizes_of_key.add(size, seconds / size)
        best = sizes_of_key.best(sorted(sizes_of_key.samples))
        # After a change of the load, one size was measured at first, which shows nothing about the others.
        if best != sizes_of_key.stored_best and len(sizes_of_key.samples) > 1:
            sizes_of_key.stored_best = best
            self._file.write(key, sizes_of_key.medians())

    def too_large(self, key: Hashable, size: int) -> None:
        """Limit this key to half of `size`, which needs too much memory or changes bytes."""
        sizes_of_key = self._of(key)
        sizes_of_key.most = max(1, min(sizes_of_key.most, size // 2))

    def forget(self, pool: str) -> None:
        """Drop what was measured of this pool's keys, and the limits of their sizes."""
        self._keys = {
            key: entry for key, entry in self._keys.items() if not (isinstance(key, tuple) and key[0] == pool)
        }

    def _of(self, key: Hashable, max_batch: int = 0) -> _Key:
        # The entry moves to the end, so that the least recently used one is dropped.
        entry = self._keys.pop(key, None) or _Key.restored(max_batch or self._max_batch, self._file.read(key))
        self._keys[key] = entry
        if len(self._keys) > MAX_KEYS:
            del self._keys[next(iter(self._keys))]
        return entry
