"""Turns a gateway's error responses back into the errors that they were made from."""

from __future__ import annotations

import json

import httpx2

from unfuse.core import errors


def error_of(response: httpx2.Response) -> errors.UnfuseError:
    """The error for an error response; one that is not in OpenAI's format becomes the message."""
    try:
        body = json.loads(response.content)["error"]
        message, param, code = str(body["message"]), body.get("param"), body.get("code")
    except (ValueError, TypeError, KeyError):
        message = f"{response.request.url} answered {response.status_code}: {' '.join(response.text.split())[:200]}"
        param, code = None, None
    match response.status_code:
        case 400 if code == "context_length_exceeded":
            return errors.ContextLengthExceeded(message, param)
        case 400 | 413 | 415:
            return errors.InvalidParameter(message, param)
        case 401 | 403:
            return errors.ConfigError(message)
        case 404:
            return errors.UnknownModel(message, param) if code == "model_not_found" else errors.NotFound(message)
        case 429:
            return errors.Overloaded(message, _retry_after(response.headers.get("retry-after", "")))
        case 503 if code == "key_unavailable":
            return errors.KeyUnavailable(message)
        case 502 | 503 | 504:
            return errors.TransientError(message)
    return errors.PermanentError(message)


def _retry_after(header: str) -> float:
    """Return the seconds in a Retry-After header; 1 if it is missing, or a date, which some proxies send."""
    try:
        return float(header)
    except ValueError:
        return 1.0
