"""Continuous batching: which tasks share the next forward.

A batch has the size at which a task is cheapest and that fits in memory. In exact pools it keeps the bytes of each
task (batch invariance).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Literal

from unfuse.core.compute_options import DEFAULT_MAX_BATCH
from unfuse.core.retries import CONNECTION, is_out_of_memory, rule_of
from unfuse.core.worker_status import BatchInvarianceStats
from unfuse.stages.base import Stage
from unfuse.stages.bitwise import first_difference
from unfuse.worker.batch_invariance import InvarianceResults, Key
from unfuse.worker.batch_memory import BatchMemory
from unfuse.worker.batch_sizes import BatchSizes, BatchSizesFile
from unfuse.worker.compute_messages import BatchMode
from unfuse.worker.device_errors import task_error
from unfuse.worker.job import Job
from unfuse.worker.memory_ladder import MemoryLadder
from unfuse.worker.ranks import Ranks

#: Most tasks in one forward of a stage that has `all_together`.
LARGEST = 256


class Batches:
    """Picks the tasks of the next forward, and computes it (continuous batching).

    - `max_batch`: most tasks in a forward; 0 means the default.
    - `exactness`: with it, a task gets the bytes that it has alone (batch invariance). It shares a forward only if
      comparisons have found no difference.
    - `synchronize`: waits until the device has computed all that was queued. Called before and after a forward of
      another key or size than the last one, whose time would be counted as its own otherwise.
    - `memory_ladder`: decides what follows when a forward runs out of memory.
    - `memory`: predicts which sizes fit, so that forwards rarely run out of memory.
    - `sizes_file`: the batch sizes that earlier processes measured.
    """

    def __init__(
        self,
        max_batch: int,
        exactness: InvarianceResults | None,
        ranks: Ranks,
        synchronize: Callable[[], object] = bool,
        memory_ladder: MemoryLadder | None = None,
        memory: BatchMemory | None = None,
        sizes_file: BatchSizesFile | None = None,
    ) -> None:
        self._memory_ladder = memory_ladder or MemoryLadder()
        self._memory = memory or BatchMemory()
        largest = max_batch or DEFAULT_MAX_BATCH
        power_of_two = 1 << (largest.bit_length() - 1)  # exact pools use no other sizes, so that few are compared
        self.sizes = BatchSizes(power_of_two if exactness else largest, sizes_file)
        self._max_batch = max_batch
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
        if self._takes_all(first.stage):
            size = self.sizes.all(first.key, len(compatible), self._max_batch or LARGEST)
            return compatible[: self._memory.largest(first.key, size)], "together"
        if self._exactness is None:
            return compatible[: self._size(first.key, len(compatible))], "together"

        if self._exactness.is_settled(first.lease.task.planned.pool) and first.key[-1] is not None:
            return self._pick_settled(first, jobs, self._exactness.settled_mode)

        exact_key, size = first.key[-1], self._size(first.key, 1 << (len(compatible).bit_length() - 1))
        best = 0 if exact_key is None else self._exactness.largest(first.key, size)
        if best < size and exact_key is not None:
            difference = self._exactness.find(first.key, size).difference
            self._record_sharing(first, BatchInvarianceStats(differences={size: difference}))
            self.sizes.too_large(first.key, size)

        # A "batch" of one is compared as well if `step` and `step_alone` compute it in different ways.
        if best == 0 or (best == 1 and not first.stage.differs_alone):
            return [first], "alone"
        if self._exactness.must_compare(first.key, best):
            return compatible[:best], "compared"
        self._record_sharing(first, BatchInvarianceStats(best))
        return compatible[:best], "together"

    def _pick_settled(
        self, first: Job, jobs: Collection[Job], mode: Literal["alone", "batched"]
    ) -> tuple[list[Job], BatchMode]:
        """Return the next batch of a settled pool, and how to compute it.

        A batched one has tasks of any exact batch key, as in batched pools.
        """
        pool = first.lease.task.planned.pool
        if self.sharing.get(pool, BatchInvarianceStats()).mode != mode:
            self._record_sharing(first, BatchInvarianceStats(mode=mode))
            self.sizes.forget(pool)  # differences have limited the sizes of some keys
            self._memory.forget(pool)
        if mode == "alone":
            return [first], mode
        key = _size_key(first, mode)
        required = key, first.priority, False
        able = [job for job in jobs if job.key[-1] is not None]
        compatible = [job for job in able if (_size_key(job, mode), job.priority, job.runs_alone) == required]
        return compatible[: self._size(key, len(compatible))], mode

    def _takes_all(self, stage: Stage) -> bool:
        """Return whether all tasks of a stage share a forward.

        Nothing is measured for such a stage, because no size is chosen.
        """
        return self._exactness is None and stage.all_together

    def _size(self, key: Key, waiting: int) -> int:
        """Return the best size of the next batch among those that fit in memory."""
        size = self.sizes.size(key, waiting)
        fitting = self._memory.largest(key, size)
        return size if fitting == size else self.sizes.size(key, fitting)

    def compute(self, batch: list[Job], mode: BatchMode) -> list[tuple[Job, Any]]:
        """Compute a step of a batch.

        Returns each job with the result for `Stage.advance`, or with an error. A shared forward that failed returns no
        jobs: they are picked again, alone or in a smaller batch.
        """
        stage = batch[0].stage
        key = _size_key(batch[0], mode)
        states = [job.state for job in batch]
        shares_forward = mode in ("together", "batched")
        size = len(batch) if shares_forward else 1
        is_timed_apart = mode == "compared" or (key, size) != self._measured
        self._measured = key, size
        if is_timed_apart:
            self._synchronize()
        began = time.monotonic()
        exchange_s = self._ranks.exchange_s
        if mode == "batched":
            stage.use_batched()
        try:
            results = (
                self._step(stage.step, states, key, size)
                if shares_forward
                else [self._step(stage.step_alone, state, key) for state in states]
            )
            if is_timed_apart:
                self._synchronize()
        except Exception as error:  # an error of one task must not end the process
            task_error(error)
            return self._handle_failure(batch, error, mode)

        seconds, exchange_s = time.monotonic() - began, self._ranks.exchange_s - exchange_s
        if not self._takes_all(stage):
            self.sizes.measured(key, size, seconds * size / len(batch))
        for job in batch:
            job.run_s = job.run_s + seconds
            job.steps = job.steps + 1
            job.batch_size_sum = job.batch_size_sum + size
            job.share_s += seconds / len(batch)
            job.exchange_s += exchange_s

        if mode == "compared":
            self._compare(batch, results, seconds / len(batch))
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

    def _step(self, compute: Callable[[Any], Any], states: Any, key: Key, size: int = 1) -> Any:
        """Compute a step of `size` tasks on every rank."""
        with self._ranks.together(), self._memory.measure(key, size):
            return compute(states)

    def _compare(self, batch: list[Job], alone: Sequence[Any], alone_s: float) -> None:
        """Compute a step once more, together, and store whether the results differ.

        `alone`: the results of the jobs alone, which took `alone_s` seconds each. An error counts as a difference. If
        memory runs out, only the batch size is limited, and a failed rank changes nothing. Raises the error of a
        failed device.
        """
        stage = batch[0].stage
        key = batch[0].key
        states, seconds = [job.state for job in batch], 0.0
        try:
            self._synchronize()
            began = time.monotonic()
            together = self._step(stage.step, states, key, len(batch))
            self._synchronize()
            seconds = time.monotonic() - began
            self.sizes.measured(key, len(batch), seconds)
            difference = self._ranks.difference(lambda: first_difference(alone, together) is not None)
        except Exception as error:  # the tasks go on with their results alone
            task_error(error)
            if is_out_of_memory(error):
                self._memory_ladder.halve(len(batch), error, partial(self.sizes.too_large, key))
                return
            if rule_of(error) is CONNECTION:  # a rank failed, which shows nothing about the batch
                return
            difference = f"{type(error).__name__}: {error}"
        if self._exactness:
            self._exactness.record(key, len(batch), difference, alone_s, seconds / len(batch))

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
            limit_size = partial(self.sizes.too_large, _size_key(batch[0], mode))
            failed = self._memory_ladder.next_rung(batch, error, limit_size)
            return [(batch[0], failed)] if failed else []
        if is_alone:
            return [(batch[0], error)]
        for job in batch:
            job.runs_alone = True
        return []


def _size_key(job: Job, mode: BatchMode) -> Key:
    """Return the key under which sizes of a job's batches are measured.

    In batched mode, the exact batch key is left out.
    """
    return job.key[:-1] if mode == "batched" else job.key
