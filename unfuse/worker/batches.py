"""Which tasks make their next step together: how many make each task cheaper, fit in memory, and keep its bytes."""

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

from unfuse.core.compute_options import USUAL_BATCH
from unfuse.core.messages import ExactBatchStats
from unfuse.core.retries import MEMORY, rule_of
from unfuse.stages.base import EncodedMedia, Stage
from unfuse.weights.fingerprints import MAX_ENTRIES, add_entry
from unfuse.worker.compute_messages import How
from unfuse.worker.job import Job
from unfuse.worker.ranks import Ranks

log = structlog.get_logger(__name__)

TRUSTED = 3  # how many comparisons have to find no difference before batches of a size are no longer compared each time

CHECKED_AGAIN = 512  # of so many batches of a trusted size, one is compared again: a difference may hide for long

Key = tuple[Hashable, ...]

UNKNOWN = "a function that cannot be seen"

LARGEST = 256  # how many tasks share a forward at most, of stages that have all together

GAIN = 0.95  # a larger batch pays off if a task takes at most this share of its time in the smaller one

SAMPLES = 5  # how many forwards of a size are remembered, the latest

CHANGED = 1.5  # a forward so many times longer, or shorter, than is usual for its size may mean another load

RETRY_S, RETRY, LEAST = 1.0, 1.6, 0.5
"""A size that is not used is tried again after so many seconds of forwards, and not before so many times what it loses,
times the square of how many forwards of it are remembered: soon at first, and once it is known for a fortieth of the
time. It loses what its tasks take longer than in the best size, and counts for at least this share of a forward: what
is level needs no haste.
"""

MAX_KEYS = 256


class InvarianceResult(msgspec.Struct, frozen=True):
    """What comparisons of a size found: so many times no difference, or a function that is to `blame` for one."""

    equal: int = 0
    blame: str = ""
    pool: str = ""
    size: int = 0

    @property
    def is_trusted(self) -> bool:
        """Whether requests may share a forward of this size."""
        return self.equal >= TRUSTED and not self.blame


UNSEEN = InvarianceResult()


class InvarianceResults:
    """The verdicts of one process, kept in a file that those of other processes and of earlier ones are in too.

    A key begins with a pool and has whatever else tasks must have in common. Verdicts are of one `scope`: the device,
    the versions and the settings under which they were found. Without a file, they end with the process; one that
    cannot be read or written costs comparisons, no more.
    """

    def __init__(self, file: Path | None, scope: str = "", chance: Callable[[], float] = random.random) -> None:
        self._file, self._scope, self._chance = file, scope, chance
        self._verdicts = self._read()

    def all(self) -> Sequence[InvarianceResult]:
        """Every verdict, of whatever scope."""
        return [*self._verdicts.values()]

    def of(self, key: Key, size: int) -> InvarianceResult:
        """What is known of batches of this size."""
        return self._verdicts.get(self._name(key, size), UNSEEN)

    def must_compare(self, key: Key, size: int) -> bool:
        """Whether the next batch of this size should be compared, unless it is known to make a difference."""
        verdict = self.of(key, size)
        return not verdict.blame and (not verdict.is_trusted or self._chance() * CHECKED_AGAIN < 1)

    def largest(self, key: Key, size: int) -> int:
        """Of this size, its half, its quarter and so on, the largest that is trusted or may still be; 0: none."""
        while size and self.of(key, size).blame:
            size //= 2
        return size

    def learn(self, key: Key, size: int, blame: str) -> None:
        """Remember a comparison: what is to blame for a difference, "" if there was none."""
        before = self.of(key, size)
        after = InvarianceResult(before.equal + (not blame), blame, str(key[0]), size)
        self._verdicts.pop(self._name(key, size), None)
        self._verdicts[self._name(key, size)] = after
        if len(self._verdicts) > MAX_ENTRIES:  # clients choose sizes, and so keys
            del self._verdicts[next(iter(self._verdicts))]
        if blame:
            log.warning("requests cannot share forwards exactly", key=str(key), size=size, because_of=blame)
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
            log.warning("what was compared before cannot be read", file=str(self._file), reason=str(error))
            return {}

    def _write(self, name: str, verdict: InvarianceResult) -> None:
        """Add a verdict to the file, beside those that other processes have added meanwhile."""
        if self._file is None:
            return
        try:
            add_entry(self._file, self._read, name, verdict)
        except OSError as error:
            log.warning("what was compared cannot be kept", file=str(self._file), reason=str(error))


