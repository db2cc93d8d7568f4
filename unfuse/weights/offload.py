"""CPU offload: keep weights in host memory while they are not used.

A device then does not need room for a whole model.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers.hooks import apply_group_offloading

from unfuse.core.offload_options import Offload
from unfuse.parallel.devices import EXCHANGES
from unfuse.weights.pinned import pin_weights


def offload_model(
    model: torch.nn.Module,
    device: torch.device,
    how: Offload,
    *,
    is_shared: bool = False,
    is_sharded: bool = False,
) -> torch.nn.Module:
    """Offload a loaded model to host memory, to run on the device, and return it.

    With `model`, all its weights move to the device when it runs, and stay until another model runs there. With
    `sequential`, its layers move one at a time, the next while one runs. A VAE always moves as a whole: it is small,
    and its `decode` does not show the order of its layers.

    `is_shared`: the weights are in memory that ranks share, and stay there. Others move to pinned memory.
    `is_sharded`: FSDP keeps shards of the weights in host memory, and gathers one block at a time. So both values mean
    the same. A model that `model` loaded on the device is unloaded first.
    """
    if is_sharded:
        model.register_forward_pre_hook(lambda *_: _shared_device(device).clear())
        return model
    if is_shared:
        pinned = device.type in EXCHANGES and all(tensor.is_pinned() for tensor in model.parameters())
    else:
        pinned = pin_weights(model, device)
    if how == "sequential" and not hasattr(model, "decode"):
        apply_group_offloading(model, device, offload_type="leaf_level", use_stream=pinned)
        return model

    hook = _OffloadHook(model, _shared_device(device))
    # Callers may run a part by itself, such as the decoder of a VAE or of a language model. Layers in lists only run
    # within the module that has the list, so they need no hook.
    for name, module in model.named_modules():
        if name and not any(part.isdecimal() for part in name.split(".")):
            module.register_forward_pre_hook(hook.load)
    hooked: torch.nn.Module = add_hook_to_module(model, hook)
    return hooked


class _Device:
    """A device on which one model of this process is loaded at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        #: The hook of the model that is loaded, or None.
        self.loaded: _OffloadHook | None = None

    def clear(self) -> None:
        """Unload the loaded model."""
        if self.loaded:
            self.loaded._unload()
        self.loaded = None


_shared_device = cache(_Device)


class _OffloadHook(ModelHook):  # type: ignore[misc]
    """Moves a model's weights to the device before it runs.

    They never change, so nothing is copied back.
    """

    def __init__(self, model: torch.nn.Module, device: _Device) -> None:
        self._tensors = [*model.parameters(), *model.buffers()]
        self._host_data = [tensor.data for tensor in self._tensors]
        self._device = device
        #: The device on which the model runs. Pipelines of diffusers read it.
        self.execution_device = device.device
        self._unload()

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Load the model. Also called when a VAE encodes or decodes."""
        self.load()
        return args, kwargs

    def load(self, *_: object) -> None:
        """Load the model in the place of another one."""
        device = self._device
        if device.loaded is not self:
            device.clear()
            try:
                for tensor, data in zip(self._tensors, self._host_data, strict=True):
                    tensor.data = data.to(device.device, non_blocking=True, copy=True)
            except BaseException:  # for example, out of memory
                self._unload()
                raise
            device.loaded = self

    def _unload(self) -> None:
        """Free the device's memory: the weights are those in host memory again."""
        for tensor, data in zip(self._tensors, self._host_data, strict=True):
            tensor.data = data
