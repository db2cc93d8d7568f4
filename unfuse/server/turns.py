"""Turns: what many ask for at once is begun a few at a time, so that whoever else asks is heard between them."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

from unfuse.server.access import EXEMPT

AT_ONCE = 4
"""Calls that begin in one turn of the event loop; each takes about a millisecond of it."""


class Turns:
    """Begins a few calls in each turn of the event loop, in the order they came; probes begin at once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call when its turn has come."""
        if scope["type"] == "http" and scope["path"] not in EXEMPT:
            loop = asyncio.get_running_loop()
            self._waiting.append(turn := loop.create_future())
            if len(self._waiting) == 1:
                loop.call_soon(self._next)
            await turn
        await self._app(scope, receive, send)

    def _next(self) -> None:
        for turn in [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]:
            if not turn.done():
                turn.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
