"""Which batch sizes have enough memory, by the measured peaks of smaller batches."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from unfuse.core.compute_device import ComputeDevice

log = structlog.get_logger(__name__)

#: How many forwards of a size are measured. The first one may also allocate what is allocated once.
MEASURED_FORWARDS = 2

#: Most keys whose peaks are remembered.
MAX_KEYS = 256


@dataclass(frozen=True)
class ForwardPeak:
    """The memory of a measured forward."""

    #: Bytes that were in use during the forward only.
    activations: int

    #: Bytes that were allocated in the forward and stayed, such as the weights of an offloaded component.
    retained: int

    #: The number of measured forwards of this size.
    forwards: int


@dataclass
class _Key:
    """The measured batch sizes of one key."""

    #: The peaks of the last measured forwards, by batch size.
    peaks: dict[int, ForwardPeak] = field(default_factory=dict)

    def predict(self, size: int) -> int:
        """Return the bytes that a forward of this size is predicted to allocate.

        Activations are linear in the size. With one measured size, all of them grow with the size. With several, the
        smallest and the largest show which part is constant.
        """
        smallest, largest = min(self.peaks), max(self.peaks)
        peak = self.peaks[largest]
        bytes_per_task = peak.activations / largest
        if smallest < largest:
            growth = peak.activations - self.peaks[smallest].activations
            bytes_per_task = max(0.0, growth / (largest - smallest))
        return int(peak.retained + peak.activations + bytes_per_task * (size - largest))


class BatchMemory:
    """The largest batch of each key that fits, predicted from measured peaks.

    On a device that measures no peaks, such as a CPU, every size counts as one that fits.
    """

    def __init__(self, device: ComputeDevice | None = None) -> None:
        self._device = device or ComputeDevice()
        self._keys: dict[Hashable, _Key] = {}

    def largest(self, key: Hashable, count: int) -> int:
        """Return how many of `count` tasks fit in one forward.

        It is all of them, a power of two, or a measured size; 1 while nothing was measured. Sizes up to the largest
        measured one are not checked.
        """
        if not self._device.measures_peaks:
            return count
        entry = self._keys.pop(key, None)
        if entry is None:
            return min(count, 1)
        self._keys[key] = entry  # at the end, so that the least recently used one is dropped
        largest = max(entry.peaks)
        if count <= largest:
            return count
        try:
            free = self._device.free_bytes()
        except RuntimeError as error:  # the next forward reports what is wrong with the device
            log.warning("the memory of the device cannot be read", reason=str(error))
            return largest
        size = count
        while size > largest and entry.predict(size) > free:
            size = 1 << ((size - 1).bit_length() - 1)
        return max(size, largest)

    @contextmanager
    def measure(self, key: Hashable, size: int) -> Iterator[None]:
        """Measure the peak of one of the first forwards of a size.

        Allocations are counted when work is queued, so this does not wait for the device. A forward that fails is not
        counted.
        """
        entry = self._keys.get(key) or _Key()
        before = entry.peaks.get(size)
        if not self._device.measures_peaks or (before and before.forwards >= MEASURED_FORWARDS):
            yield
            return
        self._device.reset_peak()
        allocated_before = self._device.allocated_bytes()
        yield
        allocated_after, peak = self._device.allocated_bytes(), self._device.peak_bytes()
        activations = max(0, peak - max(allocated_before, allocated_after))
        retained = max(0, allocated_after - allocated_before)
        entry.peaks[size] = ForwardPeak(activations, retained, 1 + (before.forwards if before else 0))
        self._keys.pop(key, None)
        self._keys[key] = entry
        if len(self._keys) > MAX_KEYS:
            del self._keys[next(iter(self._keys))]

    def forget(self, pool: str) -> None:
        """Drop what was measured of this pool's keys."""
        self._keys = {
            key: entry for key, entry in self._keys.items() if not (isinstance(key, tuple) and key[0] == pool)
        }
