"""Schemas of the bodies of creating calls in /openapi.json, made from the media's tables."""

from __future__ import annotations

from typing import Any

from unfuse.core.media import IMAGE, LAST_FRAME, REFERENCES, TEXT, VIDEO, Medium
from unfuse.core.parameters import MAX_SCALED, MAX_TEXTS, Parameter

Schema = dict[str, Any]

TYPES: dict[str, Schema] = {
    "text": {"type": "string"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "choice": {},
    "flag": {"type": "boolean"},
    "form": {"type": "string"},
    "texts": {
        "type": "object",
        "maxProperties": MAX_TEXTS,
        "additionalProperties": {"type": "string", "maxLength": 512},
    },
    "scaled": {
        "anyOf": [
            {"type": "string"},
            {
                "type": "array",
                "maxItems": MAX_SCALED,
                "items": {
                    "anyOf": [
                        {"type": "string"},
                        {
                            "type": "object",
                            "required": ["name"],
                            "properties": {"name": {"type": "string"}, "scale": {"type": "number"}},
                            "additionalProperties": False,
                        },
                    ]
                },
            },
        ]
    },
    "any": {},
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


def _fields(medium: Medium) -> Schema:
    return {one.name: schema_of(one) for one in medium.parameters if not one.required}


def _required(medium: Medium) -> Schema:
    return {one.name: schema_of(one) for one in medium.parameters if one.required}


_FILE = {"type": "string", "format": "binary"}
_URL = {"type": "string", "pattern": "^data:image/[a-z]+;base64,"}
_HELD = {"anyOf": [_URL, {"type": "object", "required": ["image_url"], "properties": {"image_url": _URL}}]}

_SEVERAL = {"anyOf": [_HELD, {"type": "array", "minItems": 1, "maxItems": len(REFERENCES), "items": _HELD}]}


def _body(required: Schema, optional: Schema) -> Schema:
    return {
        "type": "object",
        "required": list(required),
        "additionalProperties": False,
        "description": "Bounds that depend on the model are in GET /v1/models; numbers may also be sent as text.",
        "properties": {**required, **optional},
    }


def _nullable(fields: Schema) -> Schema:
    return {name: {"anyOf": [schema, {"type": "null"}]} for name, schema in fields.items()}


def _bodies(json: Schema, form: Schema | None = None) -> Schema:
    kinds = {"application/json": json} | ({"multipart/form-data": form} if form else {})
    return {"requestBody": {"required": True, "content": {kind: {"schema": body} for kind, body in kinds.items()}}}


SAID, PICTURE, FILMED, CLIP = _required(IMAGE), _fields(IMAGE), _required(VIDEO), _fields(VIDEO)
CHAT = _bodies(_body(_required(TEXT), _nullable(_fields(TEXT))))
GENERATE = _bodies(_body(SAID, _nullable(PICTURE)))
EDIT = _bodies(
    _body({**SAID, "image": _SEVERAL}, _nullable({**PICTURE, "mask": _HELD})),
    _body({**SAID, "image": _FILE}, {**PICTURE, "image[]": {"type": "array", "items": _FILE}, "mask": _FILE}),
)
MAX_NAME = 1024
ADD = _bodies(_body({"model": {"type": "string", "minLength": 1, "maxLength": MAX_NAME}}, {}))
_FRAMES = ("input_reference", LAST_FRAME)
CREATE = _bodies(
    _body(FILMED, _nullable(CLIP | dict.fromkeys(_FRAMES, _HELD))), _body(FILMED, CLIP | dict.fromkeys(_FRAMES, _FILE))
)
