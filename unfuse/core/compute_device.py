"""The device of a compute process, as its step loop uses it."""

from __future__ import annotations

#: GPU memory that a process takes before its first weight: the context, cuBLAS and cuDNN, which torch does not count.
#: Measured on an H100.
CONTEXT = 727 << 20


class ComputeDevice:
    """A CPU: it queues no work, and its allocator caches nothing that other processes need.

    `unfuse.parallel.accelerator.Accelerator` is the same for a GPU.
    """

    def reserved_bytes(self) -> int:
        """Return the bytes of GPU memory that this process uses."""
        return 0

    def cached_bytes(self) -> int:
        """Return those of them that no tensor uses."""
        return 0

    def used_by_others(self) -> int:
        """Return the bytes of GPU memory that other processes use."""
        return 0

    def empty_cache(self) -> None:
        """Return to the device what no tensor uses."""

    def select(self) -> None:
        """Make the device the current one of the calling thread."""

    def synchronize(self) -> None:
        """Wait until the device has computed all that this process has queued."""
