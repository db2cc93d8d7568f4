"""Room for outputs of which the pipeline says nothing: by what their pool made of late."""

from __future__ import annotations

import msgspec
import pytest

from tests.scheduler.model import CARD, DECODE, DENOISE, ENCODE, params
from tests.scheduler.test_scheduler import done, scheduling, take
from tools.asking import asking
from unfuse.core.modalities import OutputSize
from unfuse.core.plan import Pipeline
from unfuse.scheduler.scheduler import Scheduler
from unfuse.scheduler.transitions import REMEMBERED, OutputSizes
from unfuse.testing.queue_samples import task_of

TEXT, *OTHERS = CARD.pipeline.stages
UNSAID = msgspec.structs.replace(
    CARD, pipeline=Pipeline((msgspec.structs.replace(TEXT, output_size=OutputSize()), *OTHERS))
)
"""A model that does not say how long its embeddings are."""


async def room_of_next(scheduler: Scheduler, nbytes: int) -> int:
    """Have a request encoded into so many bytes; returns the room that was kept for it."""
    await scheduler.submit(*asking(UNSAID, params()))
    (lease,) = await take(scheduler, ENCODE)
    report = done(lease)
    assert report.output
    output = msgspec.structs.replace(report.output, nbytes=nbytes)
    await scheduler.complete(msgspec.structs.replace(report, output=output), lease.worker)
    return lease.task.planned.output_size


async def test_reserved_output_size_follows_recent_outputs_of_the_pool() -> None:
    async with scheduling() as (scheduler, _):
        assert [await room_of_next(scheduler, nbytes) for nbytes in (300, 100, 200)] == [0, 300, 300]
        for _ in range(REMEMBERED):
            await room_of_next(scheduler, 50)
        assert await room_of_next(scheduler, 50) == 50


async def test_reserved_output_size_ignores_the_largest_five_percent() -> None:
    async with scheduling() as (scheduler, _):
        for nbytes in [10_000, 20_000, 30_000, *range(1, REMEMBERED - 2)]:
            await room_of_next(scheduler, nbytes)
        assert await room_of_next(scheduler, 1) == REMEMBERED - 3


async def test_declared_output_size_precedes_the_learned_one() -> None:
    async with scheduling() as (scheduler, _):
        for _ in range(2):
            await room_of_next(scheduler, 999)
        (denoise, _) = await take(scheduler, DENOISE, slots=2)
        assert denoise.task.planned.output_size == 64 * 64 // 2
        await scheduler.complete(done(denoise), denoise.worker)
        (decode,) = await take(scheduler, DECODE)
        assert decode.task.planned.output_size == 0


async def test_retried_task_uses_the_output_size_learned_meanwhile() -> None:
    async with scheduling() as (scheduler, _):
        await scheduler.submit(*asking(UNSAID, params()))
        (waiting,) = await take(scheduler, ENCODE)
        await room_of_next(scheduler, 70)
        await scheduler.maintenance.expire_lease(waiting)
        (again,) = await take(scheduler, ENCODE)
        assert (waiting.task.planned.output_size, again.task.planned.output_size) == (0, 70)


@pytest.mark.parametrize(("lengths", "room"), [([], 0), ([7], 7), ([1, 2], 2), ([0], 0), (range(1, 101), 97)])
def test_learned_output_size_is_an_observed_size(lengths: list[int], room: int) -> None:
    output_sizes = OutputSizes()
    for nbytes in lengths:
        output_sizes.learn("p", nbytes)
    tasks = (task_of("r", "s", 1, "p", "k", "m", {}), task_of("r", "s", 1, "q", "k", "m", {}))
    assert [task.planned.output_size for task in output_sizes.with_learned_sizes(tasks)] == [room, 0]
