"""Decides whether the devices of a worker are healthy, by how its compute processes end."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial

import structlog
from msgspec.structs import replace

from unfuse.core.errors import DeviceUnusable
from unfuse.core.messages import TaskFailed
from unfuse.core.plan import declared_pool
from unfuse.core.task import Task
from unfuse.core.worker_status import DeviceErrors, DeviceFault, DeviceId
from unfuse.worker.compute_messages import DeviceFailed, MemoryShortage

log = structlog.get_logger(__name__)

#: Device errors in a row, without a completed task in between, after which a device is unhealthy.
MOST_FAILURES = 3

#: Seconds after a failure from which a completed task of any pool cancels it. The failed pool may never complete a task
#: again, as when its model was removed.
FAILURE_AGE_S = 3600.0

#: The first pause of an unhealthy device, in seconds. Each further one is twice as long, up to the longest.
PAUSE_S, MOST_PAUSE_S = 5.0, 300.0

#: Most characters of the reason in a worker's status.
REASON_CHARS = 1000


@dataclass(frozen=True)
class _Failure:
    """One device error that ended a compute process."""

    #: The tasks that had begun, as (request, stage).
    tasks: frozenset[tuple[str, str]]

    #: Their declared pools.
    pools: frozenset[str]

    #: When it happened, in monotonic seconds.
    at: float


class DeviceErrorCounts:
    """Counts device errors in the worker's parent.

    So no count ends with a compute process.
    """

    def __init__(self) -> None:
        self._counts = Counter[DeviceErrors]()

    def add(self, errors: DeviceErrors) -> None:
        """Count errors."""
        self._counts[replace(errors, count=1)] += errors.count

    def take_counts(self) -> tuple[DeviceErrors, ...]:
        """Return the errors since the last call, for a heartbeat."""
        counts, self._counts = self._counts, Counter[DeviceErrors]()
        return tuple(replace(errors, count=count) for errors, count in counts.items())


class DeviceHealth:
    """The health of a worker's devices: healthy until one fails repeatedly, or fails its check.

    A device error that ends the compute process is a failure. A completed task proves that the device works for its
    pool, and cancels the failures in which tasks of this pool had begun. It also cancels failures of any pool that are
    FAILURE_AGE_S old. A device is unhealthy after MOST_FAILURES failures, unless one task had begun in all of them:
    then the task may be the cause. It is also unhealthy when it fails its check, at once.

    The compute processes of an unhealthy worker do not run. They start again after a pause, which doubles each time
    until a task completes. The worker is healthy when they have started, since they check their devices first.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now

        #: The device of each rank, as the compute processes reported it when they started last.
        self.devices: tuple[DeviceId, ...] = ()

        #: Why the worker runs no tasks. None while all devices are healthy.
        self.fault: DeviceFault | None = None

        #: The errors of all devices that no heartbeat has reported yet.
        self.errors = DeviceErrorCounts()

        self._failures: list[_Failure] = []
        self._pause_s = 0.0  # the last pause

    def device(self, rank: int) -> DeviceId:
        """The device of a rank. Before the first start only its rank is known."""
        return self.devices[rank] if rank < len(self.devices) else DeviceId(f"rank {rank}")

    def record_failure(self, failed: DeviceFailed, begun: Collection[Task]) -> partial[TaskFailed]:
        """Record a device error that ended a compute process while these tasks had begun.

        Returns a function that makes the report for one of them.
        """
        pools = frozenset(declared_pool(task.planned.pool) for task in begun)
        had_worked = not any(failure.pools & pools or not failure.pools for failure in self._failures)
        self._failures.append(_Failure(frozenset(task.key for task in begun), pools, self._now()))
        count, device = len(self._failures), self.device(failed.rank)
        self.errors.add(DeviceErrors(device, "failed"))
        log.error(
            "a device failed", device=device.index, uuid=device.uuid, reason=failed.message, failures_in_a_row=count
        )
        if count >= MOST_FAILURES and not frozenset.intersection(*(failure.tasks for failure in self._failures)):
            reason = f"{device} failed {count} times without a completed task in between: {failed.message}"
            self._set_fault(failed.rank, reason)
        message = f"the compute process ended because {device.index} failed: {failed.message}"
        report = partial(TaskFailed, kind="device", message=message, evidence=failed.evidence)
        return partial(report, device=device, had_worked=had_worked)

    def record_unusable(self, error: DeviceUnusable) -> None:
        """Record that a device failed its check, or failed while models were loaded."""
        device = self.device(error.rank)
        self.errors.add(DeviceErrors(device, "unusable"))
        self._set_fault(error.rank, f"{device} cannot be used: {error}")

    def record_shortage(self, shortage: MemoryShortage) -> None:
        """Record that a device had too little memory for a step."""
        self.errors.add(DeviceErrors(self.device(shortage.rank), "out_of_memory", shortage.retry))

    def record_completed(self, pool: str) -> None:
        """Record that a task of this pool is complete."""
        name, oldest = declared_pool(pool), self._now() - FAILURE_AGE_S
        self._failures = [
            failure for failure in self._failures if failure.pools and name not in failure.pools and failure.at > oldest
        ]
        self._pause_s = self._pause_s if self._failures else 0.0

    def record_started(self, devices: Iterable[DeviceId]) -> None:
        """Record that the compute processes have started: all devices passed their check."""
        self.devices = tuple(devices)
        if self.fault is not None:
            device = self.device(self.fault.rank)
            log.info("the device is healthy again: it passed its check", device=device.index, uuid=device.uuid)
            self.fault = None

    async def pause(self) -> None:
        """Wait before the next start of the compute processes, if a device is unhealthy."""
        if self.fault is not None:
            await asyncio.sleep(self._pause_s)

    def _set_fault(self, rank: int, reason: str) -> None:
        self.fault = DeviceFault(rank, reason[:REASON_CHARS])
        self._pause_s = min(MOST_PAUSE_S, 2 * self._pause_s or PAUSE_S)
        device = self.device(rank)
        log.error(
            "the device is unhealthy, the worker runs no tasks",
            device=device.index,
            uuid=device.uuid,
            reason=reason,
            next_try_s=self._pause_s,
        )
