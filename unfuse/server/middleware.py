"""The layers around all routes: request ids, HEAD and OPTIONS, and the end of calls whose keys are withdrawn."""

from __future__ import annotations

import asyncio
import re
import secrets

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unfuse.edge.keys import Keys
from unfuse.edge.refusal import BrokenOff, envelope
from unfuse.server.auth import WITHDRAWN_KEY, key_in, unauthorized
from unfuse.server.errors import allowed_methods, refusal_of, response_of
from unfuse.server.responses import sse_event

#: Headers that RFC 9110 (14.2) defines only for GET.
RANGES = (b"range", b"if-range")

#: The prefix of paths that support ranges. Elsewhere, such as for /docs, Range headers are ignored.
API = "/v1/"

log = structlog.get_logger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestIds:
    """The outermost layer: gives every response an x-request-id, and an unexpected failure OpenAI's error format."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call."""
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        started = False

        async def named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        with structlog.contextvars.bound_contextvars(x_request_id=name):
            try:
                await self._app(scope, receive, named)
            except BrokenOff as error:
                log.info("broken off", path=scope["path"], reason=str(error))
            except ClientDisconnect:
                log.info("the client left before it had sent its request")
            except Exception as error:
                if started:
                    raise
                await response_of(refusal_of(error))(scope, receive, named)


class _HeadIsSent(Exception):
    """Raised to end a HEAD call after its status and headers were sent."""


class Methods:
    """Answers HEAD as GET without a body, and OPTIONS with the methods of the resource."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call."""
        method = scope["method"]
        if method == "HEAD":
            await self._head(scope, receive, send)
        elif method == "OPTIONS" and (allowed := allowed_methods(scope)):
            await Response(status_code=204, headers={"allow": allowed})(scope, receive, send)
        elif method == "GET" and not scope["path"].startswith(API):
            await self._app({**scope, "headers": _without_ranges(scope)}, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _head(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle the call as a GET, and stop before the body, so that no stream starts."""

        async def send_head(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.start":
                await send({"type": "http.response.body", "body": b""})
                raise _HeadIsSent

        try:
            await self._app({**scope, "method": "GET", "headers": _without_ranges(scope)}, receive, send_head)
        except _HeadIsSent:
            return


def _without_ranges(scope: Scope) -> list[tuple[bytes, bytes]]:
    return [header for header in scope["headers"] if header[0] not in RANGES]


class KeyWithdrawal:
    """Ends calls whose keys are withdrawn: streams with an event that says so, others by closing the connection."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call for as long as its key is known. Raises Refusal, BrokenOff."""
        begun: Message | None = None

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = message if message["type"] == "http.response.start" else begun
            await send(message)

        try:
            async with asyncio.timeout(None) as lasting:
                with self._keys.lasting(key_in(Headers(scope=scope)), lasting):
                    await self._app(scope, receive, noted)
        except TimeoutError as error:
            if not lasting.expired():
                raise
            refusal = unauthorized(WITHDRAWN_KEY)
            if begun is None:
                raise refusal from error
            kind = Headers(raw=begun["headers"]).get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise BrokenOff("the key was withdrawn") from error
            await send({"type": "http.response.body", "body": sse_event(envelope(refusal), "error")})