def difference(alone: Sequence[Any], together: Sequence[Any]) -> int | None:
    """The first of some states that has something else of a forward together than alone; None if there is none."""
    pairs = zip(alone, together, strict=True)
    return next((row for row, (own, shared) in enumerate(pairs) if not _equal(own, shared)), None)


def culprit(stage: Stage, states: Sequence[Any], row: int) -> str:
    """What is to blame for it. Computes both once more."""
    from unfuse.stages.batch_invariant_ops import first_difference

    return first_difference(lambda: stage.step_alone(states[row]), lambda: stage.step(states)) or UNKNOWN


def _equal(one: Any, other: Any) -> bool:
    """Whether two results, errors among them, are the same bit for bit."""
    if type(one) is not type(other):
        return False
    if hasattr(one, "untyped_storage"):  # a tensor of torch
        return bool(one.shape == other.shape and one.dtype == other.dtype and _bytes(one) == _bytes(other))
    match one:
        case Exception():
            return str(one) == str(other)
        case np.ndarray():
            return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
        case dict():
            return one.keys() == other.keys() and all(map(_equal, one.values(), map(other.get, one)))
        case tuple() | list():
            return len(one) == len(other) and all(map(_equal, one, other))
        case msgspec.Struct() if not isinstance(one, EncodedMedia):
            return _equal(msgspec.structs.asdict(one), msgspec.structs.asdict(other))
    return bool(one == other)


