"""The seconds that a rank spends in exchanges with other ranks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class ExchangeTimes:
    """Sums the seconds of exchanges, without waiting for a GPU.

    On a CPU an exchange is done when it returns. On a GPU it is only enqueued then. So events of the stream are
    recorded before and after it, and read once the GPU has passed them.

    `device`: the device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._pending: deque[tuple[Any, Any]] = deque()  # events that the GPU may not have passed, oldest first

    @property
    def seconds(self) -> float:
        """The seconds of all exchanges that are known to be done."""
        while self._pending and self._pending[0][1].query():
            started, ended = self._pending.popleft()
            self._seconds += started.elapsed_time(ended) / 1000
        return self._seconds

    @contextmanager
    def measure(self, device: torch.device) -> Iterator[None]:
        """Measure the exchange of tensors of this device that the block makes."""
        if device.type == "cpu":
            began = time.monotonic()
            try:
                yield
            finally:
                self._seconds += time.monotonic() - began
            return

        event_class = torch.get_device_module(self._device).Event
        started, ended = event_class(enable_timing=True), event_class(enable_timing=True)
        started.record()
        yield
        ended.record()  # on the stream that waits for the exchange, not on that of the backend
        self._pending.append((started, ended))
