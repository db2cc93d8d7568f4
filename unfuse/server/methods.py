"""ASGI middleware for the methods that every resource has: HEAD and OPTIONS, and the Allow header."""

from __future__ import annotations

from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ROUTED = ("GET", "POST", "PUT", "PATCH", "DELETE")
"""The methods that routes are declared with."""

RANGES = (b"range", b"if-range")
"""Headers that RFC 9110 (14.2) defines only for GET."""

API = "/v1/"
"""The prefix of paths that support ranges. Elsewhere, such as for /docs, Range headers are ignored."""


class _HeadIsSent(Exception):
    """Raised to end a HEAD call after its status and headers were sent."""


class Methods:
    """Answers HEAD as GET without a body, and OPTIONS with the methods of the resource."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call."""
        method = scope["method"] if scope["type"] == "http" else ""
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


def allowed_methods(scope: Scope) -> str:
    """Return the Allow header for the resource at this path; "" if there is no such resource."""
    routes = scope["app"].routes

    def is_routed(method: str) -> bool:
        return any(route.matches({**scope, "method": method})[0] is Match.FULL for route in routes)

    found = [method for method in ROUTED if is_routed(method)]
    if not found:
        return ""
    return ", ".join((*found, *(["HEAD"] if "GET" in found else []), "OPTIONS"))
