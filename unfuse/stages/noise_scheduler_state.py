"""The state of a noise scheduler between two steps, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unfuse.core.errors import PermanentError

#: Types of a noise scheduler's attributes that checkpoints store as they are, besides tensors and lists.
PLAIN = (int, float, str, bool, type(None))


def scheduler_state(scheduler: object, fresh: object) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a noise scheduler's tensors and plain values that differ from a fresh one's.

    A fresh scheduler of the same request has the rest: a first-order one differs in the index of the step, a multistep
    one also in its last predictions. Tensors are copied to the CPU. Raises PermanentError for values of other types.
    """
    tensors: dict[str, Tensor] = {}
    original = vars(fresh)
    changed = {n: value for n, value in vars(scheduler).items() if n not in original or not _equal(value, original[n])}
    return tensors, {name: _serialize(f"scheduler.{name}", value, tensors) for name, value in changed.items()}


def restore_scheduler(
    scheduler: object, tensors: Mapping[str, Tensor | None], values: Mapping[str, Any], device: Any
) -> None:
    """Set the values that `scheduler_state` returned on a fresh scheduler.

    Tensors are copied to `device`, whatever device they were saved on. Single numbers that were on the CPU stay there:
    CUDA computes with them as they are.
    """
    for name, value in values.items():
        setattr(scheduler, name, _deserialize(value, tensors, device))


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, list):
        return isinstance(right, list) and len(left) == len(right) and all(map(_equal, left, right))
    return type(left) is type(right) and bool(left == right)


def _serialize(name: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the value with each tensor replaced by its name and its device."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach().to("cpu", copy=True)
        return {"tensor": name, "cpu": value.device.type == "cpu"}
    if isinstance(value, list):
        return [_serialize(f"{name}.{index}", item, tensors) for index, item in enumerate(value)]
    if isinstance(value, PLAIN):
        return value
    raise PermanentError(f"a noise scheduler with a {type(value).__name__} in {name} cannot be saved between steps")


def _deserialize(value: Any, tensors: Mapping[str, Tensor | None], device: Any) -> Any:
    """Return the value that `_serialize` was given, with copies of its tensors."""
    if isinstance(value, dict):
        tensor = tensors[value["tensor"]]
        assert tensor is not None
        return tensor.clone() if value["cpu"] and tensor.dim() == 0 else tensor.to(device, copy=True)
    if isinstance(value, list):
        return [_deserialize(item, tensors, device) for item in value]
    return value
