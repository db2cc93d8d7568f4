"""Finds out why a server can never be the queue, as opposed to errors that may pass."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from urllib.parse import parse_qsl, urlsplit

from redis.exceptions import (
    AuthenticationError,
    InvalidResponse,
    NoPermissionError,
    RedisError,
    ResponseError,
)

from unfuse.core.errors import ConfigError

TRIES, PAUSE_S, ANSWER_S = 3, 0.2, 3.0
"""A server that hangs up TRIES times in a row is not Redis; one that is just shutting down does not do so."""

HANGS_UP = "whatever listens there hangs up: it is not Redis, or wants rediss:// (TLS)"

ADDRESS = "redis://[user:password@]host[:port][/database][?prefix=name], or rediss:// for TLS"


def parse_address(url: str) -> tuple[str, str]:
    """The URL of the server, and the prefix of the queue's keys. Raises ConfigError for a malformed address."""
    try:
        parts = urlsplit(url if "//" in url else f"{url.partition(':')[0]}://127.0.0.1")
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        prefix = options.pop("prefix", "unfuse")
        if options or parts.port == 0 or not re.fullmatch(r"/?\d* [\w.-]{1,64}", f"{parts.path} {prefix}"):
            raise ValueError
    except ValueError:
        raise ConfigError(f"a queue in Redis is {ADDRESS}") from None
    return parts._replace(query="").geturl(), prefix


async def obstacle(url: str, ask: Callable[[], Awaitable[object]]) -> str:
    """Why `ask` can never succeed, in words; "" if it succeeds, or may succeed later."""
    for _ in range(TRIES):
        try:
            async with asyncio.timeout(ANSWER_S):
                await ask()
            return ""
        except TimeoutError:
            plain = url.startswith("rediss") and await _answers_plainly(url)
            return "it is Redis without TLS: write redis://, or give it a certificate" if plain else ""
        except RedisError as error:
            found = _permanent_reason(error)
            if found != HANGS_UP:
                return found
        await asyncio.sleep(PAUSE_S)
    return HANGS_UP


def _permanent_reason(error: RedisError) -> str:
    """Why this error will not pass, in words; "" for one that may pass."""
    match error:
        case AuthenticationError():
            return f"it refuses the user or the password ({error}): write redis://user:password@host"
        case NoPermissionError():
            return f"its user may not do what a queue does ({error})"
        case ResponseError() if "DB index" in str(error):
            return f"it has no database of that number ({error}): the number is what stands behind the last /"
        case ResponseError() if "unknown command" in str(error):
            return f"it is no Redis of 6.2 or later ({error})"
        case InvalidResponse():
            return f"something else than Redis answers there ({error})"
    causes = list(_chain(error))
    if found := next((cause for cause in causes if isinstance(cause, ssl.SSLError)), None):
        return f"TLS fails ({found.reason or found}): is its certificate trusted, or is it redis:// without TLS?"
    hung_up = any(isinstance(cause, ConnectionResetError | BrokenPipeError) for cause in causes)
    return HANGS_UP if hung_up or "closed by server" in str(error) else ""


async def _answers_plainly(url: str) -> bool:
    parts = urlsplit(url)
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 6379)
            writer.write(b"PING\r\n")
            answer = await reader.read(1)
            writer.close()
            return answer in (b"+", b"-")
    return False


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
