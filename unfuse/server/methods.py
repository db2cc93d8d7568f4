"""HTTP methods that every resource has: HEAD wherever GET is, OPTIONS, and what a 405 allows."""

from __future__ import annotations

from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ROUTED = ("GET", "POST", "PUT", "PATCH", "DELETE")
"""The methods that routes are declared with."""

RANGES = (b"range", b"if-range")
"""Headers that RFC 9110 14.2 defines for GET alone."""

API = "/v1/"
"""The paths under which ranges are served. Elsewhere, as for the pages of /docs, they are ignored."""


class _HeadIsSent(Exception):
    """Ends the handling of a HEAD call, once its status and headers are sent."""


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
        """Handle the call as a GET, up to its first byte of a body: a stream is never begun."""

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
    """Return the methods of the resource at this path, as the Allow header has them; "" where there is none."""
    routes = scope["app"].routes

    def is_routed(method: str) -> bool:
        return any(route.matches({**scope, "method": method})[0] is Match.FULL for route in routes)

    found = [method for method in ROUTED if is_routed(method)]
    if not found:
        return ""
    return ", ".join((*found, *(["HEAD"] if "GET" in found else []), "OPTIONS"))
