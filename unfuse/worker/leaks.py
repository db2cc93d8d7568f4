"""Finds memory that a worker without a task holds for nobody, so that a leak is a line of the log and a metric."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import structlog

from unfuse.core.messages import Memory
from unfuse.worker.compute_messages import Leak, LeaksFound

if TYPE_CHECKING:
    from unfuse.stages.base import HasTexts, Stage
    from unfuse.stores.tensor_store import TensorStore
    from unfuse.worker.objects import Objects

log = structlog.get_logger(__name__)

MOST_LINES = 32  # leaks that are logged by name at a time


class ComputeLeakCheck:
    """Finds what a compute process without a task holds: keys and values, and inputs that are still mapped.

    With `frees`, it ends sequences that were left: no state exists that could use them. Ranks must not, since all of
    them have to have the same blocks, and one may not have what another one leaks. Inputs stay, because an array that
    is still used may lie there. `send` gets each leak once.
    """

    def __init__(
        self,
        stages: Iterable[Stage],
        store: TensorStore,
        send: Callable[[LeaksFound], object],
        *,
        frees: bool,
    ) -> None:
        found = (stage.texts for stage in stages)
        self._texts: list[HasTexts] = [*{id(texts): texts for texts in found if texts is not None}.values()]
        self._store, self._send, self._frees = store, send, frees
        self._known = frozenset[tuple[int, str]]()

    def look(self) -> None:
        """Look for leaks. To be called only while the process has no task, and takes no input of one."""
        new = self._leftovers().keys() - self._known
        if not new:
            return

        gc.collect()  # what is garbage only waits to be freed
        leftovers = {key: found for key, found in self._leftovers().items() if key in new}
        for texts in self._texts if self._frees else ():
            texts.end_all()
        self._known = frozenset(self._leftovers())

        leaks = [Leak(memory, key[1], nbytes, key not in self._known) for key, (memory, nbytes) in leftovers.items()]
        if leaks:
            self._send(LeaksFound(tuple(leaks)))

    def _leftovers(self) -> dict[tuple[int, str], tuple[Memory, int]]:
        """Memory and bytes of what is held now, by the number of the holder and a name."""
        found = dict[tuple[int, str], tuple[Memory, int]]()
        for number, texts in enumerate(self._texts):
            for name, nbytes in texts.leftovers().items():
                found[number, name] = "kv", nbytes
        for ref in self._store.held():
            found[-1, f"an input, object {ref.id} of {ref.request}, {ref.stage}"] = "arena", ref.nbytes
        return found


class WorkerLeakCheck:
    """Finds what lies in the arena of a worker without a task and has no owner; logs and counts all its leaks.

    What is found at two looks in a row is a leak. Copies of inputs are freed, since no task here can read them, and
    readers elsewhere hold what they read. Other objects stay, because whoever leaks them may still write there.
    """

    def __init__(self) -> None:
        self._suspects, self._reported = frozenset[str](), frozenset[str]()
        self._bytes = Counter[Memory]()

    def look(self, objects: Objects, *, idle: bool) -> None:
        """Look for leaks in the arena, if the worker is `idle`: it has no task, and none of which it still reports."""
        unowned = objects.unowned() if idle else {}
        confirmed = unowned.keys() & self._suspects - self._reported
        self.found(Leak("arena", name, unowned[name], objects.free_copy(name)) for name in sorted(confirmed))
        self._reported = (self._reported | confirmed) & unowned.keys() if idle else self._reported
        self._suspects = frozenset(unowned)

    def found(self, leaks: Iterable[Leak]) -> None:
        """Log leaks, and count their bytes. Of very many, the rest is one line."""
        found = [*leaks]
        for leak in found:
            self._bytes[leak.memory] += leak.bytes
        for leak in found[:MOST_LINES]:
            about = {"memory": leak.memory, "what": leak.name, "bytes": leak.bytes, "freed": leak.freed}
            log.warning("memory leak in a worker without tasks", **about)
        if rest := found[MOST_LINES:]:
            log.warning("more leaks in a worker without tasks", number=len(rest), bytes=sum(one.bytes for one in rest))

    def take(self) -> dict[Memory, int]:
        """Return the bytes that were found since the last call, for a heartbeat."""
        taken, self._bytes = dict(self._bytes), Counter[Memory]()
        return taken

    def put_back(self, taken: Mapping[Memory, int]) -> None:
        """Count again what could not be reported."""
        self._bytes.update(taken)
