"""The schemas in /openapi.json: of responses, and of the bodies of creating calls.

Those of bodies are generated from the parameter tables of the modalities. A fuzz test checks every response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import msgspec

from unfuse.core import modalities
from unfuse.core.model_spec import MAX_NAME, NAME
from unfuse.core.parameters import MAX_SCALED_NAMES, MAX_TEXTS, Modality, Parameter
from unfuse.core.request import Event, RequestStatus, WaitReason
from unfuse.server.route_parameters import CHAT_RESUMPTION, CREATING_HEADERS
from unfuse.server.served_models import Phase

Schema = dict[str, Any]
Answers = dict[int | str, Schema]

TEXT, NUMBER, INTEGER, FLAG = ({"type": kind} for kind in ("string", "number", "integer", "boolean"))
ANY: Schema = {}  # any value: it depends on the model, or on the client

UNIX = {**NUMBER, "description": "Unix seconds"}
SECONDS = {**NUMBER, "description": "seconds"}
BYTES = {**INTEGER, "description": "bytes"}


def nullable(schema: Schema) -> Schema:
    """Return a schema for this or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def array(items: Schema) -> Schema:
    """Return the schema of an array with these items."""
    return {"type": "array", "items": items}


def map_of(values: Schema) -> Schema:
    """Return the schema of an object that maps names to these values."""
    return {"type": "object", "additionalProperties": values}


def object_of(fields: Schema, **optional: Schema) -> Schema:
    """Return the schema of an object with these required fields, and with the optional ones."""
    return {"type": "object", "required": list(fields), "properties": fields | optional}


