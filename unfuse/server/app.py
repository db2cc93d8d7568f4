"""The ASGI application: routes, middleware, and the HTTP server that also answers during startup."""

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
from unfuse.edge.access import AccessGuard, AccessPolicy, ApiError, ResponseAborted, envelope
from unfuse.edge.connections import ConnectionLimits, HttpServer, Throttle
from unfuse.edge.keys import ApiKeys
from unfuse.server import chat, dead_letters, images, models, monitoring, requests, videos
from unfuse.server.auth import KEYED, WITHDRAWN_KEY, caller_of, key_in, unauthorized
from unfuse.server.errors import allowed_methods, answer_error, refusal_of, response_of
from unfuse.server.gateway import Gateway
from unfuse.server.openapi_schemas import DOCUMENTED, EVENT
from unfuse.server.responses import sse_event

#: Paths that are answered before the queue is reachable, with the JSON of their replies.
ANSWERS = {"/health": {"status": "ok"}, "/version": {"version": __version__}}

#: Headers that RFC 9110 (14.2) defines only for GET.
RANGES = (b"range", b"if-range")

#: The prefix of paths that support ranges. On other paths, for example /docs, Range headers are ignored.
API = "/v1/"

log = structlog.get_logger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def create_app(gateway: Gateway, access: AccessPolicy | None = None) -> FastAPI:
    """Return the FastAPI application that serves a gateway.

    Without API keys, `access` decides which hosts and origins may use it. Its default allows only loopback names.
    """
    keyed = bool(gateway.keys)

    # The first middleware is the outermost: RequestIds turns the errors of all others into responses.
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
            Middleware(KeyRevocation, keys=gateway.keys),
            Middleware(Methods),
        ],
    )
    app.state.gateway = gateway
    app.state.body_bytes = 0  # bytes of all bodies that are being read, counted by `server.body`

    dependencies = [Depends(caller_of), *([Depends(KEYED)] if keyed else [])]
    for module in (images, videos, chat, requests, dead_letters, models):
        app.include_router(module.router, prefix="/v1", dependencies=dependencies)
    app.include_router(monitoring.workers_router, prefix="/v1", dependencies=dependencies)
    app.include_router(monitoring.router)

    # FastAPI documents that this method is replaced to extend the schema.
    app.openapi = partial(_openapi_with_event, app.openapi)  # type: ignore[method-assign]
    return app


def _openapi_with_event(generate: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of /openapi.json with the Event schema.

    FastAPI generates it on first use and caches it.
    """
    schema = generate()
    schema.setdefault("components", {}).setdefault("schemas", {})["Event"] = EVENT
    return schema


class RequestIds:
    """The outermost middleware: sets x-request-id, and turns unexpected errors into OpenAI's format.

    A valid x-request-id of the client is used as it is; otherwise the id is random. It is also bound to log lines.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call."""
        client_id = Headers(scope=scope).get("x-request-id", "")
        request_id = client_id if _REQUEST_ID.fullmatch(client_id) else secrets.token_hex(16)
        response_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal response_started
            if message["type"] == "http.response.start":
                response_started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        with structlog.contextvars.bound_contextvars(x_request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except ResponseAborted as error:
                log.info("response aborted", path=scope["path"], reason=str(error))
            except ClientDisconnect:
                log.info("the client disconnected before its request was complete")
            except Exception as error:
                # The client has the status already. uvicorn closes the connection, so that it notices the error.
                if response_started:
                    raise
                await response_of(refusal_of(error))(scope, receive, send_with_id)


class _HeadIsSent(Exception):
    """Raised to end a HEAD call after its status and headers were sent."""


class Methods:
    """Answers HEAD as GET without a body, and OPTIONS with the methods of the resource.

    Range headers are dropped where no ranges are supported: for HEAD, and for GET outside of /v1/.
    """

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
        """Answer with the status and headers of a GET.

        The call ends before the body, so that no stream starts.
        """

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
    """Return the headers of a call without Range and If-Range."""
    return [header for header in scope["headers"] if header[0] not in RANGES]


class KeyRevocation:
    """Ends calls in progress whose API key is withdrawn.

    A call without a response so far gets 401. An event stream gets an error event. Any other response is aborted, so
    that its connection closes.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call until its key is withdrawn. Raises ApiError, ResponseAborted."""
        response_start: Message | None = None

        async def send_and_note_start(message: Message) -> None:
            nonlocal response_start
            response_start = message if message["type"] == "http.response.start" else response_start
            await send(message)

        try:
            # The timeout has no deadline until `ApiKeys` sets one, when it withdraws the key.
            async with asyncio.timeout(None) as withdrawal:
                with self._keys.end_when_withdrawn(key_in(Headers(scope=scope)), withdrawal):
                    await self._app(scope, receive, send_and_note_start)
        except TimeoutError as error:
            if not withdrawal.expired():
                raise
            refusal = unauthorized(WITHDRAWN_KEY)
            if response_start is None:
                raise refusal from error
            content_type = Headers(raw=response_start["headers"]).get("content-type", "")
            if not content_type.startswith("text/event-stream"):
                raise ResponseAborted("the API key was revoked") from error
            await send({"type": "http.response.body", "body": sse_event(envelope(refusal), "error")})


class HttpFrontend:
    """The HTTP server of one listening socket, which answers during startup too.

    It starts with the first call of `wait` or `serve`. Until `serve` sets the gateway's application, /health and
    /version are answered, /ready gets 503 with the reason, and all other calls get 503; both with `Retry-After`.
    """

    def __init__(self, listener: socket, limits: ConnectionLimits, access: AccessPolicy, keyed: bool) -> None:
        self._app: ASGIApp = RequestIds(AccessGuard(self._answer_starting, access, keyed))
        self._server = HttpServer(self, limits, access)
        self._listener = listener
        self._reason = ""  # why the server is not ready
        self._serving: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call."""
        await self._app(scope, receive, send)

    def wait(self, reason: str) -> None:
        """Answer that the server is not ready, for this reason."""
        self._reason = reason
        self._start()

    def serve(self, app: ASGIApp) -> asyncio.Task[None]:
        """Pass all further calls to this application. Returns the task that runs the HTTP server."""
        self._app = app
        return self._start()

    async def close(self) -> None:
        """Stop accepting calls, and wait until the server has ended."""
        self._server.should_exit = True
        if self._serving:
            await self._serving

    def _start(self) -> asyncio.Task[None]:
        """Start the HTTP server unless it runs. Returns its task."""
        if self._serving is None:
            self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        return self._serving

    async def _answer_starting(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a call during startup. Raises ApiError (503) unless the path is in ANSWERS."""
        retry_later = {"retry-after": "2"}
        if scope["path"] == "/ready":
            raise ApiError(503, "not_ready", self._reason, headers=retry_later)
        if scope["path"] not in ANSWERS:
            raise ApiError(
                503, "starting", "the server is starting and waits for its queue: try again soon", headers=retry_later
            )
        await JSONResponse(ANSWERS[scope["path"]])(scope, receive, send)
