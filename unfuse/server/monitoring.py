"""Routes for monitoring: health, readiness, version and metrics; for admins also workers and pools.

The first four respond without a key, but /ready and /metrics include less then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from http import HTTPStatus
from operator import or_
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends
from msgspec.structs import asdict
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from unfuse import __version__
from unfuse.core.errors import TransientError
from unfuse.core.plan import pool_with_numerics, readable_pool
from unfuse.core.worker_status import BatchInvarianceStats
from unfuse.edge.access import ApiError, envelope
from unfuse.queues.base import RegisteredWorker
from unfuse.server.auth import Principal, VisitorDep, admin_only, reader_of
from unfuse.server.gateway import Gateway, GatewayDep
from unfuse.server.metrics import Audience
from unfuse.server.openapi_schemas import POOL, READY, WORKER, list_response

router = APIRouter(tags=["health"])
workers_router = APIRouter(tags=["workers"], dependencies=[Depends(admin_only)])

WITHHELD = "the server is not ready: send an API key to get the reason"


@router.get("/health")
async def health() -> dict[str, str]:
    """Return 200 while the gateway runs."""
    return {"status": "ok"}


@router.get("/ready", responses=READY)
async def ready(gateway: GatewayDep, visitor: VisitorDep) -> JSONResponse:
    """200 if all pools of served models are live or scaled to zero, else 503.

    `missing` in the 503 lists the other pools by model. Models that were added while the server ran do not count: those
    that still load are named as loading, and those that cannot be served as failed, with the reason. 503 too while no
    model is served, while the queue is unavailable, while results cannot be stored, and while the server shuts down.
    Unreachable parts of a queue that works without them are named. Without a key, where keys are configured, the answer
    has no names and no reason.
    """
    if gateway.scheduler.draining:
        raise ApiError(503, "not_ready", "the server is shutting down", headers={"retry-after": "5"})
    try:
        answer = await _readiness(gateway)
    except ApiError as error:
        if visitor:
            raise
        raise ApiError(503, "not_ready", WITHHELD, headers={"retry-after": "2"}) from error
    if visitor:
        return answer
    if answer.status_code == HTTPStatus.OK:
        return JSONResponse({"ready": True})
    return _not_ready({"ready": False}, WITHHELD)


async def _readiness(gateway: Gateway) -> JSONResponse:
    """Return the whole response of /ready.

    Raises ApiError (503) if the queue or the result store does not work.
    """
    try:
        await gateway.queue.check()
    except TransientError as error:
        raise ApiError(503, "not_ready", str(error), headers={"retry-after": "2"}) from error
    can_store_results, waiting = await gateway.results_writable()
    if not can_store_results:
        raise ApiError(
            503,
            "not_ready",
            f"results cannot be stored: free space in the result store (--results), or make it reachable; {waiting} "
            "tasks wait",
            headers={"retry-after": "2"},
        )

    # Pools without a live worker, by public model name. Those of models that were added at run time do not count.
    registry = gateway.scheduler.registry
    public_name = gateway.names.public_name
    served = await gateway.models()
    pools_without_worker = await registry.unavailable_pools()
    missing = {
        public_name(model): [*map(readable_pool, pools)]
        for model, pools in pools_without_worker.items()
        if model not in registry.admitted
    }

    # Models that cannot be served: added ones that failed, and ones whose weights files were changed.
    changed_files = {public_name(model): registry.changed_file(*pools) for model, pools in pools_without_worker.items()}
    failed = {name: declared.failure for name, declared in gateway.failed_models().items()}
    failed |= {model: str(file) for model, file in changed_files.items() if file and model not in missing}

    if served and not missing:
        loading = sorted(model for model, file in changed_files.items() if not file)
        details = {"away": [*gateway.queue.unreachable_parts()], "loading": loading, "failed": failed}
        present_details = {key: value for key, value in details.items() if value}
        return JSONResponse({"ready": True, "models": sorted(served), **present_details})

    faults = {public_name(model): registry.device_fault(*pools) for model, pools in pools_without_worker.items()}
    reasons = [
        f"{model}: {reason}"
        if (reason := str(changed_files[model] or faults[model]))
        else f"{model} has no worker for {', '.join(pools)}"
        for model, pools in missing.items()
    ]
    body = {"ready": False, "missing": missing} | ({"failed": failed} if failed else {})
    return _not_ready(body, "; ".join(reasons) or "no model is served yet: start a worker")


def _not_ready(body: dict[str, object], message: str) -> JSONResponse:
    """Return the response 503 with these fields and an error in OpenAI's format."""
    return JSONResponse(body | envelope(ApiError(503, "not_ready", message)), 503, {"retry-after": "2"})


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of unfuse."""
    return {"version": __version__}


@router.get("/metrics", response_class=Response)
async def metrics(gateway: GatewayDep, reader: Annotated[Principal | None, Depends(reader_of)]) -> Response:
    """Metrics in the text format of Prometheus.

    A key with `admin=yes` or `read=yes` gets all metrics, as does every client with --open-metrics or if no keys are
    configured. Without a key, metrics that name a tenant, money or a model are left out. Any other key gets no metrics
    of other tenants.
    """
    registry = gateway.scheduler.registry
    results = await gateway.results_writable()
    workers, models = await registry.workers(), await gateway.models()
    roles = {
        spec.pools()[stage.name]: (stage.role, stage.components[0])
        for spec in models.values()
        for stage in spec.pipeline.stages
    }
    pools = sorted(registry.pools(models))

    audience = Audience(sees_all=gateway.open_metrics)
    if reader:
        sees_all = gateway.open_metrics or reader.admin or reader.read_only
        audience = Audience(reader.tenant, sees_models=reader.models is None, sees_all=sees_all)
    page = await gateway.metrics.render(
        gateway.queue, workers, pools, roles, registry.scaled_to_zero(), audience, results, registry.unhealthy
    )
    return Response(page, media_type=CONTENT_TYPE_LATEST)


@workers_router.get("/workers", responses=list_response(WORKER, paged=False))
async def workers(gateway: GatewayDep) -> dict[str, object]:
    """The registered workers and their state.

    A worker that sent no heartbeat for one lease time is not healthy until it sends another. A worker is also not
    healthy while one of its devices fails: `unhealthy_reason` then names it, and `device_health` shows which it is.
    """
    public_name = gateway.names.public_name
    now = await gateway.queue.now()
    healthy = {member.info.id for member in await gateway.scheduler.registry.workers()}
    members = await gateway.queue.workers()
    views = [_worker_view(member, member.info.id in healthy, now, public_name) for member in members]
    return {"object": "list", "data": views}


def _worker_view(
    member: RegisteredWorker, healthy: bool, now: float, public_name: Callable[[str], str]
) -> dict[str, object]:
    """Return the worker object of the API. `now` is a reading of the queue's clock."""
    info = member.info
    status = info.status
    fault = status.device_fault
    return {
        "id": info.id,
        "object": "worker",
        "node": info.node,
        "role": info.role,
        "device": info.device,
        "device_health": [
            {"index": device.index, "uuid": device.uuid, "healthy": fault is None or fault.rank != rank}
            for rank, device in enumerate(info.devices)
        ],
        "pools": [*map(readable_pool, info.pools)],
        "numerics": info.numerics,
        "slots": info.slots,
        "pid": info.pid,
        "arena_bytes": info.arena_bytes,
        "used": status.arena_used,
        "high_water": status.arena_high_water,
        "unwritten": status.waiting_for_results,
        "engines": info.engines,
        "loaded_model": (public_name(status.loaded) if status.loaded else None) if info.swappable_models else "all",
        "leased": member.leased,
        "models": sorted(public_name(spec.name) for spec in member.models),
        "fragmentation": round(status.arena_fragmentation, 3),
        "ranks": [{key: round(seconds, 3) for key, seconds in asdict(rank).items()} for rank in status.ranks],
        "changed": {
            readable_pool(pool_with_numerics(pool, info.numerics)): str(file) for pool, file in info.changed.items()
        },
        "healthy": healthy,
        "unhealthy_reason": fault.reason if fault else None,
        "seen_s": round(max(0.0, now - member.last_heartbeat), 3),
    }


