"""Who asks: an API key stands for a tenant."""

from __future__ import annotations

import hmac
from typing import Annotated

from fastapi import Depends
from fastapi.security import HTTPBearer
from starlette.requests import Request

from unfuse.server.errors import Refusal
from unfuse.server.gateway import gateway_of

DEFAULT_TENANT = "default"
KEYED = HTTPBearer(auto_error=False, description="an API key of this server")
"""Says in /openapi.json that a key is needed; whether it is the right one is for `tenant_of` to say."""


def tenant_of(request: Request) -> str:
    """The tenant that asks. Raises Refusal (401) for a key that is none of ours; without keys everyone is welcome."""
    keys = gateway_of(request).keys
    if not keys:
        return DEFAULT_TENANT
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    tenants = [tenant for key, tenant in keys.items() if hmac.compare_digest(key.encode(), given.strip().encode())]
    if scheme.lower() != "bearer" or not tenants:
        message = "send a key of this server as 'Authorization: Bearer KEY'"
        raise Refusal(401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"})
    return tenants[0]


Tenant = Annotated[str, Depends(tenant_of)]
