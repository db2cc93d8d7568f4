"""What comparisons found about batch invariance: which batch sizes change the results of their requests."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import structlog

from unfuse.core.plan import readable_pool
from unfuse.weights.fingerprints import MAX_ENTRIES
from unfuse.worker.results_file import ResultsFile

log = structlog.get_logger(__name__)

#: Number of comparisons without a difference after which a batch size is trusted and no longer compared each time.
TRUSTED_AFTER = 3

#: Number of keys with a difference after which a pool shares no forwards exactly, and compares no more.
SETTLED_AFTER = 3

#: One of this many batches of a trusted size is compared again: a difference may be rare.
RECHECK_ONE_IN = 512

#: How a pool computes that is settled: each request alone, or as in a batched pool.
SettledMode = Literal["alone", "batched"]

#: What these modes mean, for the log.
SETTLED_MODES: Mapping[SettledMode, str] = {
    "alone": "each request has a forward of its own",
    "batched": "requests share forwards, with results equal within a tolerance",
}

#: The difference of a batch whose results do not equal those of its requests alone.
DIFFERENT = "results differ"

#: What tasks must have in common to share a forward. The first element is the pool.
Key = tuple[Hashable, ...]


class InvarianceResult(msgspec.Struct, frozen=True):
    """What comparisons of one batch size found (batch invariance)."""

    #: Number of comparisons without a difference.
    equal: int = 0

    #: What differed: DIFFERENT, or the error of the shared forward. Empty if nothing did. Files of older versions have
    #: the name of a function here, so the name of this field in the file has stayed.
    difference: str = msgspec.field(default="", name="variant_function")

    #: The pool whose batches were compared.
    pool: str = ""

    #: The batch size.
    size: int = 0

    #: Seconds of a step for one request alone, at the last comparison; 0: unknown.
    alone_s: float = 0.0

    #: Seconds of a step of this batch, divided by its size.
    together_s: float = 0.0

    @property
    def is_trusted(self) -> bool:
        """Whether requests may share a forward of this size."""
        return self.equal >= TRUSTED_AFTER and not self.difference


NOT_COMPARED = InvarianceResult()


class InvarianceResults:
    """The batch invariance results of one process, in a file shared with other processes.

    A key begins with a pool, followed by the properties that tasks of one batch have in common. Results are valid for
    one `scope`: the device, versions and settings under which they were found. Without a `file`, they end with the
    process. A file that cannot be read or written only costs comparisons. `chance` returns a random number from 0 to 1.

    A pool is settled once SETTLED_AFTER of its keys showed a difference. `or_batched`: requests of a settled pool share
    forwards as in a batched pool. Otherwise each has a forward of its own.
    """

    def __init__(
        self,
        file: Path | None,
        scope: str = "",
        chance: Callable[[], float] = random.random,
        *,
        or_batched: bool = False,
    ) -> None:
        self._file = ResultsFile(file, InvarianceResult)
        self._scope = scope
        self._chance = chance
        self._verdicts = self._file.read()

        #: How requests of a settled pool are computed.
        self.settled_mode: SettledMode = "batched" if or_batched else "alone"

        self._different_keys: defaultdict[str, set[str]] = defaultdict(set)
        for name, result in self._verdicts.items():
            if result.difference and name.startswith(f"{scope} (".strip()):
                self._different_keys[result.pool].add(name.rpartition(" ")[0])

    def all(self) -> Sequence[InvarianceResult]:
        """Return every result, of any scope."""
        return [*self._verdicts.values()]

    def find(self, key: Key, size: int) -> InvarianceResult:
        """Return the result for batches of this size; NOT_COMPARED without one."""
        return self._verdicts.get(self._name(key, size), NOT_COMPARED)

    def is_settled(self, pool: str) -> bool:
        """Whether so many keys of this pool showed a difference that it compares no more."""
        return len(self._different_keys[pool]) >= SETTLED_AFTER

    def settled_pools(self) -> Collection[str]:
        """Return the pools that are settled, on any device and with any settings."""
        keys = {
            (name.partition("(")[0], result.pool, name.rpartition(" ")[0])
            for name, result in self._verdicts.items()
            if result.difference
        }
        counts = Counter((scope, pool) for scope, pool, _ in keys)
        return {pool for (_, pool), count in counts.items() if count >= SETTLED_AFTER}

    def must_compare(self, key: Key, size: int) -> bool:
        """Whether the next batch of this size should be computed both ways.

        A size that is known to differ is not compared again.
        """
        result = self.find(key, size)
        return not result.difference and (not result.is_trusted or self._chance() * RECHECK_ONE_IN < 1)

    def largest(self, key: Key, size: int) -> int:
        """Return the largest of size, size/2, size/4, … not known to differ, or 0."""
        while size and self.find(key, size).difference:
            size //= 2
        return size

    def record(self, key: Key, size: int, difference: str, alone_s: float = 0.0, together_s: float = 0.0) -> None:
        """Store the result of a comparison.

        `difference`: DIFFERENT, or the error of the shared forward; "" for equal results. `alone_s`, `together_s`: the
        seconds of a step for one request, alone and in this batch.
        """
        before = self.find(key, size)
        after = InvarianceResult(before.equal + (not difference), difference, str(key[0]), size, alone_s, together_s)

        # The entry moves to the end, so that the first one is always the one that was compared longest ago.
        self._verdicts.pop(self._name(key, size), None)
        self._verdicts[self._name(key, size)] = after
        if len(self._verdicts) > MAX_ENTRIES:  # clients choose image sizes, and so the number of keys
            del self._verdicts[next(iter(self._verdicts))]

        if difference:
            fields = {"pool": readable_pool(str(key[0])), "key": str(key[1:]), "size": size}
            log.warning("a batch of this size changes the results of its requests", **fields, because_of=difference)
            self._count_difference(str(key[0]), self._name(key, size))

        # Only a change of trust is written, because each write replaces the whole file.
        if after.is_trusted != before.is_trusted or difference:
            self._file.write(self._name(key, size), after)

    def _count_difference(self, pool: str, name: str) -> None:
        """Count a key with a difference, and log if it settles the pool."""
        was_settled = self.is_settled(pool)
        self._different_keys[pool].add(name.rpartition(" ")[0])
        if self.is_settled(pool) and not was_settled:
            log.warning(
                "this pool compares no more batches",
                pool=readable_pool(pool),
                keys_with_a_difference=SETTLED_AFTER,
                from_now_on=SETTLED_MODES[self.settled_mode],
            )

    def _name(self, key: Key, size: int) -> str:
        return f"{self._scope} {key!r} {size}".strip()
