"""Pinned host memory of offloaded weights: one buffer for each component.

Copies from pinned memory to a GPU overlap with computing.
"""

from __future__ import annotations

import mmap
import resource
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import structlog
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from unfuse.arena.limits import readable_bytes
from unfuse.parallel.devices import EXCHANGES

log = structlog.get_logger(__name__)

#: Bytes at whose multiples tensors start, as in memory of torch's own.
ALIGNMENT = 256


def pin_weights(model: torch.nn.Module, device: torch.device) -> bool:
    """Move a model's weights into one buffer of host memory, and pin it.

    Returns whether it is pinned. Weights that several layers share are there once. torch's own pinning rounds every
    tensor up to a power of two.
    """
    if device.type not in EXCHANGES:
        return False
    starts = dict[tuple[object, ...], int]()
    size = 0
    for tensor in (*model.parameters(), *model.buffers()):
        if _identity(tensor) not in starts:
            starts[_identity(tensor)] = size
            size += _aligned(tensor.nbytes)

    memory = _host_memory(size or ALIGNMENT, device)
    copied = dict[tuple[object, ...], torch.Tensor]()
    for tensor in (*model.parameters(), *model.buffers()):
        identity = _identity(tensor)
        if identity not in copied:
            copied[identity] = _copy_into(memory, starts[identity], tensor.data)
        tensor.data = copied[identity]  # frees what the model was loaded into, one tensor at a time

    return _pin(memory, model, device)


@contextmanager
def offloading_shards(model: torch.nn.Module, ranks: int, device: torch.device) -> Iterator[OffloadPolicy]:
    """Yield a policy for FSDP that keeps this rank's shards in host memory.

    Within this context `fully_shard` pins them in one buffer, if the device is a GPU and its driver allows that. Torch
    would pin each shard by itself, and round it up to a power of two.
    """
    if device.type not in EXCHANGES:
        yield CPUOffloadPolicy(pin_memory=False)
        return
    sizes = (-(-tensor.shape[0] // ranks) * (tensor.nbytes // tensor.shape[0]) for tensor in model.parameters())
    memory = _host_memory(sum(map(_aligned, sizes)) or ALIGNMENT, device)
    is_pinned = _pin(memory, model, device)
    with _PinnedTensors(memory) if is_pinned else nullcontext():
        yield CPUOffloadPolicy(pin_memory=is_pinned)


class _PinnedTensors(TorchFunctionMode):
    """Copies the tensors that are pinned meanwhile into a pinned buffer, one behind the other."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__()
        self._memory = memory
        self._next = 0

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.pin_memory or self._next + args[0].nbytes > self._memory.nbytes:
            return func(*args, **(kwargs or {}))
        start, self._next = self._next, self._next + _aligned(args[0].nbytes)
        return _copy_into(self._memory, start, args[0])


def _aligned(size: int) -> int:
    """Return a number of bytes, rounded up to a multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _pin(memory: torch.Tensor, model: torch.nn.Module, device: torch.device) -> bool:
    """Pin a buffer for as long as the model exists. Returns whether it is pinned."""
    if device.type != "cuda":
        return memory.is_pinned()
    if not register_memory(memory, device, type(model).__name__):
        return False
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    weakref.finalize(model, cudart.cudaHostUnregister, memory.data_ptr()).atexit = False
    return True


def register_memory(memory: torch.Tensor, device: torch.device, name: str) -> bool:
    """Pin a buffer where it is, by the driver of CUDA or ROCm.

    Returns whether it is pinned. If the driver refuses, the buffer stays pageable, and a warning has the reason.
    `name`: what it is of.
    """
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if not (error := int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))):
        return True
    with suppress(RuntimeError):  # CUDA reports a refusal once more, by the next kernel that is launched
        torch.ones(1, device=device)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    log.warning(
        "weights not pinned",
        model=name,
        size=readable_bytes(memory.nbytes),
        error=error,
        locked_memory="unlimited" if limit == resource.RLIM_INFINITY else readable_bytes(limit),
        reason="the driver refused it: copies to the GPU do not overlap with computing; raise the limit of locked "
        "memory (ulimit -l), or free host memory",
    )
    return False


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors with the same data."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _host_memory(size: int, device: torch.device) -> torch.Tensor:
    """Return a new buffer, uint8 (size,), for CUDA in pages of its own."""
    if device.type != "cuda":
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _copy_into(memory: torch.Tensor, start: int, data: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to this byte of the buffer. Returns it there, with its strides."""
    strides = torch.empty_like(data, device="meta").stride()  # without gaps or overlaps
    place = memory[start : start + data.nbytes].view(data.dtype).as_strided(data.shape, strides)
    return place.copy_(data)
