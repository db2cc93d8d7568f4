"""Checkpoints of running tasks: when they are saved, how they are encoded and recorded."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from unfuse.core.codec import decode, encode
from unfuse.core.errors import ConfigError, PermanentError
from unfuse.core.messages import Accepted, CachePrefix, CheckpointSaved
from unfuse.core.object_ref import ObjectRef
from unfuse.core.task import Claim, Lease
from unfuse.stages.base import Checkpoint, Tensors

if TYPE_CHECKING:
    from unfuse.worker.link import SchedulerLink
    from unfuse.worker.objects import WorkerObjects

#: Mean seconds between two failures of a worker, as `auto` assumes them. Machines may be preempted.
FAILS_S = 4 * 3600.0

#: Seconds that saving is assumed to take before it was measured.
UNKNOWN_S = 0.05

#: Name of the tensor with a checkpoint's plain values, as bytes.
VALUES = "unfuse.values"

DURATION_UNITS = re.compile(r"(?P<steps>[1-9]\d*)|(?P<seconds>\d+(\.\d+)?)s|auto|none")


@dataclass
class CheckpointPolicy:
    """When checkpoints are saved: every `steps`, every `seconds`, by their cost (`auto`), or never.

    `auto` uses the interval that loses least time, sqrt(2 × cost × time between failures) (Young, "A first order
    approximation to the optimum checkpoint interval", CACM 17(9), 1974). It does not save when less than half an
    interval of work is left, because then losing that work costs less, on average.
    """

    #: Save after this number of steps. 0 if the number does not matter.
    steps: int = 0

    #: Save after these seconds. 0 if the time does not matter.
    seconds: float = 0.0

    #: Whether the measured cost of saving decides. Ignored if `steps` or `seconds` is set.
    auto: bool = False

    #: The measured seconds that saving takes, smoothed.
    cost_s: float = field(default=UNKNOWN_S, init=False)

    @classmethod
    def parse(cls, text: str) -> CheckpointPolicy:
        """Parse a policy: `10` (steps), `30s` (seconds), `auto` or `none`. Raises ConfigError."""
        parsed = DURATION_UNITS.fullmatch(text)
        if parsed is None or float(parsed["seconds"] or 1) == 0:
            raise ConfigError(
                f"--checkpoint {text} is not valid: use auto, none, a number of steps (10) or of seconds (30s)"
            )
        return cls(int(parsed["steps"] or 0), float(parsed["seconds"] or 0), text == "auto")

    @property
    def never(self) -> bool:
        """Whether no checkpoint is ever saved."""
        return not (self.steps or self.seconds or self.auto)

    def is_due(self, unsaved_steps: int, unsaved_s: float, remaining_s: float) -> bool:
        """Whether to save now.

        `unsaved_steps` and `unsaved_s` count from the last save; `remaining_s` are the predicted seconds until the task
        ends.
        """
        if self.steps:
            return unsaved_steps >= self.steps
        if self.seconds:
            return unsaved_s >= self.seconds
        interval = sqrt(2 * self.cost_s * FAILS_S)
        return self.auto and unsaved_s >= interval and remaining_s >= interval / 2

    def record_cost(self, seconds: float) -> None:
        """Record the measured seconds of one save, for `auto`."""
        self.cost_s = (self.cost_s + seconds) / 2


def pack(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the checkpoint as tensors of one object; its plain values are one of them."""
    return {**checkpoint.tensors, VALUES: np.frombuffer(encode(checkpoint.values), np.uint8)}


def unpack(tensors: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint in an object's tensors. Raises PermanentError if it is no checkpoint."""
    values = tensors.get(VALUES)
    if values is None:
        raise PermanentError("the object is not a checkpoint")
    saved: Tensors = {name: tensor for name, tensor in tensors.items() if name != VALUES}
    return Checkpoint(saved, decode(np.asarray(values).tobytes(), dict[str, Any]))


class CheckpointWriter:
    """Makes checkpoints durable, has them recorded, and deletes the previous ones. For one event loop."""

    def __init__(self, objects: WorkerObjects, link: SchedulerLink) -> None:
        self._objects, self._link = objects, link

        #: Whether the worker stops, so that checkpoints must outlast it.
        self.stops = False

        self._known: dict[Claim, ObjectRef | None] = {}  # the last recorded checkpoint of each task
        self._unshared = Counter[Claim]()  # number of prefix blocks that are not recorded yet, by task
        self._shared = asyncio.Condition()
        self._lock = asyncio.Lock()  # one save at a time, so that each one replaces the one before it

    def start_task(self, lease: Lease) -> None:
        """Note that a task has started, perhaps from a checkpoint."""
        self._known[lease.claim] = lease.checkpoint

    async def record_prefix_block(self, block: CachePrefix) -> None:
        """Have the scheduler record a prefix block (prefix caching), and retain it for other tasks."""
        self._unshared[block.claim] += 1
        try:
            answer = await self._link.call(block)
            if isinstance(answer, Accepted):
                self._objects.retain(block.key, block.output)
        finally:
            async with self._shared:
                self._unshared -= Counter([block.claim])
                self._shared.notify_all()

    async def save(self, saved: CheckpointSaved) -> None:
        """Make a checkpoint durable, have it recorded, and delete the previous one.

        It is copied to the durable store, if there is one. A checkpoint that the scheduler does not record is deleted.
        So is one that cannot be copied, as when the disk is full, if the previous one has a copy.
        """
        async with self._lock:
            previous = self._known.get(saved.claim)
            obsolete: ObjectRef | None = saved.checkpoint
            is_copied = await self._objects.save_copy(saved.checkpoint, now=self.stops)
            if is_copied or previous is None or not self._objects.has_copy(previous):
                answer = await self._link.call(saved)
                if isinstance(answer, Accepted):
                    obsolete = previous
                    if saved.claim in self._known:  # the task may have ended meanwhile
                        self._known[saved.claim] = saved.checkpoint
            if obsolete:
                await self._objects.delete(obsolete)

    async def wait_until_saved(self) -> None:
        """Wait until every checkpoint so far is recorded."""
        async with self._lock:
            return

    async def wait_until_shared(self, claim: Claim) -> None:
        """Wait until every prefix block of a task so far is recorded."""
        async with self._shared:
            await self._shared.wait_for(lambda: claim not in self._unshared)

    async def end_task(self, claim: Claim, done: bool) -> None:
        """Note that a task has ended. If it is `done`, its checkpoint is deleted.

        Otherwise the checkpoint stays, so that another worker can resume the task.
        """
        known = self._known.pop(claim, None)
        if done and known:
            await self._objects.delete(known)
