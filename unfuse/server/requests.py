"""Routes for requests: request objects, event streams, result files and previews."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Header, Path, Query
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse

from unfuse.core.errors import NotFound
from unfuse.core.request import MODERATION_BLOCKED, Event, RequestStatus
from unfuse.edge.access import ApiError
from unfuse.queues.base import RequestFilter
from unfuse.server.auth import CallerDep
from unfuse.server.gateway import GatewayDep
from unfuse.server.openapi_schemas import EVENTS_RESPONSE, REQUEST, list_response, object_response
from unfuse.server.responses import file_response, sse_event, sse_response
from unfuse.server.route_parameters import After, PageLimit, RequestId, ResultIndex

router = APIRouter(prefix="/requests", tags=["requests"])


@router.get("", responses=list_response(REQUEST))
async def page(
    request: Request,
    gateway: GatewayDep,
    caller: CallerDep,
    status: Annotated[RequestStatus | None, Query(description="List only requests with this status.")] = None,
    limit: PageLimit = 100,
    after: After = None,
) -> dict[str, object]:
    """List requests, newest first. The next page starts `after` the last ID of this one."""
    records = await gateway.queue.list(
        RequestFilter(tenant=caller.visible_tenant, status=status), after=after, limit=limit + 1
    )
    return listed(await gateway.views(request, records), limit)


@router.get("/{id}", responses=object_response(REQUEST))
async def show(id: RequestId, request: Request, gateway: GatewayDep, caller: CallerDep) -> dict[str, object]:
    """One request, with the evidence of what went wrong."""
    return await gateway.view(request, await gateway.load(id, caller.visible_tenant), evidence=True)


@router.post("/{id}/cancel", responses=object_response(REQUEST))
async def cancel(id: RequestId, request: Request, gateway: GatewayDep, caller: CallerDep) -> dict[str, object]:
    """Cancel a request. A request that has ended does not change."""
    await gateway.load(id, caller.visible_tenant)
    return await gateway.view(request, await gateway.scheduler.cancel(id))


@router.get("/{id}/result/{index}", response_class=FileResponse)
async def result(
    id: RequestId, index: ResultIndex, request: Request, gateway: GatewayDep, caller: CallerDep
) -> Response:
    """Return one picture or video of a request, or ranges of its bytes."""
    files = {file.index: file for file in (await gateway.load(id, caller.visible_tenant)).context.result}
    if index not in files:
        raise NotFound(f"request {id} has no result {index}: it has {len(files)}")
    if files[index].flagged:
        raise ApiError(
            400,
            MODERATION_BLOCKED,
            f"the model's safety checker flagged result {index} of {id}, so it is not delivered",
        )
    path = await to_thread.run_sync(gateway.results.path, id, index)
    return await file_response(request, path, files[index].content_type, files[index].sha256)


@router.get("/{id}/preview/{index}/{step}", response_class=Response, responses={200: {"content": {"image/jpeg": {}}}})
async def preview(
    id: RequestId,
    index: ResultIndex,
    step: Annotated[int, Path(description="Number of the step.")],
    gateway: GatewayDep,
    caller: CallerDep,
) -> Response:
    """The preview of an image or video after a step of its running request.

    Only requests with `preview_every` or `partial_images` have previews.
    """
    plan = (await gateway.load(id, caller.visible_tenant)).context.plan
    for stage in plan.stages:
        if stage.params.get("index") == index:
            with suppress(NotFound):
                data = await to_thread.run_sync(gateway.results.attached, id, f"preview-{stage.name}-{step}")
                return Response(data, media_type="image/jpeg")
    raise NotFound(f"request {id} has no preview of picture {index} after step {step}")


@router.get("/{id}/events", response_class=StreamingResponse, responses=EVENTS_RESPONSE)
async def events(
    id: RequestId,
    gateway: GatewayDep,
    caller: CallerDep,
    last_event_id: Annotated[
        int, Header(ge=0, lt=2**63, description="`seq` of the last event that was received; 0: from the first event.")
    ] = 0,
) -> StreamingResponse:
    """The events of a request after `Last-Event-ID`, until its end, as server-sent events."""
    await gateway.load(id, caller.visible_tenant)
    return sse_response(written(gateway.queue.watch(id, last_event_id)))


async def written(event_stream: AsyncIterator[Event]) -> AsyncIterator[bytes]:
    """Yield events as server-sent events, with their sequence numbers as ids."""
    async for event in event_stream:
        yield sse_event(event, event.type, str(event.seq))


def listed(objects: list[dict[str, object]], limit: int) -> dict[str, Any]:
    """Return a page with the first `limit` of these objects.

    Callers load one object more than `limit`, which shows whether there is another page.
    """
    data = objects[:limit]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "has_more": len(objects) > limit, "first_id": first, "last_id": last}
