"""How a gateway is asked, and its answers read; and the two transports that carry calls.

Both transports have the same coroutines. Those of `BlockingTransport` never suspend, so that `run` and `iterate` drive
the asynchronous client to its end without an event loop and without another thread.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import quote, urlsplit

import httpx2
import msgspec

from unfuse.core import errors
from unfuse.core.errors import InvalidParameter, KeyUnavailable, PermanentError, TransientError
from unfuse.core.modalities import VIDEO, medium_for
from unfuse.core.request import Event


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


TIMEOUT_S = 60.0  # the longest silence of a response, in seconds; event streams send something every 15 seconds
ADD_TIMEOUT_S = 3600.0  # the same for the answer to adding a model: a server may read all bytes of its weights first
USUAL = "http://127.0.0.1:8000"  # the default address of `unfuse serve`
RECONNECTS = 8  # how often in a row an event stream is resumed without a new event

KEY = re.compile(r"[!-~]*")
"""An API key, or none."""

CHATS = "/v1/chat/completions"


MOST_KEYS = 64
"""How many idempotency keys are tried for one new request, where parts of the server's queue are away."""


def fresh_key() -> dict[str, str]:
    """The headers of a call with an idempotency key that was never used before."""
    return {"idempotency-key": uuid.uuid4().hex, "unfuse-new-key": "true"}


def settings(url: str, key: str | None) -> dict[str, Any]:
    """What an HTTP client of that gateway is made with. Raises InvalidParameter for a key that cannot be sent."""
    key = (key or "").strip()
    if not KEY.fullmatch(key):
        raise InvalidParameter(
            "an API key is printable ASCII without spaces: check that it was copied completely", "key"
        )
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return {"base_url": url, "headers": headers, "timeout": TIMEOUT_S, "trust_env": False}


File = str | Path | bytes  # a file's path, or its bytes


def submission(
    prompt: str, image: File | Sequence[File] | None, mask: File | None, last_frame: File | None, video: bool | None,
    params: Mapping[str, object],
) -> tuple[str, dict[str, Any]]:  # fmt: skip
    """Return the path and options of the call that asks for pictures or a video, as `Client.submit` says."""
    if video is None:
        video = medium_for(params) is VIDEO or last_frame is not None
    still = "/v1/images/generations" if image is None else "/v1/images/edits"
    if mask is not None and image is None:
        raise InvalidParameter("mask says where a picture is to change: give it as image too", "mask")
    if last_frame is not None and image is None:
        raise InvalidParameter("last_frame says how a video ends: give what it begins with as image too", "last_frame")
    path, body = "/v1/videos" if video else still, {"prompt": prompt, **params}
    headers = {"prefer": "respond-async", **fresh_key()}
    if image is None:
        return path, {"json": body, "headers": headers}
    form = {name: value for name, value in body.items() if value is not None and not isinstance(value, dict)}
    inner = [(name, value) for name, value in body.items() if isinstance(value, dict)]
    form |= {f"{name}[{key}]": one for name, value in inner for key, one in value.items()}
    several = [image] if isinstance(image, str | Path | bytes) else image
    sent = [("input_reference" if video else "image", one) for one in several]
    sent += [(name, one) for name, one in (("mask", mask), ("last_frame", last_frame)) if one is not None]
    files = [(name, (name, one if isinstance(one, bytes) else Path(one).read_bytes())) for name, one in sent]
    return path, {"data": form, "files": files, "headers": headers}


def conversation(messages: str | Sequence[Mapping[str, Any]], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a streamed chat. Raises InvalidParameter for text that is not valid Unicode."""
    said = [{"role": "user", "content": messages}] if isinstance(messages, str) else [*messages]
    body = {**params, "messages": said, "stream": True}
    try:
        msgspec.json.encode(body)
    except UnicodeEncodeError as error:
        message = "messages: a lone surrogate is not valid Unicode; decode bytes as UTF-8 before you send them"
        raise InvalidParameter(message, "messages") from error
    return body


def event_of(message: httpx2.ServerSentEvent) -> Event | None:
    """An event of a request; None for an error: who comes again is told why."""
    return None if message.event == "error" else msgspec.json.decode(message.data, type=Event)


class ChatChunk(NamedTuple):
    """A chat event: its id, the id of its request, and the deltas of the choices."""

    id: str
    request: str
    choices: list[dict[str, Any]]


class ChatStreamState:
    """The state of one streamed chat across reconnections.

    `headers` are sent with the next call. `lost` counts consecutive broken connections. `request` is the request's id.
    """

    def __init__(self) -> None:
        self.headers = fresh_key()
        self.lost = 0
        self.request = ""
        self._keys = 1

    def break_off(self, error: TransientError) -> float:
        """Record a call that failed. Returns the seconds to wait before the next one, without the factor of a client.

        Where the server queued nothing, because it cannot reach the place of a new key, the next call has another one.
        Raises the error where there was enough of it, or nobody listened at the first call: that is a wrong address.
        """
        if not self.request and not self.lost and isinstance(error.__cause__, httpx2.ConnectError):
            raise error
        if isinstance(error, KeyUnavailable) and "unfuse-new-key" in self.headers and self._keys < MOST_KEYS:
            self.headers |= fresh_key()
            self._keys += 1
            return 0.0
        self.headers.pop("unfuse-new-key", None)
        if self.lost >= RECONNECTS:
            raise error
        self.lost += 1
        return backoff(self.lost)

    def take(self, chunk: ChatChunk) -> list[dict[str, Any]]:
        """Record the progress of the answer. Returns the deltas of the choices."""
        self.headers.pop("unfuse-new-key", None)
        if chunk.id:
            self.headers["last-event-id"] = chunk.id
        self.lost, self.request = 0, chunk.request or self.request
        return chunk.choices

    @property
    def cancel_path(self) -> str:
        """The path of the call that cancels the request."""
        return f"/v1/requests/{self.request}/cancel"


def chunk(message: httpx2.ServerSentEvent) -> ChatChunk | None:
    """Read a chat event; None for the last. Raises PermanentError for an error."""
    if message.data == "[DONE]":
        return None
    told = msgspec.json.decode(message.data, type=dict[str, Any])
    if "error" in told:
        raise PermanentError(told["error"]["message"])
    return ChatChunk(message.id or "", str(told.get("id") or ""), told["choices"])


def model_path(name: str) -> str:
    """Return the path of a model."""
    return f"/v1/models/{quote(name)}"


def given(**params: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in params.items() if value is not None}


def backoff(lost: int) -> float:
    """Return the factor of a pause before a stream is resumed that broke this often in a row."""
    return 2.0 ** min(lost, 5)


def foreign(url: str) -> PermanentError:
    """What answers there is something else."""
    return PermanentError(f"{url} does not answer as `unfuse serve` does: is it another server, or a proxy?")


def unreachable(url: str, error: httpx2.TransportError) -> TransientError:
    """Nobody answers."""
    return TransientError(f"no answer from {url} ({error}): is `unfuse serve` running there?")


def checked(url: str) -> str:
    """Check the URL of a gateway. Raises InvalidParameter, with what was probably meant."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url.rstrip("/")
        bare = parts.netloc if "://" in url else url
        near = f"http://{bare}" if urlsplit(f"http://{bare}").hostname else USUAL
    except ValueError:
        near = USUAL
    raise InvalidParameter(f"{url!r} is no address of a server: did you mean {near}?", "server")
