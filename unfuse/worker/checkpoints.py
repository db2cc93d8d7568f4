"""When the state of a running task is saved, how it is encoded, and how the scheduler records it."""

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

FAILS_S = 4 * 3600.0  # the mean seconds between two failures of a worker that `auto` assumes: it may be taken away

UNKNOWN_S = 0.05  # the seconds that saving is assumed to take before the first time

VALUES = "unfuse.values"  # the tensor that holds a checkpoint's plain values, as bytes

SPOKEN = re.compile(r"(?P<steps>[1-9]\d*)|(?P<seconds>\d+(\.\d+)?)s|auto|none")


@dataclass
class CheckpointPolicy:
    """Save every so many `steps`, or `seconds`, or by what saving costs (`auto`); never if none of them is set.

    `auto` uses the interval that loses least time, sqrt(2 × cost × time between failures) (Young, "A first order
    approximation to the optimum checkpoint interval", CACM 17(9), 1974). It does not save when less than half an
    interval of work is left, because then losing that work costs less, on average.
    """

    steps: int = 0
    seconds: float = 0.0
    auto: bool = False
    cost_s: float = field(default=UNKNOWN_S, init=False)  # the measured seconds that saving takes, smoothed

    @classmethod
    def parse(cls, text: str) -> CheckpointPolicy:
        """Parse `10` (every ten steps), `30s` (every thirty seconds), `auto` or `none`. Raises ConfigError."""
        found = SPOKEN.fullmatch(text)
        if found is None or float(found["seconds"] or 1) == 0:
            raise ConfigError(f"--checkpoint {text}: say auto, none, a number of steps (10) or of seconds (30s)")
        return cls(int(found["steps"] or 0), float(found["seconds"] or 0), text == "auto")

    @property
    def never(self) -> bool:
        """Whether nothing is ever saved."""
        return not (self.steps or self.seconds or self.auto)

    def due(self, unsaved_steps: int, unsaved_s: float, left_s: float) -> bool:
        """Whether to save now, by the steps and seconds since the last save and the predicted seconds that are left."""
        if self.steps:
            return unsaved_steps >= self.steps
        if self.seconds:
            return unsaved_s >= self.seconds
        interval = sqrt(2 * self.cost_s * FAILS_S)
        return self.auto and unsaved_s >= interval and left_s >= interval / 2

    def took(self, seconds: float) -> None:
        """Learn the seconds that saving has just taken."""
        self.cost_s = (self.cost_s + seconds) / 2


def pack(checkpoint: Checkpoint) -> dict[str, Any]:
    """Turn a checkpoint into the tensors of one object."""
    return {**checkpoint.tensors, VALUES: np.frombuffer(encode(checkpoint.values), np.uint8)}


def unpack(tensors: Mapping[str, Any]) -> Checkpoint:
    """Turn the tensors of an object back into a checkpoint. Raises PermanentError for one that is no checkpoint."""
    values = tensors.get(VALUES)
    if values is None:
        raise PermanentError("this object is no checkpoint")
    saved: Tensors = {name: tensor for name, tensor in tensors.items() if name != VALUES}
    return Checkpoint(saved, decode(np.asarray(values).tobytes(), dict[str, Any]))


class CheckpointWriter:
    """Makes checkpoints durable, has them recorded, and deletes the ones before. For one event loop."""

    def __init__(self, objects: WorkerObjects, link: SchedulerLink) -> None:
        self._objects, self._link = objects, link
        self.stops = False  # whether the worker stops, so that checkpoints have to outlast it
        self._known: dict[Claim, ObjectRef | None] = {}
        self._unshared = Counter[Claim]()  # prefix blocks that are on their way, by task
        self._shared = asyncio.Condition()
        self._lock = asyncio.Lock()

    def begin(self, lease: Lease) -> None:
        """A task begins, perhaps from a checkpoint."""
        self._known[lease.claim] = lease.checkpoint

    async def share(self, kept: CachePrefix) -> None:
        """Have a prefix block recorded, which others find from then on, and hold it for them."""
        self._unshared[kept.claim] += 1
        try:
            answer = await self._link.call(kept)
            if isinstance(answer, Accepted):
                self._objects.share(kept.key, kept.output)
        finally:
            async with self._shared:
                self._unshared -= Counter([kept.claim])
                self._shared.notify_all()

    async def save(self, saved: CheckpointSaved) -> None:
        """Copy a checkpoint to any durable store, have it recorded, delete what it replaces; itself if not recorded.

        One that cannot be copied, as when the disk is full, replaces none that is.
        """
        async with self._lock:
            before = self._known.get(saved.claim)
            useless: ObjectRef | None = saved.checkpoint
            is_copied = await self._objects.save_copy(saved.checkpoint, now=self.stops)
            if is_copied or before is None or not self._objects.has_copy(before):
                answer = await self._link.call(saved)
                if isinstance(answer, Accepted):
                    useless = before
                    if saved.claim in self._known:
                        self._known[saved.claim] = saved.checkpoint
            if useless:
                await self._objects.delete(useless)

    async def wait_until_saved(self) -> None:
        """Wait until every checkpoint so far is recorded."""
        async with self._lock:
            return

    async def wait_until_shared(self, claim: Claim) -> None:
        """Wait until every prefix block of a task so far is recorded."""
        async with self._shared:
            await self._shared.wait_for(lambda: claim not in self._unshared)

    async def end(self, claim: Claim, done: bool) -> None:
        """A task has ended here. If it is not `done`, its checkpoint stays, so that another worker can resume it."""
        known = self._known.pop(claim, None)
        if done and known:
            await self._objects.delete(known)
