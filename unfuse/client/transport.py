"""How calls reach a gateway: awaited on an event loop, or blocking the thread of the caller.

Both transports have the same coroutines. Those of `BlockingTransport` never suspend, so that `run` and `iterate` drive
the asynchronous client to its end without an event loop and without another thread.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any, TypeVar, cast

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


T = TypeVar("T")


class AsyncTransport:
    """Calls of one gateway on an event loop. `settings` and `options` are httpx2's."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._http = httpx2.AsyncClient(**settings)

    async def request(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """Return the response of a call, also if it is a refusal."""
        return await self._http.request(method, path, **options)

    async def events(self, path: str, **options: Any) -> AsyncGenerator[httpx2.ServerSentEvent, None]:
        """Yield the server-sent events of one connection. Raises the error that a refusal was made from."""
        async with self._http.sse(path, **options) as source:
            if source.response.is_error:
                await source.response.aread()
                raise error_of(source.response)
            async for event in source:
                yield event

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)

    async def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a function that reads files."""
        return await asyncio.to_thread(function, *arguments)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


class BlockingTransport:
    """The same for callers without an event loop: each coroutine blocks until it is done."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._http = httpx2.Client(**settings)

    async def request(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """Return the response of a call, also if it is a refusal."""
        return self._http.request(method, path, **options)

    async def events(self, path: str, **options: Any) -> AsyncGenerator[httpx2.ServerSentEvent, None]:
        """Yield the server-sent events of one connection. Raises the error that a refusal was made from."""
        with self._http.sse(path, **options) as source:
            if source.response.is_error:
                source.response.read()
                raise error_of(source.response)
            for event in source:
                yield event

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    async def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a function that reads files."""
        return function(*arguments)

    async def close(self) -> None:
        """Close the connections."""
        self._http.close()


def run(awaitable: Awaitable[T]) -> T:
    """Return the result of a coroutine that never suspends, as those over a BlockingTransport."""
    try:
        next(awaitable.__await__())
    except StopIteration as end:
        return cast(T, end.value)
    raise AssertionError("a call over a blocking transport was suspended")


def iterate(items: AsyncGenerator[T, None]) -> Iterator[T]:
    """Yield the items of an asynchronous generator that never suspends. Closing this iterator closes it."""
    try:
        while True:
            yield run(anext(items))
    except StopAsyncIteration:
        return
    finally:
        run(items.aclose())
