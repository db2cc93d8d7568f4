"""Responses with server-sent events, and with files or byte ranges of files.

Ranges and preconditions are as in RFC 9110, sections 13 and 14.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import msgspec
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse

from unfuse.core.errors import NotFound, TransientError
from unfuse.edge.access import ApiError

#: Seconds of silence after which a comment is sent, so that no proxy closes the stream.
COMMENT_EVERY_S = 15.0

#: The most ranges in one call. A call with more gets the whole file.
MAX_RANGES = 100

#: A position beyond the end of every file.
BEYOND = 10**18

_RANGE = re.compile(r"([0-9]*)-([0-9]*)")
_ETAG = re.compile(r'(?:W/)?"[^"]*"')


def sse_event(data: object, kind: str = "", id: str = "") -> bytes:
    """Return a server-sent event with this data as JSON.

    It has the type `kind` and the id, unless these are "".
    """
    header_lines = (f"id: {id}\n" if id else "") + (f"event: {kind}\n" if kind else "")
    return header_lines.encode() + b"data: " + msgspec.json.encode(data) + b"\n\n"


def sse_response(events: AsyncIterator[bytes]) -> StreamingResponse:
    """Return a response that streams these events, with comments while none comes."""
    body = with_comments(events, COMMENT_EVERY_S)
    return StreamingResponse(body, media_type="text/event-stream", headers={"cache-control": "no-store"})


async def with_comments(events: AsyncIterator[bytes], comment_every: float) -> AsyncIterator[bytes]:
    """Yield events as they come, with a comment after every `comment_every` seconds without an event.

    No blank line follows a comment: once it has an id, the `openai` client treats a blank line as the end of an event.
    The stream ends if the queue cannot be read; the client resumes it with the last id.
    """
    next_event = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            # Unlike `wait_for`, `wait` does not cancel the pending event after the timeout.
            await asyncio.wait({next_event}, timeout=comment_every)
            if not next_event.done():
                yield b": waiting\n"
                continue
            event = None
            with suppress(TransientError):
                event = next_event.result()
            if event is None:
                return
            yield event
            next_event = asyncio.ensure_future(anext(events, None))
    finally:
        next_event.cancel()
        await asyncio.gather(next_event, return_exceptions=True)


async def file_response(request: Request, path: Path, media_type: str, sha256: str) -> Response:
    """Return the response with a file, or with the requested ranges of it.

    It is 304 if the client has the file already.

    `sha256` becomes the ETag. Raises NotFound if the file was deleted, and ApiError if all ranges begin after its end
    (416) or the file does not match If-Match (412).
    """
    try:
        file_stat = await to_thread.run_sync(path.stat)
    except FileNotFoundError as error:
        raise NotFound("the file was deleted") from error

    etag = f'"{sha256}"'
    response = FileResponse(path, media_type=media_type, headers={"etag": etag}, stat_result=file_stat)
    if _header_matches(request, "if-match", etag) is False:
        raise ApiError(
            412,
            "precondition_failed",
            "the file is not the one in If-Match: send the call without that header",
            headers={"etag": etag},
        )
    last_modified = response.headers["last-modified"]
    if _header_matches(request, "if-none-match", etag):
        return Response(status_code=304, headers={"etag": etag, "last-modified": last_modified})

    range_headers = request.headers.getlist("range")
    is_unchanged = request.headers.get("if-range") in (None, etag, last_modified)
    ranges = parse_ranges(range_headers[0], file_stat.st_size) if len(range_headers) == 1 and is_unchanged else None
    if ranges == []:
        raise ApiError(
            416,
            "range_not_satisfiable",
            f"the file has {file_stat.st_size} bytes, and the requested ranges begin after its end",
            headers={"content-range": f"bytes */{file_stat.st_size}"},
        )

    # FileResponse parses the Range header itself, so it gets one with only the valid ranges.
    headers = [header for header in request.scope["headers"] if header[0] not in (b"range", b"if-range")]
    if ranges:
        text = ", ".join(f"{first}-{end - 1}" for first, end in ranges)
        headers.append((b"range", f"bytes={text}".encode()))
    request.scope["headers"] = headers
    return response


def _header_matches(request: Request, header: str, etag: str) -> bool | None:
    """Return whether a header includes this ETag; None without the header.

    The header is a list of ETags, or `*`.

    A weak ETag only counts for `if-none-match`.
    """
    value = ", ".join(request.headers.getlist(header)).strip()
    if not value:
        return None
    etags = _ETAG.findall(value)
    return value == "*" or etag in etags or (header == "if-none-match" and f"W/{etag}" in etags)


def parse_ranges(header: str, size: int) -> list[tuple[int, int]] | None:
    """Return the ranges of a Range header for a file of `size` bytes.

    The list is empty if all ranges begin after the end of the file.

    A range is (first, end), without the byte `end`. Returns None if the header must be ignored: its unit is unknown,
    it is malformed, or it has too many ranges.
    """
    unit, _, range_list = header.partition("=")
    range_texts = [text.strip(" \t") for text in range_list.split(",") if text.strip(" \t")]
    if unit.strip().lower() != "bytes" or not 1 <= len(range_texts) <= MAX_RANGES:
        return None

    ranges: list[tuple[int, int]] = []
    for text in range_texts:
        match = _RANGE.fullmatch(text)
        if match is None or text == "-":
            return None
        # Only 19 digits are converted: the conversion of a very long number is slow.
        first, last = (min(int(digits.lstrip("0")[:19] or "0"), BEYOND) for digits in match.groups())
        if not match[1]:  # "-N" is the last N bytes
            ranges.append((max(0, size - last), size))
        elif match[2] and last < first:
            return None
        else:
            ranges.append((first, min(last + 1, size) if match[2] else size))
    return [(first, end) for first, end in ranges if first < end]
