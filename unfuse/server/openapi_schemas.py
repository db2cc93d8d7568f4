"""Schemas in /openapi.json: of responses, and of the bodies of creating calls, made from the media's tables.

A fuzz test checks every response against them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from unfuse.core import modalities
from unfuse.core.model_spec import MAX_NAME, NAME
from unfuse.core.parameters import MAX_SCALED, MAX_TEXTS, Modality, Parameter
from unfuse.core.request import Awaiting, Event, RequestStatus
from unfuse.server.served_models import Phase

Schema = dict[str, Any]
Answers = dict[int | str, Schema]

TEXT, NUMBER, INTEGER, FLAG = ({"type": kind} for kind in ("string", "number", "integer", "boolean"))
ANY: Schema = {}  # an object whose fields depend on the model, or on the client

UNIX = {**NUMBER, "description": "Unix seconds"}
SECONDS = {**NUMBER, "description": "seconds"}
BYTES = {**INTEGER, "description": "bytes"}


def perhaps(schema: Schema) -> Schema:
    """This schema, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def array(items: Schema) -> Schema:
    """An array of these."""
    return {"type": "array", "items": items}


def table(values: Schema) -> Schema:
    """An object that maps names to these."""
    return {"type": "object", "additionalProperties": values}


def thing(fields: Schema, **optional: Schema) -> Schema:
    """An object with these fields, which are required, and with the optional ones."""
    return {"type": "object", "required": list(fields), "properties": fields | optional}


