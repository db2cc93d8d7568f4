"""Pretended CUDA devices for a torch without CUDA: everything is computed on the CPU, with true values.

    with PretendedGpus() as gpus:
        weight = torch.ones(3, device="cuda:1")     # in host memory, with device cuda:1
        weight + torch.ones(3)                      # RuntimeError: Expected all tensors to be on the same device ...
    gpus.records.waits                              # where the host would wait for a device, by line
    gpus.memory.held()                              # bytes of tensors by device

So results can be compared with the CPU's bit for bit. Not pretended: kernels and their rounding, the order of what
runs at once, `torch.compile`, NCCL (ranks exchange by gloo), and operations that CUDA lacks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.pretend.cuda import Cuda
from tests.pretend.faults import Faults
from tests.pretend.functions import DeviceFunctions
from tests.pretend.memory import KIND, DeviceMemory, is_pretended
from tests.pretend.operations import DeviceOperations
from tests.pretend.records import Records

GIB = 1 << 30


class PretendedGpus:
    """A context in which torch has CUDA devices, in this thread and in threads that start meanwhile.

    `count`, `capacity`, `name`, `capability`: how many there are, and the bytes, name and compute capability of each.
    `folder`: where `order_faults` orders faults of this process; None: nowhere.
    """

    def __init__(
        self,
        count: int = 2,
        capacity: int = 80 * GIB,
        name: str = "Pretended GPU",
        capability: str = "9.0",
        folder: Path | None = None,
    ) -> None:
        self.name = name
        major, minor = map(int, capability.split("."))
        self.capability = major, minor
        self.memory = DeviceMemory(count, capacity)
        self.records = Records()
        self.faults = Faults(folder)
        self._thread = _ThreadState()
        self._cuda = Cuda(self)
        self._entered = ExitStack()

    def __enter__(self) -> PretendedGpus:
        with ExitStack() as entered:
            entered.enter_context(self._cuda.replaced())
            entered.enter_context(self.faults.within_forwards())
            entered.enter_context(self.modes())
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Pretend in this thread."""
        with DeviceFunctions(self), DeviceOperations(self):
            yield

    @property
    def current(self) -> int:
        """The current device of this thread: 0 until it is set, as CUDA has it."""
        return self._thread.current

    @current.setter
    def current(self, index: int) -> None:
        self._thread.current = index

    def device(self, given: Any) -> torch.device | None:
        """The device that is named, with its number. Raises the error of CUDA for one that is not there."""
        if given is None:
            return None
        device = torch.device(KIND, given) if isinstance(given, int) else torch.device(given)
        if not is_pretended(device):
            return device
        if device.index is None:
            return torch.device(KIND, self.current)
        if device.index >= self.memory.count:
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")
        return device

    @property
    def device_of_call(self) -> torch.device | None:
        """The device of the function of torch that runs: there it makes tensors."""
        return self._thread.device_of_call

    @contextmanager
    def call_for(self, device: torch.device | None) -> Iterator[None]:
        """Run a function of torch for a device."""
        before, self._thread.device_of_call = self._thread.device_of_call, device
        try:
            yield
        finally:
            self._thread.device_of_call = before

    @property
    def is_bypassed(self) -> bool:
        return self._thread.bypassed

    @contextmanager
    def bypass(self) -> Iterator[None]:
        """Compute on the CPU as it is."""
        before, self._thread.bypassed = self._thread.bypassed, True
        try:
            yield
        finally:
            self._thread.bypassed = before

    def record_call(self, name: str) -> None:
        """Record a call of torch.cuda and its like. Raises the error of a broken device."""
        self.faults.check()
        self.records.call(name)

    def synchronize(self, operation: str) -> None:
        """Record that the host waits until a device is done."""
        self.faults.check()
        self.records.wait("synchronize", operation)

    def record_copy(
        self, tensor: torch.Tensor, source: torch.device, target: torch.device, non_blocking: bool, operation: str
    ) -> None:
        """Record a copy between devices. CUDA waits for its stream in a blocking one, and for pageable memory."""
        if self.records.is_paused:
            return
        direction = f"{source.type} to {target.type}"
        self.records.copied[direction] += tensor.nbytes
        from_host = not is_pretended(source)
        pinned = " of pinned memory" if from_host and self.memory.is_pinned(tensor) else ""
        if is_pretended(source) and is_pretended(target) or non_blocking:
            self.records.call(f"copy {direction}{pinned}")
        else:
            self.records.wait("upload" if from_host else "read", f"{operation}{pinned}")


class _ThreadState(threading.local):
    """What differs between threads."""

    def __init__(self) -> None:
        self.current = 0
        self.device_of_call: torch.device | None = None
        self.bypassed = False
