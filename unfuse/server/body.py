"""The body of a creating call, JSON or a form, as one dict of fields; sizes are bounded while it is read."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing

from anyio import to_thread
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from unfuse.core.errors import InvalidParameter
from unfuse.core.media import IMAGE, VIDEO
from unfuse.edge.refusal import Refusal

MAX_BODY = 2 * 1024 * 1024  # the most bytes of a body without pictures; reading stops there

MAX_TEXT = 8 * 1024 * 1024
"""The most bytes of a form field that is not a file."""

MAX_SHOWN_BODY = 32 * 1024 * 1024
"""The most bytes of a JSON body that may contain pictures: of a chat, an edit, a video."""

MAX_VALUES = 50_000  # the most commas and opening brackets in a JSON body, outside of strings: decoding is slow

MAX_FORM = 32 * 1024 * 1024

MAX_FIELDS, MAX_FILES = 64, 8

MAX_READING = 256 * 1024 * 1024  # the most bytes of all bodies that are being read at one time
READING_PAUSE_S = 5  # seconds after which a client should try again if there was no room for its body

MAY_BE_EMPTY = frozenset(one.name for one in (*IMAGE.parameters, *VIDEO.parameters) if one.kind != "text")
"""Fields that count as missing if a form sends them empty, as HTML forms do. Other texts may be empty on purpose."""

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # errors in a form are reported to its sender

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # without a closing quote too: linear time
_MEMBER = re.compile(r"([a-z_]+)\[([^\[\]]*)\]")  # part of another field: `metadata[job]`, or one of several `image[]`


class BodyBudget:
    """Counts the bytes of all bodies that are being read, up to `most`."""

    def __init__(self, most: int = MAX_READING) -> None:
        self._most, self.held = most, 0

    def take(self, size: int) -> None:
        """Count more bytes. Raises Refusal if there would be too many."""
        if self.held + size > self._most:
            again = {"retry-after": str(READING_PAUSE_S)}
            raise Refusal(503, "too_many_bodies", "too many large bodies are being sent: try again", headers=again)
        self.held += size

    def give(self, size: int) -> None:
        """Count fewer bytes, which are freed."""
        self.held -= size


CODINGS = ("gzip", "x-gzip", "deflate", "compress", "br", "zstd")
"""Content codings for compressed bodies, which are not supported."""


async def read_json(request: Request, limit: int = MAX_BODY) -> dict[str, object]:
    """The JSON object in a body. Raises Refusal for another type or a large body, InvalidParameter for bad JSON."""
    _require_plain(request)
    if _type(request) != "application/json":
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
    if _type(request) != "multipart/form-data":
        return await read_json(request, MAX_SHOWN_BODY)
    _require_plain(request)
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
        if _is_left_out(name, part):
            continue
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


def _is_left_out(name: str, part: UploadFile | str) -> bool:
    """Return whether a part of an HTML form is a field that was not filled in."""
    if isinstance(part, UploadFile):
        return not part.filename and not part.size
    return not part and name in MAY_BE_EMPTY


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


def _require_plain(request: Request) -> None:
    """Raise Refusal if the body is compressed."""
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding in CODINGS:
        message = f"the body is compressed ({coding}), which is not supported: send it without Content-Encoding"
        raise Refusal(415, "unsupported_media_type", message, headers={"accept-encoding": "identity"})


def _type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def _bounded(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    reading: BodyBudget = request.app.state.reading
    size = 0
    try:
        async for chunk in request.stream():
            reading.take(len(chunk))
            size += len(chunk)
            if size > limit:
                raise Refusal(413, "body_too_large", f"the body is larger than the {limit} bytes that are read")
            yield chunk
    finally:
        reading.give(size)