STAGE = thing({
    "name": TEXT, "pool": TEXT, "status": TEXT, "worker": TEXT, "attempt": INTEGER, "cached": FLAG,
    "failures": INTEGER, "crashes": INTEGER, "recomputes": INTEGER,
    "queued_s": SECONDS, "get_s": SECONDS, "run_s": SECONDS, "put_s": SECONDS, "save_s": SECONDS,
    "exchange_s": SECONDS, "share_s": SECONDS,
    "steps": INTEGER, "resumed": INTEGER, "batch": NUMBER, "device": TEXT, "devices": INTEGER,
})  # fmt: skip
ERROR = thing({"code": TEXT, "message": TEXT}, stage=TEXT, evidence=TEXT)
REQUEST = thing({
    "id": TEXT, "object": {"const": "request"}, "model": TEXT,
    "medium": {"enum": [medium.name for medium in modalities.MEDIA]},
    "prompt": perhaps(TEXT), "params": table(ANY), "tenant": TEXT, "priority": INTEGER,
    "status": {"enum": list(get_args(RequestStatus))},
    "state": {"enum": [*get_args(RequestStatus), *get_args(Awaiting)]},
    "stage": perhaps(TEXT), "step": INTEGER, "steps": INTEGER,
    "progress": {**INTEGER, "minimum": 0, "maximum": 100, "description": "percent of the predicted seconds"},
    "queue_position": perhaps(INTEGER), "eta_s": perhaps(SECONDS), "seed": perhaps(INTEGER),
    "cost": thing({"predicted_s": SECONDS, "device_s": table(SECONDS), "money": perhaps(NUMBER)}),
    "created_at": UNIX, "started_at": perhaps(UNIX), "completed_at": perhaps(UNIX), "attempts": INTEGER,
    "stages": array(STAGE),
    "result": array(thing({"url": TEXT, "content_type": TEXT, "bytes": BYTES}, flagged=FLAG)),
    "error": perhaps(ERROR), "metadata": table(TEXT),
    "webhook": perhaps(thing({"url": TEXT, "state": TEXT, "attempts": INTEGER, "reason": TEXT})),
    "hint": perhaps({**TEXT, "description": "words of the prompt that the model does not know, and what it makes"}),
})  # fmt: skip
DAMAGE = thing({"id": TEXT, "object": {"const": "damaged"}, "kind": TEXT, "error": ERROR})
VIDEO = thing({
    "id": TEXT, "object": {"const": "video"}, "created_at": INTEGER, "completed_at": perhaps(INTEGER),
    "status": {"enum": ["queued", "in_progress", "completed", "failed"]}, "progress": INTEGER, "prompt": TEXT,
    "model": TEXT,
    "seconds": TEXT, "size": TEXT, "error": perhaps(thing({"code": TEXT, "message": TEXT})),
    "num_frames": INTEGER, "fps": ANY, "seed": INTEGER, "output_format": TEXT, "metadata": table(TEXT),
}, hint=TEXT)  # fmt: skip
MODEL = thing({
    "id": TEXT, "object": {"const": "model"}, "created": INTEGER, "owned_by": TEXT, "makes_video": FLAG,
    "root": TEXT, "max_model_len": perhaps(INTEGER), "input_modalities": array(TEXT),
    "takes_image": FLAG, "starts_from": table(NUMBER), "references": INTEGER,
    "last_frame": {"enum": ["", "may", "must"]}, "loras": array(TEXT), "limits": table(NUMBER),
    "defaults": table(ANY), "quality": table(table(ANY)), "stages": table(TEXT),
    "state": {"enum": ["ready", "loading", "unavailable", "failed"]}, "reason": perhaps(TEXT), "default": FLAG,
    "progress": perhaps(thing({"phase": {"enum": [*get_args(Phase)]}, "done": BYTES, "total": BYTES})),
})  # fmt: skip
WORKER = thing({
    "id": TEXT, "object": {"const": "worker"}, "node": TEXT, "role": TEXT, "device": TEXT, "pools": array(TEXT),
    "holds": perhaps(TEXT), "outcome": table(TEXT), "slots": INTEGER, "leased": INTEGER, "models": array(TEXT),
    "pid": INTEGER, "room": BYTES, "used": BYTES, "high_water": BYTES, "fragmentation": NUMBER,
    "engines": table(TEXT), "ranks": array(thing({"compute_s": SECONDS, "exchange_s": SECONDS})),
    "changed": table(TEXT), "healthy": FLAG, "seen_s": SECONDS,
})  # fmt: skip
POOL = thing({
    "id": TEXT, "object": {"const": "pool"}, "models": array(TEXT), "workers": array(TEXT), "slots": INTEGER,
    "leased": INTEGER, "waiting": INTEGER, "oldest_s": SECONDS, "state": TEXT, "reason": perhaps(TEXT),
    "shares": thing({"largest": INTEGER, "blame": table(TEXT)}),
})  # fmt: skip
PICTURES = thing({
    "created": INTEGER, "id": TEXT, "model": TEXT, "size": TEXT, "quality": TEXT, "background": TEXT,
    "data": array(thing({"seed": INTEGER}, b64_json=perhaps(TEXT), url=TEXT, flagged=FLAG)),
    "output_format": TEXT, "usage": table(ANY),
}, hint=TEXT)  # fmt: skip

_HEADERS = {"x-request-id": {"description": "what this call is called in the server's log", "schema": TEXT}}
_LATER = {"location": {"description": "where the request is read", "schema": TEXT}}
_LATER |= {"preference-applied": {"schema": {"const": "respond-async"}}}


def answer(says: str, schema: Schema, kind: str = "application/json", headers: Schema | None = None) -> Schema:
    """One response: its description, the schema of its body, its content type."""
    return {"description": says, "content": {kind: {"schema": schema}}, "headers": _HEADERS | (headers or {})}


def one(schema: Schema, status: int = 200) -> Answers:
    """The responses of a call that returns one such object."""
    return {status: answer("What was asked for", schema)}


def several(schema: Schema, paged: bool = True) -> Answers:
    """The responses of a call that returns a list of them, in pages if `paged`."""
    page = {"has_more": FLAG, "first_id": perhaps(TEXT), "last_id": perhaps(TEXT)} if paged else {}
    return one(thing({"object": {"const": "list"}, "data": array(schema), **page}))


