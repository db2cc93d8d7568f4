"""How far workers are with loading, by the log records that they write: in one line, or line by line."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from typing_extensions import override

from unfuse.arena.limits import readable_bytes

if TYPE_CHECKING:
    from unfuse.server.served_models import Phase

PHASES: tuple[Phase, ...] = ("starting", "fetching", "importing", "loading")
"""What a rank does before it is ready, in that order."""

EVERY_S = 5.0  # seconds between two lines
LOOK_S = 0.2  # seconds between two looks whether everything is loaded


class RankProgress(NamedTuple):
    """What a rank does before it is ready; `done` of `total` bytes are fetched, `rate` of them a second, or loaded."""

    phase: Phase
    done: int = 0
    total: int = 0
    rate: float = 0.0

    @property
    def order(self) -> tuple[int, int, int]:
        """A key that sorts earlier phases, and less progress, first."""
        return PHASES.index(self.phase), self.done, self.total

    def __str__(self) -> str:
        if self.phase == "fetching":
            from unfuse.weights.hub import DownloadProgress

            return f"fetches {DownloadProgress('', self.done, self.total, self.rate)}"
        return f"{readable_bytes(self.done)} of {readable_bytes(self.total)}" if self.phase == "loading" else self.phase


class LoadingProgress:
    """How far workers are with loading `models`, by their log records. As text it is the line to show, "" once all are
    ready. Records may be heard in another thread than it is asked in.
    """

    def __init__(self, models: Sequence[str]) -> None:
        self._models = ", ".join(models)
        self._roles: list[str] = []
        self._ranks: list[dict[str, RankProgress]] = []
        """Of each worker what its ranks do, none once it is ready."""
        self._ready: Callable[[], object] = bool
        self._was_over = False  # whether all have been ready; some may have been started again since

    def expect(self, roles: Sequence[str], ready: Callable[[], object] = bool) -> None:
        """Workers with these roles will be started; `ready` is called once, when all of them have loaded."""
        self._roles, self._ready = list(roles), ready
        self._ranks = [{"": RankProgress("starting")} for _ in roles]
        self._look()

    def hear(self, worker: int, record: Mapping[str, Any]) -> bool:
        """Read a log record of a worker, if it is one of these.

        Returns whether it is a part of the start, which the line shows, and not of a later one.
        """
        if worker >= len(self._ranks):
            return False
        is_first = not self._was_over
        match record:
            case {"event": "importing"}:
                self._note(worker, record, RankProgress("importing"))
            case {"event": "fetching", "done": int(done), "total": int(total), "rate": float(rate)}:
                self._note(worker, record, RankProgress("fetching", done, total, rate))
            case {"event": "loading" | "loaded", "done": int(done), "total": int(total)}:
                self._note(worker, record, RankProgress("loading", done, total))
            case {"event": "ready"}:
                self._ranks[worker] = {}
                self._look()
            case _:
                return False
        return is_first

    def earliest(self) -> RankProgress | None:
        """The earliest phase of any rank, with the bytes of all that are in it; None once all workers are ready."""
        ranks = [progress for worker in list(self._ranks) for progress in worker.values()]
        if not ranks:
            return None
        phase = min(ranks, key=lambda one: one.order).phase
        inside = [one for one in ranks if one.phase == phase]
        return RankProgress(phase, sum(one.done for one in inside), sum(one.total for one in inside))

    def _note(self, worker: int, record: Mapping[str, Any], progress: RankProgress) -> None:
        """Remember how far a rank is, in a new table, since another thread may read the old one."""
        rank = str(record.get("rank", ""))
        others = {name: one for name, one in self._ranks[worker].items() if rank and name}
        self._ranks[worker] = others | {rank: progress}

    def _look(self) -> None:
        if not any(self._ranks) and not self._was_over:
            self._was_over = True
            self._ready()

    @property
    def is_under_way(self) -> bool:
        """Whether workers are expected, and some have not loaded yet."""
        return any(self._ranks)

    def __str__(self) -> str:
        if self._roles and not self.is_under_way:
            return ""
        states = [min(ranks.values(), key=lambda one: one.order) if ranks else "ready" for ranks in self._ranks]
        counts = Counter(f"{role} {state}" for role, state in zip(self._roles, states, strict=True))
        parts = ", ".join(f"{part} (×{count})" if count > 1 else part for part, count in counts.items())
        return f"loading {self._models}: {parts}" if self._roles else f"looking into {self._models}"


class LoadLines(AbstractContextManager["LoadLines"]):
    """Says how far loading is for a program that has no terminal of its own: while it is open, `say` gets a line at
    once, every few seconds, and when all workers have loaded `model`.
    """

    def __init__(
        self,
        model: str,
        loading: LoadingProgress,
        say: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._loading, self._say, self._clock = model, loading, say, clock
        self._began = self._said_at = clock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unfuse-loading", daemon=True)

    @override
    def __enter__(self) -> Self:
        self._say(str(self._loading))
        self._thread.start()
        return self

    @override
    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def look(self) -> bool:
        """Say how far loading is, if a line is due. Returns whether there may be more to say."""
        now, state = self._clock(), str(self._loading)
        if not state:
            self._say(f"{self._model} is ready in {now - self._began:.0f} s")
            return False
        if now - self._said_at >= EVERY_S:
            self._say(f"{state} ({now - self._began:.0f} s)")
            self._said_at = now
        return True

    def _run(self) -> None:
        is_closed = False
        while self.look() and not is_closed:
            is_closed = self._closed.wait(LOOK_S)
