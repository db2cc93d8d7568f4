"""Bodies of calls, JSON or a form, as one dict of fields, and the pictures in them, which are files or data: URLs.

Sizes are bounded while a body is read. Pictures are checked before anything is stored.
"""

from __future__ import annotations

import base64
import json
import logging
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import unquote_to_bytes

from anyio import to_thread
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from unfuse.core.errors import InvalidParameter
from unfuse.core.modalities import IMAGE, MASK, REFERENCES, UPLOAD, VIDEO
from unfuse.core.pixels import check_picture, has_transparency, size_of
from unfuse.edge.access import Refusal

MAX_BODY = 2 * 1024 * 1024  # the most bytes of a body without pictures; reading stops there

#: The most bytes of a form field that is not a file.
MAX_TEXT = 8 * 1024 * 1024

#: The most bytes of a JSON body that may contain pictures: of a chat, an edit, a video.
MAX_SHOWN_BODY = 32 * 1024 * 1024

MAX_VALUES = 50_000  # the most commas and opening brackets in a JSON body, outside of strings: decoding is slow

MAX_FORM = 32 * 1024 * 1024

MAX_FIELDS, MAX_FILES = 64, 8

MAX_READING = 256 * 1024 * 1024  # the most bytes of all bodies that are being read at one time
READING_PAUSE_S = 5  # seconds after which a client should try again if there was no room for its body

#: Fields that count as missing if a form sends them empty, as HTML forms do. Other texts may be empty on purpose.
MAY_BE_EMPTY = frozenset(one.name for one in (*IMAGE.parameters, *VIDEO.parameters) if one.kind != "text")

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # errors in a form are reported to its sender

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # without a closing quote too: linear time
_MEMBER = re.compile(r"([a-z_]+)\[([^\[\]]*)\]")  # part of another field: `metadata[job]`, or one of several `image[]`


#: Content codings for compressed bodies, which are not supported.
CODINGS = ("gzip", "x-gzip", "deflate", "compress", "br", "zstd")