#: One server-sent event: in OpenAPI 3.1, the schema of an event stream describes each event.
SENT = thing({"data": TEXT}, event=TEXT, id=TEXT)

_TOLD = thing({"token": TEXT, "logprob": NUMBER, "bytes": array(INTEGER)})
_LIKELY = thing({"content": array({**_TOLD, "properties": _TOLD["properties"] | {"top_logprobs": array(_TOLD)}})})
_CALL = thing({"id": TEXT, "type": {"const": "function"}, "function": thing({"name": TEXT, "arguments": TEXT})})
_SAID = thing({"role": {"const": "assistant"}, "content": perhaps(TEXT), "refusal": ANY},
              tool_calls=array(_CALL), reasoning_content=TEXT)  # fmt: skip
CHOICE = thing({
    "index": INTEGER, "message": _SAID, "logprobs": perhaps(_LIKELY),
    "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
    "stop_reason": {"anyOf": [TEXT, INTEGER, {"type": "null"}]},
})  # fmt: skip
ANSWERED = thing({
    "id": TEXT, "object": {"const": "chat.completion"}, "created": INTEGER, "model": TEXT,
    "choices": array(CHOICE), "usage": ANY, "seed": INTEGER, "system_fingerprint": TEXT,
})  # fmt: skip
ACCEPTED: Answers = {202: answer("With `Prefer: respond-async`: the request", REQUEST, headers=_LATER)}
DRAWN = ACCEPTED | one(PICTURES)
DRAWN[200]["content"] |= {"text/event-stream": {"schema": SENT}}
FILMED = ACCEPTED | one(VIDEO)
CHATTED = ACCEPTED | one(ANSWERED)
CHATTED[200]["content"] |= {"text/event-stream": {"schema": SENT}}
DELETED = one(thing({"id": TEXT, "object": {"const": "video.deleted"}, "deleted": FLAG}))
REMOVED = one(thing({"id": TEXT, "object": {"const": "model"}, "deleted": FLAG}))
HAPPENED: Answers = {200: answer("Each event's data is an Event", SENT, "text/event-stream")}
EVENT: Schema = msgspec.json.schema(Event)["$defs"]["Event"]  # the schema of each event's data, listed by this name

FORGOTTEN = one(thing({"id": TEXT, "object": {"const": "request"}, "deleted": FLAG}))
READY = one(
    thing({"ready": {"const": True}}, models=array(TEXT), away=array(TEXT), loading=array(TEXT), failed=table(TEXT))
)

_ERROR = thing({"message": TEXT, "type": TEXT, "param": perhaps(TEXT), "code": perhaps(TEXT)})
_ENVELOPE: Schema = {
    "description": "What is wrong, and what to do",
    "content": {"application/json": {"schema": thing({"error": _ERROR})}},
}
DOCUMENTED: Answers = {"4XX": _ENVELOPE, "5XX": _ENVELOPE}  # the error replies of every route

_SCALED = thing({"name": TEXT}, scale=NUMBER) | {"additionalProperties": False}
TYPES: dict[str, Schema] = {
    "text": TEXT,
    "integer": INTEGER,
    "number": NUMBER,
    "choice": ANY,
    "flag": FLAG,
    "form": TEXT,
    "texts": table(TEXT | {"maxLength": 512}) | {"maxProperties": MAX_TEXTS},
    "scaled": {"anyOf": [TEXT, array({"anyOf": [TEXT, _SCALED]}) | {"maxItems": MAX_SCALED}]},
    "any": ANY,
}
BOUNDS = {"text": ("minLength", "maxLength"), "integer": ("minimum", "maximum"), "number": ("minimum", "maximum")}


