"""What the step loop knows of a task that runs."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from unfuse.core.errors import PermanentError, ProtocolError
from unfuse.core.growth import Grown, check_growth
from unfuse.core.request import Timings
from unfuse.core.task import Claim, Lease
from unfuse.stages.base import Stage, Tensors
from unfuse.stores.tensor_store import HeldTensors
from unfuse.stores.unsealed import Unsealed


@dataclass(eq=False)
class Job:
    """A task that runs. Tasks of equal `key` may share a forward. Times are monotonic seconds.

    `run_s` are seconds of computing, `share_s` its share of them: those of a forward are divided among its tasks.
    `resumed` is the step that it started from, `steps` how many it made since. `saved` and `reported` are the last
    steps that were saved, as far as that worked, and reported, at `saved_at` and `reported_at`. The next attempt can go
    on from step `safe`.
    """

    lease: Lease
    stage: Stage
    key: tuple[Hashable, ...]
    inputs: list[HeldTensors]
    state: Any
    get_s: float
    run_s: float
    share_s: float
    alone: bool = False
    resumed: int = 0
    steps: int = 0
    turn: int = 0  # when its last step was decided, in the order of such turns
    mates: int = 0  # the number of tasks in its forwards, itself included, summed over its steps
    saved: int = 0
    safe: int = 0
    saved_at: float = field(default_factory=time.monotonic)
    save_s: float = 0.0
    exchange_s: float = 0.0
    reported: int = 0
    reported_at: float = field(default_factory=time.monotonic)
    previews: list[int] = field(default_factory=list)
    grown: int = 0  # the number of the next piece of its output
    part: int | None = 0  # the last step whose part is stored; None after one could not be: none can follow
    prefix_blocks: list[tuple[str, str, Tensors]] = field(default_factory=list)  # see `outputs.read_prefix_blocks`
    output: Unsealed | None = None  # what its output is written into while it runs, if others may read it meanwhile

    def growth(self) -> Grown | None:
        """What the last step has added to its output, if anything; raises PermanentError where that is too much."""
        pieces = tuple(self.stage.grown(self.state))
        if not pieces:
            return None
        grown = Grown(self.claim, self.grown, pieces)
        try:
            check_growth([grown])
        except ProtocolError as error:
            raise PermanentError(f"stage {self.stage.kind} has grown by what cannot be recorded: {error}") from error
        self.grown += len(pieces)
        return grown

    @property
    def timings(self) -> Timings:
        """What it has used so far."""
        return Timings(
            get_s=self.get_s, run_s=self.run_s, steps=self.steps, batch=self.mates / max(1, self.steps),
            resumed=self.resumed, save_s=self.save_s, exchange_s=self.exchange_s, share_s=self.share_s,
        )  # fmt: skip

    @property
    def is_over(self) -> bool:
        """Whether all its steps are made."""
        step, steps = self.stage.progress(self.state)
        return step == steps

    @property
    def claim(self) -> Claim:
        """The claim of its lease."""
        return self.lease.claim

    @property
    def priority(self) -> int:
        """The priority of its task."""
        return self.lease.task.priority
