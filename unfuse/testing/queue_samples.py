"""Requests, tasks and changes for the queue's suite, made without any rule of the scheduler."""

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

TTL = 10.0
LIMITS = QueueLimits(max_active=1000, max_queue=1000)

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


def request(name: str, **fields: Any) -> RequestContext:
    """A request whose stage "s" is queued; each field goes to the struct that has it."""
    fields = {"stages": {"s": StageState("queued", attempt=1)}} | fields
    what = GenerationRequest(name, "model", fields.pop("params", {}))
    return request_context(what, fields.pop("plan", ExecutionPlan(())), **fields)


def request_context(request: GenerationRequest, plan: ExecutionPlan, **fields: Any) -> RequestContext:
    """A context of this request; `fields` are those of the caller, of the delivery, or of the context."""
    own = {
        kind: {name: fields.pop(name) for name in kind.__struct_fields__ if name in fields}
        for kind in (Caller, Delivery)
    }
    return RequestContext(
        request, Caller(**own[Caller]), Delivery(**own[Delivery]), plan, fields.pop("stages", {}), **fields
    )


def planned(**costs: float) -> ExecutionPlan:
    """A plan whose stages have these predicted seconds, each in the pool that its name begins with."""
    return ExecutionPlan(
        tuple(PlannedStage(name, "denoise", name[0], (), {}, 0, False, cost=cost) for name, cost in costs.items())
    )


def task(name: str, stage: str = "s", pool: str = "p", attempt: int = 1, **fields: Any) -> Task:
    """A task of the request of that name."""
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
    """A task; `fields` are those of the task or of its planned stage."""
    own = {name: fields.pop(name) for name in PlannedStage.__struct_fields__ if name in fields and name != "derived"}
    stage_fields = {"after": (), "params": {}, "room": 0, "final": False, **own}
    return Task(request, PlannedStage(stage, kind, pool, **stage_fields), attempt, model, params, inputs, **fields)


async def submitted(queue: QueueBackend, name: str, **fields: Any) -> RequestRecord:
    """A stored request with one queued task that has these fields."""
    return await queue.submit(request(name), [task(name, **fields)], [Event("queued")], LIMITS)


def wanted(
    *pools: str,
    slots: int = 1,
    room: int | None = None,
    keep: Mapping[str, int] | None = None,
    later: Mapping[str, int] | None = None,
    behind: Mapping[str, dict[str, int]] | None = None,
    amounts: Mapping[str, dict[str, int]] | None = None,
    **more: Any,
) -> LeaseRequest:
    """What a worker of these pools asks for: one task, unless it says otherwise.

    Tasks of a pool in `keep` have to leave that much of the `room` free; `amounts` are of other resources, by pool.
    """
    offers = {}
    for pool in pools:
        arena = {} if room is None else {ARENA: room - (keep or {}).get(pool, 0)}
        offered = {SLOTS: slots} | arena | (amounts or {}).get(pool, {})
        offers[pool] = PoolOffer(offered, (later or {}).get(pool, 0), (behind or {}).get(pool, {}))
    return LeaseRequest(offers, **more)


async def leased(queue: QueueBackend, *pools: str, worker: str = "w") -> Lease:
    """The one next lease of these pools."""
    (lease,) = await queue.lease(worker, wanted(*(pools or ("p",))), TTL)
    return lease


async def drained(queue: QueueBackend, *pools: str) -> list[str]:
    """Requests of all the tasks of these pools, in the order in which they are leased."""
    return [lease.task.request for lease in await queue.lease("w", wanted(*(pools or ("p",)), slots=1000), TTL)]


async def count_waiting(queue: QueueBackend, pool: str) -> int:
    """The number of tasks that wait in a pool."""
    return (await queue.stats([pool])).pools[pool].waiting


async def append(queue: QueueBackend, claim: Claim, offset: int, pieces: Sequence[bytes]) -> bool:
    """Append pieces to the output of one task. Returns whether its lease is held."""
    (is_held,) = await queue.append_all([OutputDeltas(claim, offset, tuple(pieces))])
    return is_held


def change(record: RequestRecord, claim: Claim | None = None, **fields: Any) -> Change:
    """The next version of a context; `push`, `close` and `events` go to the change, other fields to the context."""
    parts = {name: fields.pop(name) for name in ("push", "close", "events") if name in fields}
    context = msgspec.structs.replace(record.context, version=record.context.version + 1, **fields)
    return Change(context, claim, **parts)


def done(record: RequestRecord, lease: Lease, **fields: Any) -> Change:
    """The change that completes the leased stage, and nothing more unless `fields` say so."""
    state = StageState("done", attempt=lease.task.attempt, token=lease.token)
    stages = record.context.stages | {lease.task.stage: state}
    return change(record, lease.claim, stages=stages, **{"status": "in_progress", **fields})


async def passing(queue: QueueBackend, clock: ManualClock, seconds: float) -> list[Lease]:
    """Let time pass while somebody sweeps; returns what has expired at its end."""
    late = await queue.expired(TTL)
    for _ in range(ceil(seconds / TTL * 4)):
        clock.advance(min(TTL / 4, seconds))
        seconds -= TTL / 4
        late = await queue.expired(TTL)
    return late


async def started(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """The work as a task that has come to its first wait."""
    running = asyncio.create_task(work)
    for _ in range(5):
        await asyncio.sleep(0)
    return running


async def following(stream: AsyncIterator[Event]) -> Event | None:
    """The next event of a stream, None at its end."""
    return await anext(stream, None)


async def history(queue: QueueBackend, name: str, after: int = 0) -> Sequence[Event]:
    """All events of a request that is over."""
    return [event async for event in queue.watch(name, after)]


def handle(id: str, nbytes: int = 10) -> ObjectRef:
    """The handle of an object that somebody has."""
    return ObjectRef(id, "w", "node", "a", "s", 1, 1, nbytes, (), (1, 2**63), b"\0\xff", 0.5)


def worker(name: str, **fields: Any) -> WorkerInfo:
    """A worker of pool "p" with two slots."""
    return WorkerInfo(name, "node", "denoiser", ("p",), 2, "unix:arena", 1 << 20, **fields)


async def raised(kind: type[E], work: Awaitable[object]) -> E:
    """The error of that kind that the work ends with."""
    try:
        await work
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected")
