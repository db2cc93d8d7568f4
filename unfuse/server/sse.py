"""Server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import msgspec
from starlette.responses import StreamingResponse

from unfuse.core.errors import TransientError

COMMENT_EVERY_S = 15.0  # seconds of silence after which a comment is sent, so that no proxy closes the stream


def event(told: object, kind: str = "", id: str = "") -> bytes:
    """An event with this data, as JSON; of this kind and id, if it has them."""
    head = (f"id: {id}\n" if id else "") + (f"event: {kind}\n" if kind else "")
    return head.encode() + b"data: " + msgspec.json.encode(told) + b"\n\n"


def stream(events: AsyncIterator[bytes]) -> StreamingResponse:
    """A response that streams these events."""
    body = with_comments(events, COMMENT_EVERY_S)
    return StreamingResponse(body, media_type="text/event-stream", headers={"cache-control": "no-store"})


async def with_comments(events: AsyncIterator[bytes], comment_every: float) -> AsyncIterator[bytes]:
    """Events as they come, with a comment after every `comment_every` seconds of silence.

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
