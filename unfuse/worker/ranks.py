"""What the compute processes of a worker agree on, so that each carries out the same turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from unfuse.core.codec import decode, encode
from unfuse.core.messages import RankTimes, TaskFailed
from unfuse.worker.compute_messages import StepPlan, TaskWaits

TaskStart = TaskFailed | TaskWaits | int  # whether a rank can begin a task: the step at which it did, or why it did not


class RankExchange(Protocol):
    """All ranks, so many, of which this process is number `rank`. It has waited for them for so many seconds."""

    size: int
    rank: int
    waited_s: float

    def exchange(self, own: bytes) -> list[bytes]:
        """What each rank gives."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """A step that all ranks make: it raises on all of them if one cannot."""
        ...


class Ranks:
    """The ranks of a worker; this process is one of them, and the only one if there are no `others`.

    The first one leads: it decides the turns, which the others get through `send`, stores what is made, and reports.
    """

    def __init__(self, others: RankExchange | None = None, send: Callable[[StepPlan], object] = bool) -> None:
        self._others, self._send, self._stepped_s = others, send, 0.0
        self.size, self.leads = others.size if others else 1, not (others and others.rank)

    @property
    def exchange_s(self) -> float:
        """Seconds spent in exchanges with others so far."""
        return self._others.waited_s if self._others else 0.0

    @property
    def time(self) -> RankTimes:
        """Seconds of steps and exchanges so far; zeros if there is one rank."""
        return RankTimes(self._stepped_s, self.exchange_s)

    def tell(self, turn: StepPlan) -> None:
        """Have the other ranks carry out a turn."""
        if self._others and self.leads and turn != StepPlan():
            self._send(turn)

    def agree(self, starts: Sequence[TaskStart]) -> Sequence[TaskStart]:
        """What holds for all ranks: a task begins only where it does on each, at the same step."""
        if not (self._others and starts):
            return starts
        gathered = self._others.exchange(encode(list(starts)))
        theirs: list[list[TaskStart]] = [decode(one, list[TaskStart]) for one in gathered]
        return [_common(ranks) for ranks in zip(*theirs, strict=True)]

    @contextmanager
    def together(self) -> Iterator[None]:
        """A step that all ranks make."""
        if not self._others:
            yield
            return
        began, waited = time.monotonic(), self.exchange_s
        try:
            with self._others.together():
                yield
        finally:
            self._stepped_s += time.monotonic() - began - self.exchange_s + waited

    def blame(self, differing: int | None, look: Callable[[int], str]) -> str:
        """What makes a batch differ, as `look` finds out where one does; "" if none differs on any rank.

        Of several ranks nobody looks: computing once more would take all of them, and memory that differs is enough to
        end up here.
        """
        if not self._others:
            return "" if differing is None else look(differing)
        found = self._others.exchange(b"" if differing is None else b"!")
        return f"a function of rank {found.index(b'!')}" if any(found) else ""


def _common(starts: Sequence[TaskStart]) -> TaskStart:
    """The first failure, else a wait, else the step."""
    for kind in (TaskFailed, TaskWaits):
        if found := next((start for start in starts if isinstance(start, kind)), None):
            return found
    return starts[0] if len({*starts}) == 1 else -1
