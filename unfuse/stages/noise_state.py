"""What a noise scheduler remembers from step to step, taken out as tensors and plain values, and put back.

A scheduler made anew for the same request has all the rest, so only what has changed since is saved: of a first-order
one the index of the step, of a multistep one its last predictions too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unfuse.core.errors import PermanentError

PLAIN = (int, float, str, bool, type(None))


def save(scheduler: object, fresh: object) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Copied tensors and plain values that tell a scheduler from a fresh one. Raises PermanentError for others."""
    tensors: dict[str, Tensor] = {}
    before = vars(fresh)
    changed = {n: value for n, value in vars(scheduler).items() if n not in before or not _equal(value, before[n])}
    return tensors, {name: _taken(f"scheduler.{name}", value, tensors) for name, value in changed.items()}


def resume(scheduler: object, tensors: Mapping[str, Tensor | None], values: Mapping[str, Any], device: Any) -> None:
    """Give a fresh scheduler what `save` found of another; tensors that were not on the CPU go to the device."""
    for name, value in values.items():
        setattr(scheduler, name, _put_back(value, tensors, device))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and bool(one == other)


def _taken(name: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value in terms of plain ones; a tensor becomes [its name, whether it was on the CPU]."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach().to("cpu", copy=True)
        return {"tensor": name, "cpu": value.device.type == "cpu"}
    if isinstance(value, list):
        return [_taken(f"{name}.{index}", part, tensors) for index, part in enumerate(value)]
    if isinstance(value, PLAIN):
        return value
    raise PermanentError(f"a noise scheduler with a {type(value).__name__} in {name} cannot be saved between steps")


def _put_back(value: Any, tensors: Mapping[str, Tensor | None], device: Any) -> Any:
    if isinstance(value, dict):
        tensor = tensors[value["tensor"]]
        assert tensor is not None
        return tensor.clone() if value["cpu"] else tensor.to(device, copy=True)
    if isinstance(value, list):
        return [_put_back(part, tensors, device) for part in value]
    return value
