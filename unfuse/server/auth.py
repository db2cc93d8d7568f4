"""Who asks: an API key stands for a tenant, some for an admin."""

from __future__ import annotations

import hmac
from typing import Annotated

import msgspec
from fastapi import Depends
from fastapi.security import HTTPBearer
from starlette.requests import Request

from unfuse.server.errors import Refusal
from unfuse.server.gateway import gateway_of

DEFAULT_TENANT = "default"
KEYED = HTTPBearer(auto_error=False, description="an API key of this server")
"""Says in /openapi.json that a key is needed; whether it is the right one is for `caller_of` to say."""


class Caller(msgspec.Struct, frozen=True):
    """Who asks. `sees` is the tenant whose requests it may see and end: its own, or with None all of them."""

    tenant: str
    sees: str | None
    admin: bool


async def caller_of(request: Request) -> Caller:
    """Who asks. Raises Refusal (401) for a key that is none of ours; without keys everyone is welcome."""
    gateway = await gateway_of(request)
    if not gateway.keys:
        return Caller(DEFAULT_TENANT, DEFAULT_TENANT, True)
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    shown = [key for key in gateway.keys if hmac.compare_digest(key.encode(), given.strip().encode())]
    if scheme.lower() != "bearer" or not shown:
        message = "send a key of this server as 'Authorization: Bearer KEY'"
        raise Refusal(401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"})
    tenant, admin = gateway.keys[shown[0]], shown[0] in gateway.admins
    return Caller(tenant, None if admin else tenant, admin)


Known = Annotated[Caller, Depends(caller_of)]


async def tenant_of(caller: Known) -> str:
    """The tenant that asks. Raises Refusal (401)."""
    return caller.tenant


async def sight_of(caller: Known) -> str | None:
    """The tenant whose requests may be seen by who asks; None for those of all. Raises Refusal (401)."""
    return caller.sees


async def admin_only(caller: Known) -> None:
    """Raises Refusal (401, 403) for whoever is no admin, once there are keys."""
    if not caller.admin:
        raise Refusal(403, "admin_only", "this needs an admin's key: `unfuse serve --admin-key` says which those are")


Tenant = Annotated[str, Depends(tenant_of)]
Sight = Annotated[str | None, Depends(sight_of)]
