"""Shows in one line how far the workers of this process are with loading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unfuse.arena.limits import readable_bytes

STARTING, READY = "starting", "ready"
IMPORTING = (-1, 0)  # where a rank is before it loads: behind those that have loaded so many bytes, of so many


class Loading:
    """How far workers are with loading `models`, by the log records of each worker."""

    def __init__(self, models: Sequence[str]) -> None:
        self._models = ", ".join(models)
        self._roles: list[str] = []
        self._states: list[str] = []
        self._ranks: list[dict[str, tuple[int, int]]] = []
        self._ready: Callable[[], object] = bool
        self._was_over = False  # whether all have been ready; some may have been started again since

    def expect(self, roles: Sequence[str], ready: Callable[[], object] = bool) -> None:
        """Workers with these roles will be started; `ready` is called once, when all of them have loaded."""
        self._roles, self._states, self._ready = list(roles), [STARTING] * len(roles), ready
        self._ranks = [{} for _ in roles]
        self._look()

    def hear(self, worker: int, record: Mapping[str, Any]) -> bool:
        """Read a log record of a worker, if it is one of these. Of its ranks the last one counts.

        Returns whether it is a part of the start, which the line shows, and not of a later one.
        """
        if worker >= len(self._states):
            return False
        is_first = not self._was_over
        match record:
            case {"event": "importing"}:
                self._heard(worker, record, IMPORTING)
            case {"event": "fetching", "done": int(done), "total": int(total), "rate": float(rate)}:
                from unfuse.weights.hub import Brought

                self._states[worker] = f"fetches {Brought('', done, total, rate)}"
            case {"event": "loading" | "loaded", "done": int(done), "total": int(total)}:
                self._heard(worker, record, (done, total))
            case {"event": "ready"}:
                self._states[worker] = READY
                self._look()
            case _:
                return False
        return is_first

    def _heard(self, worker: int, record: Mapping[str, Any], loaded: tuple[int, int]) -> None:
        self._ranks[worker][str(record.get("rank"))] = loaded
        last = min(self._ranks[worker].values())
        done, total = map(readable_bytes, last)
        self._states[worker] = "importing" if last == IMPORTING else f"{done} of {total}"

    def _look(self) -> None:
        if self._is_over and not self._was_over:
            self._was_over = True
            self._ready()

    @property
    def is_under_way(self) -> bool:
        """Whether workers are expected, and some have not loaded yet."""
        return bool(self._roles) and not self._is_over

    @property
    def _is_over(self) -> bool:
        return all(state == READY for state in self._states)

    def __str__(self) -> str:
        """The line to show; "" once everything is loaded."""
        if self._roles and self._is_over:
            return ""
        counts = Counter(f"{role} {state}" for role, state in zip(self._roles, self._states, strict=True))
        parts = ", ".join(f"{part} (×{count})" if count > 1 else part for part, count in counts.items())
        return f"loading {self._models}: {parts}" if self._roles else f"looking into {self._models}"
