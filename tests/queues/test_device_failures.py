"""What follows from errors of a device, in each queue: tasks run elsewhere, and a task that causes them fails."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from tests.queues.conftest import Server
from tests.scheduler.model import CARD, ENCODE, params
from tests.scheduler.test_scheduler import done, info
from tools.asking import asking
from unfuse import queues
from unfuse.core.codec import decode, encode
from unfuse.core.messages import TaskFailed
from unfuse.core.request import RequestContext, StageState
from unfuse.core.task import Lease
from unfuse.core.worker_status import DeviceFault, DeviceId, WorkerStatus
from unfuse.scheduler.scheduler import Scheduler
from unfuse.testing.clock import ManualClock
from unfuse.testing.queue_samples import lease_request

FIRST, SECOND = "worker-1", "worker-2"


class Failing:
    """A scheduler whose workers' devices fail, with one request for each call of `submit`."""

    def __init__(self, url: str) -> None:
        clock = ManualClock()
        self.scheduler = Scheduler(queues.open(url, clock), specs=[CARD], clock=clock)

    async def __aenter__(self) -> Failing:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.scheduler.close()
        await self.scheduler.queue.close()

    async def join(self, worker: str, fault: str = "") -> None:
        status = WorkerStatus(device_fault=DeviceFault(0, fault) if fault else None)
        registered = msgspec.structs.replace(info(worker, *CARD.pools().values()), status=status)
        await self.scheduler.queue.register(registered, [CARD])
        await self.scheduler.registry.workers()

    async def submit(self, seed: int = 7) -> str:
        return (await self.scheduler.submit(*asking(CARD, params(seed)))).context.id

    async def take(self, worker: str, slots: int = 1) -> list[Lease]:
        return await self.scheduler.queue.lease(worker, lease_request(ENCODE, slots=slots), 15.0)

    async def fail(self, lease: Lease, company: bool = False, had_worked: bool = True) -> None:
        failed = TaskFailed(
            lease.claim,
            "device",
            "cuda:1 failed: CUDA error: an illegal memory access was encountered",
            "a traceback",
            had_companions=company,
            device=DeviceId("cuda:1", "GPU-1"),
            had_worked=had_worked,
        )
        await self.scheduler.fail(failed, lease.worker)

    async def context(self, request: str) -> RequestContext:
        return (await self.scheduler.queue.load(request)).context

    async def stage(self, request: str) -> StageState:
        return (await self.context(request)).stages["text_encode"]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty queue."""
    if request.param == "redis":
        server: Server = request.getfixturevalue("redis")
        server.client.flushall()
        return server.url
    return "memory:" if request.param == "memory" else f"sqlite:{request.getfixturevalue('tmp_path')}/queue"


async def test_tasks_that_shared_a_failed_device_run_alone_elsewhere_uncharged(url: str) -> None:
    async with Failing(url) as failing:
        for worker in (FIRST, SECOND):
            await failing.join(worker)
        requests = [await failing.submit(seed) for seed in range(2)]
        for lease in await failing.take(FIRST, slots=2):
            await failing.fail(lease, company=True)
        assert await failing.take(FIRST, slots=2) == []
        again = await failing.take(SECOND, slots=2)
        assert [(lease.task.request, lease.task.alone) for lease in again] == [(name, True) for name in requests]
        for request in requests:
            stage = await failing.stage(request)
            assert (stage.failures, stage.crashes, stage.device_failures) == (0, 0, ())


async def test_task_that_makes_two_working_devices_fail_ends_its_request_with_the_error(url: str) -> None:
    async with Failing(url) as failing:
        for worker in (FIRST, SECOND):
            await failing.join(worker)
        request = await failing.submit()
        for worker in (FIRST, SECOND):
            (lease,) = await failing.take(worker)
            await failing.fail(lease)
        context = await failing.context(request)
        assert context.error is not None
        assert (context.status, context.error.code, context.is_dead_letter) == ("failed", "compute_crashed", True)
        assert context.error.message == (
            "the task made its device fail 2 times, on cuda:1 of worker-1, then cuda:1 of worker-2: "
            "cuda:1 failed: CUDA error: an illegal memory access was encountered"
        )


async def test_task_that_fails_the_only_device_twice_between_completed_tasks_is_to_blame(url: str) -> None:
    async with Failing(url) as failing:
        await failing.join(FIRST)
        poison = await failing.submit()
        for _ in range(2):
            (lease,) = await failing.take(FIRST)
            await failing.fail(lease)
        assert (await failing.context(poison)).status == "failed"


async def test_failures_of_a_device_that_completed_nothing_in_between_count_to_a_higher_limit(url: str) -> None:
    async with Failing(url) as failing:
        await failing.join(FIRST)
        request = await failing.submit()
        for had_worked in (True, False):
            (lease,) = await failing.take(FIRST)
            await failing.fail(lease, had_worked=had_worked)
        assert (await failing.context(request)).status != "failed"
        assert [failure.had_worked for failure in (await failing.stage(request)).device_failures] == [True, False]
        (lease,) = await failing.take(FIRST)
        await failing.fail(lease, had_worked=False)
        assert (await failing.context(request)).status == "failed"


async def test_request_completes_elsewhere_after_its_device_failed(url: str) -> None:
    async with Failing(url) as failing:
        for worker in (FIRST, SECOND):
            await failing.join(worker)
        request = await failing.submit()
        (lease,) = await failing.take(SECOND)
        await failing.fail(lease)
        (lease,) = await failing.take(FIRST)
        await failing.scheduler.complete(done(lease), FIRST)
        assert (await failing.stage(request)).status == "done"


async def test_unhealthy_worker_is_no_other_worker_and_serves_no_pool(url: str) -> None:
    async with Failing(url) as failing:
        await failing.join(FIRST)
        await failing.join(SECOND, "cuda:0 (GPU-2) failed 3 times")
        request = await failing.submit()
        (lease,) = await failing.take(FIRST)
        await failing.fail(lease)
        (lease,) = await failing.take(FIRST)  # the task does not wait for the unhealthy worker
        assert lease.task.request == request
        registry = failing.scheduler.registry
        assert [worker.info.id for worker in await registry.workers()] == [FIRST]
        assert registry.device_fault(ENCODE) == ""

        await failing.join(FIRST, "cuda:1 (GPU-1) failed 3 times")
        assert registry.live_pools(ENCODE) == {}
        assert registry.state(ENCODE) == "unavailable"
        assert registry.device_fault(ENCODE) == "worker worker-1 is unhealthy: cuda:1 (GPU-1) failed 3 times"


def test_stage_record_without_device_failures_is_read_as_none() -> None:
    old_record = encode({"status": "queued", "attempt": 2, "crashes": 1})
    assert decode(old_record, StageState) == StageState("queued", 2, crashes=1)
