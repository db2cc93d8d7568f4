"""Keeps weights in host memory while they do not run, so that a device need not hold a whole model."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers.hooks import apply_group_offloading

from unfuse.core.compute_options import Offload
from unfuse.parallel.devices import EXCHANGES


def rest(model: torch.nn.Module, device: torch.device, how: Offload) -> torch.nn.Module:
    """Make a loaded model rest in host memory, as `--offload` says, and run on the device.

    With `model` it comes to the device when it runs and stays until another one runs there. With `sequential` its
    layers come one by one, the next while one runs; a VAE still comes whole: it is small, and is run by its `decode`,
    which tells nobody the order of its layers.
    """
    if how == "sequential" and not hasattr(model, "decode"):
        apply_group_offloading(model, device, offload_type="leaf_level", use_stream=device.type in EXCHANGES)
        return model
    resting: torch.nn.Module = add_hook_to_module(model, _OffloadHook(model, _device_of(device)))
    return resting


class _Device:
    """The room on a device that the models of this process use in turn."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.guest: _OffloadHook | None = None


_device_of = cache(_Device)


class _OffloadHook(ModelHook):  # type: ignore[misc]
    """Brings a model's weights to the device before it runs; they do not change, so nothing is ever copied back."""

    def __init__(self, model: torch.nn.Module, seat: _Device) -> None:
        pin = seat.device.type in EXCHANGES
        self._tensors = [*model.parameters(), *model.buffers()]
        self._resting = [tensor.data.pin_memory() if pin else tensor.data for tensor in self._tensors]
        self._device_of = seat
        self._leave()

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Take the seat; also called when a VAE encodes or decodes."""
        seat = self._device_of
        if seat.guest is not self:
            if seat.guest:
                seat.guest._leave()
            seat.guest = None
            try:
                for tensor, data in zip(self._tensors, self._resting, strict=True):
                    tensor.data = data.to(seat.device, non_blocking=True, copy=True)
            except BaseException:  # such as a device that is full
                self._leave()
                raise
            seat.guest = self
        return args, kwargs

    def _leave(self) -> None:
        for tensor, data in zip(self._tensors, self._resting, strict=True):
            tensor.data = data
