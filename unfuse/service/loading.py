"""Track the loading progress of workers from their log records, and show it as text."""

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

#: The phases of a rank before it is ready, in order.
PHASES: tuple[Phase, ...] = ("starting", "fetching", "importing", "loading")

EVERY_S = 5.0  # seconds between two lines of `LoadLines`
CHECK_INTERVAL_S = 0.2  # seconds between two checks whether all workers have loaded


class RankProgress(NamedTuple):
    """The phase of a rank that is not ready yet, and its progress in it."""

    #: One of PHASES.
    phase: Phase

    #: Bytes of weights that were fetched or loaded so far; 0 in other phases.
    done: int = 0

    #: Bytes of weights to fetch or load in total; 0 in other phases.
    total: int = 0

    #: Bytes fetched per second; 0 in other phases.
    rate: float = 0.0

    @property
    def order(self) -> tuple[int, int, int]:
        """The sort key that puts earlier phases first, and less progress within a phase."""
        return PHASES.index(self.phase), self.done, self.total

    def __str__(self) -> str:
        if self.phase == "fetching":
            from unfuse.weights.hub import DownloadProgress

            return f"downloading {DownloadProgress('', self.done, self.total, self.rate)}"
        return f"{readable_bytes(self.done)} of {readable_bytes(self.total)}" if self.phase == "loading" else self.phase


class LoadingProgress:
    """The loading progress of the workers of `models`, from their log records.

    As text, it is a line for users, or "" once all workers are ready. `record` may be called in another thread than the
    other methods.
    """

    def __init__(self, models: Sequence[str]) -> None:
        self._models = ", ".join(models)
        self._roles: list[str] = []
        #: The progress of each worker's ranks by rank; empty once the worker is ready.
        self._ranks: list[dict[str, RankProgress]] = []
        #: Called once all workers are ready. bool() does nothing.
        self._on_ready: Callable[[], object] = bool
        #: Whether all workers were ready once. Some may have been restarted since.
        self._was_over = False

    def expect_workers(self, roles: Sequence[str], on_ready: Callable[[], object] = bool) -> None:
        """Start to track workers with these roles.

        `on_ready`: called once, when all of them have loaded.
        """
        self._roles = list(roles)
        self._on_ready = on_ready
        self._ranks = [{"": RankProgress("starting")} for _ in roles]
        self._check_ready()

    def record(self, worker: int, record: Mapping[str, Any]) -> bool:
        """Record the progress that a worker's log record reports.

        Returns whether the record is shown as progress. That is so for progress records of the first start.
        """
        if worker >= len(self._ranks):  # the fork server, or a worker of a model that was added later
            return False
        is_first_start = not self._was_over
        match record:
            case {"event": "importing"}:
                self._set_progress(worker, record, RankProgress("importing"))
            case {"event": "fetching", "done": int(done), "total": int(total), "rate": float(rate)}:
                self._set_progress(worker, record, RankProgress("fetching", done, total, rate))
            case {"event": "loading" | "loaded", "done": int(done), "total": int(total)}:
                self._set_progress(worker, record, RankProgress("loading", done, total))
            case {"event": "ready"}:
                self._ranks[worker] = {}
                self._check_ready()
            case _:
                return False
        return is_first_start

    def earliest(self) -> RankProgress | None:
        """Return the earliest phase of any rank; None once all workers are ready.

        The bytes are the sums over all ranks in that phase.
        """
        ranks = [progress for worker in list(self._ranks) for progress in worker.values()]
        if not ranks:
            return None
        phase = min(ranks, key=lambda rank: rank.order).phase
        in_phase = [rank for rank in ranks if rank.phase == phase]
        return RankProgress(phase, sum(rank.done for rank in in_phase), sum(rank.total for rank in in_phase))

    def _set_progress(self, worker: int, record: Mapping[str, Any], progress: RankProgress) -> None:
        """Set the progress of a rank.

        The table is replaced, since another thread may read the old one.
        """
        rank = str(record.get("rank", ""))
        # A record without a rank is about the whole worker, and the first one of a rank replaces it.
        others = {name: other for name, other in self._ranks[worker].items() if rank and name}
        self._ranks[worker] = others | {rank: progress}

    def _check_ready(self) -> None:
        """Call `ready` once, when all workers are ready for the first time."""
        if not any(self._ranks) and not self._was_over:
            self._was_over = True
            self._on_ready()

    @property
    def is_under_way(self) -> bool:
        """Whether some expected workers have not loaded yet."""
        return any(self._ranks)

    def __str__(self) -> str:
        if self._roles and not self.is_under_way:
            return ""
        states = [min(ranks.values(), key=lambda rank: rank.order) if ranks else "ready" for ranks in self._ranks]
        counts = Counter(f"{role} {state}" for role, state in zip(self._roles, states, strict=True))
        parts = ", ".join(f"{part} (×{count})" if count > 1 else part for part, count in counts.items())
        return f"loading {self._models}: {parts}" if self._roles else f"inspecting {self._models}"


class LoadLines(AbstractContextManager["LoadLines"]):
    """Writes loading progress as lines, for a program without a terminal.

    While it is open, it writes a line at once, one every EVERY_S seconds, and one when all workers are ready.

    `model`: the name of the model in the last line.
    `loading`: the progress to write.
    `write_line`: called with each line, in another thread for all but the first.
    `clock`: returns the time in seconds.
    """

    def __init__(
        self,
        model: str,
        loading: LoadingProgress,
        write_line: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._loading = loading
        self._write_line = write_line
        self._clock = clock
        self._started_at = clock()
        self._last_line_at = self._started_at
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unfuse-loading", daemon=True)

    @override
    def __enter__(self) -> Self:
        self._write_line(str(self._loading))
        self._thread.start()
        return self

    @override
    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def write_if_due(self) -> bool:
        """Write a line if one is due. Returns False once all workers are ready."""
        now, state = self._clock(), str(self._loading)
        if not state:
            self._write_line(f"{self._model} is ready in {now - self._started_at:.0f} s")
            return False
        if now - self._last_line_at >= EVERY_S:
            self._write_line(f"{state} ({now - self._started_at:.0f} s)")
            self._last_line_at = now
        return True

    def _run(self) -> None:
        """Write lines until the last one, or until this is closed."""
        # After `close` there is one more call, for a last line that became due meanwhile.
        is_closed = False
        while self.write_if_due() and not is_closed:
            is_closed = self._closed.wait(CHECK_INTERVAL_S)
