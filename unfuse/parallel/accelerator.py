"""A GPU as the device of a compute process."""

from __future__ import annotations

import gc

import torch
from typing_extensions import override

from unfuse.core.compute_device import CONTEXT, ComputeDevice
from unfuse.parallel.devices import is_integrated, memory, reserved_bytes, set_current, synchronize


class Accelerator(ComputeDevice):
    """A GPU, as this process sees it.

    `device`: torch's name of the device.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._module = torch.get_device_module(torch.device(device))
        self.measures_peaks = hasattr(self._module, "reset_peak_memory_stats")  # mps has no such function

    @property
    @override
    def uses_host_memory(self) -> bool:
        return is_integrated(self._device)

    @override
    def reserved_bytes(self) -> int:
        return reserved_bytes(self._device)

    @override
    def cached_bytes(self) -> int:
        return self.reserved_bytes() - self.allocated_bytes()

    @override
    def allocated_bytes(self) -> int:
        allocated = getattr(self._module, "memory_allocated", None)
        return int(allocated(self._device) if allocated else self._module.current_allocated_memory())

    @override
    def peak_bytes(self) -> int:
        return int(self._module.max_memory_allocated(self._device))

    @override
    def reset_peak(self) -> None:
        self._module.reset_peak_memory_stats(self._device)

    @override
    def used_by_others(self) -> int:
        free, total = memory(self._device)
        return max(0, total - free - self.reserved_bytes() - CONTEXT)

    @override
    def empty_cache(self) -> None:
        gc.collect()  # tensors in reference cycles, such as those of an exception, still count as used
        self._module.empty_cache()

    @override
    def select(self) -> None:
        set_current(self._device)

    @override
    def synchronize(self) -> None:
        synchronize(self._device)

    @override
    def free_bytes(self) -> int:
        return memory(self._device)[0] + self.cached_bytes()
