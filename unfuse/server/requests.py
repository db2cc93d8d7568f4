"""Requests: what became of them, as objects, as a stream of events, as files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from anyio import to_thread
from fastapi import APIRouter, Depends, Header, Query
from starlette.requests import Request
from starlette.responses import FileResponse, StreamingResponse

from unfuse.core.errors import NotFound
from unfuse.core.event import Event
from unfuse.core.request import TERMINAL, Record, RequestStatus
from unfuse.queues.base import Filter
from unfuse.server.auth import Tenant
from unfuse.server.gateway import Gateway, gateway_of
from unfuse.server.view import request_object, status_of

router = APIRouter(prefix="/requests", tags=["requests"])
Served = Annotated[Gateway, Depends(gateway_of)]

COMMENT_EVERY_S = 15.0
"""A silent event stream says something this often, so that nobody between closes it."""

_PAGE = 200


@router.get("")
async def page(
    request: Request,
    gateway: Served,
    tenant: Tenant,
    status: RequestStatus | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: str | None = None,
) -> dict[str, object]:
    """Requests, newest first; the next page starts `after` the last id of this one."""
    found = await _matching(gateway, tenant, status, limit + 1, after)
    data = [request_object(record, _base(request)) for record in found[:limit]]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "has_more": len(found) > limit, "first_id": first, "last_id": last}


@router.get("/{id}")
async def show(id: str, request: Request, gateway: Served, tenant: Tenant) -> dict[str, object]:
    """One request."""
    return request_object(await gateway.load(id, tenant), _base(request))


@router.post("/{id}/cancel")
async def cancel(id: str, request: Request, gateway: Served, tenant: Tenant) -> dict[str, object]:
    """End a request; what is over stays as it is."""
    await gateway.load(id, tenant)
    return request_object(await gateway.scheduler.cancel(id), _base(request))


@router.get("/{id}/result/{index}", response_class=FileResponse)
async def result(id: str, index: int, gateway: Served, tenant: Tenant) -> FileResponse:
    """One picture or video of a request, or a range of its bytes."""
    files = {file.index: file for file in (await gateway.load(id, tenant)).context.result}
    if index not in files:
        raise NotFound(f"request {id} has no result {index}: it has {len(files)}")
    path = await to_thread.run_sync(gateway.results.path, id, index)
    return FileResponse(path, media_type=files[index].content_type)


@router.get("/{id}/events", response_class=StreamingResponse)
async def events(
    id: str,
    gateway: Served,
    tenant: Tenant,
    last_event_id: Annotated[int, Header(ge=0, lt=2**63)] = 0,
) -> StreamingResponse:
    """What happens to a request, as server-sent events, from behind `Last-Event-ID` to its end."""
    await gateway.load(id, tenant)
    stream = event_stream(gateway.queue.watch(id, last_event_id), COMMENT_EVERY_S)
    return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-store"})


async def event_stream(happening: AsyncIterator[Event], comment_every: float) -> AsyncIterator[bytes]:
    """Events as they are sent, with a comment after every `comment_every` seconds of silence."""
    upcoming = asyncio.ensure_future(anext(happening, None))
    try:
        while True:
            await asyncio.wait({upcoming}, timeout=comment_every)
            if not upcoming.done():
                yield b": waiting\n\n"
                continue
            event = upcoming.result()
            if event is None:
                return
            yield f"id: {event.seq}\nevent: {event.type}\n".encode() + b"data: " + msgspec.json.encode(event) + b"\n\n"
            upcoming = asyncio.ensure_future(anext(happening, None))
    finally:
        upcoming.cancel()
        await asyncio.gather(upcoming, return_exceptions=True)


async def _matching(
    gateway: Gateway, tenant: str, status: RequestStatus | None, limit: int, after: str | None
) -> list[Record]:
    over = None if status is None else status in TERMINAL
    which = Filter(over=over, tenant=tenant, status=status if over else None)
    found: list[Record] = []
    while len(found) < limit:
        records = await gateway.queue.list(which, after=after, limit=_PAGE)
        found += [record for record in records if status in (None, status_of(record))]
        if len(records) < _PAGE:
            break
        after = records[-1].context.id
    return found[:limit]


def _base(request: Request) -> str:
    return str(request.base_url).rstrip("/")
