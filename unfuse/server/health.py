"""Health, readiness, version and metrics. All answer without a key, and then tell less."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from unfuse import __version__
from unfuse.core.errors import TransientError
from unfuse.edge.refusal import Refusal, envelope
from unfuse.server.answers import READY
from unfuse.server.auth import Principal, Visitor, reader_of
from unfuse.server.gateway import Gateway, Served
from unfuse.server.metrics_audience import Audience

router = APIRouter(tags=["health"])

WITHHELD = "the server is not ready: send a key of this server to see why"


@router.get("/health")
async def health() -> dict[str, str]:
    """The gateway answers."""
    return {"status": "ok"}


@router.get("/ready", responses=READY)
async def ready(gateway: Served, visitor: Visitor) -> JSONResponse:
    """200 when every pool of every served model has a live worker, else 503 with the pools that lack one, by model.

    Models that were added while it ran do not count: those that still load are named as loading, and those that cannot
    be served as failed, with the reason. 503 too while the queue cannot work, while results cannot be kept, and while
    the server is shutting down. Unreachable parts of a queue that works without them are named. Without a key, where
    keys are configured, the answer has no names and no reason.
    """
    if gateway.scheduler.draining:
        raise Refusal(503, "not_ready", "the server is shutting down", headers={"retry-after": "5"})
    try:
        answer = await _readiness(gateway)
    except Refusal as error:
        if visitor:
            raise
        raise Refusal(503, "not_ready", WITHHELD, headers={"retry-after": "2"}) from error
    if visitor:
        return answer
    is_ready = answer.status_code == 200
    refusal = Refusal(503, "not_ready", WITHHELD)
    body = {"ready": True} if is_ready else {"ready": False, **envelope(refusal)}
    return JSONResponse(body, answer.status_code, None if is_ready else {"retry-after": "2"})


async def _readiness(gateway: Gateway) -> JSONResponse:
    """Return the whole answer of /ready. Raises Refusal (503) if the queue or the result store cannot work."""
    try:
        await gateway.queue.check()
    except TransientError as error:
        raise Refusal(503, "not_ready", str(error), headers={"retry-after": "2"}) from error
    kept, waiting = await gateway.unwritten()
    if not kept:
        message = f"results cannot be kept: make room where --results has them, or make it reachable; {waiting} wait"
        raise Refusal(503, "not_ready", message, headers={"retry-after": "2"})
    registry, shown = gateway.scheduler.registry, gateway.names.shown
    served, lacking = await gateway.models(), await registry.missing()
    missing = {shown(model): pools for model, pools in lacking.items() if model not in registry.admitted}
    changes = {shown(model): registry.changed_file(*pools) for model, pools in lacking.items()}
    failed = {name: one.failed for name, one in gateway.failed().items()}
    failed |= {model: str(changed) for model, changed in changes.items() if changed and model not in missing}
    if served and not missing:
        loading = sorted(model for model, changed in changes.items() if not changed)
        told = {"away": [*gateway.queue.away()], "loading": loading, "failed": failed}
        named = {key: value for key, value in told.items() if value}
        return JSONResponse({"ready": True, "models": sorted(served), **named})
    reasons = [
        f"{model}: {changes[model]}" if changes[model] else f"{model} lacks a worker for {', '.join(pools)}"
        for model, pools in missing.items()
    ]
    refusal = Refusal(503, "not_ready", "; ".join(reasons) or "no model is served yet: start a worker")
    body = {"ready": False, "missing": missing, **({"failed": failed} if failed else {}), **envelope(refusal)}
    return JSONResponse(body, 503, {"retry-after": "2"})


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of unfuse."""
    return {"version": __version__}


@router.get("/metrics", response_class=Response)
async def metrics(gateway: Served, reader: Annotated[Principal | None, Depends(reader_of)]) -> Response:
    """Numbers for Prometheus.

    All of them with a key that has `admin=yes` or `read=yes`, with --open-metrics, and where no keys are configured.
    Without a key only those that name no tenant, money or model. With any other key those of no other tenant.
    """
    registry = gateway.scheduler.registry
    gateway.metrics.results(*await gateway.unwritten())
    workers, models = await registry.workers(), await gateway.models()
    roles = {
        card.pools()[stage.name]: (stage.role, stage.components[0])
        for card in models.values() for stage in card.pipeline.stages
    }  # fmt: skip
    pools = sorted(registry.pools(models))
    audience = Audience(sees_all=gateway.open_metrics)
    if reader:
        sees_all = gateway.open_metrics or reader.admin or reader.only_reads
        audience = Audience(reader.tenant, sees_models=reader.models is None, sees_all=sees_all)
    page = await gateway.metrics.page(gateway.queue, workers, pools, roles, registry.asleep(), audience)
    return Response(page, media_type=CONTENT_TYPE_LATEST)
