"""Errors of a GPU, raised on purpose: a device that has failed for good, and memory that is short."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.pretend.memory import tensors_in

FILE = "faults.json"

STICKY = "illegal access"

#: Errors by what they are called here. The first breaks the device: every later operation of the process raises it too.
ERRORS: dict[str, Callable[[], Exception]] = {
    STICKY: lambda: torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    "out of memory": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "device out of memory": lambda: torch.AcceleratorError("CUDA error: out of memory"),
    "cublas": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cudnn": lambda: RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
}


@dataclass(frozen=True)
class Fault:
    """An error in some forwards of a module."""

    #: A name in ERRORS.
    error: str

    #: The class of the module, such as "FluxTransformer2DModel".
    module: str

    #: The number of the first forward that fails, from 1, and of the last. 0: all that follow.
    first: int = 1
    last: int = 0

    #: Least rows of its first tensor for a forward to fail and to be counted.
    rows: int = 0

    #: Whether only the process fails that gets there first.
    once: bool = False


class Faults:
    """Raises errors in this process. With a folder, also those of `order_faults`, in every process with this folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._armed: list[Fault] = []
        self._ordered: list[Fault] = []
        self._changed = 0
        self._forwards: dict[Fault, int] = {}
        #: The message of the error that broke the device; "" while it works.
        self.broken = ""

    def check(self) -> None:
        """Raise the error of a broken device."""
        if self.broken:
            raise torch.AcceleratorError(self.broken)

    def break_device(self) -> None:
        """Let every later operation raise a sticky error, as of an illegal memory access."""
        self.broken = str(ERRORS[STICKY]())

    def arm(self, *faults: Fault) -> None:
        """Raise these errors from now on, and no other."""
        self._armed, self.broken = [*faults], ""
        self._forwards.clear()

    @contextmanager
    def within_forwards(self) -> Iterator[None]:
        """Watch the forwards of all modules."""
        forward = torch.nn.Module.__call__

        def watched(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._before_forward(type(module).__name__, (args, kwargs))
            return forward(module, *args, **kwargs)

        torch.nn.Module.__call__ = watched
        try:
            yield
        finally:
            torch.nn.Module.__call__ = forward

    def _before_forward(self, module: str, inputs: Any) -> None:
        self._read_orders()
        for fault in (*self._armed, *self._ordered):
            if module == fault.module and _rows(inputs) >= fault.rows:
                self._raise_if_due(fault)

    def _raise_if_due(self, fault: Fault) -> None:
        number = self._forwards[fault] = self._forwards.get(fault, 0) + 1
        if number < fault.first or 0 < fault.last < number or not self._is_ours(fault):
            return
        error = ERRORS[fault.error]()
        if fault.error == STICKY:
            self.broken = str(error)
        raise error

    def _is_ours(self, fault: Fault) -> bool:
        """Whether this process is to raise a fault: of one that is for one process, the first is."""
        if not fault.once or self._folder is None:
            return True
        mark = self._folder / f"fault-of-{fault.module}-{fault.error.replace(' ', '-')}"
        try:
            mark.touch(exist_ok=False)
            mark.write_text(str(os.getpid()))
        except FileExistsError:
            return mark.read_text() == str(os.getpid())
        return True

    def _read_orders(self) -> None:
        if self._folder is None:
            return
        try:
            changed = (self._folder / FILE).stat().st_mtime_ns
        except FileNotFoundError:
            return
        if changed != self._changed:
            self._changed = changed
            self._ordered = [Fault(**fault) for fault in json.loads((self._folder / FILE).read_text())]


def order_faults(folder: Path, *faults: Fault) -> None:
    """Let the processes of a pretended machine fail so from now on; without faults, no more."""
    for mark in folder.glob("fault-of-*"):
        mark.unlink()
    unfinished = folder / f"{FILE}.new"
    unfinished.write_text(json.dumps([asdict(fault) for fault in faults]))
    unfinished.replace(folder / FILE)


def _rows(inputs: Any) -> int:
    """The length of the first tensor that a forward is called with; 0 without one."""
    return next((len(tensor) for tensor in tensors_in(inputs) if tensor.dim()), 0)
