"""The device of a compute process, as its step loop uses it."""

from __future__ import annotations

#: GPU memory that a process takes before its first weight: the context, cuBLAS and cuDNN, which torch does not count.
#: Measured on an H100.
CONTEXT = 727 << 20

#: The first compute capability of NVIDIA GPUs with instructions for bfloat16 (Ampere).
BFLOAT16_CAPABILITY = (8, 0)


class ComputeDevice:
    """A CPU: it queues no work, and its allocator caches nothing that other processes need.

    `unfuse.parallel.accelerator.Accelerator` is the same for a GPU.
    """

    #: Whether the device counts the most bytes of tensors, so that the memory of a forward can be measured.
    measures_peaks = False

    @property
    def uses_host_memory(self) -> bool:
        """Whether its memory is the host's, so that offload to the host saves none."""
        return True

    def reserved_bytes(self) -> int:
        """Return the bytes of GPU memory that this process uses."""
        return 0

    def cached_bytes(self) -> int:
        """Return those of them that no tensor uses."""
        return 0

    def used_by_others(self) -> int:
        """Return the bytes of GPU memory that other processes use."""
        return 0

    def free_bytes(self) -> int:
        """Return the bytes that this process can still use, its own cache included."""
        return 0

    def allocated_bytes(self) -> int:
        """Return the bytes of GPU memory that tensors of this process use."""
        return 0

    def peak_bytes(self) -> int:
        """Return the most bytes that tensors used at once since `reset_peak`."""
        return 0

    def reset_peak(self) -> None:
        """Count the most bytes of tensors anew, without waiting for the device."""

    def empty_cache(self) -> None:
        """Return to the device what no tensor uses."""

    def select(self) -> None:
        """Make the device the current one of the calling thread."""

    def synchronize(self) -> None:
        """Wait until the device has computed all that this process has queued."""
