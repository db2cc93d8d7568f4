"""Finds out why a server can never be the queue, as opposed to errors that may pass."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from urllib.parse import urlsplit

from redis.exceptions import (
    AuthenticationError,
    InvalidResponse,
    MovedError,
    NoPermissionError,
    RedisError,
    ResponseError,
)

TRIES, PAUSE_S, ANSWER_S = 3, 0.2, 3.0
"""A server that hangs up TRIES times in a row is not Redis; one that is just shutting down does not do so."""

HANGS_UP = "whatever listens there hangs up: it is not Redis, or wants rediss:// (TLS)"


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
        case ResponseError() if (told := str(error)).startswith("MISPLACED"):
            return told.partition(" ")[2]
        case ResponseError() if "unknown command" in str(error):
            return f"it is no Redis of 6.2 or later ({error})"
        case MovedError():
            home = f"{error.host}:{error.port}"
            return (
                f"it is of a Redis Cluster, where this prefix is at {home}: name that server, or write redis+cluster://"
            )
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
