"""Begins only a few calls in each turn of the event loop, so that others are served between them."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unfuse.edge.access import EXEMPT

AT_ONCE = 4  # how many calls begin or end in one turn of the event loop; each takes about a millisecond


class Throttle:
    """Lets a few calls in each turn of the event loop begin, or notice that their client is gone. Probes never wait."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call, after waiting for its turn."""
        if scope["type"] != "http" or scope["path"] in EXEMPT:
            await self._app(scope, receive, send)
            return

        async def heard() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                await self._turn()
            return message

        await self._turn()
        await self._app(scope, heard, send)

    async def _turn(self) -> None:
        """Wait for a turn."""
        loop = asyncio.get_running_loop()
        self._waiting.append(turn := loop.create_future())
        if len(self._waiting) == 1:
            loop.call_soon(self._next)
        await turn

    def _next(self) -> None:
        for turn in [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]:
            if not turn.done():
                turn.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
