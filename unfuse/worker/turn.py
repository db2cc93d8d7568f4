"""What the step loop decides, and what it knows of a task that runs."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from unfuse.core.task import Claim, Lease
from unfuse.stages.base import SteppedStage
from unfuse.stores.tensor_store import Held
from unfuse.worker.compute_messages import Cancel

How = Literal["together", "alone", "compared"]


class Turn(msgspec.Struct, frozen=True):
    """One round of the loop, as plain data: it is decided once, and carried out the same in every compute process.

    It names tasks to drop, to admit, to try `again` (they wait for the result store) and to save, and the batch that
    makes a step `how`: together, each alone, or both ways, to compare them; what each has alone then counts.
    """

    drop: tuple[Cancel, ...] = ()
    admit: tuple[Claim, ...] = ()
    again: tuple[Claim, ...] = ()
    save: tuple[Claim, ...] = ()
    step: tuple[Claim, ...] = ()
    how: How = "together"


@dataclass(eq=False)
class Job:
    """A task that runs. Tasks of equal `key` may share a forward. Times are monotonic seconds.

    `resumed` is the step that it started from, `steps` how many it made since. `saved` and `reported` are the last
    steps that were saved and reported, at `saved_at` and `reported_at`.
    """

    lease: Lease
    stage: SteppedStage[Any]
    key: tuple[Hashable, ...]
    inputs: list[Held]
    state: Any
    get_s: float
    run_s: float
    alone: bool = False
    resumed: int = 0
    steps: int = 0
    mates: int = 0
    """The number of tasks in its forwards, itself included, summed over its steps."""
    saved: int = 0
    saved_at: float = field(default_factory=time.monotonic)
    save_s: float = 0.0
    reported: int = 0
    reported_at: float = field(default_factory=time.monotonic)
    previews: list[int] = field(default_factory=list)
    part: int | None = 0
    """The last step whose part is stored; None after one could not be: none can follow."""

    @property
    def claim(self) -> Claim:
        """The claim of its lease."""
        return self.lease.claim

    @property
    def priority(self) -> int:
        """The priority of its task."""
        return self.lease.task.priority
