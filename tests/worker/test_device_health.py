"""When the devices of a worker are healthy: a function of how its compute processes end and what they complete."""

from __future__ import annotations

import asyncio

import pytest

from unfuse.core.errors import DeviceUnusable
from unfuse.core.messages import TaskFailed
from unfuse.core.task import Claim, Task
from unfuse.core.worker_status import DeviceErrors, DeviceId
from unfuse.testing.queue_samples import task_of
from unfuse.testing.virtual_time import in_virtual_time
from unfuse.worker import device_health
from unfuse.worker.compute_messages import DeviceFailed, MemoryShortage
from unfuse.worker.device_health import MOST_FAILURES, DeviceHealth

ERROR = DeviceFailed(1, "CUDA error: an illegal memory access was encountered")


@pytest.fixture
def health() -> DeviceHealth:
    health = DeviceHealth()
    health.record_started([DeviceId("cuda:0", "GPU-0"), DeviceId("cuda:1", "GPU-1")])
    return health


def task(request: str, pool: str = "denoise:p") -> Task:
    return task_of(request, "denoise", 1, pool, "denoise", "model", {})


def fail(health: DeviceHealth, *tasks: Task) -> TaskFailed:
    return health.record_failure(ERROR, tasks)(Claim("req", "denoise", 1, b""))


def test_device_is_unhealthy_after_failures_without_a_completed_task(health: DeviceHealth) -> None:
    for number in range(MOST_FAILURES):
        assert health.fault is None
        report = fail(health, task(f"req_{number}"))
        assert report.had_worked == (number == 0)
    assert (report.kind, report.device) == ("device", DeviceId("cuda:1", "GPU-1"))
    assert report.message == f"the compute process ended because cuda:1 failed: {ERROR.message}"
    assert health.fault is not None
    assert health.fault.rank == 1
    assert health.fault.reason.startswith("cuda:1 (GPU-1) failed 3 times without a completed task in between: CUDA")


def test_device_is_healthy_while_one_task_ran_in_all_of_its_failures(health: DeviceHealth) -> None:
    for number in range(MOST_FAILURES + 1):
        fail(health, task("req_poison"), task(f"req_{number}"))
    assert health.fault is None
    fail(health, task("req_other"))
    assert health.fault is not None


def test_completed_task_proves_the_device_for_its_pool_only(health: DeviceHealth) -> None:
    fail(health, task("req_1"))
    health.record_completed("text_encode:q")
    assert fail(health, task("req_2", "text_encode:q")).had_worked
    assert not fail(health, task("req_1")).had_worked
    health.record_completed("denoise:p@numerics")
    assert fail(health, task("req_3")).had_worked
    assert not fail(health, task("req_4", "text_encode:q")).had_worked


def test_failures_of_a_removed_model_end_with_tasks_of_other_pools_an_hour_later() -> None:
    """Given two failures of a pool that never completes a task again."""
    seconds = [0.0]
    health = DeviceHealth(lambda: seconds[0])
    for number in range(MOST_FAILURES - 1):
        fail(health, task(f"req_{number}", "denoise:removed"))
    seconds[0] = device_health.FAILURE_AGE_S - 1
    health.record_completed("denoise:p")
    assert not fail(health, task("req_again", "denoise:removed")).had_worked
    assert health.fault is not None, "three in a row, within an hour"

    health.record_started([DeviceId("cuda:0"), DeviceId("cuda:1")])
    seconds[0] += 10 * device_health.FAILURE_AGE_S
    fail(health, task("req_idle"))
    assert health.fault is not None, "the device has completed nothing since, however long ago that was"

    health.record_started([DeviceId("cuda:0"), DeviceId("cuda:1")])
    seconds[0] += device_health.FAILURE_AGE_S
    health.record_completed("text_encode:q")
    for number in range(MOST_FAILURES - 1):
        fail(health, task(f"req_new_{number}"))
    assert health.fault is None


def test_failure_without_a_task_counts_against_the_device(health: DeviceHealth) -> None:
    for _ in range(MOST_FAILURES):
        fail(health)
    assert health.fault is not None


def test_failed_check_makes_the_device_unhealthy_until_it_passes(health: DeviceHealth) -> None:
    health.record_unusable(DeviceUnusable("it computed a wrong product", rank=0))
    assert health.fault is not None
    assert health.fault.reason == "cuda:0 (GPU-0) cannot be used: it computed a wrong product"
    health.record_started(health.devices)
    assert health.fault is None


def test_errors_are_counted_by_device_and_kind_until_they_are_reported(health: DeviceHealth) -> None:
    fail(health, task("req_1"))
    fail(health, task("req_2"))
    health.record_unusable(DeviceUnusable("it computed a wrong product", rank=0))
    for retry in ("halved", "halved", ""):
        health.record_shortage(MemoryShortage(1, retry))  # type: ignore[arg-type]
    health.record_completed("denoise:p")
    first, second = health.devices
    assert set(health.errors.take_counts()) == {
        DeviceErrors(second, "failed", count=2),
        DeviceErrors(first, "unusable"),
        DeviceErrors(second, "out_of_memory", "halved", 2),
        DeviceErrors(second, "out_of_memory"),
    }
    assert health.errors.take_counts() == ()


@in_virtual_time
async def test_pauses_of_an_unhealthy_device_double_until_a_task_completes() -> None:
    health, now = DeviceHealth(), asyncio.get_running_loop().time

    async def pause_s() -> int:
        health.record_unusable(DeviceUnusable("it failed"))
        began = now()
        await health.pause()
        health.record_started([DeviceId("cuda:0")])
        return round(now() - began)

    first, longest = device_health.PAUSE_S, device_health.MOST_PAUSE_S
    assert [await pause_s() for _ in range(8)] == [min(longest, first * 2**number) for number in range(8)]
    health.record_completed("denoise:p")
    assert await pause_s() == first
