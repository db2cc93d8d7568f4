"""The application: the routes of all resources and the layers around them, and what answers before it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from socket import socket
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from unfuse import __version__
from unfuse.core.errors import UnfuseError
from unfuse.edge.access import Access, Guard
from unfuse.edge.connections import ConnectionLimits, HttpServer
from unfuse.edge.refusal import Refusal
from unfuse.edge.throttle import Throttle
from unfuse.server import chat, dead_letters, images, models, monitoring, requests, videos
from unfuse.server.auth import KEYED, caller_of
from unfuse.server.body import BodyBudget
from unfuse.server.errors import answer_error
from unfuse.server.gateway import Gateway
from unfuse.server.middleware import KeyWithdrawal, Methods, RequestIds
from unfuse.server.openapi_schemas import DOCUMENTED, EVENT

#: What is answered whether or not there is a queue, by path.
ANSWERS = {"/health": {"status": "ok"}, "/version": {"version": __version__}}


def create_app(gateway: Gateway, access: Access | None = None) -> FastAPI:
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
            Middleware(Guard, access=access or Access(), keyed=keyed),
            Middleware(KeyWithdrawal, keys=gateway.keys),
            Middleware(Methods),
        ],
    )
    app.state.gateway, app.state.reading = gateway, BodyBudget()
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


class Front:
    """The HTTP server at a socket, which answers for a gateway from the first call of `wait` or `serve` on.

    Until then `/ready` has the reason, and all calls that need the queue get 503 with `Retry-After`.
    """

    def __init__(self, listener: socket, bounds: ConnectionLimits, access: Access, keyed: bool) -> None:
        self._app: ASGIApp = RequestIds(Guard(self._answer_starting, access, keyed))
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
