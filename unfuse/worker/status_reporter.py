"""Report the status and the leaks of a compute process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping

import structlog

from unfuse.core.messages import Memory
from unfuse.core.text import TextStats
from unfuse.core.worker_status import BatchInvarianceStats
from unfuse.stages.base import ReportsTextStats, Stage
from unfuse.stores.tensor_store import TensorStore
from unfuse.worker import compute_messages as messages
from unfuse.worker.ranks import Ranks

log = structlog.get_logger(__name__)


#: Least seconds between two status reports of a busy process.
REPORT_S = 0.25


def text_stats(stages: Iterable[Stage]) -> list[ReportsTextStats]:
    """Return the text statistics of these stages, each object once, also if stages share it."""
    return [*{id(texts): texts for stage in stages if (texts := stage.texts) is not None}.values()]


class ComputeLeakCheck:
    """Finds memory leaks of a compute process without tasks: KV cache blocks and mapped inputs.

    `send` gets each leak once. With `frees`, the check frees the KV of leaked sequences, since no task exists that
    could use it. Several ranks must not free it: all ranks need equal blocks, and another rank may not have this leak.
    Inputs stay mapped, because an array over them may be in use.
    """

    def __init__(
        self,
        stages: Iterable[Stage],
        store: TensorStore,
        send: Callable[[messages.LeaksFound], object],
        *,
        frees: bool,
    ) -> None:
        self._texts = text_stats(stages)
        self._store = store
        self._send = send
        self._frees = frees
        self._known = frozenset[tuple[int, str]]()

    def check(self) -> None:
        """Look for leaks, only while the process has no task and receives no input."""
        new = self._leftovers().keys() - self._known
        if not new:
            return

        gc.collect()  # garbage is no leak: it is only not freed yet
        leftovers = {key: leftover for key, leftover in self._leftovers().items() if key in new}
        for texts in self._texts if self._frees else ():
            texts.end_all()
        self._known = frozenset(self._leftovers())

        leaks = [
            messages.Leak(memory, key[1], nbytes, key not in self._known) for key, (memory, nbytes) in leftovers.items()
        ]
        if leaks:
            self._send(messages.LeaksFound(tuple(leaks)))

    def _leftovers(self) -> dict[tuple[int, str], tuple[Memory, int]]:
        """Return kind and bytes of the memory in use, by (owner, name).

        The owner is an index in the text statistics, or -1 for the tensor store.
        """
        leftovers = dict[tuple[int, str], tuple[Memory, int]]()
        for index, texts in enumerate(self._texts):
            for name, nbytes in texts.leftovers().items():
                leftovers[index, name] = "kv", nbytes
        for ref in self._store.open_refs():
            leftovers[-1, f"input object {ref.id} of {ref.request}, {ref.stage}"] = "arena", ref.nbytes
        return leftovers


class StatusReporter:
    """Sends the status of a compute process when it has changed.

    `sharing` is `Batches.sharing`. `device_memory` returns the bytes that the process uses on a GPU. Only the first
    rank reports text statistics, because all ranks have the same KV blocks.
    """

    def __init__(
        self,
        stages: Iterable[Stage],
        sharing: Mapping[str, BatchInvarianceStats],
        ranks: Ranks,
        device_memory: Callable[[], int],
        send: Callable[[messages.RankStatus], object],
    ) -> None:
        self._texts = text_stats(stages) if ranks.leads else []
        self._sharing, self._ranks = sharing, ranks
        self._device_memory, self._send = device_memory, send
        self._last, self._reported_at = messages.RankStatus(), 0.0

    def report(self, *, busy: bool) -> None:
        """Report now unless `busy`, else at most every REPORT_S seconds."""
        now = time.monotonic()
        if busy and now - self._reported_at < REPORT_S:
            return
        status = messages.RankStatus(
            time=self._ranks.time,
            device_memory=self._device_memory(),
            texts=sum((texts.load() for texts in self._texts), TextStats()) if self._texts else None,
            retracted=sum(texts.retracted for texts in self._texts),
            batch_invariance=dict(self._sharing),
        )
        if status != self._last:
            self._send(status)
        self._last, self._reported_at = status, now
