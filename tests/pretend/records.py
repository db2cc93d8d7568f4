"""What a program did with the pretended devices: where the host waited for them, and what it called."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import local
from types import FrameType
from typing import Any, NamedTuple

PROJECT = f"{Path(__file__).parents[2]}/unfuse/"
PACKAGES = "/site-packages/"
LIBRARIES = ("diffusers/", "transformers/", "accelerate/", "peft/")


class Wait(NamedTuple):
    """A place where the host waits until a device has done all that it was given."""

    #: read: a value is read on the host. upload: a blocking copy from the host. size: the size of a result depends on
    #: values. index: indices are on the host. synchronize: it is asked for.
    kind: str

    #: The function or aten operation.
    operation: str

    #: The line of unfuse, and behind "<" that of a library which it called.
    line: str


class Call(NamedTuple):
    """A call of `torch.cuda` and its like, or a copy that does not wait."""

    #: What was called, with the arguments that matter.
    name: str

    #: The line of unfuse.
    line: str


class Records:
    """Counts waits and calls. Nothing that happens within `pause` is counted."""

    def __init__(self) -> None:
        self.waits, self.calls = Counter[Wait](), Counter[Call]()
        #: Aten operations on the devices, views not counted: about as many as kernels are launched.
        self.operations = Counter[str]()
        #: Bytes that were copied, by direction: "cpu to cuda", "cuda to cpu", "cuda to cuda".
        self.copied = Counter[str]()
        #: Streams that were made, by device.
        self.streams = Counter[str]()
        self._local = local()

    @property
    def is_paused(self) -> bool:
        return getattr(self._local, "paused", False)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Count nothing in this thread."""
        before, self._local.paused = self.is_paused, True
        try:
            yield
        finally:
            self._local.paused = before

    def wait(self, kind: str, operation: str) -> None:
        if not self.is_paused:
            self.waits[Wait(kind, operation, line_of_caller())] += 1

    def call(self, name: str) -> None:
        if not self.is_paused:
            self.calls[Call(name, line_of_caller())] += 1

    def clear(self) -> None:
        """Begin to count anew, except streams: each exists from then on."""
        for counter in (self.waits, self.calls, self.operations, self.copied):
            counter.clear()

    def called(self, name: str) -> int:
        """How often something was called whose name begins so."""
        return sum(count for call, count in self.calls.items() if call.name.startswith(name))

    def as_json(self) -> dict[str, Any]:
        return {
            "waits": [[*wait, count] for wait, count in self.waits.most_common()],
            "calls": [[*call, count] for call, count in self.calls.most_common()],
            "operations": self.operations.total(),
            "copied": dict(self.copied),
            "streams": dict(self.streams),
        }


def line_of_caller() -> str:
    """The innermost line of unfuse, and the line of a library that it called."""
    library = ""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PROJECT):
            line = f"unfuse/{file.removeprefix(PROJECT)}:{frame.f_lineno}"
            return f"{line} < {library}" if library else line
        package = file.partition(PACKAGES)[2]
        if not library and package.startswith(LIBRARIES):
            library = f"{package}:{frame.f_lineno}"
        frame = frame.f_back
    return library or "elsewhere"
