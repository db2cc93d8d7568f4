"""What the gateway refuses by itself, and the body of an error reply in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping

from unfuse.core import errors
from unfuse.core.request import MODERATION_BLOCKED


class Refusal(errors.UnfuseError):
    """A call that the gateway itself refuses, with an HTTP status and a code for programs."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.headers = status, code, param, dict(headers or {})


class BrokenOff(Exception):
    """A response cannot be sent to its end: the connection closes before that, so that the client notices."""


def envelope(error: Refusal) -> dict[str, object]:
    """The body of an error reply."""
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(error.status)
    kind = kind or ("server_error" if error.status >= 500 else "invalid_request_error")
    kind = "image_generation_user_error" if error.code == MODERATION_BLOCKED else kind
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}