@workers_router.get("/pools", responses=list_response(POOL, paged=False))
async def pools(gateway: GatewayDep) -> dict[str, object]:
    """The pools of the served models, with their models, healthy workers and waiting tasks.

    `leased` counts all tasks of the pool's workers, including those of their other pools. `oldest_s` is the longest
    wait of the first few tasks in the queue. `batch_invariance` has `largest`, the largest batch
    that changed no byte of any result, and `differences`, by batch size why it is not used: the results of a comparison
    differed, or its batch failed. Its `mode` is `compared` until three keys showed a difference, and then `alone` or
    `batched`.
    """
    registry = gateway.scheduler.registry
    members = await registry.workers()
    models = registry.pools(await gateway.models())
    stats = await gateway.queue.stats(sorted(models))
    data = []
    for pool, names in models.items():
        pool_members = [member for member in members if pool in member.info.pools]
        invariance = [member.info.status.batch_invariance.get(pool, BatchInvarianceStats()) for member in pool_members]
        data.append(
            {
                "id": readable_pool(pool),
                "object": "pool",
                "state": registry.state(pool),
                "reason": str(registry.changed_file(pool) or registry.device_fault(pool)) or None,
                "models": names,
                "workers": [member.info.id for member in pool_members],
                "slots": sum(member.info.slots for member in pool_members),
                "leased": sum(member.leased for member in pool_members),
                "waiting": stats.pools[pool].waiting,
                "oldest_s": round(stats.pools[pool].oldest_s, 3),
                "batch_invariance": msgspec.to_builtins(reduce(or_, invariance, BatchInvarianceStats()), str_keys=True),
            }
        )
    return {"object": "list", "data": data}
