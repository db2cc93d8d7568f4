"""Remembers which records of a queue in Redis could not be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from unfuse.core.errors import ProtocolError
from unfuse.queues.base import Damage
from unfuse.supervision.supervisor import RepeatedErrors

MOST = 1000  # how many are remembered: enough to begin a repair

T = TypeVar("T")


class Unreadable:
    """Records that could not be read, by kind and id. The records themselves stay in Redis."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[str, str], str] = {}
        self._errors = RepeatedErrors()

    def read(self, kind: str, id: str, read: Callable[[], T]) -> T | None:
        """What `read` returns; None, and noted, if the record cannot be read."""
        try:
            found = read()
        except (ProtocolError, TypeError, ValueError) as error:
            self.note(kind, id, str(error))
            return None
        self._reasons.pop((kind, id), None)
        return found

    def note(self, kind: str, id: str, reason: str) -> None:
        """Log and remember a record that cannot be read."""
        self._errors.log(f"reading a {kind}", ProtocolError(reason), id=id)
        if len(self._reasons) < MOST:
            self._reasons[kind, id] = reason

    def forget(self, id: str) -> None:
        """Forget the records of this id, because they are gone."""
        self._reasons = {key: reason for key, reason in self._reasons.items() if key[1] != id}

    def all(self) -> list[Damage]:
        """All records that are remembered."""
        return [Damage(id, kind, reason) for (kind, id), reason in self._reasons.items()]
