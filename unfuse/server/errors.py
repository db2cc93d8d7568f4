"""Sends every error in OpenAI's format, and every response with an x-request-id."""

from __future__ import annotations

import errno
import re
import secrets
from http import HTTPStatus
from math import ceil

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unfuse.core import errors
from unfuse.edge.refusal import BrokenOff, Refusal, envelope
from unfuse.server.answers import TEXT, Answers, Schema, perhaps, thing
from unfuse.server.methods import allowed_methods

log = structlog.get_logger(__name__)

_SLASHES = re.compile("/+")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_ERROR = thing({"message": TEXT, "type": TEXT, "param": perhaps(TEXT), "code": perhaps(TEXT)})
_ENVELOPE: Schema = {
    "description": "What is wrong, and what to do",
    "content": {"application/json": {"schema": thing({"error": _ERROR})}},
}
DOCUMENTED: Answers = {"4XX": _ENVELOPE, "5XX": _ENVELOPE}  # the error replies of every route, for /openapi.json


def install(app: FastAPI) -> None:
    """Answer every UnfuseError of the routes in OpenAI's format."""
    app.add_exception_handler(errors.UnfuseError, _answer)
    app.add_exception_handler(HTTPException, _answer)
    app.add_exception_handler(RequestValidationError, _answer)


async def _answer(request: Request, error: Exception) -> JSONResponse:
    refusal, path = refusal_of(error), request.scope["path"]
    if isinstance(error, HTTPException) and refusal.status == HTTPStatus.NOT_FOUND:
        refusal = Refusal(404, refusal.code, f"nothing is served at {path[:80]}: {_hint_at(request.scope)}")
    if refusal.status == HTTPStatus.METHOD_NOT_ALLOWED and (allowed := allowed_methods(request.scope)):
        message = f"{request.method} is not served at {path[:80]}: send {allowed.removesuffix(', OPTIONS')}"
        refusal = Refusal(405, refusal.code, message, headers={"allow": allowed})
    return _response(refusal)


def _hint_at(scope: Scope) -> str:
    """Return a hint to the right path for a base URL without /v1, with /v1 twice, or with a trailing slash."""
    path = _SLASHES.sub("/", scope["path"])
    meant = (path, f"/v1{path}", path.removeprefix("/v1"))
    served = [one for one in meant if one != scope["path"] and allowed_methods({**scope, "path": one})]
    return f"did you mean {served[0][:80]}?" if served else "see /docs"


def _response(refusal: Refusal) -> JSONResponse:
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
            message = "the server has no room for what it was sent, or cannot reach where it is kept: try again later"
            return Refusal(503, "no_room", message, headers={"retry-after": "10"})
        case errors.KeyUnavailable():
            log.info("unavailable", reason=str(error))
            message = (
                "the shard of the queue for requests with this Idempotency-Key does not answer, so nothing was queued: "
                "repeat the call later, or send another key if this one was never used before"
            )
            return Refusal(503, "key_unavailable", message, "Idempotency-Key", {"retry-after": "2"})
        case errors.TransientError():
            log.error("unavailable", reason=str(error))
            message = "the server cannot do this now, try again soon; its log holds why, under this x-request-id"
            return Refusal(503, "unavailable", message, headers={"retry-after": "2"})
    log.error("request failed", exc_info=error)
    return Refusal(500, "internal_error", "the server failed; its log holds why, under this x-request-id")


class Edge:
    """The outermost layer: gives every response an x-request-id, and an unexpected failure OpenAI's error format."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        started = False

        async def named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        with structlog.contextvars.bound_contextvars(x_request_id=name):
            try:
                await self._app(scope, receive, named)
            except BrokenOff as error:
                log.info("broken off", path=scope["path"], reason=str(error))
            except ClientDisconnect:
                log.info("the client left before it had sent its request")
            except Exception as error:
                if started:
                    raise
                await _response(refusal_of(error))(scope, receive, named)
