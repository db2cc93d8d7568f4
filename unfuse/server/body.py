"""Bodies of calls: read JSON or a form into fields, and decode the pictures.

A picture is a file of a form, or a data: URL. Sizes are limited while a body is read. Pictures are checked before
anything is stored.
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
from unfuse.core.modalities import IMAGE, IMAGE_UPLOADS, MASK, UPLOAD, VIDEO
from unfuse.core.pixels import check_picture, has_transparency, size_of
from unfuse.edge.access import ApiError

#: The most bytes of a body without pictures.
MAX_BODY = 2 * 1024 * 1024

#: The most bytes of a form field that is not a file.
MAX_TEXT = 8 * 1024 * 1024

#: The most bytes of a JSON body that may contain pictures: of a chat, an edit, a video.
MAX_MEDIA_BODY = 32 * 1024 * 1024

#: The most commas and opening brackets in a JSON body, outside of strings: decoding many values is slow.
MAX_VALUES = 50_000

#: The most bytes of a form.
MAX_FORM = 32 * 1024 * 1024

#: The most fields that are not files, and the most files, of a form.
MAX_FIELDS, MAX_FILES = 64, 8

#: The most bytes of all bodies that are being read at one time.
MAX_READING = 256 * 1024 * 1024

#: Seconds after which a client should try again if MAX_READING was reached.
READING_PAUSE_S = 5

#: The most bytes of one picture.
MAX_BYTES = 20 * 1024 * 1024

#: A media type of each kind of data: URL, for errors.
EXAMPLES = {"image": "image/png", "video": "video/mp4"}

#: Types of content parts with a picture: of chat completions, of transformers, of the Responses API.
IMAGE_PART_TYPES = ("image_url", "image", "input_image")

#: Media types that clients send if they do not know the type. The format is then detected from the bytes.
UNKNOWN_TYPES = ("", "application/octet-stream", "binary/octet-stream")

#: Content codings for compressed bodies, which are not supported.
CODINGS = ("gzip", "x-gzip", "deflate", "compress", "br", "zstd")

#: Fields that count as missing if a form sends them empty, as HTML forms do. Other texts may be empty on purpose.
MAY_BE_EMPTY = frozenset(field.name for field in (*IMAGE.parameters, *VIDEO.parameters) if field.kind != "text")

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # errors in a form are reported to its sender

# A JSON string, also one without a closing quote, so that the time to match is linear.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)

# A form field that is part of another one: `metadata[job]`, or one of several `image[]`.
_MEMBER = re.compile(r"([a-z_]+)\[([^\[\]]*)\]")

# The head of a data: URL (RFC 2397): a media type, optional parameters, optional `;base64`, and a comma.
_DATA_URL = re.compile(r"data:(?P<kind>[^/;,]*)(?P<rest>[^,]*),", re.IGNORECASE)


async def read_json(request: Request, limit: int = MAX_BODY) -> dict[str, object]:
    """Return the fields of the JSON object in a body of at most `limit` bytes.

    Raises ApiError for another content type (415) or a large body (413), InvalidParameter for malformed JSON.
    """
    if _media_type(request) != "application/json":
        raise ApiError(415, "unsupported_media_type", "send the body as JSON, with 'Content-Type: application/json'")

    body = bytearray()
    async for chunk in _read_chunks(request, limit):
        body += chunk
    try:
        fields = await to_thread.run_sync(_decode_json, body)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(f"the body is not JSON: {error}") from error

    if not isinstance(fields, dict):
        raise InvalidParameter('the body must be a JSON object, such as {"prompt": "a red circle on white"}')
    return fields


async def read_body(request: Request) -> dict[str, object]:
    """Return the fields of a JSON object or of a form.

    Files of a form are bytes. Raises as `read_json` does.
    """
    if _media_type(request) != "multipart/form-data":
        return await read_json(request, MAX_MEDIA_BODY)
    # After an error, the stream is closed at once, so that its bytes no longer count in `app.state.body_bytes`.
    async with aclosing(_read_chunks(request, MAX_FORM)) as stream:
        parser = _Form(request.headers, stream, max_files=MAX_FILES, max_fields=MAX_FIELDS, max_part_size=MAX_TEXT)
        try:
            form = await parser.parse()
        except MultiPartException as error:
            raise InvalidParameter(f"the form cannot be read: {error.message}") from error
        except UnicodeError as error:
            raise InvalidParameter(f"the form cannot be read, send it in UTF-8: {error}") from error

    try:
        if not parser.is_complete:
            raise InvalidParameter("the form cannot be read: it ends before its last boundary")
        return await _form_fields(form)
    finally:
        await form.close()


class _Form(MultiPartParser):
    """A form parser that detects an incomplete form.

    A form without its last part could be a valid form of another request.
    """

    #: Whether the last boundary was reached.
    is_complete = False

    def on_end(self) -> None:
        self.is_complete = True


async def _form_fields(form: FormData) -> dict[str, object]:
    """Return the fields of a form.

    A field that is sent several times becomes a list, `a[b]` a member of a dict `a`.
    """
    fields: dict[str, object] = {}
    for name, part in form.multi_items():
        is_empty = not (part.filename or part.size) if isinstance(part, UploadFile) else not part
        if is_empty and (name in MAY_BE_EMPTY or isinstance(part, UploadFile)):
            continue  # a field of an HTML form that was not filled in

        value = await part.read() if isinstance(part, UploadFile) else part
        field, member = match.groups() if (match := _MEMBER.fullmatch(name)) else (name, "")
        earlier = fields.get(field)
        if not member:
            fields[field] = (
                value if earlier is None else [*(earlier if isinstance(earlier, list) else [earlier]), value]
            )
        elif isinstance(members := fields.setdefault(field, {}), dict) and member not in members:
            members[member] = value
        else:
            raise InvalidParameter(f"{name[:80]} is sent twice: send it once", name[:80])

    return {name: _files_as_list(value) for name, value in fields.items()}


def _files_as_list(value: object) -> object:
    """Return the files of `image[0]`, `image[1]`, … as a list. Other values are returned unchanged."""
    if not isinstance(value, dict):
        return value
    if not all(isinstance(member, bytes) and key.isdecimal() for key, member in value.items()):
        return value
    return [value[key] for key in sorted(value, key=int)]


def _decode_json(body: bytearray) -> object:
    """Return the value of a JSON text.

    Raises ValueError, RecursionError, and InvalidParameter for too many values.
    """
    # The fast count includes separators in strings. Only if it is too high, the strings are removed, which is slow.
    if _count_separators(body) > MAX_VALUES and (
        _count_strings(body) > 2 * MAX_VALUES or _count_separators(_STRING.sub(b"", body)) > MAX_VALUES
    ):
        raise InvalidParameter(f"the body has more than {MAX_VALUES} values")
    return json.loads(body)


def _count_separators(body: bytes | bytearray) -> int:
    """Return the number of commas and opening brackets in a body, including those in strings."""
    return sum(map(body.count, (b",", b"[", b"{")))


def _count_strings(body: bytearray) -> int:
    """Return approximately how many strings a body has.

    Each value has at most two: its key, and its text.
    """
    return (body.count(b'"') - body.count(b'\\"')) // 2


def _media_type(request: Request) -> str:
    """Return the content type of a body without its parameters.

    Raises ApiError if the body is compressed.
    """
    coding = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    if any(name.strip() in CODINGS for name in coding.split(",")):
        raise ApiError(
            415,
            "unsupported_media_type",
            f"the body is compressed ({coding}), which is not supported: send it without Content-Encoding",
            headers={"accept-encoding": "identity"},
        )
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def _read_chunks(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    """Yield the chunks of a body of at most `limit` bytes.

    The bytes of all bodies that are being read are counted in `app.state.body_bytes`.

    Raises ApiError: 413 for a larger body, 503 while all bodies that are being read have more than MAX_READING bytes.
    """
    state = request.app.state
    size = 0
    try:
        async for chunk in request.stream():
            if state.body_bytes + len(chunk) > MAX_READING:
                raise ApiError(
                    503,
                    "too_many_bodies",
                    "too many large request bodies are being read: try again",
                    headers={"retry-after": str(READING_PAUSE_S)},
                )
            state.body_bytes += len(chunk)
            size += len(chunk)
            if size > limit:
                raise ApiError(413, "body_too_large", f"the body is larger than the limit of {limit} bytes")
            yield chunk
    finally:
        state.body_bytes -= size


def read_image(name: str, value: object) -> bytes:
    """Return the bytes of the picture in a field.

    The value is a file, a data: URL, an object with the URL as `image_url`, or a list with one of these.

    The picture is decoded, which is too slow for the event loop. Raises InvalidParameter unless the field has one
    complete picture of an accepted format and size.
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, list):
        raise InvalidParameter(f"{name} must be one picture, not {len(value)}", name)

    if isinstance(value, dict):
        if value.get("file_id") is not None:
            raise InvalidParameter(
                f"{name} names a file by file_id, but this server stores no uploaded files: send the picture as a "
                "data: URL",
                name,
            )
        image_url = value.get("image_url")
        value = image_url.get("url") if isinstance(image_url, dict) else image_url

    data = value if isinstance(value, bytes) else decode_data_url(name, value)
    if not 0 < len(data) <= MAX_BYTES:
        raise InvalidParameter(f"{name} must have 1 to {MAX_BYTES} bytes, not {len(data)}", name)
    check_picture(data, name)
    return data


