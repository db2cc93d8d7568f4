"""Signed links: each opens one result without an API key until it expires."""

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
from unfuse.edge.access import ApiError
from unfuse.queues.base import WorkerRegistry

#: Lifetime in seconds of a link in a response.
LINK_TTL_S = 3600

#: Lifetime in seconds of a link in a webhook message, which may wait in the receiver's queue.
WEBHOOK_LINK_TTL_S = 24 * 3600

_RESULT = re.compile(r"/v1/requests/[^/]+/result/[0-9]+")
_EXPIRES = re.compile(r"[0-9]{1,12}")


class SignedLinks:
    """Signs the paths of results, and verifies the signatures.

    registry: stores the secret, which all gateways of a queue share.
    clock: the clock for the expiry, in Unix seconds. If it is set back, links expire later.
    signs: whether paths are signed. Without API keys they are not.
    """

    def __init__(self, registry: WorkerRegistry, clock: Clock, *, signs: bool) -> None:
        self._registry = registry
        self._clock = clock
        self._signs = signs
        self._secret = b""  # "" until it is loaded

    async def signer(self, ttl_s: int = LINK_TTL_S) -> Callable[[str], str]:
        """Return a function that signs the path of a result for `ttl_s` seconds.

        While the queue with the secret is unavailable, the function returns paths unchanged. Such a link needs a key.
        """
        secret = b""
        if self._signs:
            with suppress(TransientError):
                secret = await self._load_secret()
        if not secret:
            return str  # returns the path unchanged

        def sign(path: str) -> str:
            expires = str(int(self._clock.wall()) + ttl_s)
            return f"{path}?expires={expires}&signature={_signature(secret, path, expires)}"

        return sign

    async def opens(self, request: Request) -> bool:
        """Return whether the call has a valid signed link to a result.

        Raises ApiError (403) if the link has expired or its signature is wrong.
        """
        path, query = request.scope["path"], request.query_params
        if not self._signs or "signature" not in query or not _RESULT.fullmatch(path):
            return False

        expires = query.get("expires", "")
        expected = _signature(await self._load_secret(), path, expires)
        is_authentic = hmac.compare_digest(expected.encode(), query["signature"].encode())
        if not is_authentic or not _EXPIRES.fullmatch(expires) or request.method != "GET":
            raise ApiError(
                403, "invalid_link", "the signature of this link is wrong: get a new link with GET /v1/requests/{id}"
            )
        if int(expires) <= self._clock.wall():
            raise ApiError(
                403, "link_expired", "this link has expired: get a new link with GET /v1/requests/{id}, or send a key"
            )
        return True

    async def _load_secret(self) -> bytes:
        """Return the signing secret. The first gateway of a queue creates it."""
        if not self._secret:
            self._secret = bytes.fromhex(await self._registry.secret("links", secrets.token_hex(32)))
        return self._secret


def parse_public_url(url: str) -> str:
    """Return the base address of links without a trailing slash; "" for "". Raises UsageError."""
    if not url:
        return ""
    hint = "write it like https://pictures.example, or https://example.com/pictures behind a proxy with a prefix"
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or not url.isprintable() or set(url) & set(" \"'<>\\^`{|}"):
        raise UsageError(f"--public-url {url!r} is not an http or https address: {hint}")
    if parts.query or parts.fragment or parts.username is not None or url.endswith(("?", "#")):
        raise UsageError(f"--public-url {url!r} must not have a user, query or fragment: {hint}")
    return url.rstrip("/")


def _signature(secret: bytes, path: str, expires: str) -> str:
    """Return the HMAC-SHA256 of a path and its expiry, as hex."""
    return hmac.new(secret, f"{path}\n{expires}".encode(errors="surrogateescape"), sha256).hexdigest()