STAGE = object_of(
    {
        "name": TEXT,
        "pool": TEXT,
        "status": TEXT,
        "worker": TEXT,
        "attempt": INTEGER,
        "cached": FLAG,
        "failures": INTEGER,
        "crashes": INTEGER,
        "recomputes": INTEGER,
        "vae": nullable(TEXT),
        "device_failures": INTEGER,
        "queued_s": SECONDS,
        "get_s": SECONDS,
        "run_s": SECONDS,
        "put_s": SECONDS,
        "save_s": SECONDS,
        "exchange_s": SECONDS,
        "share_s": SECONDS,
        "steps": INTEGER,
        "resumed": INTEGER,
        "batch": NUMBER,
        "device": TEXT,
        "devices": INTEGER,
    }
)
ERROR = object_of({"code": TEXT, "message": TEXT}, stage=TEXT, evidence=TEXT)
REQUEST = object_of(
    {
        "id": TEXT,
        "object": {"const": "request"},
        "model": TEXT,
        "modality": {"enum": [modality.name for modality in modalities.MODALITIES]},
        "prompt": nullable(TEXT),
        "params": map_of(ANY),
        "tenant": TEXT,
        "priority": INTEGER,
        "status": {"enum": list(get_args(RequestStatus))},
        "state": {"enum": [*get_args(RequestStatus), *get_args(WaitReason)]},
        "stage": nullable(TEXT),
        "step": INTEGER,
        "steps": INTEGER,
        "progress": {**INTEGER, "minimum": 0, "maximum": 100, "description": "percent of the predicted seconds"},
        "queue_position": nullable(INTEGER),
        "eta_s": nullable(SECONDS),
        "seed": nullable(INTEGER),
        "cost": object_of({"predicted_s": SECONDS, "device_s": map_of(SECONDS), "money": nullable(NUMBER)}),
        "created_at": UNIX,
        "started_at": nullable(UNIX),
        "completed_at": nullable(UNIX),
        "attempts": INTEGER,
        "stages": array(STAGE),
        "result": array(object_of({"url": TEXT, "content_type": TEXT, "bytes": BYTES}, flagged=FLAG)),
        "error": nullable(ERROR),
        "metadata": map_of(TEXT),
        "webhook": nullable(object_of({"url": TEXT, "state": TEXT, "attempts": INTEGER, "reason": TEXT})),
        "hint": nullable(
            {
                **TEXT,
                "description": (
                    "words of the prompt that are not in the model's vocabulary, and what the model can generate"
                ),
            }
        ),
    }
)
DAMAGE = object_of({"id": TEXT, "object": {"const": "damaged"}, "kind": TEXT, "error": ERROR})
VIDEO = object_of(
    {
        "id": TEXT,
        "object": {"const": "video"},
        "created_at": INTEGER,
        "completed_at": nullable(INTEGER),
        "status": {"enum": ["queued", "in_progress", "completed", "failed"]},
        "progress": INTEGER,
        "prompt": TEXT,
        "model": TEXT,
        "seconds": TEXT,
        "size": TEXT,
        "error": nullable(object_of({"code": TEXT, "message": TEXT})),
        "num_frames": INTEGER,
        "fps": ANY,
        "seed": INTEGER,
        "output_format": TEXT,
        "metadata": map_of(TEXT),
    },
    hint=TEXT,
)
MODEL = object_of(
    {
        "id": TEXT,
        "object": {"const": "model"},
        "created": INTEGER,
        "owned_by": TEXT,
        "makes_video": FLAG,
        "root": TEXT,
        "max_model_len": nullable(INTEGER),
        "input_modalities": array(TEXT),
        "takes_image": FLAG,
        "starts_from": map_of(NUMBER),
        "references": INTEGER,
        "last_frame": {"enum": ["", "may", "must"]},
        "loras": array(TEXT),
        "limits": map_of(NUMBER),
        "defaults": map_of(ANY),
        "quality": map_of(map_of(ANY)),
        "stages": map_of(TEXT),
        "state": {"enum": ["ready", "loading", "unavailable", "failed"]},
        "reason": nullable(TEXT),
        "default": FLAG,
        "progress": nullable(object_of({"phase": {"enum": [*get_args(Phase)]}, "done": BYTES, "total": BYTES})),
    }
)
WORKER = object_of(
    {
        "id": TEXT,
        "object": {"const": "worker"},
        "node": TEXT,
        "role": TEXT,
        "device": TEXT,
        "device_health": array(object_of({"index": TEXT, "uuid": TEXT, "healthy": FLAG})),
        "pools": array(TEXT),
        "loaded_model": nullable(TEXT),
        "numerics": map_of(TEXT),
        "slots": INTEGER,
        "leased": INTEGER,
        "models": array(TEXT),
        "pid": INTEGER,
        "arena_bytes": BYTES,
        "used": BYTES,
        "high_water": BYTES,
        "fragmentation": NUMBER,
        "engines": map_of(TEXT),
        "ranks": array(object_of({"compute_s": SECONDS, "exchange_s": SECONDS})),
        "changed": map_of(TEXT),
        "unwritten": INTEGER,
        "healthy": FLAG,
        "unhealthy_reason": nullable(TEXT),
        "seen_s": SECONDS,
    }
)
POOL = object_of(
    {
        "id": TEXT,
        "object": {"const": "pool"},
        "models": array(TEXT),
        "workers": array(TEXT),
        "slots": INTEGER,
        "leased": INTEGER,
        "waiting": INTEGER,
        "oldest_s": SECONDS,
        "state": TEXT,
        "reason": nullable(TEXT),
        "batch_invariance": object_of({"largest": INTEGER, "differences": map_of(TEXT), "mode": TEXT}),
    }
)
PICTURES = object_of(
    {
        "created": INTEGER,
        "id": TEXT,
        "model": TEXT,
        "size": TEXT,
        "quality": TEXT,
        "background": TEXT,
        "data": array(object_of({"seed": INTEGER}, b64_json=nullable(TEXT), url=TEXT, flagged=FLAG)),
        "output_format": TEXT,
        "usage": map_of(ANY),
    },
    hint=TEXT,
)

_HEADERS = {"x-request-id": {"description": "ID of this call in the server's log", "schema": TEXT}}
_LATER = {"location": {"description": "URL of the request", "schema": TEXT}}
_LATER |= {"preference-applied": {"schema": {"const": "respond-async"}}}


def response(description: str, schema: Schema, kind: str = "application/json", headers: Schema | None = None) -> Schema:
    """Return the documentation of one response.

    description: its description.
    schema: the schema of its body.
    kind: its content type.
    headers: its further headers.
    """
    return {"description": description, "content": {kind: {"schema": schema}}, "headers": _HEADERS | (headers or {})}


def object_response(schema: Schema, status: int = 200) -> Answers:
    """Return the documentation of a route that responds with one object."""
    return {status: response("Successful response", schema)}


def list_response(schema: Schema, paged: bool = True) -> Answers:
    """Return the documentation of a route that lists objects, in pages if `paged`."""
    page = {"has_more": FLAG, "first_id": nullable(TEXT), "last_id": nullable(TEXT)} if paged else {}
    return object_response(object_of({"object": {"const": "list"}, "data": array(schema), **page}))


#: One server-sent event: in OpenAPI 3.1, the schema of an event stream describes each event.
SENT = object_of({"data": TEXT}, event=TEXT, id=TEXT)

