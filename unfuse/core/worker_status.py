"""The status of a worker: what it runs and uses, and whether its devices work.

Heartbeats carry it, and every scheduler of a queue reads it.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from unfuse.core.compute_options import MAX_RANKS
from unfuse.core.request import Seconds
from unfuse.core.text import TextStats

Count = Annotated[int, Meta(ge=0, le=1 << 60)]
Share = Annotated[float, Meta(ge=0, le=1)]
"""Numbers that workers report. Metrics add them up, so NaN, infinity and negative numbers are refused."""

Word = Annotated[str, Meta(max_length=128)]
"""A short text that a worker reports, such as a name."""


class BatchInvarianceStats(msgspec.Struct, frozen=True):
    """Batch invariance of an exact pool: how many requests may share a forward."""

    #: Size of the largest batch that gave each request the bytes that it has alone.
    largest: Count = 1
    #: By batch size that is not used, what a comparison showed: that results differ, or the error of the batch.
    differences: Annotated[dict[int, str], Meta(max_length=256)] = {}
    #: How requests are computed. compared: they share forwards of sizes for which comparisons found no difference.
    #: alone or batched: three keys showed a difference, so each has a forward of its own, or results are equal within a
    #: tolerance.
    mode: Literal["compared", "alone", "batched"] = "compared"

    def __or__(self, other: BatchInvarianceStats) -> BatchInvarianceStats:
        weaker = max(self.mode, other.mode, key=("compared", "alone", "batched").index)
        return BatchInvarianceStats(max(self.largest, other.largest), self.differences | other.differences, weaker)


class RankTimes(msgspec.Struct, frozen=True):
    """Seconds of one rank since it started.

    The slowest rank is the one that computes longest: the others wait for it.
    """

    #: Seconds of computing steps.
    compute_s: Seconds = 0.0
    #: Seconds of waiting for other ranks and exchanging numbers with them.
    exchange_s: Seconds = 0.0


class ChangedFile(msgspec.Struct, frozen=True):
    """A model file that was modified after a worker loaded it."""

    #: Path of the file, relative to the model's folder.
    name: str
    #: Whether its bytes were compared and differ. Until then they may still be the same.
    compared: bool

    def __str__(self) -> str:
        if self.compared:
            return f"{self.name} has changed since it was loaded: restart the server to load the new file"
        return f"{self.name} was modified since it was loaded: wait until its bytes are compared"


class DeviceId(msgspec.Struct, frozen=True):
    """One device of a worker, as it is named in answers, metrics and logs."""

    #: Name with the index, such as `cuda:1` or `cpu`.
    index: Word
    #: UUID as the driver lists it, such as `GPU-3f1c…`. Empty if the device has none.
    uuid: Word = ""

    def __str__(self) -> str:
        return f"{self.index} ({self.uuid})" if self.uuid else self.index


DeviceErrorKind = Literal["out_of_memory", "failed", "unusable"]
"""Kinds of device errors: memory ran out, the compute process ended, or the device failed its check."""

MemoryRetry = Literal["halved", "repeated", "reduced"]
"""What followed an out-of-memory error: smaller batches, the same step once more, or a step in smaller parts."""


class DeviceErrors(msgspec.Struct, frozen=True):
    """Errors of one device, of one kind and with one retry, since the last heartbeat."""

    #: The device.
    device: DeviceId
    #: The kind of the errors.
    kind: DeviceErrorKind
    #: What followed an out-of-memory error. "": the task failed, or the errors are of another kind.
    retry: MemoryRetry | Literal[""] = ""
    #: Number of errors.
    count: Count = 1


class DeviceFault(msgspec.Struct, frozen=True):
    """Why a worker is unhealthy: one of its devices failed repeatedly, or failed its check."""

    #: Rank of the device.
    rank: Count
    #: One sentence, for people.
    reason: Annotated[str, Meta(max_length=4096)]

    def __str__(self) -> str:
        return self.reason


class WorkerStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker runs and uses now. Its registration and every heartbeat carry one."""

    #: Bytes of the arena in use.
    arena_used: Count = 0

    #: The most bytes of the arena that were ever in use.
    arena_high_water: Count = 0

    #: Share of the arena's free bytes that one object cannot use, from 0 to 1.
    arena_fragmentation: Share = 0.0

    #: Bytes of GPU memory, as the first compute process reports it; without a GPU, of the processes' host memory.
    memory: Count = 0

    #: Share of the last seconds in which the worker had tasks to compute, from 0 to 1.
    utilization: Share = 0.0

    #: Number of tasks that wait because the result store is full or cannot be reached.
    waiting_for_results: Count = 0

    #: Number of tasks whose inputs are still being written or transferred.
    waiting_for_inputs: Count = 0

    #: Times of each rank, in the order of ranks. Empty if there is only one rank.
    ranks: Annotated[tuple[RankTimes, ...], Meta(max_length=MAX_RANKS)] = ()

    #: KV blocks and prompts of the language stages. None without language stages.
    texts: TextStats | None = None

    #: By exact pool, the batch invariance that comparisons showed so far.
    batch_invariance: dict[str, BatchInvarianceStats] = {}

    #: Name of the loaded model, out of `WorkerInfo.swappable_models`. Empty during a model swap, and without model
    #: swapping.
    loaded: str = ""

    #: Seconds that loading it took.
    load_s: Seconds = 0.0

    #: Name of the model that a swap is loading in place of `loaded`. Empty without a swap.
    target: str = ""

    #: Why the worker runs no tasks. None while its devices are healthy.
    device_fault: DeviceFault | None = None
