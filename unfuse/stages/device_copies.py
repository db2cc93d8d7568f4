"""Copies between host and device for which the host waits late, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from unfuse.parallel.devices import EXCHANGES

if TYPE_CHECKING:
    from torch import Tensor


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor on a device, and in another dtype if given.

    The host does not wait for the device.

    A blocking copy waits until everything that was queued before is computed. A copy from pageable memory is staged
    before this returns, so the tensor may then change.
    """
    return tensor.to(device, dtype, non_blocking=device.type != "cpu")


class HostCopy:
    """Copies of tensors in host memory, made while the device computes on.

    The copies are queued when this object is made, so what is queued later does not delay them. Tensors of the CPU are
    not copied.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._copied = None
        device = tensors[0].device
        if device.type not in EXCHANGES:
            self._host = [tensor.cpu() for tensor in tensors]
            return
        self._host = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        for host, tensor in zip(self._host, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._copied = torch.get_device_module(device).current_stream(device).record_event()

    @property
    def is_ready(self) -> bool:
        """Whether the copies are complete, so that `read` does not wait."""
        return self._copied is None or bool(self._copied.query())

    def read(self) -> list[Tensor]:
        """Return the copies, once they are complete.

        Waits for nothing that was queued after them.
        """
        if self._copied is not None:
            self._copied.synchronize()
        return self._host
