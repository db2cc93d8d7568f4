"""How far the workers of one plan are with loading, and why they could not start, by the lines that they write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from unfuse.server.gateway import JoinProgress, Phase
from unfuse.worker.records import read_record

LAST_WORDS = b"unfuse: "
"""What the line begins with in which a command says why it ends."""

PHASES = get_args(Phase)


class StartProgress:
    """The progress of so many workers; lines may be heard in another thread than it is asked in."""

    def __init__(self, workers: int) -> None:
        self.reason = ""  # why a worker could not start, in its own words; "" if none has said so
        self._workers: list[dict[str, JoinProgress]] = [{"": JoinProgress("starting")} for _ in range(workers)]

    def hear(self, worker: int, line: bytes) -> None:
        """Read a line of a worker, if it says how far it is, or why it ends."""
        if line.startswith(LAST_WORDS):
            self.reason = line.removeprefix(LAST_WORDS).decode(errors="replace").strip()
        record = read_record(line) if worker < len(self._workers) else None
        if record is None:
            return
        match record:
            case {"event": "ready"}:
                self._workers[worker] = {}
            case {"event": "importing"}:
                self._note(worker, record, JoinProgress("importing"))
            case {"event": "fetching", "done": int(done), "total": int(total)}:
                self._note(worker, record, JoinProgress("fetching", done, total))
            case {"event": "loading" | "loaded", "done": int(done), "total": int(total)}:
                self._note(worker, record, JoinProgress("loading", done, total))

    def now(self) -> JoinProgress | None:
        """The earliest phase of any rank, with bytes; None once all workers are ready."""
        ranks = [progress for worker in list(self._workers) for progress in list(worker.values())]
        if not ranks:
            return None
        phase = min((one.phase for one in ranks), key=PHASES.index)
        inside = [one for one in ranks if one.phase == phase]
        return JoinProgress(phase, sum(one.done for one in inside), sum(one.total for one in inside))

    def _note(self, worker: int, record: Mapping[str, Any], progress: JoinProgress) -> None:
        """Remember how far a rank is, in a new table, since another thread may read the old one."""
        rank = str(record.get("rank", ""))
        others = {name: one for name, one in self._workers[worker].items() if rank and name}
        self._workers[worker] = others | {rank: progress}
