"""Copies between host and device for which the host does not wait longer than it must."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor on a device, and in another dtype if given. The host does not wait for the device.

    A blocking copy waits until everything that was queued before is computed. A copy from pageable memory is staged
    before this returns, so the tensor may then change.
    """
    return tensor.to(device, dtype, non_blocking=device.type != "cpu")
