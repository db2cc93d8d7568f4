"""On which pretended device a tensor lies, and how many bytes each device has.

The device is an attribute of the tensor's storage. Views, parameters and `.data =` share the storage, and torch keeps
the attributes of a storage for as long as its memory lives.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import torch

KIND = "cuda"

#: Names of the attributes of a storage.
DEVICE, PINNED = "pretended_device", "pretended_pinned"

#: The number of CUDA's error cudaErrorMemoryAllocation.
OUT_OF_MEMORY = 2


def tensors_in(*values: Any) -> Iterator[torch.Tensor]:
    """All tensors of these values: of lists, tuples and dictionaries too."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(*value)
        elif isinstance(value, dict):
            yield from tensors_in(*value.values())


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own kind: not a sparse one, nor a wrapper such as a DTensor."""
    dispatches = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return tensor.layout == torch.strided and not dispatches


def is_pretended(device: torch.device) -> bool:
    return device.type == KIND


class DeviceMemory:
    """Places tensors on `count` pretended devices of `capacity` bytes each, and counts their bytes.

    As CUDA's caching allocator does, a device keeps what was freed `reserved` for later tensors, until it is emptied.
    """

    def __init__(self, count: int, capacity: int) -> None:
        self.count, self.capacity = count, capacity
        #: The most bytes that tensors had at once, by device, and the bytes that are reserved.
        self.peak, self.reserved = Counter[str](), Counter[str]()
        #: Bytes of host memory that were pinned, all together.
        self.pinned = 0
        #: The sizes of host memory that is registered with the driver, by address.
        self.registered = dict[int, int]()
        #: The most bytes that the driver registers, all together; None: any.
        self.registrable: int | None = None
        self._held = Counter[str]()
        self._changes = deque[tuple[str, int]]()  # finalizers run anywhere, also while the lock is held: they append
        self._lock = threading.RLock()

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """The device of a tensor: a pretended one, or its real one."""
        with torch._C.DisableTorchFunction():
            real = tensor.device
            if real.type != "cpu" or not has_storage(tensor):
                return real
            found: torch.device = getattr(tensor.untyped_storage(), DEVICE, real)
            return found

    def place(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Let a new tensor lie on a device. Raises OutOfMemoryError if its bytes do not fit."""
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
            known = getattr(storage, DEVICE, None)
            assert known in (None, device), f"a tensor on {known} cannot become one on {device} in its place"
            if known is None:
                self._allocate(str(device), storage.nbytes())
                setattr(storage, DEVICE, device)
                weakref.finalize(storage, self._changes.append, (str(device), -storage.nbytes()))
        return tensor

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let a tensor of the host lie in pinned memory."""
        with torch._C.DisableTorchFunction():
            setattr(tensor.untyped_storage(), PINNED, True)
        self.pinned += tensor.nbytes
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            if not has_storage(tensor):
                return False
            address = tensor.data_ptr()
            registered = any(start <= address < start + size for start, size in self.registered.items())
            return registered or hasattr(tensor.untyped_storage(), PINNED)

    def register(self, address: int, size: int) -> int:
        """Pin host memory where it is. Returns CUDA's error, 0 for none."""
        if self.registrable is not None and sum(self.registered.values()) + size > self.registrable:
            return OUT_OF_MEMORY
        assert address not in self.registered, "CUDA refuses memory that is registered already"
        self.registered[address] = size
        return 0

    def unregister(self, address: int) -> int:
        self.registered.pop(address)
        return 0

    def held(self) -> dict[str, int]:
        """The bytes of tensors that exist, by device."""
        with self._lock:
            self._count_changes()
            return {device: size for device, size in self._held.items() if size}

    def held_on(self, device: torch.device) -> int:
        return self.held().get(str(device), 0)

    def empty_cache(self) -> None:
        """Reserve nothing but what tensors have."""
        with self._lock:
            self._count_changes()
            self.reserved = Counter(self._held)

    def reset_peak(self) -> None:
        with self._lock:
            self._count_changes()
            self.peak = Counter(self._held)

    def _allocate(self, device: str, size: int) -> None:
        with self._lock:
            self._count_changes()
            held = self._held[device] + size
            if held > self.capacity:
                free = self.capacity - self._held[device]
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {size} bytes. GPU {device.partition(':')[2]} has a total "
                    f"capacity of {self.capacity} bytes of which {free} bytes is free."
                )
            self._held[device] = held
            self.peak[device] = max(self.peak[device], held)
            self.reserved[device] = max(self.reserved[device], held)

    def _count_changes(self) -> None:
        while self._changes:
            device, size = self._changes.popleft()
            self._held[device] += size
