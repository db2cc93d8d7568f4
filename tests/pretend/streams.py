"""Streams, events, generators and the current device, as `torch.cuda` has them. Streams are always done."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from tests.pretend.memory import KIND, is_pretended

if TYPE_CHECKING:
    from tests.pretend.gpus import PretendedGpus

PlainGenerator = torch._C.Generator


class DeviceEvent:
    """An event, which has happened when it is recorded. Subclasses name the `gpus`."""

    gpus: PretendedGpus

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None:
        self.gpus.record_call("event.record")

    def wait(self, stream: Any = None) -> None:
        self.gpus.record_call("event.wait")

    def synchronize(self) -> None:
        self.gpus.synchronize("event.synchronize")

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0


class CurrentStreams(threading.local):
    """The streams of this thread that are not the default ones, by device."""

    def __init__(self) -> None:
        self.by_device: dict[torch.device, Any] = {}


class DeviceStream:
    """A stream on the device that it names, or on the current one. Subclasses name the `gpus`, `events` and `current`.

    As a context, it is the current one of its device.
    """

    gpus: PretendedGpus
    events: type[DeviceEvent]
    current: CurrentStreams

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self._place(self.gpus.device(KIND if device is None else device), id(self))
        self.gpus.record_call(f"Stream({self.device})")
        self.gpus.records.streams[str(self.device)] += 1

    @classmethod
    def default(cls, device: torch.device) -> Any:
        """The stream that a device has from the beginning."""
        stream = cls.__new__(cls)
        stream._place(device, 0)
        return stream

    def _place(self, device: Any, number: int) -> None:
        self.device, self.device_index, self.cuda_stream = device, device.index, number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceStream) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[torch.device, int]:
        return self.device, self.cuda_stream

    def synchronize(self) -> None:
        self.gpus.synchronize("stream.synchronize")

    def wait_stream(self, stream: Any) -> None:
        self.gpus.record_call("stream.wait_stream")

    def wait_event(self, event: Any) -> None:
        self.gpus.record_call("stream.wait_event")

    def record_event(self, event: Any = None) -> Any:
        self.gpus.record_call("stream.record_event")
        return event or self.events()

    def query(self) -> bool:
        return True

    def __enter__(self) -> Any:
        self._before = self.current.by_device.get(self.device)
        self.current.by_device[self.device] = self
        return self

    def __exit__(self, *_: object) -> None:
        del self.current.by_device[self.device]
        if self._before is not None:
            self.current.by_device[self.device] = self._before


class DeviceContext:
    """`torch.cuda.device`: the current device is another within it. Subclasses name the `gpus`."""

    gpus: PretendedGpus

    def __init__(self, device: Any) -> None:
        placed = self.gpus.device(device)
        self.idx = self.gpus.current if placed is None else placed.index

    def __enter__(self) -> None:
        self._before, self.gpus.current = self.gpus.current, self.idx

    def __exit__(self, *_: object) -> None:
        self.gpus.current = self._before


class GeneratorType(type(PlainGenerator)):
    """Every generator of torch is a `torch.Generator`, also those that were made before."""

    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, PlainGenerator)


class DeviceGenerator(PlainGenerator, metaclass=GeneratorType):
    """A generator, which draws the CPU's numbers on every device. Subclasses name the `gpus`."""

    gpus: PretendedGpus
    placed: torch.device

    def __new__(cls, device: Any = "cpu") -> Any:
        placed = cls.gpus.device(device)
        assert placed is not None
        generator = PlainGenerator.__new__(cls, "cpu" if is_pretended(placed) else placed)
        generator.placed = placed
        return generator

    @property
    def device(self) -> torch.device:
        return self.placed
