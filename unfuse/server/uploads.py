"""Uploads of a request: files and data: URLs become checked bytes before anything is stored."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

from unfuse.core.errors import InvalidParameter
from unfuse.core.media import MASK, REFERENCES, UPLOAD
from unfuse.core.pixels import check_picture, has_transparency, size_of

MAX_BYTES = 20 * 1024 * 1024

EXAMPLES = {"image": "image/png", "video": "video/mp4"}

PICTURE_PARTS = ("image_url", "image", "input_image")
"""Types of content parts with a picture: of chat completions, of transformers, of the Responses API."""

UNKNOWN_TYPES = ("", "application/octet-stream", "binary/octet-stream")
"""Media types that clients send if they do not know the type. The format is then detected from the bytes."""

_DATA_URL = re.compile(r"data:(?P<kind>[^/;,]*)(?P<rest>[^,]*),", re.IGNORECASE)
"""The head of a data: URL (RFC 2397): a media type, optional parameters, optional `;base64`, and a comma."""


def read_picture(name: str, value: object) -> bytes:
    """Return the bytes of the picture in a field, which is a file or a data: URL.

    It decodes the picture, which is too slow for the event loop. Raises InvalidParameter unless the field holds one
    complete picture of an accepted format and size.
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, list):
        raise InvalidParameter(f"{name} must be one picture, not {len(value)}", name)
    if isinstance(value, dict):
        value = address_of(name, value)
    data = value if isinstance(value, bytes) else decode_data_url(name, value)
    if not 0 < len(data) <= MAX_BYTES:
        raise InvalidParameter(f"{name} must have 1 to {MAX_BYTES} bytes, not {len(data)}", name)
    check_picture(data, name)
    return data


def read_pictures(given: Mapping[str, object], field: str) -> dict[str, bytes]:
    """Return the bytes of a request's pictures, by the attachments that they become.

    `given` has the value of each, the start picture before its mask. `field` is the name of the field for all pictures
    to start from. Takes long, as `read_picture` does. Raises InvalidParameter.
    """
    found = dict[str, bytes]()
    for name, value in given.items():
        if name == MASK:
            found[name] = read_mask(value, found[UPLOAD])
        else:
            found[name] = read_picture(field if name in REFERENCES else name, value)
    return found


def read_mask(value: object, picture: bytes) -> bytes:
    """Return a mask's bytes. Raises InvalidParameter unless it has transparency and the size of its picture."""
    data = read_picture("mask", value)
    sizes = ["{}x{}".format(*size_of(one)) for one in (data, picture)]
    if sizes[0] != sizes[1]:
        raise InvalidParameter(f"mask is {sizes[0]} pixels, image {sizes[1]}: send one of the same size", "mask")
    if not has_transparency(data):
        raise InvalidParameter("mask has no transparency: make it transparent where image is to change", "mask")
    return data


def address_of(name: str, value: dict[str, object]) -> object:
    """Return the address in an object such as `{"image_url": "data:…"}`. Raises InvalidParameter for a `file_id`."""
    if value.get("file_id") is not None:
        message = f"{name} names a file by file_id, and this server keeps no files: send the picture as a data: URL"
        raise InvalidParameter(message, name)
    address = value.get("image_url")
    return address.get("url") if isinstance(address, dict) else address


def decode_data_url(name: str, value: object, kind: str = "image") -> bytes:
    """Return the bytes in a data: URL (RFC 2397) of a media type `kind/…`, or of an unknown type.

    As in browsers, white space in base64 is ignored, and its padding may be missing. Raises InvalidParameter.
    """
    head = _DATA_URL.match(value) if isinstance(value, str) else None
    if not isinstance(value, str) or head is None:
        only = f"a file, or a data:{EXAMPLES[kind]};base64,… URL"
        rest = "other addresses are not fetched, files not kept to refer to"
        raise InvalidParameter(f"{name} must be {only} ({rest})", name)
    media_type = f"{head['kind']}{head['rest'].partition(';')[0]}"[:60]
    parameters = [one.strip().lower() for one in head["rest"].split(";")[1:]]
    is_unknown = "base64" in parameters and media_type.lower() in UNKNOWN_TYPES
    if head["kind"].lower() != kind and not is_unknown:
        raise InvalidParameter(f"{name} is a data: URL of type {media_type!r}: send one of {EXAMPLES[kind]}", name)
    body = value[head.end() :]
    if "base64" not in parameters:
        return unquote_to_bytes(body)
    return _from_base64(name, body)


def as_image_url(part: Any) -> Any:
    """Return a content part in the form `image_url` if it has a picture in another form, else unchanged.

    The other forms are `{"type": "image", "image": ADDRESS}` (or `url`, `image_url`) and `input_image`.
    """
    if not isinstance(part, Mapping) or part.get("type") not in PICTURE_PARTS[1:]:
        return part
    address = next((part[name] for name in ("image_url", "image", "url") if part.get(name) is not None), None)
    shown = dict(address) if isinstance(address, Mapping) else {"url": address}
    if part.get("detail") is not None:
        shown["detail"] = part["detail"]
    return {"type": "image_url", "image_url": shown}


def _from_base64(name: str, text: str) -> bytes:
    try:
        compact = b"".join((unquote_to_bytes(text) if "%" in text else text.encode("ascii")).split())
        return base64.b64decode(compact + b"=" * (-len(compact) % 4), validate=True)
    except ValueError as error:
        raise InvalidParameter(f"{name} is not base64: {error}", name) from error
