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
from unfuse.core.retries import is_out_of_memory
from unfuse.stages.base import EncodedMedia, Stage
from unfuse.weights.fingerprints import MAX_ENTRIES, add_entry
from unfuse.worker.compute_messages import BatchMode
from unfuse.worker.job import Job
from unfuse.worker.memory_ladder import MemoryLadder
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

    A key begins with a pool, followed by the properties that tasks of one batch have in common. Results are valid for
    one `scope`: the device, versions and settings under which they were found. Without a `file`, they end with the
    process. A file that cannot be read or written only costs comparisons. `chance` returns a random number from 0 to 1.
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
        """Whether the next batch of this size should be computed both ways.

        A size that is known to differ is not compared again.
        """
        result = self.find(key, size)
        return not result.variant_function and (not result.is_trusted or self._chance() * RECHECK_ONE_IN < 1)

    def largest(self, key: Key, size: int) -> int:
        """Return the largest of size, size/2, size/4, … not known to differ, or 0."""
        while size and self.find(key, size).variant_function:
            size //= 2
        return size

    def record(self, key: Key, size: int, cause: str) -> None:
        """Store the result of a comparison.

        `cause`: the function that made a difference, or the error of the shared forward; "" for equal results.
        """
        before = self.find(key, size)
        after = InvarianceResult(before.equal + (not cause), cause, str(key[0]), size)

        # The entry moves to the end, so that the first one is always the one that was compared longest ago.
        self._verdicts.pop(self._name(key, size), None)
        self._verdicts[self._name(key, size)] = after
        if len(self._verdicts) > MAX_ENTRIES:  # clients choose image sizes, and so the number of keys
            del self._verdicts[next(iter(self._verdicts))]

        if cause:
            fields = {"pool": readable_pool(str(key[0])), "key": str(key[1:]), "size": size}
            log.warning("a batch of this size changes the results of its requests", **fields, because_of=cause)

        # Only a change of trust is written, because each write replaces the whole file.
        if after.is_trusted != before.is_trusted or cause:
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

    def _write(self, name: str, result: InvarianceResult) -> None:
        """Add a result to the file. Results that other processes added meanwhile stay."""
        if self._file is None:
            return
        try:
            add_entry(self._file, self._read, name, result)
        except OSError as error:
            log.warning("the batch invariance results cannot be written", file=str(self._file), reason=str(error))


def first_difference(alone: Sequence[Any], together: Sequence[Any]) -> int | None:
    """Return the first row whose result alone differs from the one together, or None."""
    pairs = zip(alone, together, strict=True)
    return next((row for row, (single, shared) in enumerate(pairs) if not _equal(single, shared)), None)


