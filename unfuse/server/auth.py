"""Identifies the caller: an API key stands for a tenant, some keys for an admin."""

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
"""Declares in /openapi.json that a key is needed; `caller_of` checks it."""


class Caller(msgspec.Struct, frozen=True):
    """The caller. It may see and end the requests of the tenant `sees`, which is its own; None: of all tenants."""

    tenant: str
    sees: str | None
    admin: bool


async def caller_of(request: Request) -> Caller:
    """The caller. Raises Refusal (401) for an unknown key; without configured keys, everyone is admitted."""
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
    """The caller's tenant. Raises Refusal (401)."""
    return caller.tenant


async def sight_of(caller: Known) -> str | None:
    """The tenant whose requests the caller may see; None: all tenants. Raises Refusal (401)."""
    return caller.sees


async def admin_only(caller: Known) -> None:
    """Raise Refusal (401, 403) unless the caller is an admin, if keys are configured."""
    if not caller.admin:
        raise Refusal(403, "admin_only", "this needs an admin's key: `unfuse serve --admin-key` says which those are")


Tenant = Annotated[str, Depends(tenant_of)]
Sight = Annotated[str | None, Depends(sight_of)]
