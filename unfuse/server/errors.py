"""Error handling: map every exception to an HTTP error response in OpenAI's format."""

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
from unfuse.edge.access import ApiError, envelope

#: The methods that routes are declared with.
ROUTED = ("GET", "POST", "PUT", "PATCH", "DELETE")

log = structlog.get_logger(__name__)

_SLASHES = re.compile("/+")


async def answer_error(request: Request, error: Exception) -> JSONResponse:
    """Return the response for an exception of a route.

    404 and 405 get a hint to the right path or method.
    """
    refusal = refusal_of(error)
    path = request.scope["path"]

    # Only the router raises this type of 404. A route whose object does not exist raises another error.
    if isinstance(error, HTTPException) and refusal.status == HTTPStatus.NOT_FOUND:
        refusal = ApiError(404, refusal.code, f"nothing is served at {path[:80]}: {_hint_at(request.scope)}")
    if refusal.status == HTTPStatus.METHOD_NOT_ALLOWED and (allowed := allowed_methods(request.scope)):
        message = f"{request.method} is not allowed at {path[:80]}: send {allowed.removesuffix(', OPTIONS')}"
        refusal = ApiError(405, refusal.code, message, headers={"allow": allowed})
    return response_of(refusal)


def _hint_at(scope: Scope) -> str:
    """Return a hint to the right path, for an error.

    It detects a base URL without /v1, with /v1 twice, or with a trailing slash.
    """
    path = _SLASHES.sub("/", scope["path"])
    candidates = (path, f"/v1{path}", path.removeprefix("/v1"))
    served_paths = [
        candidate
        for candidate in candidates
        if candidate != scope["path"] and allowed_methods({**scope, "path": candidate})
    ]
    return f"did you mean {served_paths[0][:80]}?" if served_paths else "see /docs"


def response_of(refusal: ApiError) -> JSONResponse:
    """Return the error response for a refusal."""
    return JSONResponse(envelope(refusal), refusal.status, refusal.headers)


def refusal_of(error: Exception) -> ApiError:
    """Return the refusal that a client gets for an exception.

    Errors of the server are logged here.
    """
    match error:
        case ApiError():
            return error
        case errors.UnknownModel():
            return ApiError(404, "model_not_found", str(error), error.param or "model")
        case errors.ContextLengthExceeded():
            return ApiError(400, "context_length_exceeded", str(error), error.param)
        case errors.InvalidParameter():
            return ApiError(400, "invalid_parameter", str(error), error.param)
        case errors.NotFound():
            return ApiError(404, "not_found", str(error))
        case errors.Overloaded():
            return _overload_refusal(error)
        case errors.WeightsChanged():
            return ApiError(503, "weights_changed", str(error), headers={"x-should-retry": "false"})
        case HTTPException():
            code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
            return ApiError(error.status_code, code, f"{error.detail}: see /docs", headers=error.headers)
        case RequestValidationError():
            first_error = error.errors()[0]
            name = str(first_error["loc"][-1])
            return ApiError(400, "invalid_parameter", f"{name}: {first_error['msg']}", name)
    return _server_refusal(error)


def _overload_refusal(error: errors.Overloaded) -> ApiError:
    """Return the refusal by admission control, with `Retry-After` in seconds."""
    headers = {"retry-after": str(max(1, ceil(error.retry_after)))}
    if isinstance(error, errors.ShuttingDown):
        return ApiError(503, "stopping", str(error), headers=headers)
    code = "rate_limit_exceeded" if isinstance(error, errors.LimitReached) else "overloaded"
    return ApiError(429, code, str(error), headers=headers)


def _server_refusal(error: Exception) -> ApiError:
    """Log an error that the client did not cause, and return its refusal.

    The reason may contain local paths. It is only logged, except for RecordDamaged.
    """
    match error:
        case errors.RecordDamaged():
            return ApiError(500, "damaged", str(error), headers={"x-should-retry": "false"})
        case errors.ResultsUnavailable() | OSError(errno=errno.ENOSPC | errno.EDQUOT):
            log.error("storage is full or unreachable", reason=str(error.__cause__ or error))
            return ApiError(
                503,
                "no_room",
                "the server's storage is full or unreachable: try again later",
                headers={"retry-after": "10"},
            )
        case errors.KeyUnavailable():
            log.info("unavailable", reason=str(error))
            return ApiError(
                503,
                "key_unavailable",
                "the queue shard for requests with this Idempotency-Key does not respond, so nothing was queued: "
                "repeat the call later, or send another key if this one was never used before",
                "Idempotency-Key",
                {"retry-after": "2"},
            )
        case errors.TransientError():
            log.error("unavailable", reason=str(error))
            return ApiError(
                503,
                "unavailable",
                "the server cannot process the call now: try again soon; the server's log has the reason under this "
                "x-request-id",
                headers={"retry-after": "2"},
            )
    log.error("request failed", exc_info=error)
    return ApiError(500, "internal_error", "the server failed: its log has the reason under this x-request-id")


def allowed_methods(scope: Scope) -> str:
    """Return the Allow header for a path; "" if it has no resource."""
    routes = scope["app"].routes
    methods = [
        method
        for method in ROUTED
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in routes)
    ]
    if not methods:
        return ""
    return ", ".join((*methods, *(["HEAD"] if "GET" in methods else []), "OPTIONS"))
