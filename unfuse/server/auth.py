"""Identifies the caller: an API key stands for a tenant, some keys for an admin."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

from fastapi import Depends
from fastapi.security import HTTPBearer
from msgspec.structs import asdict
from starlette.datastructures import Headers
from starlette.requests import Request

from unfuse.core.errors import TransientError
from unfuse.edge.access import STRANGER, Refusal
from unfuse.edge.keys import DEFAULT_TENANT, ApiKey
from unfuse.server.gateway import gateway_of

#: Declares in /openapi.json that a key is needed; `caller_of` checks it.
KEYED = HTTPBearer(auto_error=False, description="an API key of this server")

#: Why a call is refused that shows no key, an unknown one, or one that was removed meanwhile.
NO_KEY = (
    "this server needs an API key: send one by --api-key or UNFUSE_API_KEY, in HTTP as 'Authorization: Bearer KEY' or "
    "'x-api-key: KEY'"
)
UNKNOWN_KEY = "this server does not know this key: use one that `unfuse keys add NAME` made for it"
WITHDRAWN_KEY = "this server does not know this key any more: it was removed, or its rights were reduced"


class Principal(ApiKey, frozen=True):
    """A caller with what its key opens. It sees and ends the requests of the tenant `sees`; None: of all tenants."""

    sees: str | None = None

    def may_use(self, model: str) -> bool:
        """Return whether it may ask for a model, by the name that clients use."""
        return self.models is None or model in self.models


async def caller_of(request: Request) -> Principal:
    """Return the caller. Raises Refusal: 401 for an unknown key, 403 for what a key that only reads may not do.

    Without configured keys, everyone is admitted. A signed link to a result opens without a key, or with any key.
    """
    gateway = await gateway_of(request)
    if not gateway.keys:
        return Principal(DEFAULT_TENANT, admin=True, sees=DEFAULT_TENANT)
    shown = key_in(request.headers)
    key = gateway.keys.of(shown)
    with suppress(*((Refusal, TransientError) if key else ())):
        if await gateway.links.opens(request):  # the path of one result
            return Principal(DEFAULT_TENANT)
    if key is None:
        raise unauthorized(UNKNOWN_KEY if shown else NO_KEY)
    if key.only_reads and request.method not in ("GET", "HEAD", "OPTIONS"):
        raise Refusal(403, "read_only", "this key only reads: whoever keeps the keys can give one without read=yes")
    return _caller(key)


async def visitor_of(request: Request) -> Principal | None:
    """Return the caller of a path that is open to everybody; None for a stranger.

    A stranger sent no key that is known where keys are configured; without configured keys, it used a host or an
    origin that is not allowed.
    """
    keys = (await gateway_of(request)).keys
    if not keys:
        return None if request.scope.get(STRANGER) else await caller_of(request)
    key = keys.of(key_in(request.headers))
    return None if key is None else _caller(key)


Visitor = Annotated[Principal | None, Depends(visitor_of)]


async def reader_of(request: Request, visitor: Visitor) -> Principal | None:
    """Return the same for a path that shows less to strangers. Raises Refusal (401) for an unknown key.

    A program that lost its key is then told so, and does not work with less without notice.
    """
    gateway = await gateway_of(request)
    if visitor is None and gateway.keys and key_in(request.headers) and not gateway.open_metrics:
        raise unauthorized(UNKNOWN_KEY)
    return visitor


def _caller(key: ApiKey) -> Principal:
    return Principal(**asdict(key), sees=None if key.admin else key.tenant)


Known = Annotated[Principal, Depends(caller_of)]


async def admin_only(caller: Known) -> None:
    """Raise Refusal (401, 403) unless the caller is an admin, if keys are configured."""
    if not caller.admin:
        raise Refusal(
            403,
            "admin_only",
            "this needs an admin's key: one with admin=yes in the server's --api-keys FILE, or a sole --api-key",
        )


def key_in(headers: Headers) -> str:
    """Return the key in the `Authorization` or `x-api-key` header; "" if there is none."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


def unauthorized(message: str) -> Refusal:
    """Return the refusal (401) of a call without a known key."""
    return Refusal(401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"})