async def read_json(request: Request, limit: int = MAX_BODY) -> dict[str, object]:
    """The JSON object in a body. Raises Refusal for another type or a large body, InvalidParameter for bad JSON."""
    if _plain_type(request) != "application/json":
        raise Refusal(415, "unsupported_media_type", "send the body as JSON, with 'Content-Type: application/json'")
    body = bytearray()
    async for chunk in _bounded(request, limit):
        body += chunk
    try:
        given = await to_thread.run_sync(_decoded, body)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(f"the body is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise InvalidParameter('the body must be a JSON object, such as {"prompt": "a red circle on white"}')
    return given


async def read_body(request: Request) -> dict[str, object]:
    """The fields of a JSON object or of a form, whose files are bytes. Raises as `read_json` does."""
    if _plain_type(request) != "multipart/form-data":
        return await read_json(request, MAX_SHOWN_BODY)
    async with aclosing(_bounded(request, MAX_FORM)) as stream:
        parser = _Form(request.headers, stream, max_files=MAX_FILES, max_fields=MAX_FIELDS, max_part_size=MAX_TEXT)
        try:
            form = await parser.parse()
        except MultiPartException as error:
            raise InvalidParameter(f"the form cannot be read: {error.message}") from error
        except UnicodeError as error:
            raise InvalidParameter(f"the form cannot be read, send it in UTF-8: {error}") from error
    try:
        if not parser.whole:
            raise InvalidParameter("the form cannot be read: it ends before its last boundary")
        return await _fields(form)
    finally:
        await form.close()


class _Form(MultiPartParser):
    """A parser that knows whether the form is complete: without its last part it would be a different request."""

    whole = False

    def on_end(self) -> None:
        self.whole = True


async def _fields(form: FormData) -> dict[str, object]:
    given: dict[str, object] = {}
    for name, part in form.multi_items():
        is_empty = not (part.filename or part.size) if isinstance(part, UploadFile) else not part
        if is_empty and (name in MAY_BE_EMPTY or isinstance(part, UploadFile)):
            continue  # a field of an HTML form that was not filled in
        value = await part.read() if isinstance(part, UploadFile) else part
        outer, key = found.groups() if (found := _MEMBER.fullmatch(name)) else (name, "")
        before = given.get(outer)
        if not key:
            given[outer] = value if before is None else [*(before if isinstance(before, list) else [before]), value]
        elif isinstance(members := given.setdefault(outer, {}), dict) and key not in members:
            members[key] = value
        else:
            raise InvalidParameter(f"{name[:80]} is sent twice: send it once", name[:80])
    return {name: _in_order(value) for name, value in given.items()}


def _in_order(value: object) -> object:
    """Return the files of `image[0]`, `image[1]`, … as a list. Other values stay as they are."""
    if not isinstance(value, dict) or not all(isinstance(one, bytes) and key.isdecimal() for key, one in value.items()):
        return value
    return [value[key] for key in sorted(value, key=int)]


def _decoded(body: bytearray) -> object:
    if _marks(body) > MAX_VALUES and (_texts(body) > 2 * MAX_VALUES or _marks(_STRING.sub(b"", body)) > MAX_VALUES):
        raise InvalidParameter(f"the body has more than {MAX_VALUES} values")
    return json.loads(body)


def _marks(body: bytes | bytearray) -> int:
    """Return the number of commas and opening brackets in a body, including those in strings."""
    return sum(map(body.count, (b",", b"[", b"{")))


def _texts(body: bytearray) -> int:
    """Return about how many strings a body has. A value has at most two, one of them its key."""
    return (body.count(b'"') - body.count(b'\\"')) // 2


def _plain_type(request: Request) -> str:
    """Return the content type of a body without its parameters. Raises Refusal if the body is compressed."""
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding in CODINGS:
        raise Refusal(
            415,
            "unsupported_media_type",
            f"the body is compressed ({coding}), which is not supported: send it without Content-Encoding",
            headers={"accept-encoding": "identity"},
        )
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def _bounded(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    """Yield a body. `app.state.body_bytes` counts the bytes of all bodies that are being read."""
    state, size = request.app.state, 0
    try:
        async for chunk in request.stream():
            if state.body_bytes + len(chunk) > MAX_READING:
                raise Refusal(
                    503,
                    "too_many_bodies",
                    "too many large bodies are being sent: try again",
                    headers={"retry-after": str(READING_PAUSE_S)},
                )
            state.body_bytes += len(chunk)
            size += len(chunk)
            if size > limit:
                raise Refusal(413, "body_too_large", f"the body is larger than the {limit} bytes that are read")
            yield chunk
    finally:
        state.body_bytes -= size


MAX_BYTES = 20 * 1024 * 1024

EXAMPLES = {"image": "image/png", "video": "video/mp4"}

#: Types of content parts with a picture: of chat completions, of transformers, of the Responses API.
PICTURE_PARTS = ("image_url", "image", "input_image")

#: Media types that clients send if they do not know the type. The format is then detected from the bytes.
UNKNOWN_TYPES = ("", "application/octet-stream", "binary/octet-stream")

#: The head of a data: URL (RFC 2397): a media type, optional parameters, optional `;base64`, and a comma.
_DATA_URL = re.compile(r"data:(?P<kind>[^/;,]*)(?P<rest>[^,]*),", re.IGNORECASE)


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
        if value.get("file_id") is not None:
            raise InvalidParameter(
                f"{name} names a file by file_id, and this server keeps no files: send the picture as a data: URL", name
            )
        address = value.get("image_url")
        value = address.get("url") if isinstance(address, dict) else address
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
        found[name] = read_picture(field if name in REFERENCES else name, value)
        if name == MASK:
            _check_mask(found[MASK], found[UPLOAD])
    return found


def _check_mask(mask: bytes, picture: bytes) -> None:
    """Raise InvalidParameter unless a mask has transparency and the size of its picture."""
    sizes = ["{}x{}".format(*size_of(one)) for one in (mask, picture)]
    if sizes[0] != sizes[1]:
        raise InvalidParameter(f"mask is {sizes[0]} pixels, image {sizes[1]}: send one of the same size", "mask")
    if not has_transparency(mask):
        raise InvalidParameter("mask has no transparency: make it transparent where image is to change", "mask")


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