def read_images(values: Mapping[str, object], field: str) -> dict[str, bytes]:
    """Return the bytes of a request's pictures, by the attachments that they become.

    values: the value of each picture, by the name of its attachment. The start picture comes before its mask.
    field: the name of the field for all pictures to start from, for errors.

    The pictures are decoded, which is too slow for the event loop. Raises InvalidParameter.
    """
    pictures = dict[str, bytes]()
    for name, value in values.items():
        pictures[name] = read_image(field if name in IMAGE_UPLOADS else name, value)
        if name == MASK:
            _check_mask(pictures[MASK], pictures[UPLOAD])
    return pictures


def _check_mask(mask: bytes, picture: bytes) -> None:
    """Raise InvalidParameter unless a mask has transparency and the size of its picture."""
    mask_size, picture_size = ("{}x{}".format(*size_of(data)) for data in (mask, picture))
    if mask_size != picture_size:
        raise InvalidParameter(
            f"mask is {mask_size} pixels, but image is {picture_size}: send a mask of the same size", "mask"
        )
    if not has_transparency(mask):
        raise InvalidParameter("mask has no transparency: make it transparent where image is to be edited", "mask")


def decode_data_url(name: str, value: object, kind: str = "image") -> bytes:
    """Return the bytes in a data: URL (RFC 2397).

    Its media type must be `kind/…`, or one of UNKNOWN_TYPES in base64.

    As in browsers, white space in base64 is ignored, and its padding may be missing. Raises InvalidParameter.
    """
    match = _DATA_URL.match(value) if isinstance(value, str) else None
    if not isinstance(value, str) or match is None:
        accepted = f"a file, or a data:{EXAMPLES[kind]};base64,… URL"
        reason = "other URLs are not fetched, and uploaded files cannot be referenced"
        raise InvalidParameter(f"{name} must be {accepted} ({reason})", name)

    media_type = f"{match['kind']}{match['rest'].partition(';')[0]}"[:60]
    parameters = [parameter.strip().lower() for parameter in match["rest"].split(";")[1:]]
    is_unknown_type = "base64" in parameters and media_type.lower() in UNKNOWN_TYPES
    if match["kind"].lower() != kind and not is_unknown_type:
        raise InvalidParameter(f"{name} is a data: URL of type {media_type!r}: send one of {EXAMPLES[kind]}", name)
    data = value[match.end() :]
    if "base64" not in parameters:
        return unquote_to_bytes(data)
    return _from_base64(name, data)


def as_image_url(part: Any) -> Any:
    """Return a content part with a picture in the form `image_url`, any other part unchanged.

    The other forms are `{"type": "image", "image": ADDRESS}` (or `url`, `image_url`) and `input_image`.
    """
    if not isinstance(part, Mapping) or part.get("type") not in IMAGE_PART_TYPES[1:]:
        return part
    address = next((part[name] for name in ("image_url", "image", "url") if part.get(name) is not None), None)
    image_url = dict(address) if isinstance(address, Mapping) else {"url": address}
    if part.get("detail") is not None:
        image_url["detail"] = part["detail"]
    return {"type": "image_url", "image_url": image_url}


def _from_base64(name: str, text: str) -> bytes:
    """Return the bytes of a base64 text, without its white space and percent-encoding. Raises InvalidParameter."""
    try:
        compact = b"".join((unquote_to_bytes(text) if "%" in text else text.encode("ascii")).split())
        return base64.b64decode(compact + b"=" * (-len(compact) % 4), validate=True)
    except ValueError as error:
        raise InvalidParameter(f"{name} is not base64: {error}", name) from error
