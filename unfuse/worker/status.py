"""The status of a worker: reported by its compute processes, and completed by its parent for each heartbeat."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING

from unfuse.core.messages import Sharing
from unfuse.core.text import TextLoad
from unfuse.worker.compute_messages import RankStatus

if TYPE_CHECKING:
    from unfuse.stages.base import HasTexts, Stage
    from unfuse.worker.ranks import Ranks

PAGE = os.sysconf("SC_PAGE_SIZE")

REPORT_S = 0.25  # the least seconds between two reports of a busy process

OVER_S = 15.0  # seconds over which utilization is a mean; what lies longer back counts ever less


class StatusReporter:
    """Sends the status of a compute process when it has changed.

    `sharing` is what batches found, and `device_memory` returns bytes of a GPU. Language stages are reported by the
    first of several ranks alone, since all have the same blocks.
    """

    def __init__(
        self,
        stages: Iterable[Stage],
        sharing: Mapping[str, Sharing],
        ranks: Ranks,
        device_memory: Callable[[], int],
        send: Callable[[RankStatus], object],
    ) -> None:
        shared = (stage.texts for stage in stages if ranks.leads)
        self._texts: list[HasTexts] = [*{id(texts): texts for texts in shared if texts is not None}.values()]
        self._sharing, self._ranks, self._device_memory, self._send = sharing, ranks, device_memory, send
        self._last, self._reported_at = RankStatus(), 0.0

    def report(self, *, busy: bool) -> None:
        """Report now if the process is about to wait, else at most every REPORT_S seconds."""
        now = time.monotonic()
        if busy and now - self._reported_at < REPORT_S:
            return
        status = RankStatus(
            time=self._ranks.time,
            device_memory=self._device_memory(),
            texts=sum((texts.load() for texts in self._texts), TextLoad()) if self._texts else None,
            retracted=sum(texts.retracted for texts in self._texts),
            batch_invariance=dict(self._sharing),
        )
        if status != self._last:
            self._send(status)
        self._last, self._reported_at = status, now


class BusyShare:
    """The share of the last seconds in which there were tasks to compute."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._at = now, now()
        self._share, self._busy = 0.0, False

    def tell(self, busy: bool) -> None:
        """From now on there are tasks, or none."""
        self._share, self._at, self._busy = self.share, self._now(), busy

    @property
    def share(self) -> float:
        """From 0 to 1."""
        target = float(self._busy)
        return target + (self._share - target) * exp((self._at - self._now()) / OVER_S)


def resident(pids: Iterable[int]) -> int:
    """Bytes of host memory that these processes have; what several map counts in each."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    return total
