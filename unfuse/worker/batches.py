"""Which tasks make their next step together, and what that computes of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from unfuse.core.compute import USUAL_BATCH
from unfuse.core.messages import Sharing
from unfuse.stages.base import SteppedStage
from unfuse.worker.batcher import BatchSizes, out_of_memory
from unfuse.worker.compute_messages import How, Shares
from unfuse.worker.exactness import Exactness, culprit, difference
from unfuse.worker.ranks import Ranks
from unfuse.worker.turn import Job

LARGEST = 256  # how many tasks share a forward at most, of stages that have all together


class Batches:
    """Picks up to `most` tasks for a forward (0: as is usual), and computes it.

    With `exactness`, a task gets the bytes that it has alone: it shares a forward only where comparing shows that.
    `send` hears how requests of a pool share forwards, when that is news.
    """

    def __init__(self, most: int, exactness: Exactness | None, ranks: Ranks, send: Callable[[Shares], object]) -> None:
        usual = most or USUAL_BATCH
        few = 1 << (usual.bit_length() - 1)  # of few sizes, comparisons are soon done
        self.sizes, self._most = BatchSizes(few if exactness else usual), most
        self._exactness, self._ranks, self._send = exactness, ranks, send
        self._turns, self._turn = dict[str, int](), 0
        self._shares: dict[str, Sharing] = {}

    def pick(self, jobs: Collection[Job]) -> tuple[list[Job], How]:
        """The next batch of these: the task whose place is first, and those that may share its forward.

        Those that wait come last: a step of theirs looks after what they wait for.
        """
        jobs = [job for job in jobs if not job.stage.waits(job.state)] or jobs
        first = min(jobs, key=self._place)
        self._turn += 1
        self._turns[first.lease.task.planned.pool] = first.turn = self._turn
        if first.alone:
            return [first], "alone"
        same = first.key, first.priority, False
        mates = [job for job in jobs if (job.key, job.priority, job.alone) == same]
        if self._exactness is None and first.stage.all_together:
            return mates[: self.sizes.all(first.key, len(mates), self._most or LARGEST)], "together"
        if self._exactness is None:
            return mates[: self.sizes.size(first.key, len(mates))], "together"
        likeness, size = first.key[-1], self.sizes.size(first.key, 1 << (len(mates).bit_length() - 1))
        best = 0 if likeness is None else self._exactness.largest(first.key, size)
        if best < size and likeness is not None:
            self._tell(first, Sharing(blame={size: self._exactness.of(first.key, size).blame}))
            self.sizes.too_large(first.key, size)
        if best == 0 or (best == 1 and not first.stage.differs_alone):
            return [first], "alone"
        if self._exactness.must_compare(first.key, best):
            return mates[:best], "compared"
        self._tell(first, Sharing(best))
        return mates[:best], "together"

    def compute(self, batch: list[Job], how: How) -> list[tuple[Job, Any]]:
        """What a step makes of each of these: it is for the stage to go on with, or an error.

        Nothing of those that are to be tried again, alone or in a smaller batch, because it failed together.
        """
        stage, key, states, began = batch[0].stage, batch[0].key, [job.state for job in batch], time.monotonic()
        waited = self._ranks.exchange_s
        size = len(batch) if how == "together" else 1
        try:
            made = self._together(stage, states) if how == "together" else [self._alone(stage, one) for one in states]
        except Exception as error:  # an error of one task must not end the process
            return self._fallen_apart(batch, error, how)
        seconds, waited = time.monotonic() - began, self._ranks.exchange_s - waited
        self.sizes.measured(key, size, seconds * size / len(batch))
        for job in batch:
            job.run_s, job.steps, job.mates = job.run_s + seconds, job.steps + 1, job.mates + size
            job.share_s += seconds / len(batch)
            job.exchange_s += waited
        if how == "compared":
            self._compare(batch, made)
        return [*zip(batch, made, strict=True)]

    def _place(self, job: Job) -> tuple[int, bool, bool, int, int]:
        """Urgent ones first, then what takes one step, and of either what ends requests: so the others share as large a
        forward as they can, and slots bound how long they wait. Pools take turns, those of texts whatever they end: for
        a long prompt would wait until no text is written. So does what has made its only step in vain: a prompt for
        which there is no room would keep texts from making some. Texts that may not share a forward take turns.
        """
        task, steps = job.lease.task, job.stage.progress(job.state)[1]
        soon = task.planned.final or job.stage.texts is not None
        own = job.turn if self._exactness and job.stage.all_together else 0
        return -job.priority, steps > 1 or job.steps > 0, not soon, self._turns.get(task.planned.pool, 0), own

    def _tell(self, job: Job, found: Sharing) -> None:
        """Let the parent know how requests of this job's pool share forwards, when that is news."""
        pool = job.lease.task.planned.pool
        known = self._shares.get(pool, Sharing())
        if known | found != known:
            self._shares[pool] = known | found
            self._send(Shares(pool, self._shares[pool]))

    def _together(self, stage: SteppedStage[Any], states: list[Any]) -> list[Any]:
        with self._ranks.together():
            return stage.compute(states)

    def _alone(self, stage: SteppedStage[Any], state: Any) -> Any:
        with self._ranks.together():
            return stage.alone(state)

    def _compare(self, batch: list[Job], alone: Sequence[Any]) -> None:
        """Compute a step that each task has made alone once more, together, and remember whether that differs."""
        stage, key, states, began = batch[0].stage, batch[0].key, [job.state for job in batch], time.monotonic()
        try:
            together = self._together(stage, states)
            self.sizes.measured(key, len(batch), time.monotonic() - began)
            blame = self._ranks.blame(difference(alone, together), partial(culprit, stage, states))
        except Exception as error:  # what they have alone counts
            if out_of_memory(error):
                self.sizes.too_large(key, len(batch))
                return
            blame = f"{type(error).__name__}: {error}"
        if self._exactness:
            self._exactness.learn(key, len(batch), blame)

    def _fallen_apart(self, batch: list[Job], error: Exception, how: How) -> list[tuple[Job, Any]]:
        if len(batch) == 1 and (how == "alone" or not batch[0].stage.differs_alone):
            return [(batch[0], error)]
        if len(batch) > 1 and out_of_memory(error):
            self.sizes.too_large(batch[0].key, len(batch))
        else:
            for job in batch:
                job.alone = True
        return []
