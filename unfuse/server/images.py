"""Pictures: POST /v1/images/generations, as the `openai` client sends it."""

from __future__ import annotations

import base64
from typing import Annotated, Any

import msgspec
from anyio import to_thread
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from unfuse.core.errors import InvalidParameter
from unfuse.core.params import MAX_FPS, MAX_PRIORITY, MAX_SEED, MAX_TIMEOUT, MIN_TIMEOUT, OUTPUT_FORMATS
from unfuse.core.request import RequestContext
from unfuse.server.accept import accept, read_json
from unfuse.server.auth import Tenant
from unfuse.server.errors import Refusal
from unfuse.server.gateway import Gateway, gateway_of
from unfuse.server.view import request_object, result_url
from unfuse.stores.results import ResultStore

router = APIRouter(tags=["images"])

_USAGE = {
    "input_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
    "output_tokens": 0,
    "total_tokens": 0,
}
"""Pictures are not counted in tokens; the `openai` client's type wants the fields."""


def _integer(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


_OPTIONAL: dict[str, dict[str, Any]] = {
    "model": {"type": "string", "description": "may be left out where one model is served"},
    "negative_prompt": {"type": "string"},
    "size": {"type": "string", "pattern": "^(auto|[0-9]+x[0-9]+)$", "default": "auto"},
    "n": _integer(1, 10),
    "seed": _integer(0, MAX_SEED),
    "num_inference_steps": _integer(1, 1000),
    "guidance_scale": {"type": "number", "minimum": 0},
    "num_frames": _integer(1, 1),
    "fps": _integer(1, MAX_FPS),
    "output_format": {"type": "string", "enum": list(OUTPUT_FORMATS), "default": "png"},
    "output_compression": {**_integer(0, 100), "default": 100},
    "response_format": {"type": "string", "enum": ["b64_json", "url"], "default": "b64_json"},
    "priority": {**_integer(-MAX_PRIORITY, MAX_PRIORITY), "default": 0},
    "timeout": {"type": "number", "minimum": MIN_TIMEOUT, "maximum": MAX_TIMEOUT, "description": "seconds"},
    "metadata": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 512}},
    "quality": {"const": "auto"},
    "background": {"const": "auto"},
    "stream": {"const": False},
    "partial_images": {"const": 0},
    "user": {"type": "string"},
    "style": {"type": "string"},
    "moderation": {"type": "string"},
    "safety_identifier": {"type": "string"},
}
_BODY = {
    "type": "object",
    "required": ["prompt"],
    "additionalProperties": False,
    "description": "Bounds that depend on the model are in GET /v1/models; numbers may also be sent as text.",
    "properties": {
        "prompt": {"type": "string", "minLength": 1},
        **{name: {"anyOf": [schema, {"type": "null"}]} for name, schema in _OPTIONAL.items()},
    },
}


@router.post(
    "/images/generations",
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": _BODY}}}},
    responses={202: {"description": "With `Prefer: respond-async`: the request object"}},
)
async def generate(request: Request, gateway: Annotated[Gateway, Depends(gateway_of)], tenant: Tenant) -> Response:
    """Make pictures of a prompt, and wait for them. A client that leaves cancels nothing."""
    given = await read_json(request)
    if given.get("num_frames") not in (None, 1, "1"):
        raise InvalidParameter("num_frames can only be 1 here: a picture has one frame", "num_frames")
    given["num_frames"] = 1
    record, delivery = await accept(gateway, request, tenant, given)
    base_url = str(request.base_url).rstrip("/")
    if _respond_async(request):
        location = f"{base_url}/v1/requests/{record.context.id}"
        headers = {"location": location, "preference-applied": "respond-async"}
        return JSONResponse(request_object(record, base_url), 202, headers)
    context = (await gateway.finished(record)).context
    _require_result(context)
    where = base_url if delivery.response_format == "url" else None
    reply = await to_thread.run_sync(_reply, gateway.results, context, where)
    return Response(reply, media_type="application/json")


def _respond_async(request: Request) -> bool:
    preferences = ",".join(request.headers.getlist("prefer")).split(",")
    return any(preference.partition(";")[0].strip().lower() == "respond-async" for preference in preferences)


def _require_result(context: RequestContext) -> None:
    """Raise Refusal for a request that ended without result; repeating the call would only be told the same."""
    if context.status == "completed":
        return
    final = {"x-should-retry": "false"}
    why = context.error.message if context.error else f"the request was {context.status}"
    code = context.error.code if context.error else context.status
    status = {"cancelled": 409, "expired": 504}.get(context.status, 500)
    raise Refusal(status, code, f"{context.id}: {why}", headers=final)


def _reply(results: ResultStore, context: RequestContext, base_url: str | None) -> bytes:
    """The reply in OpenAI's shape, pictures inside (base64) or by address under `base_url`; reads files."""
    seed = context.params["seed"]
    data = []
    for file in sorted(context.result, key=lambda file: file.index):
        picture: dict[str, object] = {"seed": seed + file.index} if isinstance(seed, int) else {}
        if base_url is None:
            picture["b64_json"] = base64.b64encode(results.read(context.id, file.index)).decode()
        else:
            picture["url"] = result_url(context, file.index, base_url)
        data.append(picture)
    return msgspec.json.encode(
        {
            "created": int(context.completed_at or context.created_at),
            "id": context.id,
            "model": context.model,
            "data": data,
            "output_format": context.params.get("output_format"),
            "size": f"{context.params['width']}x{context.params['height']}",
            "usage": _USAGE,
        }
    )
