"""Continuous batching: which tasks share the next forward.

A batch has the size at which a task is cheapest and that fits in memory. In exact pools it keeps the bytes of each
task (batch invariance).
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import structlog

from unfuse.core.compute_options import DEFAULT_MAX_BATCH
from unfuse.core.messages import BatchInvarianceStats
from unfuse.core.plan import readable_pool
from unfuse.core.retries import MEMORY, rule_of
from unfuse.stages.base import EncodedMedia, Stage
from unfuse.weights.fingerprints import MAX_ENTRIES, add_entry
from unfuse.worker.compute_messages import BatchMode
from unfuse.worker.job import Job
from unfuse.worker.ranks import Ranks

log = structlog.get_logger(__name__)

#: Number of comparisons without a difference after which a batch size is trusted and no longer compared each time.
TRUSTED_AFTER = 3

#: One of this many batches of a trusted size is compared again: a difference may be rare.
RECHECK_ONE_IN = 512

#: What tasks must have in common to share a forward. The first element is the pool.
Key = tuple[Hashable, ...]

UNKNOWN = "an unknown function"

#: Most tasks in one forward of a stage that has `all_together`.
LARGEST = 256

#: A larger batch is better if a task takes at most this share of its time in the smaller one.
GAIN = 0.95

#: Number of latest forwards of each size that are remembered.
SAMPLES = 5

#: A forward this many times longer or shorter than the median of its size may mean another load.
CHANGED = 1.5

#: When an unused size is tried again. The wait, in seconds of forwards, is at least RETRY_S and at least RETRY × loss ×
#: (remembered forwards)². So a size is tried again soon at first, and for a fortieth of the time once it is known.
#: The loss is what the size's tasks take longer than in the best size, and at least the share LEAST of their forward:
#: sizes that are about equal are not tried often.
RETRY_S = 1.0
RETRY = 1.6
LEAST = 0.5

#: Most keys whose batch sizes are remembered.
MAX_KEYS = 256


class InvarianceResult(msgspec.Struct, frozen=True):
    """What comparisons of one batch size found (batch invariance)."""

    #: Number of comparisons without a difference.
    equal: int = 0

    #: The function that made a difference. Empty if none did.
    variant_function: str = ""

    #: The pool whose batches were compared.
    pool: str = ""

    #: The batch size.
    size: int = 0

    @property
    def is_trusted(self) -> bool:
        """Whether requests may share a forward of this size."""
        return self.equal >= TRUSTED_AFTER and not self.variant_function


NOT_COMPARED = InvarianceResult()


class InvarianceResults:
    """The batch invariance results of one process, in a file shared with other processes.

    A key begins with a pool and has whatever else tasks must have in common. Results are valid for one `scope`: the
    device, versions and settings under which they were found. Without a `file`, they end with the process. A file
    that cannot be read or written only costs comparisons. `chance` returns a random number from 0 to 1.
    """

    def __init__(self, file: Path | None, scope: str = "", chance: Callable[[], float] = random.random) -> None:
        self._file = file
        self._scope = scope
        self._chance = chance
        self._verdicts = self._read()

    def all(self) -> Sequence[InvarianceResult]:
        """Return every result, of any scope."""
        return [*self._verdicts.values()]

    def find(self, key: Key, size: int) -> InvarianceResult:
        """Return the result for batches of this size; NOT_COMPARED without one."""
        return self._verdicts.get(self._name(key, size), NOT_COMPARED)

    def must_compare(self, key: Key, size: int) -> bool:
        """Whether the next batch of this size should be compared.

        Never, if it is known to differ.
        """
        verdict = self.find(key, size)
        return not verdict.variant_function and (not verdict.is_trusted or self._chance() * RECHECK_ONE_IN < 1)

    def largest(self, key: Key, size: int) -> int:
        """Return the largest of size, size/2, size/4, … not known to differ, or 0."""
        while size and self.find(key, size).variant_function:
            size //= 2
        return size

    def record(self, key: Key, size: int, blame: str) -> None:
        """Store the result of a comparison.

        `blame`: the function that made a difference, or the error of the shared forward; "" for equal results.
        """
        before = self.find(key, size)
        after = InvarianceResult(before.equal + (not blame), blame, str(key[0]), size)
        self._verdicts.pop(self._name(key, size), None)
        self._verdicts[self._name(key, size)] = after
        if len(self._verdicts) > MAX_ENTRIES:  # clients choose image sizes, and so the number of keys
            del self._verdicts[next(iter(self._verdicts))]
        if blame:
            about = {"pool": readable_pool(str(key[0])), "key": str(key[1:]), "size": size}
            log.warning("a batch of this size changes the results of its requests", **about, because_of=blame)
        if after.is_trusted != before.is_trusted or blame:
            self._write(self._name(key, size), after)

    def _name(self, key: Key, size: int) -> str:
        return f"{self._scope} {key!r} {size}".strip()

    def _read(self) -> dict[str, InvarianceResult]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, InvarianceResult]) if self._file else {}
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("the batch invariance results cannot be read", file=str(self._file), reason=str(error))
            return {}

    def _write(self, name: str, verdict: InvarianceResult) -> None:
        """Add a result to the file, and keep those that other processes added meanwhile."""
        if self._file is None:
            return
        try:
            add_entry(self._file, self._read, name, verdict)
        except OSError as error:
            log.warning("the batch invariance results cannot be written", file=str(self._file), reason=str(error))


def first_difference(alone: Sequence[Any], together: Sequence[Any]) -> int | None:
    """Return the first row whose result differs between alone and together, or None."""
    pairs = zip(alone, together, strict=True)
    return next((row for row, (single, shared) in enumerate(pairs) if not _equal(single, shared)), None)


def variant_function(stage: Stage, states: Sequence[Any], row: int) -> str:
    """Return the function that makes this row differ. Computes both forwards once more."""
    from unfuse.stages.batch_invariant_ops import first_difference

    return first_difference(lambda: stage.step_alone(states[row]), lambda: stage.step(states)) or UNKNOWN


def _equal(left: Any, right: Any) -> bool:
    """Whether two results, errors among them, are equal bit for bit."""
    if type(left) is not type(right):
        return False
    if hasattr(left, "untyped_storage"):  # a torch tensor
        return bool(left.shape == right.shape and left.dtype == right.dtype and _bytes(left) == _bytes(right))
    match left:
        case Exception():
            return str(left) == str(right)
        case np.ndarray():
            return bool(left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes())
        case dict():
            return left.keys() == right.keys() and all(map(_equal, left.values(), map(right.get, left)))
        case tuple() | list():
            return len(left) == len(right) and all(map(_equal, left, right))
        case msgspec.Struct() if not isinstance(left, EncodedMedia):
            return _equal(msgspec.structs.asdict(left), msgspec.structs.asdict(right))
    return bool(left == right)


def _bytes(tensor: Any) -> bytes:
    import torch

    flat = tensor.detach().cpu().contiguous().view(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


@dataclass
class _Key:
    """The measured batch sizes of one key."""

    #: The largest size that is tried.
    most: int

    #: By batch size, the latest forwards: (`spent` after it, its seconds for each task).
    samples: dict[int, deque[tuple[float, float]]] = field(default_factory=dict)

    #: Seconds of all forwards so far.
    spent: float = 0.0

    #: Sizes whose last forward took much longer than usual (1) or much shorter (-1).
    odd: dict[int, int] = field(default_factory=dict)

    def seconds(self, size: int) -> float:
        """Return the median seconds that a task takes in a forward of this size."""
        return median(seconds for _, seconds in self.samples[size])

    def best(self, sizes: list[int]) -> int:
        """Return the best measured size of these ascending sizes, or the last one."""
        best, *larger = [size for size in sizes if size in self.samples] or sizes[-1:]
        for size in larger:
            if self.seconds(size) <= GAIN * self.seconds(best):
                best = size
        return best

    def is_due(self, size: int, best: int) -> bool:
        """Return whether to try this size next instead of the best one.

        Always, if it was not measured yet.
        """
        if size not in self.samples:
            return True
        samples, seconds = self.samples[size], self.seconds(size)
        lost = size * max(seconds - self.seconds(best), LEAST * seconds)
        return self.spent - samples[-1][0] > max(RETRY_S, RETRY * len(samples) ** 2 * lost)

    def add(self, size: int, seconds: float) -> None:
        """Add a forward of this size with its seconds for each task.

        An unusual forward is ignored. A second one in the same direction means another load: then all samples are
        dropped but this one.
        """
        usual = self.seconds(size) if size in self.samples else seconds
        way = (seconds > CHANGED * usual) - (CHANGED * seconds < usual)
        self.spent += size * seconds

        if way and way == self.odd.get(size):
            self.samples.clear()
            self.odd.clear()
        elif way:
            self.odd[size] = way
            return

        self.odd.pop(size, None)
        self.samples.setdefault(size, deque(maxlen=SAMPLES)).append((self.spent, seconds))


class BatchSizes:
    """The best batch size of each key, by median seconds for a task.

    Sizes are 1, 2, 4, … and `most`, the largest. They are compared under one load. When two forwards of a size in a
    row show that the load has changed, all medians are dropped, and the sizes next to the one in use are tried again.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: dict[Hashable, _Key] = {}

    def size(self, key: Hashable, waiting: int) -> int:
        """Return how many of the `waiting` tasks of this key should share the next forward."""
        sizes_of_key = self._of(key)
        most = min(waiting, sizes_of_key.most)
        if not sizes_of_key.samples:
            return 1
        sizes = [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]
        if odd := sizes_of_key.odd.keys() & sizes:  # once more, to see whether it is another load
            return min(odd)

        best = sizes_of_key.best(sizes)
        index = sizes.index(best)
        neighbors = (*sizes[index + 1 : index + 2], *sizes[max(0, index - 1) : index])
        return next(
            (size for size in neighbors if best in sizes_of_key.samples and sizes_of_key.is_due(size, best)), best
        )

    def all(self, key: Hashable, waiting: int, most: int) -> int:
        """Return how many of the `waiting` tasks can share a forward, up to `most`.

        For stages that gain from having all tasks in each forward.
        """
        return min(waiting, self._of(key, most).most)

    def measured(self, key: Hashable, size: int, seconds: float) -> None:
        """Record that a batch of this size took so many seconds."""
        self._of(key).add(size, seconds / size)

    def too_large(self, key: Hashable, size: int) -> None:
        """Limit this key to half of `size`, which needs too much memory or changes bytes."""
        sizes_of_key = self._of(key)
        sizes_of_key.most = max(1, min(sizes_of_key.most, size // 2))

    def _of(self, key: Hashable, most: int = 0) -> _Key:
        entry = self._keys.pop(key, None) or _Key(most or self._most)
        self._keys[key] = entry
        if len(self._keys) > MAX_KEYS:
            del self._keys[next(iter(self._keys))]
        return entry


class Batches:
    """Picks the tasks of the next forward, and computes it (continuous batching).

    - `most`: most tasks in a forward; 0 means the default.
    - `exactness`: with it, a task gets the bytes that it has alone (batch invariance): it shares a forward only where
      comparisons have shown that.
    - `sharing` says by pool how requests share forwards in an exact pool, as far as it was compared.
    """

    def __init__(self, most: int, exactness: InvarianceResults | None, ranks: Ranks) -> None:
        usual = most or DEFAULT_MAX_BATCH
        few = 1 << (usual.bit_length() - 1)  # in an exact pool powers of two only, so that there are few comparisons
        self.sizes, self._most = BatchSizes(few if exactness else usual), most
        self._exactness, self._ranks = exactness, ranks
        self._turns, self._turn = dict[str, int](), 0
        self.sharing: dict[str, BatchInvarianceStats] = {}

    def pick(self, jobs: Collection[Job]) -> tuple[list[Job], BatchMode]:
        """Return the next batch and how to compute it.

        The batch is the first task in order and the tasks that may share its forward. Tasks that wait for something
        are picked only if all do: their step then checks whether the wait is over.
        """
        jobs = [job for job in jobs if not job.stage.waits(job.state)] or jobs
        first = min(jobs, key=self._sort_key)
        self._turn += 1
        self._turns[first.lease.task.planned.pool] = first.turn = self._turn
        if first.runs_alone:
            return [first], "alone"
        same = first.key, first.priority, False
        mates = [job for job in jobs if (job.key, job.priority, job.runs_alone) == same]
        if self._exactness is None and first.stage.all_together:
            return mates[: self.sizes.all(first.key, len(mates), self._most or LARGEST)], "together"
        if self._exactness is None:
            return mates[: self.sizes.size(first.key, len(mates))], "together"
        exact_key, size = first.key[-1], self.sizes.size(first.key, 1 << (len(mates).bit_length() - 1))
        best = 0 if exact_key is None else self._exactness.largest(first.key, size)
        if best < size and exact_key is not None:
            self._record_sharing(
                first,
                BatchInvarianceStats(variant_functions={size: self._exactness.find(first.key, size).variant_function}),
            )
            self.sizes.too_large(first.key, size)
        if best == 0 or (best == 1 and not first.stage.differs_alone):
            return [first], "alone"
        if self._exactness.must_compare(first.key, best):
            return mates[:best], "compared"
        self._record_sharing(first, BatchInvarianceStats(best))
        return mates[:best], "together"

    def compute(self, batch: list[Job], how: BatchMode) -> list[tuple[Job, Any]]:
        """Compute a step of a batch.

        Returns each job with the result for its stage, or an error.

        Jobs whose batch failed together are left out: they are tried again, alone or in a smaller batch.
        """
        stage = batch[0].stage
        key = batch[0].key
        states = [job.state for job in batch]
        began = time.monotonic()
        waited = self._ranks.exchange_s
        size = len(batch) if how == "together" else 1
        try:
            results = (
                self._step(stage.step, states)
                if how == "together"
                else [self._step(stage.step_alone, state) for state in states]
            )
        except Exception as error:  # an error of one task must not end the process
            return self._handle_failure(batch, error, how)
        seconds, waited = time.monotonic() - began, self._ranks.exchange_s - waited
        self.sizes.measured(key, size, seconds * size / len(batch))
        for job in batch:
            job.run_s = job.run_s + seconds
            job.steps = job.steps + 1
            job.batch_size_sum = job.batch_size_sum + size
            job.share_s += seconds / len(batch)
            job.exchange_s += waited
        if how == "compared":
            self._compare(batch, results)
        return [*zip(batch, results, strict=True)]

    def _sort_key(self, job: Job) -> tuple[int, bool, bool, int, int]:
        """Return the sort key of a job: priority, single-step stages, final stages, then round-robin.

        Single-step stages go first, and of either kind those that end requests, so that the others share forwards
        that are as large as possible; slots bound how long they wait. Pools go round-robin. Text pools are not
        preferred for being final, or decode would starve the prefill of a long prompt. A single-step task that has
        already stepped in vain, such as a prompt without room in the KV cache, loses its preference, or it would
        starve the texts whose end makes room. Texts that may not share a forward go round-robin, too.
        """
        task, steps = job.lease.task, job.stage.progress(job.state)[1]
        soon = task.planned.final or job.stage.texts is not None
        own_turn = job.turn if self._exactness and job.stage.all_together else 0
        return -job.priority, steps > 1 or job.steps > 0, not soon, self._turns.get(task.planned.pool, 0), own_turn

    def _record_sharing(self, job: Job, stats: BatchInvarianceStats) -> None:
        """Add to the invariance results of the job's pool."""
        pool = job.lease.task.planned.pool
        known = self.sharing.get(pool, BatchInvarianceStats())
        if known | stats != known:
            self.sharing[pool] = known | stats

    def _step(self, compute: Callable[[Any], Any], states: Any) -> Any:
        """Compute a step on every rank."""
        with self._ranks.together():
            return compute(states)

    def _compare(self, batch: list[Job], alone: Sequence[Any]) -> None:
        """Compute a step once more, together, and store whether the results differ.

        `alone`: the results of the jobs alone. An error counts as a difference; if memory runs out, only the batch size
        is limited.
        """
        stage = batch[0].stage
        key = batch[0].key
        states = [job.state for job in batch]
        began = time.monotonic()
        try:
            together = self._step(stage.step, states)
            self.sizes.measured(key, len(batch), time.monotonic() - began)
            blame = self._ranks.variant_function(
                first_difference(alone, together), partial(variant_function, stage, states)
            )
        except Exception as error:  # the tasks go on with their results alone
            if rule_of(error) is MEMORY:
                self.sizes.too_large(key, len(batch))
                return
            blame = f"{type(error).__name__}: {error}"
        if self._exactness:
            self._exactness.record(key, len(batch), blame)

    def _handle_failure(self, batch: list[Job], error: Exception, how: BatchMode) -> list[tuple[Job, Any]]:
        """Handle a failed forward: limit the batch size, or run its jobs alone.

        Returns the error for a job that was alone already.
        """
        if len(batch) == 1 and (how == "alone" or not batch[0].stage.differs_alone):
            return [(batch[0], error)]
        if len(batch) > 1 and rule_of(error) is MEMORY:
            self.sizes.too_large(batch[0].key, len(batch))
        else:
            for job in batch:
                job.runs_alone = True
        return []
