"""The application: the routes of all resources and the layers around them, and what answers before it is there."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable
from functools import partial
from socket import socket
from typing import Any

import structlog
from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi_offline import FastAPIOffline
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unfuse import __version__
from unfuse.core.errors import UnfuseError
from unfuse.edge.access import AccessGuard, AccessPolicy, Refusal, ResponseAborted, envelope
from unfuse.edge.connections import ConnectionLimits, HttpServer, Throttle
from unfuse.edge.keys import ApiKeys
from unfuse.server import chat, dead_letters, images, models, monitoring, requests, videos
from unfuse.server.auth import KEYED, WITHDRAWN_KEY, caller_of, key_in, unauthorized
from unfuse.server.errors import allowed_methods, answer_error, refusal_of, response_of
from unfuse.server.gateway import Gateway
from unfuse.server.openapi_schemas import DOCUMENTED, EVENT
from unfuse.server.responses import sse_event

#: Paths that are answered also while the queue is not reachable.
ANSWERS = {"/health": {"status": "ok"}, "/version": {"version": __version__}}

#: Headers that RFC 9110 (14.2) defines only for GET.
RANGES = (b"range", b"if-range")

#: The prefix of paths that support ranges. Elsewhere, such as for /docs, Range headers are ignored.
API = "/v1/"

log = structlog.get_logger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def create_app(gateway: Gateway, access: AccessPolicy | None = None) -> FastAPI:
    """The application of a gateway. Without keys, `access` says from where it may be used: from this machine alone."""
    keyed = bool(gateway.keys)
    app = FastAPIOffline(
        redoc_url=None,
        title="unfuse",
        version=__version__,
        responses=DOCUMENTED,
        exception_handlers=dict.fromkeys((UnfuseError, HTTPException, RequestValidationError), answer_error),
        middleware=[
            Middleware(RequestIds),
            Middleware(Throttle),
            Middleware(AccessGuard, access=access or AccessPolicy(), keyed=keyed),
            Middleware(KeyWithdrawal, keys=gateway.keys),
            Middleware(Methods),
        ],
    )
    app.state.gateway, app.state.body_bytes = gateway, 0
    guards = [Depends(caller_of), *([Depends(KEYED)] if keyed else [])]
    for resource in (images, videos, chat, requests, dead_letters, models):
        app.include_router(resource.router, prefix="/v1", dependencies=guards)
    app.include_router(monitoring.workers_router, prefix="/v1", dependencies=guards)
    app.include_router(monitoring.router)
    app.openapi = partial(_described, app.openapi)  # type: ignore[method-assign]  # it is said to be done so
    return app


def _described(made: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What /openapi.json says: made when it is first asked for, and kept, since a start need not wait for it."""
    schema = made()
    schema.setdefault("components", {}).setdefault("schemas", {})["Event"] = EVENT
    return schema


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
            except ResponseAborted as error:
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

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call for as long as its key is known. Raises Refusal, ResponseAborted."""
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
                raise ResponseAborted("the key was withdrawn") from error
            await send({"type": "http.response.body", "body": sse_event(envelope(refusal), "error")})


class HttpFrontend:
    """The HTTP server at a socket, which answers for a gateway from the first call of `wait` or `serve` on.

    Until then `/ready` has the reason, and all calls that need the queue get 503 with `Retry-After`.
    """

    def __init__(self, listener: socket, bounds: ConnectionLimits, access: AccessPolicy, keyed: bool) -> None:
        self._app: ASGIApp = RequestIds(AccessGuard(self._answer_starting, access, keyed))
        self._server, self._listener = HttpServer(self, bounds, access), listener
        self._reason = ""
        self._serving: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call."""
        await self._app(scope, receive, send)

    def wait(self, reason: str) -> None:
        """Answer that the server is not ready, for this reason."""
        self._reason = reason
        self._begin()

    def serve(self, app: ASGIApp) -> asyncio.Task[None]:
        """Have the gateway's application answer. Returns the task that serves."""
        self._app = app
        return self._begin()

    async def close(self) -> None:
        """Answer what was asked, and end."""
        self._server.should_exit = True
        if self._serving:
            await self._serving

    def _begin(self) -> asyncio.Task[None]:
        if self._serving is None:
            self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        return self._serving

    async def _answer_starting(self, scope: Scope, receive: Receive, send: Send) -> None:
        again = {"retry-after": "2"}
        if scope["path"] == "/ready":
            raise Refusal(503, "not_ready", self._reason, headers=again)
        if scope["path"] not in ANSWERS:
            raise Refusal(503, "starting", "the server waits for its queue: try again soon", headers=again)
        await JSONResponse(ANSWERS[scope["path"]])(scope, receive, send)