def schema_of(parameter: Parameter) -> Schema:
    """A parameter as JSON Schema; bounds that differ between models are left out."""
    named = zip(BOUNDS.get(parameter.kind, ()), (parameter.low, parameter.high), strict=False)
    bounds = {name: bound for name, bound in named if not isinstance(bound, str)}
    chosen: Schema = {"enum": list(parameter.choices)} if parameter.choices else {}
    chosen |= {"pattern": f"^({parameter.form[0]})$"} if parameter.kind == "form" else {}
    default = {} if parameter.default is None else {"default": parameter.default}
    return TYPES[parameter.kind] | bounds | chosen | default | {"description": parameter.description}


def _fields(medium: Modality, required: bool = False) -> Schema:
    shown = (one for one in medium.parameters if one.required is required and one.use != "refused")
    return {one.name: schema_of(one) for one in shown}


#: A gray picture of 64 by 64 pixels, as a data URL.
GRAY = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAAAAACPAi4CAAAAKUlEQVR42u3MQREAAAwCIKMb3RD77S"
    "AA6VEEAoFAIBAIBAKBQCAQfA8G320AeXC6efoAAAAASUVORK5CYII="
)

_FILE = {**TEXT, "format": "binary"}
_URL = {**TEXT, "pattern": "^[Dd][Aa][Tt][Aa]:image/"}
_HELD = {"anyOf": [_URL, thing({"image_url": _URL})]}

_SEVERAL = {"anyOf": [_HELD, array(_HELD) | {"minItems": 1, "maxItems": len(modalities.REFERENCES)}]}


def _body(required: Schema, optional: Schema) -> Schema:
    says = "Bounds that depend on the model are in GET /v1/models; numbers may also be sent as text."
    return thing(required, **optional) | {"additionalProperties": False, "description": says}


def _nullable(fields: Schema) -> Schema:
    return {name: perhaps(schema) for name, schema in fields.items()}


def _bodies(json: Schema, form: Schema | None = None, *, example: Mapping[str, object]) -> Schema:
    """Bodies of a call. `example` is one as JSON, which the page at /docs sends unless somebody changes it."""
    content: Schema = {"application/json": {"schema": json, "example": example}}
    content |= {"multipart/form-data": {"schema": form}} if form else {}
    return {"requestBody": {"required": True, "content": content}}


SAID, PICTURE = _fields(modalities.IMAGE, True), _fields(modalities.IMAGE)
CLIP = _fields(modalities.VIDEO)
CHAT = _bodies(
    _body(_fields(modalities.TEXT, True), _nullable(_fields(modalities.TEXT))),
    example={"messages": [{"role": "user", "content": "What is the capital of France?"}]},
)
GENERATE = _bodies(_body(SAID, _nullable(PICTURE)), example={"prompt": "a red circle on white"})
EDIT = _bodies(
    _body(SAID, _nullable({**PICTURE, "image": _SEVERAL, "images": _SEVERAL, "mask": _HELD}))
    | {"anyOf": [{"required": ["image"]}, {"required": ["images"]}]},
    _body({**SAID, "image": _FILE}, {**PICTURE, "image[]": array(_FILE), "mask": _FILE}),
    example={"prompt": "a red circle on white", "image": GRAY},
)
MAX_SOURCE = 1024
_SOURCE = "A folder or GGUF file of the server's machine, or a hub name such as owner/model."
_NAME = "What clients call it; by default the hub name, or the last part of the path."
ADD = _bodies(
    thing(
        {"model": {**TEXT, "minLength": 1, "maxLength": MAX_SOURCE, "description": _SOURCE}},
        name=perhaps({**TEXT, "maxLength": MAX_NAME, "pattern": f"^{NAME}$", "description": _NAME}),
    )
    | {"additionalProperties": False},
    example={"model": "unfuse/shapes"},
)
_FRAMES = ("input_reference", modalities.LAST_FRAME)
CREATE = _bodies(
    _body(_fields(modalities.VIDEO, True), _nullable(CLIP | dict.fromkeys(_FRAMES, _HELD))),
    _body(_fields(modalities.VIDEO, True), CLIP | dict.fromkeys(_FRAMES, _FILE)),
    example={"prompt": "a blue star moving left on black", "seconds": 1},
)