_TOKEN = object_of({"token": TEXT, "logprob": NUMBER, "bytes": array(INTEGER)})
_LOGPROBS = object_of(
    {"content": array({**_TOKEN, "properties": _TOKEN["properties"] | {"top_logprobs": array(_TOKEN)}})}
)
_CALL = object_of({"id": TEXT, "type": {"const": "function"}, "function": object_of({"name": TEXT, "arguments": TEXT})})
_MESSAGE = object_of(
    {"role": {"const": "assistant"}, "content": nullable(TEXT), "refusal": ANY},
    tool_calls=array(_CALL),
    reasoning_content=TEXT,
)
CHOICE = object_of(
    {
        "index": INTEGER,
        "message": _MESSAGE,
        "logprobs": nullable(_LOGPROBS),
        "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
        "stop_reason": {"anyOf": [TEXT, INTEGER, {"type": "null"}]},
    }
)
ANSWERED = object_of(
    {
        "id": TEXT,
        "object": {"const": "chat.completion"},
        "created": INTEGER,
        "model": TEXT,
        "choices": array(CHOICE),
        "usage": ANY,
        "seed": INTEGER,
        "system_fingerprint": TEXT,
    }
)
ACCEPTED: Answers = {202: response("With `Prefer: respond-async`: the request", REQUEST, headers=_LATER)}
IMAGES_RESPONSE = ACCEPTED | object_response(PICTURES)
IMAGES_RESPONSE[200]["content"] |= {"text/event-stream": {"schema": SENT}}
VIDEO_RESPONSE = ACCEPTED | object_response(VIDEO)
CHAT_RESPONSE = ACCEPTED | object_response(ANSWERED)
CHAT_RESPONSE[200]["content"] |= {"text/event-stream": {"schema": SENT}}
DELETED = object_response(object_of({"id": TEXT, "object": {"const": "video.deleted"}, "deleted": FLAG}))
REMOVED = object_response(object_of({"id": TEXT, "object": {"const": "model"}, "deleted": FLAG}))
EVENTS_RESPONSE: Answers = {200: response("Each event's data is an Event", SENT, "text/event-stream")}
EVENT: Schema = msgspec.json.schema(Event)["$defs"]["Event"]  # the schema of each event's data, listed by this name

DEAD_DELETED_RESPONSE = object_response(object_of({"id": TEXT, "object": {"const": "request"}, "deleted": FLAG}))
READY = object_response(
    object_of(
        {"ready": {"const": True}}, models=array(TEXT), away=array(TEXT), loading=array(TEXT), failed=map_of(TEXT)
    )
)

_ERROR = object_of({"message": TEXT, "type": TEXT, "param": nullable(TEXT), "code": nullable(TEXT)})
_ENVELOPE: Schema = {
    "description": "The error, and how to correct it",
    "content": {"application/json": {"schema": object_of({"error": _ERROR})}},
}
DOCUMENTED: Answers = {"4XX": _ENVELOPE, "5XX": _ENVELOPE}  # the error replies of every route

_SCALED = object_of({"name": TEXT}, scale=NUMBER) | {"additionalProperties": False}
TYPES: dict[str, Schema] = {
    "text": TEXT,
    "integer": INTEGER,
    "number": NUMBER,
    "choice": ANY,
    "flag": FLAG,
    "form": TEXT,
    "texts": map_of(TEXT | {"maxLength": 512}) | {"maxProperties": MAX_TEXTS},
    "scaled": {"anyOf": [TEXT, array({"anyOf": [TEXT, _SCALED]}) | {"maxItems": MAX_SCALED_NAMES}]},
    "any": ANY,
}
BOUNDS = {"text": ("minLength", "maxLength"), "integer": ("minimum", "maximum"), "number": ("minimum", "maximum")}


def schema_of(parameter: Parameter) -> Schema:
    """Return the JSON Schema of a parameter. Bounds that differ between models are left out."""
    named_bounds = zip(BOUNDS.get(parameter.kind, ()), (parameter.low, parameter.high), strict=False)
    bounds = {name: bound for name, bound in named_bounds if not isinstance(bound, str)}
    allowed: Schema = {"enum": list(parameter.choices)} if parameter.choices else {}
    allowed |= {"pattern": f"^({parameter.form[0]})$"} if parameter.kind == "form" else {}
    default = {} if parameter.default is None else {"default": parameter.default}
    return TYPES[parameter.kind] | bounds | allowed | default | {"description": parameter.description}


def _fields(modality: Modality, required: bool = False) -> Schema:
    """Return the schemas of a modality's required or optional parameters.

    Parameters that are always refused are left out.
    """
    parameters = (parameter for parameter in modality.parameters if parameter.required is required)
    return {parameter.name: schema_of(parameter) for parameter in parameters if parameter.use != "refused"}