def _bytes(tensor: Any) -> bytes:
    import torch

    flat = tensor.detach().cpu().contiguous().view(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


@dataclass
class _Key:
    most: int
    taken: dict[int, deque[tuple[float, float]]] = field(default_factory=dict)
    """By batch size: `spent` after a forward, and the seconds that it took for each task."""
    spent: float = 0.0  # seconds of all forwards
    odd: dict[int, int] = field(default_factory=dict)
    """The sizes whose last forward took much longer than usual (1), or much shorter (-1)."""

    def seconds(self, size: int) -> float:
        """What a task takes in a forward of this size: the median."""
        return median(seconds for _, seconds in self.taken[size])

    def best(self, sizes: list[int]) -> int:
        """The best of these sizes, of those that were tried."""
        best, *larger = [size for size in sizes if size in self.taken] or sizes[-1:]
        for size in larger:
            if self.seconds(size) <= GAIN * self.seconds(best):
                best = size
        return best

    def is_due(self, size: int, best: int) -> bool:
        """Whether this size should be tried beside the best one."""
        if size not in self.taken:
            return True
        taken, seconds = self.taken[size], self.seconds(size)
        lost = size * max(seconds - self.seconds(best), LEAST * seconds)
        return self.spent - taken[-1][0] > max(RETRY_S, RETRY * len(taken) ** 2 * lost)

    def add(self, size: int, seconds: float) -> None:
        """Take in a forward. One of another load does not count; of two of a size in turn, the second alone is kept."""
        usual = self.seconds(size) if size in self.taken else seconds
        way = (seconds > CHANGED * usual) - (CHANGED * seconds < usual)
        self.spent += size * seconds
        if way and way == self.odd.get(size):
            self.taken.clear()
            self.odd.clear()
        elif way:
            self.odd[size] = way
            return
        self.odd.pop(size, None)
        self.taken.setdefault(size, deque(maxlen=SAMPLES)).append((self.spent, seconds))


class BatchSizes:
    """The best batch size of each key, at most `most`: of single, double, fourfold size and so on, by medians.

    Sizes are compared by what they took under one load. Once two forwards of a size in turn say that it is another one,
    the sizes next to the one in use are tried again, and from the better one those next to that.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: dict[Hashable, _Key] = {}

    def size(self, key: Hashable, waiting: int) -> int:
        """How many of the tasks of this key that wait should share the next forward."""
        found = self._of(key)
        most = min(waiting, found.most)
        if not found.taken:
            return 1
        sizes = [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]
        if odd := found.odd.keys() & sizes:  # once more, to see whether it is another load
            return min(odd)
        best = found.best(sizes)
        place = sizes.index(best)
        beside = (*sizes[place + 1 : place + 2], *sizes[max(0, place - 1) : place])
        return next((size for size in beside if best in found.taken and found.is_due(size, best)), best)

    def all(self, key: Hashable, waiting: int, most: int) -> int:
        """How many of these tasks can share a forward, up to `most`: where it pays to have all in each."""
        return min(waiting, self._of(key, most).most)

    def measured(self, key: Hashable, size: int, seconds: float) -> None:
        """Learn that a batch of this size took so many seconds."""
        self._of(key).add(size, seconds / size)

    def too_large(self, key: Hashable, size: int) -> None:
        """No batch of this size, for want of memory or because mates change bytes: halve it from now on."""
        found = self._of(key)
        found.most = max(1, min(found.most, size // 2))

    def _of(self, key: Hashable, most: int = 0) -> _Key:
        found = self._keys.pop(key, None) or _Key(most or self._most)
        self._keys[key] = found
        if len(self._keys) > MAX_KEYS:
            del self._keys[next(iter(self._keys))]
        return found


class Batches:
    """Picks up to `most` tasks for a forward (0: as is usual), and computes it.

    With `exactness`, a task gets the bytes that it has alone: it shares a forward only where comparing shows that.
    `sharing` says by pool how requests share forwards then, as far as that is known.
    """

    def __init__(self, most: int, exactness: InvarianceResults | None, ranks: Ranks) -> None:
        usual = most or USUAL_BATCH
        few = 1 << (usual.bit_length() - 1)  # of few sizes, comparisons are soon done
        self.sizes, self._most = BatchSizes(few if exactness else usual), most
        self._exactness, self._ranks = exactness, ranks
        self._turns, self._turn = dict[str, int](), 0
        self.sharing: dict[str, ExactBatchStats] = {}

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
        exact_key, size = first.key[-1], self.sizes.size(first.key, 1 << (len(mates).bit_length() - 1))
        best = 0 if exact_key is None else self._exactness.largest(first.key, size)
        if best < size and exact_key is not None:
            self._note(first, ExactBatchStats(blame={size: self._exactness.of(first.key, size).blame}))
            self.sizes.too_large(first.key, size)
        if best == 0 or (best == 1 and not first.stage.differs_alone):
            return [first], "alone"
        if self._exactness.must_compare(first.key, best):
            return mates[:best], "compared"
        self._note(first, ExactBatchStats(best))
        return mates[:best], "together"

    def compute(self, batch: list[Job], how: How) -> list[tuple[Job, Any]]:
        """What a step makes of each of these: it is for the stage to go on with, or an error.

        Nothing of those that are to be tried again, alone or in a smaller batch, because it failed together.
        """
        stage, key, states, began = batch[0].stage, batch[0].key, [job.state for job in batch], time.monotonic()
        waited = self._ranks.exchange_s
        size = len(batch) if how == "together" else 1
        try:
            made = (
                self._step(stage.step, states)
                if how == "together"
                else [self._step(stage.step_alone, one) for one in states]
            )
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

    def _note(self, job: Job, found: ExactBatchStats) -> None:
        """Add to what is known of how requests of this job's pool share forwards."""
        pool = job.lease.task.planned.pool
        known = self.sharing.get(pool, ExactBatchStats())
        if known | found != known:
            self.sharing[pool] = known | found

    def _step(self, compute: Callable[[Any], Any], states: Any) -> Any:
        """Make a step on every rank."""
        with self._ranks.together():
            return compute(states)

    def _compare(self, batch: list[Job], alone: Sequence[Any]) -> None:
        """Compute a step that each task has made alone once more, together, and remember whether that differs."""
        stage, key, states, began = batch[0].stage, batch[0].key, [job.state for job in batch], time.monotonic()
        try:
            together = self._step(stage.step, states)
            self.sizes.measured(key, len(batch), time.monotonic() - began)
            blame = self._ranks.blame(difference(alone, together), partial(culprit, stage, states))
        except Exception as error:  # what they have alone counts
            if rule_of(error) is MEMORY:
                self.sizes.too_large(key, len(batch))
                return
            blame = f"{type(error).__name__}: {error}"
        if self._exactness:
            self._exactness.learn(key, len(batch), blame)

    def _fallen_apart(self, batch: list[Job], error: Exception, how: How) -> list[tuple[Job, Any]]:
        if len(batch) == 1 and (how == "alone" or not batch[0].stage.differs_alone):
            return [(batch[0], error)]
        if len(batch) > 1 and rule_of(error) is MEMORY:
            self.sizes.too_large(batch[0].key, len(batch))
        else:
            for job in batch:
                job.alone = True
        return []
