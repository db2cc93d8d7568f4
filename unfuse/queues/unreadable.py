"""What a queue that is elsewhere has met and could not read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from unfuse.core.errors import ProtocolError
from unfuse.queues.base import Damage
from unfuse.supervision.repeated_errors import RepeatedErrors

MOST = 1000
"""So many are remembered: whoever repairs a queue begins with those."""

T = TypeVar("T")


class Unreadable:
    """What was met of it, by kind and id. What is stored is the queue's own; this says where to look."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[str, str], str] = {}
        self._errors = RepeatedErrors()

    def sound(self, kind: str, id: str, read: Callable[[], T]) -> T | None:
        """What is read; nothing where that cannot be."""
        try:
            found = read()
        except (ProtocolError, TypeError, ValueError) as error:
            self.note(kind, id, str(error))
            return None
        self._reasons.pop((kind, id), None)
        return found

    def note(self, kind: str, id: str, reason: str) -> None:
        """This cannot be read."""
        self._errors.log(f"reading a {kind}", ProtocolError(reason), id=id)
        if len(self._reasons) < MOST:
            self._reasons[kind, id] = reason

    def forget(self, id: str) -> None:
        """It is gone."""
        self._reasons = {key: reason for key, reason in self._reasons.items() if key[1] != id}

    def all(self) -> list[Damage]:
        """All that was met."""
        return [Damage(id, kind, reason) for (kind, id), reason in self._reasons.items()]
