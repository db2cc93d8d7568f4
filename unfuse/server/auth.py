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
from unfuse.server.errors import BrokenOff, Refusal, envelope
from unfuse.server.gateway import gateway_of
from unfuse.server.keys import DEFAULT_TENANT, Keys
from unfuse.server.sse import event

KEYED = HTTPBearer(auto_error=False, description="an API key of this server")
"""Declares in /openapi.json that a key is needed; `caller_of` checks it."""

READS = frozenset({"GET", "HEAD", "OPTIONS"})


class Caller(msgspec.Struct, frozen=True):
    """The caller. It may see and end the requests of the tenant `sees`, which is its own; None: of all tenants.

    It may ask for these `models` (None: any), and have this much.
    """

    tenant: str
    sees: str | None
    admin: bool
    models: frozenset[str] | None = None
    allowance: Allowance = Allowance()

    def may_use(self, model: str) -> bool:
        """Whether it may ask for a model, by the name that clients use."""
        return self.models is None or model in self.models


async def caller_of(request: Request) -> Caller:
    """The caller. Raises Refusal (401) for an unknown key, and 403 for what a key that only reads may not do.

    Without configured keys, everyone is admitted. A signed link to a result opens without a key, or with any key.
    """
    gateway = await gateway_of(request)
    keys = gateway.keys
    if not keys:
        return Caller(DEFAULT_TENANT, DEFAULT_TENANT, True)
    key = keys.of(_shown(request.headers))
    if key is None:
        if await gateway.links.opens(request):
            return FOLLOWS_LINK
        raise _unknown()
    with suppress(Refusal, TransientError):
        if await gateway.links.opens(request):
            return FOLLOWS_LINK
    if key.only_reads and request.method not in READS:
        raise Refusal(403, "read_only", "this key only reads: whoever keeps the keys can give one without read=yes")
    return Caller(key.tenant, None if key.admin else key.tenant, key.admin, key.models, key.allowance)


FOLLOWS_LINK = Caller(DEFAULT_TENANT, None, False)
"""The caller of a signed link. The link opens the path of one result."""

Known = Annotated[Caller, Depends(caller_of)]


async def admin_only(caller: Known) -> None:
    """Raise Refusal (401, 403) unless the caller is an admin, if keys are configured."""
    if not caller.admin:
        raise Refusal(403, "admin_only", "this needs an admin's key: `unfuse serve --admin-key` says which those are")


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
                raise _unknown() from error
            kind = Headers(raw=begun["headers"]).get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise BrokenOff("the key was withdrawn") from error
            await send({"type": "http.response.body", "body": event(envelope(_unknown()), "error")})


def _shown(headers: Headers) -> str:
    """Return the key in the `Authorization` or `x-api-key` header; "" if there is none."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


def _unknown() -> Refusal:
    message = "send a key of this server as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
    return Refusal(401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"})
