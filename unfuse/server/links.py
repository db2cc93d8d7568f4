"""Addresses of results: signed ones open without a key for a while, each for one result."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from urllib.parse import urlsplit

from starlette.requests import Request

from unfuse.core.clock import Clock
from unfuse.core.errors import TransientError, UsageError
from unfuse.queues.base import TaskQueue
from unfuse.server.errors import Refusal

LASTS_S = 3600
"""Seconds for which a link in an answer opens without a key."""

WEBHOOK_LASTS_S = 24 * 3600
"""The same of a link in a webhook's message, which may wait in its receiver's queue."""

SECRET = "links"
"""The name in the queue of the secret by which all gateways of a queue sign."""

Sign = Callable[[str], str]
"""Turns the path of a result into one that opens without a key, or leaves it as it is."""

_RESULT = re.compile(r"/v1/requests/[^/]+/result/[0-9]+")
_EXPIRES = re.compile(r"[0-9]{1,12}")


class Links:
    """Signs the paths of results, and checks signatures. Without keys (`signs` is false) paths stay as they are.

    Times are Unix seconds of this gateway's clock: a clock that steps moves the end of every link by its step.
    """

    def __init__(self, queue: TaskQueue, clock: Clock, *, signs: bool) -> None:
        self._queue, self._clock, self._signs = queue, clock, signs
        self._secret = b""

    async def signer(self, lasts_s: int = LASTS_S) -> Sign:
        """Return what signs paths for so many seconds from then.

        Paths stay as they are while the part of the queue is away that holds the secret: with a key they open all the
        same.
        """
        secret = b""
        if self._signs:
            with suppress(TransientError):
                secret = await self._load_secret()
        if not secret:
            return str

        def sign(path: str) -> str:
            expires = str(int(self._clock.wall()) + lasts_s)
            return f"{path}?expires={expires}&signature={_signature(secret, path, expires)}"

        return sign

    async def opens(self, request: Request) -> bool:
        """Return whether the call follows a signed link to a result.

        Raises Refusal (403) for a link that is expired, or that was not made here.
        """
        path, query = request.scope["path"], request.query_params
        if not self._signs or "signature" not in query or not _RESULT.fullmatch(path):
            return False
        expires = query.get("expires", "")
        expected = _signature(await self._load_secret(), path, expires)
        is_ours = hmac.compare_digest(expected.encode(), query["signature"].encode())
        if not is_ours or not _EXPIRES.fullmatch(expires) or request.method != "GET":
            message = "this link was not made here, or was changed: ask for the request again, which has a new one"
            raise Refusal(403, "invalid_link", message)
        if int(expires) <= self._clock.wall():
            message = "this link is too old: ask for the request again, which has a new one, or send a key"
            raise Refusal(403, "link_expired", message)
        return True

    async def _load_secret(self) -> bytes:
        if not self._secret:
            self._secret = bytes.fromhex(await self._queue.secret(SECRET, secrets.token_hex(32)))
        return self._secret


def parse_public_url(url: str) -> str:
    """Return the address as links begin with it, without a slash at its end; "" for "". Raises UsageError."""
    if not url:
        return ""
    hint = "write it like https://pictures.example, or https://example.com/pictures behind a proxy with a prefix"
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or not url.isprintable() or set(url) & set(" \"'<>\\^`{|}"):
        raise UsageError(f"--public-url {url!r} is no address of a server: {hint}")
    if parts.query or parts.fragment or parts.username is not None or url.endswith(("?", "#")):
        raise UsageError(f"--public-url {url!r} must have no user, query or fragment: {hint}")
    return url.rstrip("/")


def _signature(secret: bytes, path: str, expires: str) -> str:
    return hmac.new(secret, f"{path}\n{expires}".encode(errors="surrogateescape"), sha256).hexdigest()
