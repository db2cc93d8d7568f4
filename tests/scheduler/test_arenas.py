"""What can never lie in the arenas it has to lie in is refused with the sum; whatever might is not."""

from __future__ import annotations

import msgspec
import pytest

from tests.scheduler.model import CARD, DECODE, DENOISE, ENCODE, params
from tests.scheduler.test_backpressure import BIG, MIB, ROOMS
from tests.scheduler.test_scheduler import info, scheduling
from tools.asking import asking
from unfuse.core.errors import InvalidParameter
from unfuse.core.messages import WorkerInfo
from unfuse.core.plan import ExecutionPlan, compile_plan
from unfuse.queues.base import RegisteredWorker
from unfuse.scheduler.admission import PoolArenas
from unfuse.scheduler.scheduler import Scheduler

EACH = [frozenset((ENCODE,)), frozenset((DENOISE,)), frozenset((DECODE,))]
ALL = [frozenset((ENCODE, DENOISE, DECODE))]
LATENTS = ROOMS[1].fixed


def plan(n: int = 1) -> ExecutionPlan:
    return compile_plan(BIG.pipeline, BIG.pools(), params(), [{"seed": seed, "index": seed} for seed in range(n)])


def workers(pools: list[frozenset[str]], *output_sizes: int) -> list[WorkerInfo]:
    return [
        msgspec.structs.replace(info(f"w{number}", *sorted(served)), arena_bytes=room)
        for number, (served, room) in enumerate(zip(pools, output_sizes, strict=True))
    ]


async def refusal(plan: ExecutionPlan, live: list[WorkerInfo], arenas: PoolArenas | None = None, *made: str) -> str:
    """What the plan is refused with, having looked again; nothing if it is not."""
    looked = []

    async def look() -> list[RegisteredWorker]:
        looked.append(True)
        return [RegisteredWorker(worker, (), 0.0) for worker in live]

    try:
        await (arenas or PoolArenas()).require_room(plan, made, live, look)
    except InvalidParameter as error:
        assert looked
        return str(error)
    assert not looked
    return ""


@pytest.mark.parametrize(
    ("pools", "output_sizes", "n", "says"),
    [
        (EACH, (6 * MIB, 20 * MIB, 4096), 1, ""),
        (EACH, (6 * MIB, 20 * MIB - 4096, 4096), 1, f"{20 * MIB} bytes, but an arena has at most {20 * MIB - 4096}"),
        (EACH, (5 * MIB, 20 * MIB, 4096), 1, "--arena 6MiB or more"),
        (EACH, (6 * MIB, 60 * MIB, 4096), 3, ""),
        (EACH, (6 * MIB, 59 * MIB, 4096), 3, "--arena 60MiB or more"),
        (ALL, (26 * MIB,), 1, ""),
        (ALL, (25 * MIB,), 1, f"{26 * MIB} bytes, but the arenas together have {25 * MIB}"),
        (ALL, (86 * MIB,), 4, ""),
        (ALL, (85 * MIB,), 4, "fewer pixels, frames or pictures"),
        (ALL * 2, (46 * MIB, 46 * MIB), 4, ""),
        (ALL * 2, (46 * MIB, 30 * MIB), 4, "--arena 43MiB or more"),
        (ALL * 2, (50 * MIB, 39 * MIB), 4, "4 outputs of stage kind denoise need"),
        ([*EACH, EACH[1]], (6 * MIB, 39 * MIB, 4096, 59 * MIB), 3, ""),
        ([*EACH, EACH[1]], (6 * MIB, 39 * MIB, 4096, 39 * MIB), 3, "none can be split over the arenas"),
        ([EACH[0] | EACH[1], EACH[1]], (26 * MIB, 20 * MIB), 2, ""),
    ],
)
async def test_plan_too_large_for_the_arenas_is_rejected_with_the_sizes(
    pools: list[frozenset[str]], output_sizes: tuple[int, ...], n: int, says: str
) -> None:
    found = await refusal(plan(n), workers(pools, *output_sizes))
    assert says in found and bool(says) == bool(found)


async def test_plan_of_unknown_fit_is_not_rejected() -> None:
    small = workers(ALL, 25 * MIB)
    assert not await refusal(plan(), [])
    assert not await refusal(plan(), workers(EACH, 6 * MIB, 0, 0)), "a store without arenas"
    assert not await refusal(compile_plan(CARD.pipeline, CARD.pools(), params(), [{"index": 0}]), small)
    assert not await refusal(plan(), small, None, "text_encode"), "it is there already"
    assert not await refusal(plan(), small, PoolArenas(spills=True)), "together they go elsewhere"
    assert await refusal(plan(), workers(ALL, 19 * MIB), PoolArenas(spills=True)), "one by one they have to fit"


async def test_arena_check_uses_expected_workers_until_live_ones_register() -> None:
    expected = PoolArenas(workers(EACH, 6 * MIB, 19 * MIB, 4096))
    assert await refusal(plan(), [], expected)
    assert not await refusal(plan(), workers(ALL, 26 * MIB), expected)


async def test_new_worker_is_counted_before_a_request_is_rejected() -> None:
    async with scheduling(arenas=PoolArenas(workers(ALL, MIB))) as (scheduler, _):
        with pytest.raises(InvalidParameter, match="--arena"):
            await scheduler.submit(*asking(BIG, params()))
        assert isinstance(scheduler, Scheduler)
        (live,) = workers(ALL, 26 * MIB)
        await scheduler.queue.register(live)
        assert (await scheduler.submit(*asking(BIG, params()))).context.status == "queued"
