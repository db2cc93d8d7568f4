"""Routes for pictures, from a prompt or from a picture, in the format of the `openai` client."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated

import msgspec
from anyio import to_thread
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from unfuse.core.errors import InvalidParameter, NotFound, UnfuseError
from unfuse.core.media import IMAGE, MASK
from unfuse.core.request import Record, RequestContext, ResultFile
from unfuse.server.accept import Call, respond_async
from unfuse.server.answers import DRAWN
from unfuse.server.auth import Known
from unfuse.server.body import read_body, read_json
from unfuse.server.caller import Caller
from unfuse.server.errors import envelope, refusal_of
from unfuse.server.fields import EDIT, GENERATE
from unfuse.server.gateway import Gateway, base_of, gateway_of, require_result
from unfuse.server.sse import stream
from unfuse.server.view import result_url, size_of
from unfuse.stores.results import ResultStore

router = APIRouter(tags=["images"])
Served = Annotated[Gateway, Depends(gateway_of)]

_USAGE = {
    "input_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
    "output_tokens": 0,
    "total_tokens": 0,
}
"""Pictures are not counted in tokens, but the `openai` client's type requires these fields."""


@router.post("/images/generations", openapi_extra=GENERATE, responses=DRAWN)
async def generate(request: Request, gateway: Served, asker: Known) -> Response:
    """Make pictures of a prompt, and wait for them. A client that leaves cancels nothing, unless the server says so."""
    call = Call(gateway, request, asker, await read_json(request), IMAGE, waits=True)
    return await _answer(call, "image_generation")


@router.post("/images/edits", openapi_extra=EDIT, responses=DRAWN)
async def edit(request: Request, gateway: Served, asker: Known) -> Response:
    """Make pictures that start from others, and wait for them. A served model must be able to do this."""
    given = await read_body(request)
    if given.get("image") in (None, [], [None]):
        raise InvalidParameter("image is missing: send the picture to start from", "image")
    return await _answer(Call(gateway, request, asker, given, IMAGE, "image", waits=True, beside=MASK), "image_edit")


async def _answer(call: Call, kind: str) -> Response:
    record, delivery = await call.accept()
    gateway, base_url = call.gateway, base_of(call.request)
    if accepted := respond_async(call, record):
        return accepted
    caller = Caller(gateway, call.request, record)
    if delivery.stream:
        return stream(caller.told(_events(gateway, record, kind)))
    with caller.answered():
        context = (await gateway.finished(record)).context
        require_result(context)
        where = base_url if delivery.response_format == "url" else None
        reply = await to_thread.run_sync(_reply, gateway.results, context, where)
        return Response(reply, media_type="application/json")


async def _events(gateway: Gateway, record: Record, kind: str) -> AsyncIterator[bytes]:
    """Events with previews, as far as they still exist, then with the pictures, or with the error."""
    request, made = record.context.id, Counter[str]()
    try:
        async for event in gateway.queue.watch(request):
            with suppress(NotFound):
                if event.type == "preview":
                    name = f"preview-{event.stage}-{event.step}"
                    data = await to_thread.run_sync(gateway.results.attached, request, name)
                    told = {"partial_image_index": made[event.stage], "output_format": "jpeg"}
                    yield _event(f"{kind}.partial_image", record.context, data, told)
                    made[event.stage] += 1
        context = (await gateway.finished(record)).context
        require_result(context)
        form = {"output_format": context.params["output_format"], "usage": _USAGE}
        for file in _files(context):
            data = await to_thread.run_sync(gateway.results.read, request, file.index)
            yield _event(f"{kind}.completed", context, data, form | _seed(context, file))
    except UnfuseError as error:
        yield b"data: " + msgspec.json.encode(envelope(refusal_of(error))) + b"\n\n"


def _event(kind: str, context: RequestContext, data: bytes, told: dict[str, object]) -> bytes:
    event = {
        "type": kind,
        "b64_json": base64.b64encode(data).decode(),
        "created_at": int(context.created_at),
        **_form(context),
        **told,
    }
    return f"event: {kind}\ndata: ".encode() + msgspec.json.encode(event) + b"\n\n"


def _form(context: RequestContext) -> dict[str, object]:
    """The format, size and quality of the pictures that were made."""
    return {"size": size_of(context), "quality": context.params.get("quality", "auto"), "background": "opaque"}


def _files(context: RequestContext) -> list[ResultFile]:
    return sorted(context.result, key=lambda file: file.index)


def _seed(context: RequestContext, file: ResultFile) -> dict[str, object]:
    seed = context.params["seed"]
    return {"seed": seed + file.index} if isinstance(seed, int) else {}


def _reply(results: ResultStore, context: RequestContext, base_url: str | None) -> bytes:
    """The reply in OpenAI's shape, pictures inside (base64) or by address under `base_url`; reads files."""
    data = []
    for file in _files(context):
        picture = _seed(context, file)
        if base_url is None:
            picture["b64_json"] = base64.b64encode(results.read(context.id, file.index)).decode()
        else:
            picture["url"] = result_url(context, file.index, base_url)
        data.append(picture)
    return msgspec.json.encode(
        {
            "created": int(context.completed_at or context.created_at),
            "id": context.id,
            "model": context.asked or context.model,
            "data": data,
            "output_format": context.params.get("output_format"),
            **_form(context),
            "usage": _USAGE,
        }
    )