#: A gray picture of 64 by 64 pixels, as a data URL.
GRAY = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAAAAACPAi4CAAAAKUlEQVR42u3MQREAAAwCIKMb3RD77S"
    "AA6VEEAoFAIBAIBAKBQCAQfA8G320AeXC6efoAAAAASUVORK5CYII="
)

_START = {"description": "picture to start from"}
_REDRAWN = {"description": "picture of the same size, whose transparent parts are redrawn"}
_SAME = {"description": "the same as image, for several pictures"}
_LAST = {"description": "last frame, of models that make a video between two pictures"}
_FILE = {**TEXT, "format": "binary"}
_URL = {**TEXT, "pattern": "^[Dd][Aa][Tt][Aa]:image/"}
_IMAGE = {"anyOf": [_URL, object_of({"image_url": _URL})]}
_IMAGES = {"anyOf": [_IMAGE, array(_IMAGE) | {"minItems": 1, "maxItems": len(modalities.IMAGE_UPLOADS)}]}


def _body(required: Schema, optional: Schema) -> Schema:
    """Return the schema of a body, which has no other fields than these."""
    description = "Bounds that depend on the model are in GET /v1/models; numbers may also be sent as text."
    return object_of(required, **optional) | {"additionalProperties": False, "description": description}


def _nullable(fields: Schema) -> Schema:
    """Return the schemas of these fields, each of which may also be null."""
    return {name: nullable(schema) for name, schema in fields.items()}


def _bodies(
    json: Schema, form: Schema | None = None, *, example: Mapping[str, object], headers: Sequence[Schema] = ()
) -> Schema:
    """Return the documentation of a call's body and headers.

    json: the schema of a JSON body. form: that of a form, or None if it is refused.
    example: a JSON body that works, with which the page at /docs fills its form.
    """
    content: Schema = {"application/json": {"schema": json, "example": example}}
    content |= {"multipart/form-data": {"schema": form}} if form else {}
    return {"requestBody": {"required": True, "content": content}} | ({"parameters": [*headers]} if headers else {})


IMAGE_FIELDS, PICTURE = _fields(modalities.IMAGE, True), _fields(modalities.IMAGE)
CLIP = _fields(modalities.VIDEO)
CHAT = _bodies(
    _body(_fields(modalities.TEXT, True), _nullable(_fields(modalities.TEXT))),
    example={"messages": [{"role": "user", "content": "What is the capital of France?"}]},
    headers=[*CREATING_HEADERS, CHAT_RESUMPTION],
)
GENERATE = _bodies(
    _body(IMAGE_FIELDS, _nullable(PICTURE)), example={"prompt": "a red circle on white"}, headers=CREATING_HEADERS
)
EDIT = _bodies(
    _body(
        IMAGE_FIELDS,
        _nullable({**PICTURE, "image": _IMAGES | _START, "images": _IMAGES | _SAME, "mask": _IMAGE | _REDRAWN}),
    )
    | {"anyOf": [{"required": ["image"]}, {"required": ["images"]}]},
    _body(
        {**IMAGE_FIELDS, "image": _FILE | _START},
        {**PICTURE, "image[]": array(_FILE) | _SAME, "mask": _FILE | _REDRAWN},
    ),
    example={"prompt": "a red circle on white", "image": GRAY},
    headers=CREATING_HEADERS,
)
MAX_SOURCE = 1024
_SOURCE = "A folder or GGUF file on the server's machine, or a hub name such as owner/model."
_NAME = "Name that clients use; by default the hub name, or the last part of the path."
ADD = _bodies(
    object_of(
        {"model": {**TEXT, "minLength": 1, "maxLength": MAX_SOURCE, "description": _SOURCE}},
        name=nullable({**TEXT, "maxLength": MAX_NAME, "pattern": f"^{NAME}$", "description": _NAME}),
    )
    | {"additionalProperties": False},
    example={"model": "unfuse/shapes"},
)
_FRAMES = {"input_reference": _START, modalities.LAST_FRAME: _LAST}
CREATE = _bodies(
    _body(_fields(modalities.VIDEO, True), _nullable(CLIP | {name: _IMAGE | text for name, text in _FRAMES.items()})),
    _body(_fields(modalities.VIDEO, True), CLIP | {name: _FILE | text for name, text in _FRAMES.items()}),
    example={"prompt": "a blue star moving left on black", "seconds": 1},
    headers=CREATING_HEADERS,
)
