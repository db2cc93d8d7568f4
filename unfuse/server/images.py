"""Routes for pictures, from a prompt or from a picture, in the format of the `openai` client."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from io import BytesIO

import msgspec
from anyio import to_thread
from fastapi import APIRouter
from PIL import Image
from starlette.requests import Request
from starlette.responses import Response

from unfuse.core.errors import InvalidParameter, NotFound, UnfuseError
from unfuse.core.media import IMAGE, MASK
from unfuse.core.medium import nth_seed
from unfuse.core.request import Delivery, Record, RequestContext, ResultFile
from unfuse.edge.refusal import envelope
from unfuse.server import sse
from unfuse.server.accept import Call
from unfuse.server.answers import DRAWN
from unfuse.server.auth import Known
from unfuse.server.body import read_body, read_json
from unfuse.server.caller import answer_call
from unfuse.server.errors import refusal_of
from unfuse.server.fields import EDIT, GENERATE
from unfuse.server.gateway import Gateway, Served, base_of
from unfuse.server.view import result_path, size_of
from unfuse.stores.results import ResultStore

router = APIRouter(tags=["images"])

_USAGE = {
    "input_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
    "output_tokens": 0,
    "total_tokens": 0,
}
"""Pictures are not counted in tokens, but the `openai` client's type requires these fields."""


_FLAGGED = {"b64_json": None, "flagged": True}
"""The entry of a flagged picture in a response with several pictures."""


@router.post("/images/generations", openapi_extra=GENERATE, responses=DRAWN)
async def generate(request: Request, gateway: Served, asker: Known) -> Response:
    """Make pictures of a prompt, and wait for them. They are cancelled when the client disconnects."""
    call = Call(gateway, request, asker, await read_json(request), IMAGE, waits=True)
    return await _answer(call, "image_generation")


@router.post("/images/edits", openapi_extra=EDIT, responses=DRAWN)
async def edit(request: Request, gateway: Served, asker: Known) -> Response:
    """Make pictures that start from others, and wait for them. A served model must be able to do this."""
    given = await read_body(request)
    if given.get("images") is not None:
        if given.get("image") is not None:
            raise InvalidParameter("image and images say the same: send one of them", "images")
        given["image"] = given.pop("images")
    if given.get("image") in (None, [], [None]):
        raise InvalidParameter("image is missing: send the picture to start from", "image")
    return await _answer(Call(gateway, request, asker, given, IMAGE, "image", waits=True, beside=MASK), "image_edit")


async def _answer(call: Call, kind: str) -> Response:
    gateway, base, sign = call.gateway, base_of(call.request), await call.gateway.links.signer()

    def reply(context: RequestContext, delivery: Delivery) -> bytes:
        def address(index: int) -> str:
            return base + sign(result_path(context, index))

        return _reply(gateway.results, context, address if delivery.response_format == "url" else None)

    return await answer_call(call, lambda record: _events(gateway, record, kind), reply)


async def _events(gateway: Gateway, record: Record, kind: str) -> AsyncIterator[bytes]:
    """Events with previews, as far as they still exist, then with the pictures, or with the error."""
    request, made = record.context.id, Counter[str]()
    try:
        async for stage, data in _previews(gateway, request):
            told = {"partial_image_index": made[stage], "output_format": "jpeg"}
            yield _event(f"{kind}.partial_image", record.context, data, told)
            made[stage] += 1
        context = await gateway.completed(request)
        form = {"output_format": context.request.params["output_format"], "usage": _USAGE}
        for file in context.result:
            said = form | _seed(context, file)
            if file.flagged:
                yield _event(f"{kind}.completed", context, b"", said | _FLAGGED)
                continue
            data = await to_thread.run_sync(gateway.results.read, request, file.index)
            yield _event(f"{kind}.completed", context, data, said | _true_size(data, file))
    except UnfuseError as error:
        yield sse.event(envelope(refusal_of(error)))


async def _previews(gateway: Gateway, request: str) -> AsyncIterator[tuple[str, bytes]]:
    """The previews of a request that still exist, with their stages, until its end, or until it is known no more."""
    with suppress(NotFound):
        async for event in gateway.queue.watch(request):
            if event.type == "preview":
                with suppress(NotFound):
                    name = f"preview-{event.stage}-{event.step}"
                    yield event.stage, await to_thread.run_sync(gateway.results.attached, request, name)


def _event(kind: str, context: RequestContext, data: bytes, told: dict[str, object]) -> bytes:
    picture = {"b64_json": base64.b64encode(data).decode(), "created_at": int(context.created_at)}
    return sse.event({"type": kind, **picture, **_form(context), **told}, kind)


def _form(context: RequestContext) -> dict[str, object]:
    """Return the requested size, the quality and the background."""
    return {"size": size_of(context), "quality": context.request.params.get("quality", "auto"), "background": "opaque"}


def _true_size(picture: bytes, file: ResultFile) -> dict[str, object]:
    """Return the size in the header of a generated picture; empty for another content type."""
    if not file.content_type.startswith("image/"):
        return {}
    with Image.open(BytesIO(picture)) as image:
        return {"size": f"{image.width}x{image.height}"}


def _seed(context: RequestContext, file: ResultFile) -> dict[str, object]:
    seed = context.request.params["seed"]
    return {"seed": nth_seed(seed, file.index)} if isinstance(seed, int) else {}


def _reply(results: ResultStore, context: RequestContext, address: Callable[[int], str] | None) -> bytes:
    """Return the response in OpenAI's form, with base64 pictures, or with links made by `address`. Reads files."""
    data, size = [], dict[str, object]()
    for file in context.result:
        picture = _seed(context, file)
        if file.flagged:
            picture |= _FLAGGED
            data.append(picture)
            continue
        if address is None:
            content = results.read(context.id, file.index)
            size = _true_size(content, file)
            picture["b64_json"] = base64.b64encode(content).decode()
        else:
            picture["url"] = address(file.index)
        data.append(picture)
    return msgspec.json.encode(
        {
            "created": int(context.completed_at or context.created_at),
            "id": context.id,
            "model": context.request.requested_model,
            "data": data,
            "output_format": context.request.params.get("output_format"),
            **_form(context),
            **size,
            **({"hint": context.request.hint} if context.request.hint else {}),
            "usage": _USAGE,
        }
    )
