"""What a server answers while it waits for its queue: it is alive, and not ready."""

from __future__ import annotations

import asyncio
from socket import socket

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from unfuse import __version__
from unfuse.edge.access import Access, Guard
from unfuse.edge.connections import ConnectionLimits, HttpServer
from unfuse.edge.refusal import Refusal
from unfuse.server.errors import Edge

ANSWERS = {"/health": {"status": "ok"}, "/version": {"version": __version__}}
"""What is answered whether or not there is a queue, by path."""

AGAIN = {"retry-after": "2"}


class Starting:
    """The application of a server whose gateway is not there yet. Once `app` is set, that answers instead.

    Until then `/ready` has the `reason`, and all calls that need the queue get 503 with `Retry-After`.
    """

    def __init__(self, access: Access, keyed: bool) -> None:
        self.app: ASGIApp | None = None
        self.reason = "the server is starting"
        self._until_then = Edge(Guard(self._answer, access, keyed))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call."""
        await (self.app or self._until_then)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/ready":
            raise Refusal(503, "not_ready", self.reason, headers=AGAIN)
        if path not in ANSWERS:
            raise Refusal(503, "starting", "the server waits for its queue: try again soon", headers=AGAIN)
        await JSONResponse(ANSWERS[path])(scope, receive, send)


class Front:
    """The HTTP server at a socket, which answers for a gateway from the first call of `wait` or `serve` on."""

    def __init__(self, listener: socket, bounds: ConnectionLimits, access: Access, keyed: bool) -> None:
        self._starting = Starting(access, keyed)
        self._server, self._listener = HttpServer(self._starting, bounds, access), listener
        self._serving: asyncio.Task[None] | None = None

    def wait(self, reason: str) -> None:
        """Answer that the server is not ready, for this reason."""
        self._starting.reason = reason
        self._begin()

    def serve(self, app: ASGIApp) -> asyncio.Task[None]:
        """Have the gateway's application answer. Returns the task that serves."""
        self._starting.app = app
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