def variant_function(stage: Stage, states: Sequence[Any], row: int) -> str:
    """Return the function that makes this row differ. Repeats both forwards to find it."""
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

        A size that was not measured yet is always due.
        """
        if size not in self.samples:
            return True
        samples, seconds = self.samples[size], self.seconds(size)
        loss = size * max(seconds - self.seconds(best), LEAST * seconds)
        return self.spent - samples[-1][0] > max(RETRY_S, RETRY * len(samples) ** 2 * loss)

    def add(self, size: int, seconds: float) -> None:
        """Add a forward of this size with its seconds for each task.

        An unusual forward is ignored. A second one in the same direction means that the load has changed. Then all
        samples of all sizes are dropped, except this one.
        """
        usual = self.seconds(size) if size in self.samples else seconds
        direction = (seconds > CHANGED * usual) - (CHANGED * seconds < usual)
        self.spent += size * seconds

        if direction and direction == self.odd.get(size):
            self.samples.clear()
            self.odd.clear()
        elif direction:
            self.odd[size] = direction
            return

        self.odd.pop(size, None)
        self.samples.setdefault(size, deque(maxlen=SAMPLES)).append((self.spent, seconds))


class BatchSizes:
    """The best batch size of each key, by median seconds for a task.

    Sizes are 1, 2, 4, … and `max_batch`, the largest. They are compared under one load. When two forwards of a size in
    a row show that the load has changed, all medians are dropped, and the sizes next to the one in use are tried again.
    """

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._keys: dict[Hashable, _Key] = {}

    def size(self, key: Hashable, waiting: int) -> int:
        """Return how many of the `waiting` tasks of this key should share the next forward."""
        sizes_of_key = self._of(key)
        max_size = min(waiting, sizes_of_key.most)
        if not sizes_of_key.samples:
            return 1

        sizes = [*(1 << power for power in range(max_size.bit_length()) if 1 << power < max_size), max_size]
        if odd := sizes_of_key.odd.keys() & sizes:  # once more, to see whether it is another load
            return min(odd)

        # Only neighbors are tried, the larger first: after a change that does not matter, this costs two forwards.
        best = sizes_of_key.best(sizes)
        index = sizes.index(best)
        neighbors = (*sizes[index + 1 : index + 2], *sizes[max(0, index - 1) : index])
        return next(
            (size for size in neighbors if best in sizes_of_key.samples and sizes_of_key.is_due(size, best)), best
        )

    def all(self, key: Hashable, waiting: int, max_batch: int) -> int:
        """Return how many of the `waiting` tasks can share a forward, at most `max_batch`.

        It is for stages with `all_together`: nothing is measured, and only memory limits the size.
        """
        return min(waiting, self._of(key, max_batch).most)

    def measured(self, key: Hashable, size: int, seconds: float) -> None:
        """Record the seconds that a batch of this size took."""
        self._of(key).add(size, seconds / size)

    def too_large(self, key: Hashable, size: int) -> None:
        """Limit this key to half of `size`, which needs too much memory or changes bytes."""
        sizes_of_key = self._of(key)
        sizes_of_key.most = max(1, min(sizes_of_key.most, size // 2))

    def _of(self, key: Hashable, max_batch: int = 0) -> _Key:
        # The entry moves to the end, so that the least recently used one is dropped.
        entry = self._keys.pop(key, None) or _Key(max_batch or self._max_batch)
        self._keys[key] = entry
        if len(self._keys) > MAX_KEYS:
            del self._keys[next(iter(self._keys))]
        return entry


class Batches:
    """Picks the tasks of the next forward, and computes it (continuous batching).

    - `max_batch`: most tasks in a forward; 0 means the default.
    - `exactness`: with it, a task gets the bytes that it has alone (batch invariance). It shares a forward only if
      comparisons have found no difference.
    - `synchronize`: waits until the device has computed all that was queued. Called before and after a forward of
      another key or size than the last one, whose time would be counted as its own otherwise.
    - `memory_ladder`: decides what follows when a forward runs out of memory.
    """

    def __init__(
        self,
        max_batch: int,
        exactness: InvarianceResults | None,
        ranks: Ranks,
        synchronize: Callable[[], object] = bool,
        memory_ladder: MemoryLadder | None = None,
    ) -> None:
        self._memory_ladder = memory_ladder or MemoryLadder()
        largest = max_batch or DEFAULT_MAX_BATCH
        power_of_two = 1 << (largest.bit_length() - 1)  # exact pools use no other sizes, so that few are compared
        self.sizes, self._max_batch = BatchSizes(power_of_two if exactness else largest), max_batch
        self._exactness, self._ranks = exactness, ranks
        self._synchronize = synchronize
        self._measured: tuple[Key, int] | None = None  # the key and the size of the last forward

        # Batches are numbered in order. By pool, the number of its last batch; and the number of the last batch of all.
        self._turns, self._turn = dict[str, int](), 0

        #: By pool, how requests share forwards in an exact pool, as far as it was compared.
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

        required = first.key, first.priority, False
        compatible = [job for job in jobs if (job.key, job.priority, job.runs_alone) == required]
        if self._exactness is None and first.stage.all_together:
            return compatible[: self.sizes.all(first.key, len(compatible), self._max_batch or LARGEST)], "together"
        if self._exactness is None:
            return compatible[: self.sizes.size(first.key, len(compatible))], "together"

        exact_key, size = first.key[-1], self.sizes.size(first.key, 1 << (len(compatible).bit_length() - 1))
        best = 0 if exact_key is None else self._exactness.largest(first.key, size)
        if best < size and exact_key is not None:
            self._record_sharing(
                first,
                BatchInvarianceStats(variant_functions={size: self._exactness.find(first.key, size).variant_function}),
            )
            self.sizes.too_large(first.key, size)

        # A "batch" of one is compared as well if `step` and `step_alone` compute it in different ways.
        if best == 0 or (best == 1 and not first.stage.differs_alone):
            return [first], "alone"
        if self._exactness.must_compare(first.key, best):
            return compatible[:best], "compared"
        self._record_sharing(first, BatchInvarianceStats(best))
        return compatible[:best], "together"

    def compute(self, batch: list[Job], mode: BatchMode) -> list[tuple[Job, Any]]:
        """Compute a step of a batch.

        Returns each job with the result for `Stage.advance`, or with an error. A shared forward that failed returns no
        jobs: they are picked again, alone or in a smaller batch.
        """
        stage = batch[0].stage
        key = batch[0].key
        states = [job.state for job in batch]
        size = len(batch) if mode == "together" else 1
        follows_another = (key, size) != self._measured
        self._measured = key, size
        if follows_another:
            self._synchronize()
        began = time.monotonic()
        exchange_s = self._ranks.exchange_s
        try:
            results = (
                self._step(stage.step, states)
                if mode == "together"
                else [self._step(stage.step_alone, state) for state in states]
            )
            if follows_another:
                self._synchronize()
        except Exception as error:  # an error of one task must not end the process
            return self._handle_failure(batch, error, mode)

        seconds, exchange_s = time.monotonic() - began, self._ranks.exchange_s - exchange_s
        self.sizes.measured(key, size, seconds * size / len(batch))
        for job in batch:
            job.run_s = job.run_s + seconds
            job.steps = job.steps + 1
            job.batch_size_sum = job.batch_size_sum + size
            job.share_s += seconds / len(batch)
            job.exchange_s += exchange_s

        if mode == "compared":
            self._compare(batch, results)
        return [outcome for job, result in zip(batch, results, strict=True) for outcome in self._outcome(job, result)]

    def _sort_key(self, job: Job) -> tuple[int, bool, bool, int, int]:
        """Return the sort key of a job: priority, single-step stages, final stages, then round-robin.

        - Single-step stages go first, and of either kind the final stages. Meanwhile more of the other tasks can
          gather for one forward, and the number of slots bounds how long they wait.
        - All text stages count as final. Otherwise decode would starve the prefill of a long prompt.
        - A single-step task that has made a step without result loses its preference, such as a prompt without room in
          the KV cache. Otherwise it would starve the texts whose end makes room.
        - Then pools go round-robin, and in an exact pool also the texts, which may not share a forward.
        """
        task, steps = job.lease.task, job.stage.progress(job.state)[1]
        counts_as_final = task.planned.final or job.stage.texts is not None
        text_turn = job.turn if self._exactness and job.stage.all_together else 0
        return (
            -job.priority,
            steps > 1 or job.steps > 0,
            not counts_as_final,
            self._turns.get(task.planned.pool, 0),
            text_turn,
        )

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

        `alone`: the results of the jobs alone. An error counts as a difference, but if memory runs out, only the batch
        size is limited.
        """
        stage = batch[0].stage
        key = batch[0].key
        states = [job.state for job in batch]
        began = time.monotonic()
        try:
            together = self._step(stage.step, states)
            self.sizes.measured(key, len(batch), time.monotonic() - began)
            cause = self._ranks.variant_function(
                first_difference(alone, together), partial(variant_function, stage, states)
            )
        except Exception as error:  # the tasks go on with their results alone
            if is_out_of_memory(error):
                self._memory_ladder.recover(error)
                self.sizes.too_large(key, len(batch))
                return
            cause = f"{type(error).__name__}: {error}"
        if self._exactness:
            self._exactness.record(key, len(batch), cause)

    def _outcome(self, job: Job, result: Any) -> list[tuple[Job, Any]]:
        """Return the job with its result; nothing if its step is computed again.

        A stage that computes the tasks of a batch one by one returns the error of a task that has run out of memory.
        """
        if isinstance(result, Exception) and is_out_of_memory(result):
            return self._handle_failure([job], result, "alone")
        job.repeats_step = False
        return [(job, result)]

    def _handle_failure(self, batch: list[Job], error: Exception, mode: BatchMode) -> list[tuple[Job, Any]]:
        """Handle a failed forward: limit the batch size, or run its jobs alone.

        Returns the error only for a job that was alone already.
        """
        is_alone = len(batch) == 1 and (mode == "alone" or not batch[0].stage.differs_alone)
        if is_out_of_memory(error) and (is_alone or len(batch) > 1):
            failed = self._memory_ladder.next_rung(batch, error, self.sizes.too_large)
            return [(batch[0], failed)] if failed else []
        if is_alone:
            return [(batch[0], error)]
        for job in batch:
            job.runs_alone = True
        return []
