"""What the compute processes of a worker agree on, so that each carries out the same turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from typing_extensions import override

from unfuse.core.codec import decode, encode
from unfuse.core.messages import Failed, Spent
from unfuse.worker.compute_messages import Turn, Waits

Verdict = Failed | Waits | int  # whether a rank can begin a task: the step at which it did, or why it did not


class Exchange(Protocol):
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
    """The only rank of a worker."""

    leads = True  # whether this one decides the turns, stores what is made, and reports

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return 1

    @property
    def exchange_s(self) -> float:
        """Seconds spent in exchanges with others so far."""
        return 0.0

    @property
    def time(self) -> Spent:
        """Seconds of steps and exchanges so far; zeros if there is one rank."""
        return Spent()

    def tell(self, turn: Turn) -> None:
        """Have the other ranks carry out a turn."""

    def agree(self, verdicts: Sequence[Verdict]) -> Sequence[Verdict]:
        """What holds for all ranks: a task begins only where it does on each, at the same step."""
        return verdicts

    def together(self) -> AbstractContextManager[None]:
        """A step that all ranks make."""
        return nullcontext()

    def blame(self, differing: int | None, look: Callable[[int], str]) -> str:
        """What makes a batch differ, as `look` finds out where one does; "" if none differs on any rank."""
        return "" if differing is None else look(differing)


class SeveralRanks(Ranks):
    """One of several; the first one leads, and tells the others through `send`."""

    def __init__(self, others: Exchange, send: Callable[[Turn], None]) -> None:
        self._others, self._send, self.leads = others, send, others.rank == 0
        self._stepped_s = 0.0

    @property
    @override
    def size(self) -> int:
        return self._others.size

    @property
    @override
    def exchange_s(self) -> float:
        return self._others.waited_s

    @property
    @override
    def time(self) -> Spent:
        return Spent(self._stepped_s, self.exchange_s)

    @override
    def tell(self, turn: Turn) -> None:
        if self.leads and turn != Turn():
            self._send(turn)

    @override
    def agree(self, verdicts: Sequence[Verdict]) -> Sequence[Verdict]:
        if not verdicts:
            return verdicts
        said = self._others.exchange(encode(list(verdicts)))
        theirs: list[list[Verdict]] = [decode(one, list[Verdict]) for one in said]
        return [_common(ranks) for ranks in zip(*theirs, strict=True)]

    @override
    @contextmanager
    def together(self) -> Iterator[None]:
        began, waited = time.monotonic(), self.exchange_s
        try:
            with self._others.together():
                yield
        finally:
            self._stepped_s += time.monotonic() - began - self.exchange_s + waited

    @override
    def blame(self, differing: int | None, look: Callable[[int], str]) -> str:
        """Nobody looks: computing once more would take all ranks, and memory that differs is enough to end up here."""
        found = self._others.exchange(b"" if differing is None else b"!")
        return f"a function of rank {found.index(b'!')}" if any(found) else ""


def _common(verdicts: Sequence[Verdict]) -> Verdict:
    """The first failure, else a wait, else the step."""
    for kind in (Failed, Waits):
        if found := next((verdict for verdict in verdicts if isinstance(verdict, kind)), None):
            return found
    return verdicts[0] if len({*verdicts}) == 1 else -1
