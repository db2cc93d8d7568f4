"""What the bodies of creating calls may hold, for /openapi.json."""

from __future__ import annotations

from typing import Any

from unfuse.core import params
from unfuse.core.params import PICTURE, UNUSED, VIDEO, Medium

Schema = dict[str, Any]

_SECONDS = {"type": "number", "minimum": params.MIN_TIMEOUT, "maximum": params.MAX_TIMEOUT}


def _integer(low: int, high: int, says: str = "") -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high, "description": says}


def _shared(medium: Medium) -> Schema:
    return {
        "model": {"type": "string", "description": "may be left out where one model is served"},
        "negative_prompt": {"type": "string"},
        "size": {"type": "string", "pattern": "^(auto|[0-9]+x[0-9]+)$", "default": "auto"},
        "seed": _integer(0, params.MAX_SEED),
        "num_inference_steps": _integer(1, 1000),
        "guidance_scale": {"type": "number", "minimum": 0},
        "guidance_scale_2": {"type": "number", "minimum": 0, "description": "of models that have it"},
        "true_cfg_scale": {"type": "number", "minimum": 0, "description": "of models that have it"},
        "feature_cache": {
            "type": "number",
            "minimum": 0,
            "maximum": 1,
            "description": "where pools batch: skip transformer blocks while the first one's effect differs by less",
        },
        "lora": {"type": "string", "description": "name of an adapter that the server has, see GET /v1/models"},
        "lora_scale": {"type": "number", "minimum": -params.MAX_LORA_SCALE, "maximum": params.MAX_LORA_SCALE},
        "fps": _integer(1, params.MAX_FPS),
        "output_format": {"type": "string", "enum": list(medium.formats), "default": medium.formats[0]},
        "output_compression": _integer(0, 100, "quality of jpeg and webp"),
        "preview_every": _integer(0, 1000, "steps between previews; 0: none"),
        "cache": {"type": "boolean", "default": True, "description": "false: encode anew, for this request alone"},
        "priority": _integer(-params.MAX_PRIORITY, params.MAX_PRIORITY),
        "timeout": {**_SECONDS, "description": "seconds from acceptance to the end"},
        "metadata": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 512}},
        **{name: {"type": "string"} for name in sorted(UNUSED)},
        **{name: {"enum": list(allowed)} for name, allowed in medium.only.items()},
    }


_PICTURE = {
    **_shared(PICTURE),
    "n": _integer(1, 10),
    "quality": {"type": "string", "enum": list(params.QUALITIES), "description": "the answer says which one was used"},
    "response_format": {"type": "string", "enum": ["b64_json", "url"], "default": "b64_json"},
    "stream": {"type": "boolean", "default": False},
    "partial_images": _integer(0, params.MAX_PARTIAL, "previews of each picture, at most; needs stream"),
}
_VIDEO = {
    **_shared(VIDEO),
    "num_frames": _integer(1, 10_000),
    "seconds": {**_SECONDS, "description": "instead of num_frames; rounded up to a length that the model can make"},
}
_FILE = {"type": "string", "format": "binary"}
_URL = {"type": "string", "pattern": "^data:image/[a-z]+;base64,"}
_HELD = {"anyOf": [_URL, {"type": "object", "required": ["image_url"], "properties": {"image_url": _URL}}]}


def _body(required: Schema, optional: Schema) -> Schema:
    return {
        "type": "object",
        "required": ["prompt", *required],
        "additionalProperties": False,
        "description": "Bounds that depend on the model are in GET /v1/models; numbers may also be sent as text.",
        "properties": {"prompt": {"type": "string", "minLength": 1}, **required, **optional},
    }


def _nullable(fields: Schema) -> Schema:
    return {name: {"anyOf": [schema, {"type": "null"}]} for name, schema in fields.items()}


def _bodies(json: Schema, form: Schema | None = None) -> Schema:
    kinds = {"application/json": json} | ({"multipart/form-data": form} if form else {})
    return {"requestBody": {"required": True, "content": {kind: {"schema": body} for kind, body in kinds.items()}}}


GENERATE = _bodies(_body({}, _nullable(_PICTURE)))
EDIT = _bodies(_body({"image": _HELD}, _nullable(_PICTURE)), _body({"image": _FILE}, _PICTURE))
CREATE = _bodies(
    _body({}, _nullable({**_VIDEO, "input_reference": _HELD})), _body({}, {**_VIDEO, "input_reference": _FILE})
)
