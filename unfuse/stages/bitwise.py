"""Compares results of stages bit for bit, on the device on which they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from unfuse.stages.base import EncodedMedia

if TYPE_CHECKING:
    from torch import Tensor


def first_difference(alone: Sequence[Any], together: Sequence[Any]) -> int | None:
    """Return the first row whose result alone differs from the one together, or None."""
    pairs = zip(alone, together, strict=True)
    return next((row for row, (single, shared) in enumerate(pairs) if not are_equal(single, shared)), None)


def are_equal(left: Any, right: Any) -> bool:
    """Return whether two results, errors among them, are equal bit for bit.

    Tensors stay on their device: the host reads one truth value for each pair of tensors.
    """
    if type(left) is not type(right):
        return False
    if hasattr(left, "untyped_storage"):
        return _are_tensors_equal(left, right)
    if hasattr(left, "__array_interface__"):  # a numpy array
        return bool(left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes())
    match left:
        case Exception():
            return str(left) == str(right)
        case dict():
            return left.keys() == right.keys() and all(map(are_equal, left.values(), map(right.get, left)))
        case tuple() | list():
            return len(left) == len(right) and all(map(are_equal, left, right))
        case msgspec.Struct() if not isinstance(left, EncodedMedia):
            return are_equal(msgspec.structs.asdict(left), msgspec.structs.asdict(right))
    return bool(left == right)


def _are_tensors_equal(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype, device and bits."""
    import torch

    if (left.shape, left.dtype, left.device) != (right.shape, right.dtype, right.device):
        return False
    # As integers, a NaN equals itself, and 0.0 differs from -0.0.
    return torch.equal(_bits(left), _bits(right))


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as integers, without a copy where its memory has its values."""
    import torch

    values = tensor.detach().resolve_conj().resolve_neg()
    values = torch.view_as_real(values) if values.is_complex() else values
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(integers[values.element_size()])
