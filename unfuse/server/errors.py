"""Turns every error into a refusal, and answers it in OpenAI's format."""

from __future__ import annotations

import errno
import re
from http import HTTPStatus
from math import ceil

import structlog
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Match
from starlette.types import Scope

from unfuse.core import errors
from unfuse.edge.access import Refusal, envelope

#: The methods that routes are declared with.
ROUTED = ("GET", "POST", "PUT", "PATCH", "DELETE")

log = structlog.get_logger(__name__)

_SLASHES = re.compile("/+")


async def answer_error(request: Request, error: Exception) -> JSONResponse:
    """Answer an error of a route."""
    refusal, path = refusal_of(error), request.scope["path"]
    if isinstance(error, HTTPException) and refusal.status == HTTPStatus.NOT_FOUND:
        refusal = Refusal(404, refusal.code, f"nothing is served at {path[:80]}: {_hint_at(request.scope)}")
    if refusal.status == HTTPStatus.METHOD_NOT_ALLOWED and (allowed := allowed_methods(request.scope)):
        message = f"{request.method} is not served at {path[:80]}: send {allowed.removesuffix(', OPTIONS')}"
        refusal = Refusal(405, refusal.code, message, headers={"allow": allowed})
    return response_of(refusal)


def _hint_at(scope: Scope) -> str:
    """Return a hint to the right path for a base URL without /v1, with /v1 twice, or with a trailing slash."""
    path = _SLASHES.sub("/", scope["path"])
    meant = (path, f"/v1{path}", path.removeprefix("/v1"))
    served = [one for one in meant if one != scope["path"] and allowed_methods({**scope, "path": one})]
    return f"did you mean {served[0][:80]}?" if served else "see /docs"


def response_of(refusal: Refusal) -> JSONResponse:
    """Return the error reply."""
    return JSONResponse(envelope(refusal), refusal.status, refusal.headers)


def refusal_of(error: Exception) -> Refusal:
    """The refusal that a client gets for an error."""
    match error:
        case Refusal():
            return error
        case errors.UnknownModel():
            return Refusal(404, "model_not_found", str(error), error.param or "model")
        case errors.ContextLengthExceeded():
            return Refusal(400, "context_length_exceeded", str(error), error.param)
        case errors.InvalidParameter():
            return Refusal(400, "invalid_parameter", str(error), error.param)
        case errors.NotFound():
            return Refusal(404, "not_found", str(error))
        case errors.Overloaded():
            return _come_again(error)
        case errors.WeightsChanged():
            return Refusal(503, "weights_changed", str(error), headers={"x-should-retry": "false"})
        case HTTPException():
            code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
            return Refusal(error.status_code, code, f"{error.detail}: see /docs", headers=error.headers)
        case RequestValidationError():
            first = error.errors()[0]
            name = str(first["loc"][-1])
            return Refusal(400, "invalid_parameter", f"{name}: {first['msg']}", name)
    return _trouble(error)


def _come_again(error: errors.Overloaded) -> Refusal:
    """Return the refusal of a request that may be accepted later, with `Retry-After` in seconds."""
    headers = {"retry-after": str(max(1, ceil(error.retry_after)))}
    if isinstance(error, errors.ShuttingDown):
        return Refusal(503, "stopping", str(error), headers=headers)
    code = "rate_limit_exceeded" if isinstance(error, errors.LimitReached) else "overloaded"
    return Refusal(429, code, str(error), headers=headers)


def _trouble(error: Exception) -> Refusal:
    """The refusal for an error that is not the client's fault. Its reason may name local paths, and is only logged."""
    match error:
        case errors.Damaged():
            return Refusal(500, "damaged", str(error), headers={"x-should-retry": "false"})
        case errors.ResultsUnavailable() | OSError(errno=errno.ENOSPC | errno.EDQUOT):
            log.error("no room", reason=str(error.__cause__ or error))
            return Refusal(
                503,
                "no_room",
                "the server has no room for what it was sent, or cannot reach where it is kept: try again later",
                headers={"retry-after": "10"},
            )
        case errors.KeyUnavailable():
            log.info("unavailable", reason=str(error))
            return Refusal(
                503,
                "key_unavailable",
                "the shard of the queue for requests with this Idempotency-Key does not answer, so nothing was queued: "
                "repeat the call later, or send another key if this one was never used before",
                "Idempotency-Key",
                {"retry-after": "2"},
            )
        case errors.TransientError():
            log.error("unavailable", reason=str(error))
            return Refusal(
                503,
                "unavailable",
                "the server cannot do this now, try again soon; its log holds why, under this x-request-id",
                headers={"retry-after": "2"},
            )
    log.error("request failed", exc_info=error)
    return Refusal(500, "internal_error", "the server failed; its log holds why, under this x-request-id")


def allowed_methods(scope: Scope) -> str:
    """Return the Allow header for the resource at this path; "" if there is no such resource."""
    routes = scope["app"].routes
    found = [
        method
        for method in ROUTED
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in routes)
    ]
    if not found:
        return ""
    return ", ".join((*found, *(["HEAD"] if "GET" in found else []), "OPTIONS"))
