"""A pool whose files have changed has no workers: requests that need it fail with the file's name."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from tests.scheduler.model import CARD, DECODE, DENOISE, ENCODE, params
from tests.scheduler.test_scheduler import WORKER, info, scheduling, take
from tools.asking import asking
from unfuse.core.errors import WeightsChanged
from unfuse.core.messages import Heartbeat, HeartbeatReply, Register, Registered, StorageLocations, WorkerInfo
from unfuse.core.request import RequestContext
from unfuse.core.worker_status import ChangedFile
from unfuse.scheduler.dispatcher import Dispatcher
from unfuse.scheduler.scheduler import Scheduler

FILE = "transformer/diffusion_pytorch_model.safetensors"
TOUCHED, CHANGED = ChangedFile(FILE, compared=False), ChangedFile(FILE, compared=True)
POOLS = (ENCODE, DENOISE, DECODE)


def lacking(file: ChangedFile, *pools: str) -> WorkerInfo:
    """A worker of all pools but these, whose file has changed."""
    left = tuple(pool for pool in POOLS if pool not in pools)
    return replace(info(WORKER, *left), changed=dict.fromkeys(pools, file))


async def over(scheduler: Scheduler, request: str) -> RequestContext:
    """The context once its request is over."""
    for _ in range(100):
        context = (await scheduler.queue.load(request)).context
        if context.is_over:
            return context
        await asyncio.sleep(0)
    raise AssertionError(f"{request} is not over")


async def test_worker_stays_registered_if_all_its_pools_have_changed_files() -> None:
    async with scheduling() as (scheduler, _):
        dispatcher = Dispatcher(scheduler, [], StorageLocations("memory"))
        welcome = await dispatcher.answer(b"w", Register(lacking(CHANGED, *POOLS), (CARD,), b"s"))
        assert isinstance(welcome, Registered)
        assert isinstance(await dispatcher.answer(b"w", Heartbeat()), HeartbeatReply)

        assert [member.info.changed for member in await scheduler.registry.workers()] == [dict.fromkeys(POOLS, CHANGED)]
        assert scheduler.registry.changed_file(DENOISE) == CHANGED


async def test_new_request_is_rejected_with_the_name_of_the_changed_file() -> None:
    async with scheduling() as (scheduler, _):
        await scheduler.queue.register(lacking(CHANGED, DENOISE), [CARD])
        await scheduler.registry.workers()

        with pytest.raises(WeightsChanged, match=f"{FILE} has changed since it was loaded: restart the server"):
            await scheduler.submit(*asking(CARD, params()))
        assert await scheduler.registry.unavailable_pools() == {CARD.name: [DENOISE]}


async def test_requests_wait_while_a_touched_file_is_compared() -> None:
    async with scheduling() as (scheduler, _):
        dispatcher = Dispatcher(scheduler, [], StorageLocations("memory"))
        await dispatcher.answer(b"w", Register(lacking(TOUCHED, ENCODE), (CARD,), b"s"))
        context = (await scheduler.submit(*asking(CARD, params()))).context
        assert context.status == "queued"

        await dispatcher.answer(b"w", Register(info(WORKER, *POOLS), (CARD,), b"s"))
        assert scheduler.registry.changed_file(*POOLS) is None
        assert [lease.task.request for lease in await take(scheduler, ENCODE)] == [context.id]


async def test_queued_request_fails_with_the_name_of_the_changed_file() -> None:
    async with scheduling() as (scheduler, _):
        dispatcher = Dispatcher(scheduler, [], StorageLocations("memory"))
        await dispatcher.answer(b"w", Register(info(WORKER, *POOLS), (CARD,), b"s"))
        waiting = (await scheduler.submit(*asking(CARD, params()))).context

        await dispatcher.answer(b"w", Register(lacking(CHANGED, DENOISE), (CARD,), b"s"))

        failed = await over(scheduler, waiting.id)
        assert failed.error
        assert (failed.status, failed.error.code, failed.error.stage) == ("failed", "weights_changed", "denoise.0")
        assert failed.error.message == str(CHANGED)


async def test_running_task_continues_after_a_weights_file_changes() -> None:
    """A file that was put in the place of another one changes nothing of what is loaded."""
    async with scheduling() as (scheduler, _):
        dispatcher = Dispatcher(scheduler, [], StorageLocations("memory"))
        await dispatcher.answer(b"w", Register(info(WORKER, *POOLS), (CARD,), b"s"))
        running = (await scheduler.submit(*asking(CARD, params()))).context
        await take(scheduler, ENCODE)

        await dispatcher.answer(b"w", Register(lacking(CHANGED, ENCODE), (CARD,), b"s"))
        await scheduler.maintenance.requests()

        assert not (await scheduler.queue.load(running.id)).context.is_over


async def test_pool_stays_available_if_another_worker_has_unchanged_files() -> None:
    async with scheduling() as (scheduler, _):
        await scheduler.queue.register(lacking(CHANGED, *POOLS), [CARD])
        await scheduler.queue.register(info("other", *POOLS), [CARD])
        await scheduler.registry.workers()

        assert (await scheduler.submit(*asking(CARD, params()))).context.status == "queued"
        assert await scheduler.registry.unavailable_pools() == {}
