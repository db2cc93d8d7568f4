"""Sample requests, tasks and changes for the queue suite, independent of the scheduler's rules."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping, Sequence
from math import ceil
from typing import Any, TypeVar

import msgspec

from unfuse.core.messages import WorkerInfo
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import ExecutionPlan, Params, PlannedStage
from unfuse.core.request import (
    Caller,
    Change,
    Delivery,
    Event,
    GenerationRequest,
    RequestContext,
    RequestRecord,
    StageState,
)
from unfuse.core.task import ARENA, SLOTS, Claim, Lease, OutputDeltas, Task
from unfuse.queues.base import LeaseRequest, PoolOffer, QueueBackend, QueueLimits
from unfuse.testing.clock import ManualClock

#: Duration of leases in the suite, in seconds.
TTL = 10.0
LIMITS = QueueLimits(max_active=1000, max_queue=1000)

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


def request(name: str, **fields: Any) -> RequestContext:
    """Return a request whose stage "s" is queued. `fields` belong to any of its structs."""
    fields = {"stages": {"s": StageState("queued", attempt=1)}} | fields
    generation = GenerationRequest(name, "model", fields.pop("params", {}))
    return request_context(generation, fields.pop("plan", ExecutionPlan(())), **fields)


def request_context(request: GenerationRequest, plan: ExecutionPlan, **fields: Any) -> RequestContext:
    """Return a context of this request. `fields` are those of the caller, delivery or context."""
    nested = {
        kind: {name: fields.pop(name) for name in kind.__struct_fields__ if name in fields}
        for kind in (Caller, Delivery)
    }
    return RequestContext(
        request, Caller(**nested[Caller]), Delivery(**nested[Delivery]), plan, fields.pop("stages", {}), **fields
    )


def plan_with_costs(**costs: float) -> ExecutionPlan:
    """Return a plan with one stage for each predicted cost in seconds.

    A stage's pool is the first letter of its name.
    """
    return ExecutionPlan(
        tuple(PlannedStage(name, "denoise", name[0], (), {}, 0, False, cost=cost) for name, cost in costs.items())
    )


def task(name: str, stage: str = "s", pool: str = "p", attempt: int = 1, **fields: Any) -> Task:
    """Return a task of the request `name`."""
    return task_of(name, stage, attempt, pool, "denoise", "model", {}, **fields)


def task_of(
    request: str,
    stage: str,
    attempt: int,
    pool: str,
    kind: str,
    model: str,
    params: Params,
    inputs: tuple[ObjectRef, ...] = (),
    **fields: Any,
) -> Task:
    """Return a task. `fields` are those of the task or of its planned stage."""
    planned = {
        name: fields.pop(name) for name in PlannedStage.__struct_fields__ if name in fields and name != "derived"
    }
    stage_fields = {"after": (), "params": {}, "output_size": 0, "final": False, **planned}
    return Task(request, PlannedStage(stage, kind, pool, **stage_fields), attempt, model, params, inputs, **fields)


async def submit(queue: QueueBackend, name: str, **fields: Any) -> RequestRecord:
    """Submit a request with one task. `fields` are the task's."""
    return await queue.submit(request(name), [task(name, **fields)], [Event("queued")], LIMITS)


def lease_request(
    *pools: str,
    slots: int = 1,
    arena_bytes: int | None = None,
    reserves: Mapping[str, int] | None = None,
    stage_depths: Mapping[str, int] | None = None,
    backpressure: Mapping[str, dict[str, int]] | None = None,
    amounts: Mapping[str, dict[str, int]] | None = None,
    **more: Any,
) -> LeaseRequest:
    """Return the lease request of a worker of these pools, by default for one task.

    `reserves`: bytes of `arena_bytes` that tasks of a pool must leave free.
    `amounts`: amounts of other resources, by pool.
    """
    offers = {}
    for pool in pools:
        arena = {} if arena_bytes is None else {ARENA: arena_bytes - (reserves or {}).get(pool, 0)}
        resources = {SLOTS: slots} | arena | (amounts or {}).get(pool, {})
        offers[pool] = PoolOffer(resources, (stage_depths or {}).get(pool, 0), (backpressure or {}).get(pool, {}))
    return LeaseRequest(offers, **more)


async def lease_next(queue: QueueBackend, *pools: str, worker: str = "w") -> Lease:
    """Lease the next task of these pools."""
    (lease,) = await queue.lease(worker, lease_request(*(pools or ("p",))), TTL)
    return lease


async def lease_all(queue: QueueBackend, *pools: str) -> list[str]:
    """Lease all tasks of these pools. Returns their requests in that order."""
    return [lease.task.request for lease in await queue.lease("w", lease_request(*(pools or ("p",)), slots=1000), TTL)]


async def count_waiting(queue: QueueBackend, pool: str) -> int:
    """Return the number of waiting tasks of a pool."""
    return (await queue.stats([pool])).pools[pool].waiting


async def append(queue: QueueBackend, claim: Claim, offset: int, deltas: Sequence[bytes]) -> bool:
    """Append output deltas to one task. Returns whether its lease is held."""
    (has_lease,) = await queue.append_deltas([OutputDeltas(claim, offset, tuple(deltas))])
    return has_lease


def change(record: RequestRecord, claim: Claim | None = None, **fields: Any) -> Change:
    """Return the change to the next version of a context.

    `push`, `close` and `events` are fields of the change, the others of the context.
    """
    parts = {name: fields.pop(name) for name in ("push", "close", "events") if name in fields}
    context = msgspec.structs.replace(record.context, version=record.context.version + 1, **fields)
    return Change(context, claim, **parts)


def completion(record: RequestRecord, lease: Lease, **fields: Any) -> Change:
    """Return the change that completes the leased stage, with further `fields`."""
    state = StageState("done", attempt=lease.task.attempt, token=lease.token)
    stages = record.context.stages | {lease.task.stage: state}
    return change(record, lease.claim, stages=stages, **{"status": "in_progress", **fields})


async def advance_clock(queue: QueueBackend, clock: ManualClock, seconds: float) -> list[Lease]:
    """Advance the clock, calling `sweep_expired` regularly. Returns the leases expired at the end."""
    expired = await queue.sweep_expired(TTL)
    for _ in range(ceil(seconds / TTL * 4)):
        clock.advance(min(TTL / 4, seconds))
        seconds -= TTL / 4
        expired = await queue.sweep_expired(TTL)
    return expired


async def start_task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task and run it up to its first wait."""
    running = asyncio.create_task(work)
    for _ in range(5):
        await asyncio.sleep(0)
    return running


async def next_event(stream: AsyncIterator[Event]) -> Event | None:
    """Return the next event of a stream, or None at its end."""
    return await anext(stream, None)


async def history(queue: QueueBackend, name: str, after: int = 0) -> Sequence[Event]:
    """Return all events of a request that is over."""
    return [event async for event in queue.watch(name, after)]


def object_ref(id: str, nbytes: int = 10) -> ObjectRef:
    """Return a ref of an object that does not exist."""
    return ObjectRef(id, "w", "node", "a", "s", 1, 1, nbytes, (), (1, 2**63), b"\0\xff", 0.5)


def worker_info(name: str, **fields: Any) -> WorkerInfo:
    """Return a worker of pool "p" with two slots."""
    return WorkerInfo(name, "node", "denoiser", ("p",), 2, "unix:arena", 1 << 20, **fields)


async def expect_error(kind: type[E], work: Awaitable[object]) -> E:
    """Return the error of this kind that the awaitable raises. Raises AssertionError without one."""
    try:
        await work
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected")
