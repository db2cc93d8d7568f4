"""The agreement between a worker's ranks, so that all run the same step plans."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from unfuse.core.codec import decode, encode
from unfuse.core.errors import OutOfMemory
from unfuse.core.messages import TaskFailed
from unfuse.core.worker_status import RankTimes
from unfuse.worker.batch_invariance import DIFFERENT
from unfuse.worker.compute_messages import StepPlan, TaskWaits

#: The start of a task on one rank: the step at which it starts, or why it does not.
TaskStart = TaskFailed | TaskWaits | int


class RankExchange(Protocol):
    """The exchange between all ranks of a worker."""

    #: Number of ranks.
    size: int

    #: Number of this rank.
    rank: int

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for others."""
        ...

    def exchange(self, data: bytes) -> list[bytes]:
        """Send this rank's bytes to all ranks. Returns those of each, in rank order."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """Return a context manager for one step on all ranks.

        If a rank fails before its first exchange, the block raises on all ranks.
        """
        ...


class Ranks:
    """The ranks of a worker: this process and the `others`, if there are any.

    The first rank leads: it decides the step plans, stores outputs and reports. `send` sends a step plan to the others.
    """

    def __init__(self, others: RankExchange | None = None, send: Callable[[StepPlan], object] = bool) -> None:
        self._others, self._send = others, send
        self._stepped_s = 0.0

        #: The number of ranks, and whether this one is the first.
        self.size, self.leads = others.size if others else 1, not (others and others.rank)

    @property
    def exchange_s(self) -> float:
        """Seconds spent in exchanges with other ranks so far."""
        return self._others.waited_s if self._others else 0.0

    @property
    def time(self) -> RankTimes:
        """Seconds of steps and exchanges so far; zeros if there is one rank."""
        return RankTimes(self._stepped_s, self.exchange_s)

    def send_plan(self, plan: StepPlan) -> None:
        """Send a step plan to the other ranks, if this is the first one.

        An empty plan is not sent.
        """
        if self._others and self.leads and plan != StepPlan():
            self._send(plan)

    def receive_plan(self, starts: Sequence[TaskStart]) -> Sequence[TaskStart]:
        """Return the starts on which all ranks agree, one for each task.

        `starts` are those of this rank. A start of -1 means that the ranks would start at different steps.
        """
        if not (self._others and starts):
            return starts
        encoded = self._others.exchange(encode(list(starts)))
        starts_by_rank: list[list[TaskStart]] = [decode(data, list[TaskStart]) for data in encoded]
        return [_common(ranks) for ranks in zip(*starts_by_rank, strict=True)]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make a step on all ranks, and measure its time."""
        if not self._others:
            yield
            return
        began, exchange_s_before = time.monotonic(), self.exchange_s
        try:
            with self._others.together():
                yield
        finally:
            # exchanges on a GPU are known later, and may be those of the step before
            self._stepped_s += max(0.0, time.monotonic() - began - self.exchange_s + exchange_s_before)

    def difference(self, compare: Callable[[], bool]) -> str:
        """Return what differs in a batch on any rank; "" if nothing does.

        `compare`: returns whether results differ on this rank. With several ranks, the text names the first that
        differs. Raises the error of `compare`; if another rank raised one, OutOfMemory, the most likely one.
        """
        if not self._others:
            return DIFFERENT if compare() else ""
        try:
            flag = b"!" if compare() else b""
        except Exception:  # the other ranks wait for the flag of this one
            self._others.exchange(b"?")
            raise
        flags = self._others.exchange(flag)
        if b"?" in flags:
            raise OutOfMemory(f"rank {flags.index(b'?')} cannot compare the results")
        return f"{DIFFERENT} on rank {flags.index(b'!')}" if any(flags) else ""


def _common(starts: Sequence[TaskStart]) -> TaskStart:
    """Return the first failure, else a wait, else the step; -1 if the steps differ."""
    for kind in (TaskFailed, TaskWaits):
        if match := next((start for start in starts if isinstance(start, kind)), None):
            return match
    return starts[0] if len({*starts}) == 1 else -1
