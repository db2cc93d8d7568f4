"""Routes for dead letters: failed requests that a person should look at, with the evidence."""

from __future__ import annotations

from anyio import to_thread
from fastapi import APIRouter
from starlette.requests import Request

from unfuse.core.errors import NotFound, UnknownModel
from unfuse.core.request import TenantLimits
from unfuse.edge.access import ApiError
from unfuse.queues.base import RequestFilter
from unfuse.server.auth import CallerDep
from unfuse.server.gateway import GatewayDep
from unfuse.server.openapi_schemas import DAMAGE, DEAD_DELETED_RESPONSE, REQUEST, list_response, object_response
from unfuse.server.requests import listed
from unfuse.server.route_parameters import After, DeadId, PageLimit

router = APIRouter(prefix="/dead", tags=["dead"])


@router.get("", responses=list_response({"anyOf": [REQUEST, DAMAGE]}))
async def page(
    request: Request,
    gateway: GatewayDep,
    caller: CallerDep,
    limit: PageLimit = 100,
    after: After = None,
) -> dict[str, object]:
    """List dead requests, newest first, with the evidence.

    An admin also gets unreadable records of the queue, before them.
    """
    records = await gateway.queue.list(
        RequestFilter(tenant=caller.visible_tenant, is_dead_letter=True), after=after, limit=limit + 1
    )
    views = await gateway.views(request, records, evidence=True)

    # The tenant of an unreadable record is unknown, so only admins see it.
    damaged = await gateway.queue.damaged() if caller.admin and not after else ()
    entries = [
        {
            "id": entry.id,
            "object": "damaged",
            "kind": entry.kind,
            "error": {"code": "damaged", "message": f"this {entry.kind} cannot be read: {entry.reason}"},
        }
        for entry in damaged
    ]
    requests_page = listed(views, limit)
    return requests_page | {"data": [*entries, *requests_page["data"]]}


@router.get("/{id}", responses=object_response(REQUEST))
async def show(id: DeadId, request: Request, gateway: GatewayDep, caller: CallerDep) -> dict[str, object]:
    """One dead request, with the evidence."""
    record = await gateway.load(id, caller.visible_tenant)
    if not record.context.is_dead_letter:
        raise NotFound(f"request {id} is not a dead letter: see /v1/requests/{id}")
    return await gateway.view(request, record, evidence=True)


@router.delete("/{id}", responses=DEAD_DELETED_RESPONSE)
async def delete(id: DeadId, gateway: GatewayDep, caller: CallerDep) -> dict[str, object]:
    """Delete a dead request and its files, or an unreadable record of the queue.

    Only an admin can delete unreadable records.
    """
    if caller.admin and any(entry.id == id for entry in await gateway.queue.damaged()):
        await gateway.queue.discard(id)
    elif (await gateway.load(id, caller.visible_tenant)).context.is_dead_letter:
        await gateway.delete(id)
    else:
        raise NotFound(f"request {id} is not a dead letter: see /v1/requests/{id}")
    return {"id": id, "object": "request", "deleted": True}


@router.post("/{id}/retry", status_code=202, responses=object_response(REQUEST, 202))
async def retry(id: DeadId, request: Request, gateway: GatewayDep, caller: CallerDep) -> dict[str, object]:
    """Retry a dead request, as a new request with the same seed.

    The old one is no longer a dead letter. The new one's id follows from the old one's: a repeat of an interrupted call
    creates no second request.
    """
    dead_record = await gateway.load(id, caller.visible_tenant)
    if not dead_record.context.is_dead_letter:
        raise ApiError(
            409,
            "not_dead",
            f"request {id} is not a dead letter, it is {dead_record.context.status}: only dead letters can be retried",
            headers={"x-should-retry": "false"},
        )
    if not caller.may_use(model := dead_record.context.request.requested_model):
        raise UnknownModel(f"model {model!r} is not served for this API key", "model")
    await gateway.model(model, caller.models)  # a request for a model that is not served now would wait for ever

    # An admin may retry another tenant's request: then the admin's limits do not apply.
    limits = caller.limits if caller.tenant == dead_record.context.caller.tenant else TenantLimits()
    new_id = gateway.scheduler.choose_retry_id(dead_record.context, limits)

    # The new request needs its uploads before it is submitted. Those of the old request are deleted only after that.
    for name in dead_record.context.request.derived.attachments:
        data = await to_thread.run_sync(gateway.results.attached, id, name)
        await to_thread.run_sync(gateway.results.attach, new_id, name, data)
    with gateway.log_refusals(dead_record.context.caller.tenant, dead_record.context.request.model):
        record = await gateway.scheduler.retry(id, new_id, limits)
    gateway.delete_attachments(dead_record.context)
    return await gateway.view(request, record)
