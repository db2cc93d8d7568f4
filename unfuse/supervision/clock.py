"""The clock of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable

from typing_extensions import override

from unfuse.core.clock import Clock


class SystemClock(Clock):
    """Monotonic and Unix seconds, in any thread; alarms are the running event loop's."""

    @override
    def now(self) -> float:
        return time.monotonic()

    @override
    def wall(self) -> float:
        return time.time()

    @override
    def call_at(self, when: float, callback: Callable[[], object]) -> Callable[[], None]:
        import asyncio  # who only reads the time, such as a process that serves objects, has no event loop

        return asyncio.get_running_loop().call_later(max(0.0, when - self.now()), callback).cancel
