"""Turns: calls that come or go at once are begun and ended a few at a time: whoever else asks is heard between them."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unfuse.server.access import EXEMPT

AT_ONCE = 4
"""Calls that begin, or whose client is gone, in one turn of the event loop; each takes about a millisecond of it."""


class Throttle:
    """A few calls in each turn of the event loop begin or hear that their client is gone, in order; probes at once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call when its turn has come."""
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
        """Wait for one."""
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
