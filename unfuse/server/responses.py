"""Responses with server-sent events, and with files or ranges of their bytes (RFC 9110, sections 13 and 14)."""

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
from unfuse.edge.access import Refusal

#: Seconds of silence after which a comment is sent, so that no proxy closes the stream.
COMMENT_EVERY_S = 15.0

#: The most ranges in one call. A call with more gets the whole file.
MAX_RANGES = 100

#: A position beyond the end of every file.
BEYOND = 10**18

_RANGE = re.compile(r"([0-9]*)-([0-9]*)")
_ETAG = re.compile(r'(?:W/)?"[^"]*"')


def sse_event(data: object, kind: str = "", id: str = "") -> bytes:
    """Return a server-sent event with this data, as JSON; of this kind and id, if it has them."""
    head = (f"id: {id}\n" if id else "") + (f"event: {kind}\n" if kind else "")
    return head.encode() + b"data: " + msgspec.json.encode(data) + b"\n\n"


def sse_response(events: AsyncIterator[bytes]) -> StreamingResponse:
    """Return a response that streams these events."""
    body = with_comments(events, COMMENT_EVERY_S)
    return StreamingResponse(body, media_type="text/event-stream", headers={"cache-control": "no-store"})


async def with_comments(events: AsyncIterator[bytes], comment_every: float) -> AsyncIterator[bytes]:
    """Yield events as they come, with a comment after every `comment_every` seconds of silence.

    No blank line follows a comment: at one, the `openai` client takes what it has for an event, once it knows an id.
    The stream ends if the queue cannot be read; the client resumes it with the last id.
    """
    upcoming = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            await asyncio.wait({upcoming}, timeout=comment_every)
            if not upcoming.done():
                yield b": waiting\n"
                continue
            event = None
            with suppress(TransientError):
                event = upcoming.result()
            if event is None:
                return
            yield event
            upcoming = asyncio.ensure_future(anext(events, None))
    finally:
        upcoming.cancel()
        await asyncio.gather(upcoming, return_exceptions=True)


async def file_response(request: Request, path: Path, media_type: str, sha256: str) -> Response:
    """Return the response with a file, or with the ranges that the call requests; 304 if the client has it.

    `sha256` becomes the ETag. Raises NotFound if the file was deleted, and Refusal if the file ends before every
    range (416) or is another than the one that is meant (412).
    """
    try:
        stat = await to_thread.run_sync(path.stat)
    except FileNotFoundError as error:
        raise NotFound("the file was deleted") from error
    etag = f'"{sha256}"'
    response = FileResponse(path, media_type=media_type, headers={"etag": etag}, stat_result=stat)
    if _names(request, "if-match", etag) is False:
        raise Refusal(
            412,
            "precondition_failed",
            "the file is not the one that If-Match names: send the call without that header",
            headers={"etag": etag},
        )
    modified = response.headers["last-modified"]
    if _names(request, "if-none-match", etag):
        return Response(status_code=304, headers={"etag": etag, "last-modified": modified})
    requested = request.headers.getlist("range")
    is_unchanged = request.headers.get("if-range") in (None, etag, modified)
    ranges = parse_ranges(requested[0], stat.st_size) if len(requested) == 1 and is_unchanged else None
    if ranges == []:
        raise Refusal(
            416,
            "range_not_satisfiable",
            f"the file has {stat.st_size} bytes, and the requested ranges begin after its end",
            headers={"content-range": f"bytes */{stat.st_size}"},
        )

    # FileResponse parses the Range header itself, so it gets one with only the valid ranges.
    headers = [header for header in request.scope["headers"] if header[0] not in (b"range", b"if-range")]
    if ranges:
        text = ", ".join(f"{first}-{end - 1}" for first, end in ranges)
        headers.append((b"range", f"bytes={text}".encode()))
    request.scope["headers"] = headers
    return response


def _names(request: Request, header: str, etag: str) -> bool | None:
    """Return whether the header, a list of ETags or `*`, names this one; None if the call has no such header.

    A weak ETag only counts for `if-none-match`.
    """
    listed = ", ".join(request.headers.getlist(header)).strip()
    if not listed:
        return None
    found = _ETAG.findall(listed)
    return listed == "*" or etag in found or (header == "if-none-match" and f"W/{etag}" in found)


def parse_ranges(header: str, size: int) -> list[tuple[int, int]] | None:
    """Return the ranges of a Range header for a file of `size` bytes; empty if all begin after its end.

    A range is (first, end), without the byte `end`. Returns None if the header must be ignored: its unit is unknown,
    it is malformed, or it has too many ranges.
    """
    unit, _, listed = header.partition("=")
    texts = [text.strip(" \t") for text in listed.split(",") if text.strip(" \t")]
    if unit.strip().lower() != "bytes" or not 1 <= len(texts) <= MAX_RANGES:
        return None
    found: list[tuple[int, int]] = []
    for text in texts:
        match = _RANGE.fullmatch(text)
        if match is None or text == "-":
            return None
        first, last = (min(int(digits.lstrip("0")[:19] or "0"), BEYOND) for digits in match.groups())
        if not match[1]:
            found.append((max(0, size - last), size))
        elif match[2] and last < first:
            return None
        else:
            found.append((first, min(last + 1, size) if match[2] else size))
    return [(first, end) for first, end in found if first < end]
