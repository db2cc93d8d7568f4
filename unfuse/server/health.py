"""Health, readiness, version and metrics, for probes, without a key."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from unfuse import __version__
from unfuse.core.errors import TransientError
from unfuse.server.answers import READY
from unfuse.server.errors import Refusal, envelope
from unfuse.server.gateway import Served

router = APIRouter(tags=["health"])


@router.get("/health")
async def health() -> dict[str, str]:
    """The gateway answers."""
    return {"status": "ok"}


@router.get("/ready", responses=READY)
async def ready(gateway: Served) -> JSONResponse:
    """200 when every pool of every served model has a live worker, else 503 with the pools that lack one, by model.

    Models that were added while it ran do not count: how far these are is in /v1/models. 503 too while the queue cannot
    work, while results cannot be kept, and while the server is shutting down. What is away of a queue that works
    all the same is told.
    """
    try:
        await gateway.queue.check()
    except TransientError as error:
        raise Refusal(503, "not_ready", str(error), headers={"retry-after": "2"}) from error
    kept, waiting = await gateway.unwritten()
    if not kept:
        message = f"results cannot be kept: make room where --results has them, or make it reachable; {waiting} wait"
        raise Refusal(503, "not_ready", message, headers={"retry-after": "2"})
    if gateway.scheduler.draining:
        raise Refusal(503, "not_ready", "the server is shutting down", headers={"retry-after": "5"})
    registry = gateway.scheduler.registry
    missing = {model: pools for model, pools in (await registry.missing()).items() if model not in registry.admitted}
    served = await gateway.models()
    if served and not missing:
        away = gateway.queue.away()
        return JSONResponse({"ready": True, "models": sorted(served)} | ({"away": [*away]} if away else {}))
    lacking = [
        f"{model}: {changed}" if (changed := registry.changed_file(*pools)) else f"{model} lacks a worker for {named}"
        for model, pools in missing.items()
        if (named := ", ".join(pools))
    ]
    refusal = Refusal(503, "not_ready", "; ".join(lacking) or "no model is served yet: start a worker")
    return JSONResponse({"ready": False, "missing": missing, **envelope(refusal)}, 503, {"retry-after": "2"})


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of unfuse."""
    return {"version": __version__}


@router.get("/metrics", response_class=Response)
async def metrics(gateway: Served) -> Response:
    """Numbers for Prometheus."""
    registry = gateway.scheduler.registry
    gateway.metrics.results(*await gateway.unwritten())
    workers, models = await registry.workers(), await gateway.models()
    roles = {
        card.pools()[stage.name]: (stage.role, stage.components[0])
        for card in models.values() for stage in card.pipeline.stages
    }  # fmt: skip
    pools = sorted(registry.pools(models))
    page = await gateway.metrics.page(gateway.queue, workers, pools, roles, registry.asleep())
    return Response(page, media_type=CONTENT_TYPE_LATEST)
