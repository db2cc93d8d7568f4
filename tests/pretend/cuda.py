"""What stands in for `torch.cuda`, `torch.accelerator` and their like on a machine without GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch.nn.attention.bias import CausalBias
from torch.utils._python_dispatch import _disable_current_modes

from tests.pretend.memory import KIND
from tests.pretend.streams import CurrentStreams, DeviceContext, DeviceEvent, DeviceGenerator, DeviceStream

if TYPE_CHECKING:
    from tests.pretend.gpus import PretendedGpus

#: What every pretended GPU says of itself, besides its compute capability: what an H100 says.
PROPERTIES = {
    "multi_processor_count": 132,
    "max_threads_per_multi_processor": 2048,
    "warp_size": 32,
    "L2_cache_size": 50 << 20,
    "is_integrated": 0,
    "is_multi_gpu_board": 0,
    "regs_per_multiprocessor": 65536,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 232448,
    "shared_memory_per_multiprocessor": 233472,
    "gcnArchName": "",
}


class Cuda:
    """The replacements, which record what is called. `replaced` puts them where torch has its own."""

    def __init__(self, gpus: PretendedGpus) -> None:
        self._gpus, self._memory = gpus, gpus.memory
        self._current = CurrentStreams()
        self.Event = type("Event", (DeviceEvent,), {"gpus": gpus})
        self.Stream = type("Stream", (DeviceStream,), {"gpus": gpus, "events": self.Event, "current": self._current})
        self.Device = type("device", (DeviceContext,), {"gpus": gpus})
        self.Generator = type(DeviceGenerator)("Generator", (DeviceGenerator,), {"gpus": gpus})

    def _device(self, device: Any) -> Any:
        """The device that is named, or the current one."""
        return self._gpus.device(KIND if device is None else device)

    def _current_stream(self, device: Any = None) -> Any:
        placed = self._device(device)
        return self._current.by_device.get(placed) or self.Stream.default(placed)

    def _set_stream(self, stream: Any) -> None:
        self._current.by_device[stream.device] = stream

    def _set_device(self, device: Any) -> None:
        self._gpus.record_call(f"set_device({device})")
        self._gpus.current = self._device(device).index

    def _properties(self, device: Any = None) -> SimpleNamespace:
        uuid = f"{self._device(device).index:08x}-0000-4000-8000-000000000000"
        major, minor = self._gpus.capability
        properties = PROPERTIES | {"major": major, "minor": minor, "total_memory": self._memory.capacity}
        return SimpleNamespace(name=self._gpus.name, uuid=uuid, **properties)

    def _reader(self, bytes_by_device: Callable[[], Mapping[str, int]]) -> Callable[..., int]:
        """A function that reads a number of bytes of a device."""
        return lambda device=None: bytes_by_device().get(str(self._device(device)), 0)

    def _memory_info(self, device: Any = None) -> tuple[int, int]:
        self._gpus.record_call("mem_get_info")
        reserved = self._memory.reserved[str(self._device(device))]
        return self._memory.capacity - reserved, self._memory.capacity

    def _empty_cache(self) -> None:
        self._gpus.record_call("empty_cache")
        self._memory.empty_cache()

    def _recorder(self, name: str, answer: Any = None) -> Callable[..., Any]:
        """A function that is recorded, and has always this answer."""

        def call(*_: Any, **__: Any) -> Any:
            self._gpus.record_call(name)
            return answer

        return call

    def _synchronizer(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: self._gpus.synchronize(name)

    def _of_both(self) -> dict[str, Any]:
        """The functions that `torch.cuda` and `torch.accelerator` have by one name."""
        memory = self._memory
        return {
            "is_available": lambda: True,
            "device_count": lambda: memory.count,
            "current_stream": self._current_stream,
            "set_stream": self._set_stream,
            "memory_allocated": self._reader(memory.held),
            "memory_reserved": self._reader(lambda: memory.reserved),
            "max_memory_allocated": self._reader(lambda: memory.peak),
            "max_memory_reserved": self._reader(lambda: memory.reserved),
            "reset_peak_memory_stats": lambda *_: memory.reset_peak(),
            "empty_cache": self._empty_cache,
        }

    def _of_cuda(self) -> dict[str, Any]:
        registers = {
            "cudaHostRegister": lambda address, size, flags: self._gpus.memory.register(address, size),
            "cudaHostUnregister": self._gpus.memory.unregister,
        }
        return self._of_both() | {
            "is_initialized": lambda: True,
            "init": lambda: None,
            "_lazy_init": lambda: None,
            "current_device": lambda: self._gpus.current,
            "set_device": self._set_device,
            "device": self.Device,
            "get_device_name": lambda device=None: self._gpus.name,
            "get_device_capability": lambda device=None: self._gpus.capability,
            "get_device_properties": self._properties,
            "get_arch_list": lambda: ["sm_90"],
            "is_bf16_supported": lambda *_, **__: True,
            "mem_get_info": self._memory_info,
            "ipc_collect": self._recorder("ipc_collect"),
            "synchronize": self._synchronizer("cuda.synchronize"),
            "Stream": self.Stream,
            "Event": self.Event,
            "stream": lambda stream: nullcontext() if stream is None else stream,
            "default_stream": lambda device=None: self.Stream.default(self._device(device)),
            "is_current_stream_capturing": lambda: False,
            "manual_seed": self._recorder("manual_seed"),
            "manual_seed_all": self._recorder("manual_seed_all"),
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
            "cudart": lambda: SimpleNamespace(**registers),
        }

    def _of_accelerator(self) -> dict[str, Any]:
        return self._of_both() | {
            "current_accelerator": lambda check_available=False: torch.device(KIND),
            "current_device_index": lambda: self._gpus.current,
            "set_device_index": self._set_device,
            "synchronize": self._synchronizer("accelerator.synchronize"),
        }

    def _of_torch(self) -> list[tuple[Any, str, Any]]:
        """Other attributes to replace: of which object, the name and the value."""
        module_before, join_before = torch.get_device_module, torch.distributed.init_process_group
        run_before = threading.Thread.run

        def device_module(device: Any = None) -> Any:
            is_cuda = torch.device(KIND if device is None else device).type == KIND
            return torch.cuda if is_cuda else module_before(device)

        def join(backend: Any = None, *args: Any, device_id: Any = None, **kwargs: Any) -> Any:
            self._gpus.record_call(f"init_process_group({backend})")
            return join_before("gloo", *args, **kwargs)  # whatever ranks would exchange by between GPUs

        def plain_bias(cls: Any, *_: Any) -> Any:
            with _disable_current_modes():  # torch cannot make this subclass under a dispatch mode
                return torch.Tensor.__new__(cls)

        def run(thread: threading.Thread) -> None:
            with self._gpus.modes():
                run_before(thread)

        return [
            (torch, "get_device_module", device_module),
            (torch, "Generator", self.Generator),
            (torch, "Stream", self.Stream),
            (torch.distributed, "init_process_group", join),
            (threading.Thread, "run", run),
            (CausalBias, "__new__", plain_bias),
        ]

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Replace what torch has, for all threads; what was there before is put back."""
        functions = ((torch.cuda, self._of_cuda()), (torch.accelerator, self._of_accelerator()))
        values = [(module, name, value) for module, named in functions for name, value in named.items()]
        with _attributes([*values, *self._of_torch()]):
            yield


@contextmanager
def _attributes(values: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes, and put back what each object had itself."""
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in values]
    for owner, name, value in values:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
