"""Schemas of the bodies of creating calls in /openapi.json, made from the media's tables."""

from __future__ import annotations

from collections.abc import Mapping

from unfuse.core.media import IMAGE, LAST_FRAME, REFERENCES, TEXT as WORDS, VIDEO, Medium
from unfuse.core.model_names import MAX_NAME, NAME
from unfuse.core.parameters import MAX_SCALED, MAX_TEXTS, Parameter
from unfuse.server.answers import ANY, FLAG, INTEGER, NUMBER, TEXT, Schema, array, perhaps, table, thing

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


def _fields(medium: Medium, required: bool = False) -> Schema:
    shown = (one for one in medium.parameters if one.required is required and one.use != "refused")
    return {one.name: schema_of(one) for one in shown}


GRAY = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAAAAACPAi4CAAAAKUlEQVR42u3MQREAAAwCIKMb3RD77S"
    "AA6VEEAoFAIBAIBAKBQCAQfA8G320AeXC6efoAAAAASUVORK5CYII="
)
"""A gray picture of 64 by 64 pixels, as a data URL."""

_FILE = {**TEXT, "format": "binary"}
_URL = {**TEXT, "pattern": "^[Dd][Aa][Tt][Aa]:image/"}
_HELD = {"anyOf": [_URL, thing({"image_url": _URL})]}

_SEVERAL = {"anyOf": [_HELD, array(_HELD) | {"minItems": 1, "maxItems": len(REFERENCES)}]}


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


SAID, PICTURE, FILMED, CLIP = _fields(IMAGE, True), _fields(IMAGE), _fields(VIDEO, True), _fields(VIDEO)
CHAT = _bodies(
    _body(_fields(WORDS, True), _nullable(_fields(WORDS))),
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
_FRAMES = ("input_reference", LAST_FRAME)
CREATE = _bodies(
    _body(FILMED, _nullable(CLIP | dict.fromkeys(_FRAMES, _HELD))),
    _body(FILMED, CLIP | dict.fromkeys(_FRAMES, _FILE)),
    example={"prompt": "a blue star moving left on black", "seconds": 1},
)
