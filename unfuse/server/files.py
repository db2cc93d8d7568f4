"""Responses with a file, with ranges of its bytes, or 304 if the client has it (RFC 9110, sections 13 and 14)."""

from __future__ import annotations

import re
from pathlib import Path

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from unfuse.core.errors import NotFound
from unfuse.edge.refusal import Refusal

MAX_RANGES = 100
"""The most ranges in one call. A call with more gets the whole file."""

MAX_DIGITS = 18
"""A position with more digits is beyond the end of every file."""

Ranges = list[tuple[int, int]]
"""Byte ranges as (first, end), without the byte `end`."""

_RANGE = re.compile(r"([0-9]*)-([0-9]*)")
_ETAG = re.compile(r'(?:W/)?"[^"]*"')


async def file_response(request: Request, path: Path, media_type: str, sha256: str) -> Response:
    """Return the response with a file, or with the ranges that the call requests; 304 if the client has it.

    `sha256` becomes the ETag. Raises NotFound if the file was deleted, and Refusal if the file ends before every
    range (416) or is another than the one that is meant (412).
    """
    try:
        stat = await to_thread.run_sync(path.stat)
    except FileNotFoundError as error:
        raise NotFound("the file was deleted") from error
    headers = {"etag": f'"{sha256}"'}
    response = FileResponse(path, media_type=media_type, headers=headers, stat_result=stat)
    if _names(request, "if-match", response.headers["etag"]) is False:
        message = "the file is not the one that If-Match names: send the call without that header"
        raise Refusal(412, "precondition_failed", message, headers={"etag": response.headers["etag"]})
    if _names(request, "if-none-match", response.headers["etag"]):
        return Response(status_code=304, headers={name: response.headers[name] for name in ("etag", "last-modified")})
    asked = request.headers.getlist("range")
    condition = request.headers.get("if-range")
    is_unchanged = condition in (None, response.headers["etag"], response.headers["last-modified"])
    ranges = parse_ranges(asked[0], stat.st_size) if len(asked) == 1 and is_unchanged else None
    if ranges == []:
        message = f"the file has {stat.st_size} bytes, and the requested ranges begin after its end"
        raise Refusal(416, "range_not_satisfiable", message, headers={"content-range": f"bytes */{stat.st_size}"})

    # FileResponse parses the Range header itself, so it gets one with only the valid ranges.
    kept = [header for header in request.scope["headers"] if header[0] not in (b"range", b"if-range")]
    if ranges:
        text = ", ".join(f"{first}-{end - 1}" for first, end in ranges)
        kept.append((b"range", f"bytes={text}".encode()))
    request.scope["headers"] = kept
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


def parse_ranges(header: str, size: int) -> Ranges | None:
    """Return the ranges of a Range header for a file of `size` bytes; empty if all begin after its end.

    Returns None if the header must be ignored: its unit is unknown, it is malformed, or it has too many ranges.
    """
    unit, _, listed = header.partition("=")
    texts = [text.strip(" \t") for text in listed.split(",") if text.strip(" \t")]
    if unit.strip().lower() != "bytes" or not 1 <= len(texts) <= MAX_RANGES:
        return None
    found: Ranges = []
    for text in texts:
        match = _RANGE.fullmatch(text)
        if match is None or text == "-":
            return None
        first, last = (_number(digits) for digits in match.groups())
        if first is None:
            found.append((max(0, size - (last or 0)), size))
        elif last is not None and last < first:
            return None
        else:
            found.append((first, size if last is None else min(last + 1, size)))
    return _merged([(first, end) for first, end in found if first < end])


def _number(digits: str) -> int | None:
    """Return the number, or a number larger than every file if it has too many digits; None for ""."""
    if not digits:
        return None
    significant = digits.lstrip("0") or "0"
    return int(significant) if len(significant) <= MAX_DIGITS else 10**MAX_DIGITS


def _merged(ranges: Ranges) -> Ranges:
    """Return the ranges sorted, with overlapping and adjacent ranges merged."""
    merged: Ranges = []
    for first, end in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((first, end))
    return merged
