"""The memory of one device: what this process has cached, and what other processes use."""

from __future__ import annotations

import gc

import torch

from unfuse.parallel.devices import memory, reserved_bytes

#: GPU memory that a process uses for its context and the kernels of libraries, which torch does not count.
CONTEXT = 512 << 20


class DeviceMemory:
    """The memory of a GPU, as this process sees it.

    `device`: torch's name of the device.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._module = torch.get_device_module(torch.device(device))

    def empty_cache(self) -> None:
        """Return to the device what torch has reserved and no tensor uses."""
        gc.collect()  # tensors in reference cycles, such as those of an exception, still count as used
        self._module.empty_cache()

    def cached(self) -> int:
        """Return the bytes that torch has reserved and no tensor uses."""
        allocated = getattr(self._module, "memory_allocated", None)
        used = allocated(self._device) if allocated else self._module.current_allocated_memory()
        return reserved_bytes(self._device) - int(used)

    def free(self) -> int:
        """Return the bytes that this process can still use: those of the device, and its own cache."""
        return memory(self._device)[0] + self.cached()

    def used_by_others(self) -> int:
        """Return the bytes that other processes use. They include other workers of this machine."""
        free, total = memory(self._device)
        return max(0, total - free - reserved_bytes(self._device) - CONTEXT)
