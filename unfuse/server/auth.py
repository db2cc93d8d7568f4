"""Identifies the caller: an API key stands for a tenant, some keys for an admin."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Annotated

import msgspec
from fastapi import Depends
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unfuse.core.errors import TransientError
from unfuse.core.request import Allowance
from unfuse.edge.access import STRANGER
from unfuse.edge.key_lines import DEFAULT_TENANT, Key
from unfuse.edge.keys import Keys
from unfuse.edge.refusal import BrokenOff, Refusal, envelope
from unfuse.server.gateway import gateway_of
from unfuse.server.sse import event

KEYED = HTTPBearer(auto_error=False, description="an API key of this server")
"""Declares in /openapi.json that a key is needed; `caller_of` checks it."""

READS = frozenset({"GET", "HEAD", "OPTIONS"})


class Principal(msgspec.Struct, frozen=True):
    """The caller. It may see and end the requests of the tenant `sees`, which is its own; None: of all tenants.

    It may ask for these `models` (None: any), and have this much. One that `only_reads` creates nothing, and sees all
    metrics, as an admin does.
    """

    tenant: str
    sees: str | None
    admin: bool
    models: frozenset[str] | None = None
    allowance: Allowance = Allowance()
    only_reads: bool = False

    def may_use(self, model: str) -> bool:
        """Whether it may ask for a model, by the name that clients use."""
        return self.models is None or model in self.models


async def caller_of(request: Request) -> Principal:
    """The caller. Raises Refusal (401) for an unknown key, and 403 for what a key that only reads may not do.

    Without configured keys, everyone is admitted. A signed link to a result opens without a key, or with any key.
    """
    gateway = await gateway_of(request)
    keys = gateway.keys
    if not keys:
        return Principal(DEFAULT_TENANT, DEFAULT_TENANT, True)
    shown = _shown(request.headers)
    key = keys.of(shown)
    if key is None:
        if await gateway.links.opens(request):
            return FOLLOWS_LINK
        raise _unauthorized(shown)
    with suppress(Refusal, TransientError):
        if await gateway.links.opens(request):
            return FOLLOWS_LINK
    if key.only_reads and request.method not in READS:
        raise Refusal(403, "read_only", "this key only reads: whoever keeps the keys can give one without read=yes")
    return _caller(key)


async def visitor_of(request: Request) -> Principal | None:
    """Return the caller of a path that is open to everybody; None for a stranger.

    A stranger sent no key that is known where keys are configured; without configured keys, it used a host or an
    origin that is not allowed.
    """
    keys = (await gateway_of(request)).keys
    if not keys:
        return None if request.scope.get(STRANGER) else Principal(DEFAULT_TENANT, DEFAULT_TENANT, True)
    key = keys.of(_shown(request.headers))
    return None if key is None else _caller(key)


Visitor = Annotated[Principal | None, Depends(visitor_of)]


async def reader_of(request: Request, visitor: Visitor) -> Principal | None:
    """Return the same for a path that shows less to strangers. Raises Refusal (401) for an unknown key.

    A program that lost its key is then told so, and does not work with less without notice.
    """
    gateway, shown = await gateway_of(request), _shown(request.headers)
    if visitor is None and shown and gateway.keys and not gateway.open_metrics:
        raise _unauthorized(shown)
    return visitor


def _caller(key: Key) -> Principal:
    sees = None if key.admin else key.tenant
    return Principal(key.tenant, sees, key.admin, key.models, key.allowance, key.only_reads)


FOLLOWS_LINK = Principal(DEFAULT_TENANT, None, False)
"""The caller of a signed link. The link opens the path of one result."""

Known = Annotated[Principal, Depends(caller_of)]


async def admin_only(caller: Known) -> None:
    """Raise Refusal (401, 403) unless the caller is an admin, if keys are configured."""
    if not caller.admin:
        message = "this needs an admin's key: one with admin=yes in the server's --api-keys FILE, or a sole --api-key"
        raise Refusal(403, "admin_only", message)


class Lasting:
    """Ends calls whose keys are withdrawn: streams with an event that says so, others by closing the connection."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call for as long as its key is known. Raises Refusal, BrokenOff."""
        if scope["type"] != "http" or not self._keys:
            await self._app(scope, receive, send)
            return
        begun: Message | None = None

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = message if message["type"] == "http.response.start" else begun
            await send(message)

        try:
            async with asyncio.timeout(None) as lasting:
                with self._keys.lasting(_shown(Headers(scope=scope)), lasting):
                    await self._app(scope, receive, noted)
        except TimeoutError as error:
            if not lasting.expired():
                raise
            if begun is None:
                raise _withdrawn() from error
            kind = Headers(raw=begun["headers"]).get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise BrokenOff("the key was withdrawn") from error
            await send({"type": "http.response.body", "body": event(envelope(_withdrawn()), "error")})


def _shown(headers: Headers) -> str:
    """Return the key in the `Authorization` or `x-api-key` header; "" if there is none."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


def _unauthorized(shown: str) -> Refusal:
    """Return the refusal of a call whose key is unknown, or that shows none."""
    if shown:
        return _refusal("this server does not know this key: use one that `unfuse keys add NAME` made for it")
    return _refusal(
        "this server needs an API key: send one by --api-key or UNFUSE_API_KEY, in HTTP as 'Authorization: Bearer KEY' "
        "or 'x-api-key: KEY'"
    )


def _withdrawn() -> Refusal:
    return _refusal("this server does not know this key any more: it was removed, or its rights were reduced")


def _refusal(message: str) -> Refusal:
    return Refusal(401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"})
