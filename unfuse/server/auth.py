"""Authentication: identify the caller by its API key, and restrict routes to admins."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

from fastapi import Depends
from fastapi.security import HTTPBearer
from msgspec.structs import asdict
from starlette.datastructures import Headers
from starlette.requests import Request

from unfuse.core.errors import TransientError
from unfuse.edge.access import STRANGER, ApiError
from unfuse.edge.keys import DEFAULT_TENANT, ApiKey
from unfuse.server.gateway import gateway_of

#: Declares in /openapi.json that a key is needed; `caller_of` checks it.
KEYED = HTTPBearer(auto_error=False, description="an API key of this server")

#: Messages of refusals (401): for a call without a key, with an unknown key, or with a key that was removed meanwhile.
NO_KEY = (
    "this server needs an API key: send one by --api-key or UNFUSE_API_KEY, or in HTTP as the header 'Authorization: "
    "Bearer KEY' or 'x-api-key: KEY'"
)
UNKNOWN_KEY = "the API key is not valid for this server: create one with `unfuse keys add NAME`"
WITHDRAWN_KEY = "the API key is no longer valid: it was removed, or its rights were reduced"


class Principal(ApiKey, frozen=True):
    """The caller of a call, with the rights of its key."""

    #: The tenant whose requests it may see and cancel; None is all tenants.
    visible_tenant: str | None = None

    def may_use(self, model: str) -> bool:
        """Return whether it may use the model with this public name."""
        return self.models is None or model in self.models


async def caller_of(request: Request) -> Principal:
    """Return the caller of a call.

    Raises ApiError: 401 for a missing or unknown key, 403 for a change with a read-only key.

    Without configured keys, everyone is admitted. A valid signed link to a result needs no key, and works with any.
    """
    gateway = await gateway_of(request)
    if not gateway.keys:
        return Principal(DEFAULT_TENANT, admin=True, visible_tenant=DEFAULT_TENANT)

    sent_key = key_in(request.headers)
    key = gateway.keys.find(sent_key)
    # A link that is wrong or cannot be verified does not matter for a call with a known key.
    with suppress(*((ApiError, TransientError) if key else ())):
        if await gateway.links.opens(request):
            return Principal(DEFAULT_TENANT)  # the link is for this one result, of any tenant
    if key is None:
        raise unauthorized(UNKNOWN_KEY if sent_key else NO_KEY)
    if key.read_only and request.method not in ("GET", "HEAD", "OPTIONS"):
        raise ApiError(403, "read_only", "the API key is read-only: ask the server's operator for one without read=yes")
    return _principal(key)


async def visitor_of(request: Request) -> Principal | None:
    """Return the caller of a path that is open to everybody; None for a stranger.

    With configured keys, a stranger is a caller without a known key. Without configured keys, it is a caller that used
    a host or an origin that is not allowed.
    """
    keys = (await gateway_of(request)).keys
    if not keys:
        return None if request.scope.get(STRANGER) else await caller_of(request)
    key = keys.find(key_in(request.headers))
    return None if key is None else _principal(key)


#: The type of a route's parameter that gets the caller, or None for a stranger.
VisitorDep = Annotated[Principal | None, Depends(visitor_of)]


async def reader_of(request: Request, visitor: VisitorDep) -> Principal | None:
    """Return the caller of /metrics, which has fewer metrics for strangers; None for a stranger.

    Raises ApiError (401) for an unknown key, so that a program with an outdated key does not get fewer metrics
    unnoticed. With open metrics, the key does not matter.
    """
    gateway = await gateway_of(request)
    if visitor is None and gateway.keys and key_in(request.headers) and not gateway.open_metrics:
        raise unauthorized(UNKNOWN_KEY)
    return visitor


def _principal(key: ApiKey) -> Principal:
    return Principal(**asdict(key), visible_tenant=None if key.admin else key.tenant)


#: The type of a route's parameter that gets the caller.
CallerDep = Annotated[Principal, Depends(caller_of)]


async def admin_only(caller: CallerDep) -> None:
    """Raise ApiError (401, 403) unless the caller is an admin, if keys are configured."""
    if not caller.admin:
        raise ApiError(
            403,
            "admin_only",
            "this call needs an admin key: one with admin=yes in the server's --api-keys FILE, or its only --api-key",
        )


def key_in(headers: Headers) -> str:
    """Return the key in the `Authorization` or `x-api-key` header; "" if there is none."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    return credentials.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


def unauthorized(message: str) -> ApiError:
    """Return the refusal (401) of a call without a known key."""
    return ApiError(401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"})
