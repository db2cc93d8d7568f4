"""What decoding needs to know of grammars: which tokens may come next. Who finds that out does so beside the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Constraint(Protocol):
    """A text that has to match a grammar, and is followed somewhere else."""

    @property
    def compiling(self) -> bool:
        """Whether its grammar is not compiled yet."""

    def begin(self, ids: Sequence[int]) -> None:
        """Have it found out, meanwhile, what may follow these ids."""

    def waits(self, wait_s: float = 0.0) -> bool:
        """Whether that is overdue, also after so many seconds."""

    def allowed(self, ids: Sequence[int]) -> bytes | None:
        """A bit for each token, set if it may follow these ids; None if that is overdue. Raises PermanentError."""

    def close(self) -> None:
        """The text is over."""


class Grammars(Protocol):
    """What follows texts by their grammars."""

    def open(self, grammar: bytes) -> Constraint:
        """A new text, which has to match this grammar."""
