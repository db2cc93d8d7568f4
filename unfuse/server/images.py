"""Routes for image generation and image edits, in the format of the `openai` client."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from io import BytesIO

import msgspec
from anyio import to_thread
from fastapi import APIRouter
from PIL import Image
from starlette.requests import Request
from starlette.responses import Response

from unfuse.core.errors import InvalidParameter, NotFound
from unfuse.core.modalities import IMAGE, MASK
from unfuse.core.parameters import nth_seed
from unfuse.core.request import Delivery, RequestContext, RequestRecord, ResultFile
from unfuse.server.auth import CallerDep
from unfuse.server.body import read_body, read_json
from unfuse.server.calls import GenerationCall, answer_call
from unfuse.server.gateway import Gateway, GatewayDep
from unfuse.server.openapi_schemas import EDIT, GENERATE, IMAGES_RESPONSE
from unfuse.server.request_objects import result_path, size_of
from unfuse.server.responses import sse_event
from unfuse.stores.results import ResultStore

router = APIRouter(tags=["images"])

#: Pictures are not counted in tokens, but the `openai` client's type requires these fields.
_USAGE = {
    "input_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
    "output_tokens": 0,
    "total_tokens": 0,
}

#: The entry of a flagged picture in a response with several pictures.
_FLAGGED: dict[str, object] = {"b64_json": None, "flagged": True}


@router.post("/images/generations", openapi_extra=GENERATE, responses=IMAGES_RESPONSE)
async def generate(request: Request, gateway: GatewayDep, asker: CallerDep) -> Response:
    """Generate images from a prompt, and return them when they are complete.

    If the client disconnects first, the request is cancelled, except with an idempotency key, a webhook or
    `--on-disconnect continue`.
    """
    call = GenerationCall(gateway, request, asker, await read_json(request), IMAGE, waits_for_result=True)
    return await _answer(call, "image_generation")


@router.post("/images/edits", openapi_extra=EDIT, responses=IMAGES_RESPONSE)
async def edit(request: Request, gateway: GatewayDep, asker: CallerDep) -> Response:
    """Generate images that start from other images, and return them when they are complete.

    A served model must support this.
    """
    fields = await read_body(request)
    if fields.get("images") is not None:
        if fields.get("image") is not None:
            raise InvalidParameter("image and images are the same parameter: send one of them", "images")
        fields["image"] = fields.pop("images")
    if fields.get("image") in (None, [], [None]):
        raise InvalidParameter("image is missing: send the picture to start from", "image")
    call = GenerationCall(
        gateway, request, asker, fields, IMAGE, "image", waits_for_result=True, second_image_field=MASK
    )
    return await _answer(call, "image_edit")


async def _answer(call: GenerationCall, kind: str) -> Response:
    """Return the response of a call for pictures.

    kind: the first part of the type of streamed events, such as `image_edit` in `image_edit.completed`.
    """
    gateway = call.gateway
    base_url = gateway.base_url(call.request)
    sign = await gateway.links.signer()  # created here, because `reply` is run in a thread

    def reply(context: RequestContext, delivery: Delivery) -> bytes:
        paths = [result_path(context, file.index) for file in context.result]
        links = [base_url + sign(path) for path in paths] if delivery.response_format == "url" else None
        return _reply(gateway.results, context, links)

    return await answer_call(call, lambda record: _events(gateway, record, kind), reply)


async def _events(gateway: Gateway, record: RequestRecord, kind: str) -> AsyncIterator[bytes]:
    """Yield events with the previews that still exist, then events with the finished pictures."""
    request = record.context.id
    preview_counts = Counter[str]()
    async for stage, data in _previews(gateway, request):
        fields = {"partial_image_index": preview_counts[stage], "output_format": "jpeg"}
        yield _event(f"{kind}.partial_image", record.context, data, fields)
        preview_counts[stage] += 1

    context = await gateway.completed(request)
    common_fields = {"output_format": context.request.params["output_format"], "usage": _USAGE}
    for file in context.result:
        data = b"" if file.flagged else await to_thread.run_sync(gateway.results.read, request, file.index)
        picture_fields = _FLAGGED if file.flagged else _true_size(data, file)
        yield _event(f"{kind}.completed", context, data, common_fields | _seed(context, file) | picture_fields)


async def _previews(gateway: Gateway, request: str) -> AsyncIterator[tuple[str, bytes]]:
    """Yield the previews of a request as (stage, JPEG), until it ends or is deleted.

    A preview that was deleted before it could be read is skipped.
    """
    with suppress(NotFound):
        async for event in gateway.queue.watch(request):
            if event.type == "preview":
                with suppress(NotFound):
                    name = f"preview-{event.stage}-{event.step}"
                    yield event.stage, await to_thread.run_sync(gateway.results.attached, request, name)


def _event(kind: str, context: RequestContext, data: bytes, fields: dict[str, object]) -> bytes:
    """Return a server-sent event with a picture. `fields` are added, and override the common ones."""
    picture = {"b64_json": base64.b64encode(data).decode(), "created_at": int(context.created_at)}
    return sse_event({"type": kind, **picture, **_requested_form(context), **fields}, kind)


def _requested_form(context: RequestContext) -> dict[str, object]:
    """Return the requested size, the quality and the background."""
    return {"size": size_of(context), "quality": context.request.params.get("quality", "auto"), "background": "opaque"}


def _true_size(picture: bytes, file: ResultFile) -> dict[str, object]:
    """Return the field with the true size of a generated picture, from its header.

    There is no field for other content types.
    """
    if not file.content_type.startswith("image/"):
        return {}
    with Image.open(BytesIO(picture)) as image:
        return {"size": f"{image.width}x{image.height}"}


def _seed(context: RequestContext, file: ResultFile) -> dict[str, object]:
    """Return the seed of one picture, or no field without a seed."""
    seed = context.request.params["seed"]
    return {"seed": nth_seed(seed, file.index)} if isinstance(seed, int) else {}


def _reply(results: ResultStore, context: RequestContext, links: Sequence[str] | None) -> bytes:
    """Return the response in OpenAI's format, as JSON. Reads files.

    links: the URL of each picture; None to send the pictures as base64.
    """
    data = []
    size = dict[str, object]()
    for position, file in enumerate(context.result):
        picture = _seed(context, file)
        if file.flagged:
            picture |= _FLAGGED
        elif links is None:
            content = results.read(context.id, file.index)
            size = _true_size(content, file)
            picture["b64_json"] = base64.b64encode(content).decode()
        else:
            picture["url"] = links[position]
        data.append(picture)

    return msgspec.json.encode(
        {
            "created": int(context.completed_at or context.created_at),
            "id": context.id,
            "model": context.request.requested_model,
            "data": data,
            "output_format": context.request.params.get("output_format"),
            **_requested_form(context),
            **size,
            **({"hint": context.request.hint} if context.request.hint else {}),
            "usage": _USAGE,
        }
    )
