"""Build requests to a gateway, parse its responses, and send calls over two HTTP transports.

Both transports have the same coroutines. Those of `BlockingTransport` never suspend, so `run` and `iterate` drive the
asynchronous client to completion without an event loop and without another thread.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import quote, urlsplit

import httpx2
import msgspec

from unfuse.core import errors
from unfuse.core.errors import InvalidParameter, KeyUnavailable, PermanentError, TransientError
from unfuse.core.modalities import VIDEO, modality_for
from unfuse.core.request import Event


def error_of(response: httpx2.Response) -> errors.UnfuseError:
    """Return the exception for an error response, chosen by its status and error code.

    If the body is not in OpenAI's error format, its first 200 characters become the message. The message for an unknown
    id names the server, since another one may have the object.
    """
    try:
        body = json.loads(response.content)["error"]
        message = str(body["message"])
        param = body.get("param")
        code = body.get("code")
    except (ValueError, TypeError, KeyError):
        message = (
            f"{response.request.url} responded with {response.status_code}: {' '.join(response.text.split())[:200]}"
        )
        param = None
        code = None

    match response.status_code:
        case 400 if code == "context_length_exceeded":
            return errors.ContextLengthExceeded(message, param)
        case 400 | 413 | 415:
            return errors.InvalidParameter(message, param)
        case 401 | 403:
            return errors.ConfigError(message)
        case 404 if code == "model_not_found":
            return errors.UnknownModel(message, param)
        case 404:
            return errors.NotFound(message if code is None else f"{message} (server: {_server_of(response)})")
        case 429:
            return errors.Overloaded(message, _retry_after(response.headers.get("retry-after", "")))
        # Nothing was queued under the idempotency key: another key may belong to a reachable shard of the queue.
        case 503 if code == "key_unavailable":
            return errors.KeyUnavailable(message)
        case 502 | 503 | 504:
            return errors.TransientError(message)
    return errors.PermanentError(message)


def _server_of(response: httpx2.Response) -> str:
    """Return the URL of the server that a response is from, without the path."""
    url = response.request.url
    return f"{url.scheme}://{url.netloc.decode()}"


def _retry_after(header: str) -> float:
    """Return the seconds in a Retry-After header, or 1 if there are none.

    The header may be missing, or be a date, which some proxies send.
    """
    try:
        return float(header)
    except ValueError:
        return 1.0


T = TypeVar("T")


class AsyncTransport:
    """Asynchronous HTTP calls to one gateway.

    `settings` are the keyword arguments of `httpx2.AsyncClient`, `options` those of one httpx2 call.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._http = httpx2.AsyncClient(**settings)

    async def request(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """Return the response of a call, also if it is an error response."""
        return await self._http.request(method, path, **options)

    async def events(self, path: str, **options: Any) -> AsyncGenerator[httpx2.ServerSentEvent, None]:
        """Yield the server-sent events of one connection. Raises the error of an error response."""
        async with self._http.sse(path, **options) as source:
            if source.response.is_error:
                await source.response.aread()
                raise error_of(source.response)
            async for event in source:
                yield event

    async def sleep(self, seconds: float) -> None:
        """Wait without blocking the event loop."""
        await asyncio.sleep(seconds)

    async def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a function that reads files, in a thread, and return its result."""
        return await asyncio.to_thread(function, *arguments)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


class BlockingTransport:
    """HTTP calls to one gateway for callers without an event loop.

    It has the coroutines of `AsyncTransport`. Each blocks its thread until it is done, and never suspends.
    `settings` are the keyword arguments of `httpx2.Client`, `options` those of one httpx2 call.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._http = httpx2.Client(**settings)

    async def request(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """Return the response of a call, also if it is an error response."""
        return self._http.request(method, path, **options)

    async def events(self, path: str, **options: Any) -> AsyncGenerator[httpx2.ServerSentEvent, None]:
        """Yield the server-sent events of one connection. Raises the error of an error response."""
        with self._http.sse(path, **options) as source:
            if source.response.is_error:
                source.response.read()
                raise error_of(source.response)
            for event in source:
                yield event

    async def sleep(self, seconds: float) -> None:
        """Wait, blocking the thread."""
        time.sleep(seconds)

    async def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a function that reads files, in this thread, and return its result."""
        return function(*arguments)

    async def close(self) -> None:
        """Close the connections."""
        self._http.close()


def run(awaitable: Awaitable[T]) -> T:
    """Return the result of a coroutine that never suspends, as over a BlockingTransport."""
    try:
        next(awaitable.__await__())
    except StopIteration as end:
        return cast(T, end.value)
    raise AssertionError("a call over a blocking transport was suspended")


def iterate(items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    """Yield the items of an asynchronous generator that never suspends.

    Closing this iterator closes the generator.
    """
    try:
        while True:
            yield run(anext(items))
    except StopAsyncIteration:
        return
    finally:
        run(items.aclose())


#: Read timeout of a call, in seconds. Event streams send something every 15 seconds.
TIMEOUT_S = 60.0

#: Read timeout of adding a model, in seconds. A server may read all bytes of the weights before it responds.
ADD_TIMEOUT_S = 3600.0

#: The default URL of `unfuse serve`.
DEFAULT_RETRIES = "http://127.0.0.1:8000"

#: How often in a row an event stream is resumed without a new event, before the call fails.
RECONNECTS = 8

#: An API key, or an empty string for none.
KEY = re.compile(r"[!-~]*")

#: The path of chat completions.
CHATS = "/v1/chat/completions"

#: How many idempotency keys are tried for one new request while shards of the server's queue are unreachable.
MAX_KEYS = 64


def fresh_key() -> dict[str, str]:
    """Return the headers of a call with a new idempotency key.

    The key is marked as never used before, so the server does not have to look for an earlier request.
    """
    return {"idempotency-key": uuid.uuid4().hex, "unfuse-new-key": "true"}


def settings(url: str, key: str | None) -> dict[str, Any]:
    """Return the keyword arguments for an HTTP client of the gateway at `url`.

    Raises InvalidParameter for an API key that cannot be sent in a header.
    """
    key = (key or "").strip()
    if not KEY.fullmatch(key):
        raise InvalidParameter(
            "an API key must be printable ASCII without spaces: check that it was copied completely", "key"
        )
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return {"base_url": url, "headers": headers, "timeout": TIMEOUT_S, "trust_env": False}


#: A file's path, or its bytes.
File = str | Path | bytes


def submit_call(
    prompt: str,
    image: File | Sequence[File] | None,
    mask: File | None,
    last_frame: File | None,
    video: bool | None,
    params: Mapping[str, object],
) -> tuple[str, dict[str, Any]]:
    """Return the path and options of the call that submits a picture or video request.

    `Client.submit` documents the parameters. Files named by a path are read here.
    Raises InvalidParameter for `mask` or `last_frame` without `image`.
    """
    if video is None:
        video = modality_for(params) is VIDEO or last_frame is not None
    image_path = "/v1/images/generations" if image is None else "/v1/images/edits"
    if mask is not None and image is None:
        raise InvalidParameter("mask selects the parts of image to edit: set image too", "mask")
    if last_frame is not None and image is None:
        raise InvalidParameter(
            "last_frame is the last frame of a video: set its first frame as image too", "last_frame"
        )
    path = "/v1/videos" if video else image_path
    body = {"prompt": prompt, **params}
    headers = {"prefer": "respond-async", **fresh_key()}
    if image is None:
        return path, {"json": body, "headers": headers}

    # Calls with files are multipart forms. A form has no nested objects: {"a": {"b": 1}} becomes the field a[b].
    form = {name: value for name, value in body.items() if value is not None and not isinstance(value, dict)}
    nested = [(name, value) for name, value in body.items() if isinstance(value, dict)]
    form |= {f"{name}[{key}]": item for name, value in nested for key, item in value.items()}

    images = [image] if isinstance(image, str | Path | bytes) else image
    named_files = [("input_reference" if video else "image", file) for file in images]
    named_files += [(name, file) for name, file in (("mask", mask), ("last_frame", last_frame)) if file is not None]
    files = [(name, (name, file if isinstance(file, bytes) else Path(file).read_bytes())) for name, file in named_files]
    return path, {"data": form, "files": files, "headers": headers}


def chat_body(messages: str | Sequence[Mapping[str, Any]], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a streamed chat completion.

    `messages` are chat messages, or the text of a single user message.
    Raises InvalidParameter for text that is not valid Unicode.
    """
    chat_messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else [*messages]
    body = {**params, "messages": chat_messages, "stream": True}
    try:
        msgspec.json.encode(body)
    except UnicodeEncodeError as error:
        message = "messages: a lone surrogate is not valid Unicode; decode bytes as UTF-8 before you send them"
        raise InvalidParameter(message, "messages") from error
    return body


def parse_request_event(message: httpx2.ServerSentEvent) -> Event | None:
    """Return the request event of a server-sent event, or None for an error event.

    None ends the connection. The next call of the client then gets the reason as an error response.
    """
    return None if message.event == "error" else msgspec.json.decode(message.data, type=Event)


class ChatChunk(NamedTuple):
    """One event of a streamed chat completion."""

    #: The event's id, which a resumed connection starts after; "" if the event has none.
    id: str

    #: The request's id; "" if the event has none.
    request: str

    #: The deltas of the choices, in OpenAI's format.
    choices: list[dict[str, Any]]


class ChatStreamState:
    """The state of one streamed chat across reconnections."""

    def __init__(self) -> None:
        #: The headers of the next call: an idempotency key, and where to resume.
        self.headers = fresh_key()

        #: Consecutive broken connections without a new event.
        self.lost = 0

        #: The request's id; "" until the first event.
        self.request = ""

        #: The number of idempotency keys tried so far.
        self._keys_tried = 1

    def record_failure(self, error: TransientError) -> float:
        """Record a failed call, and return the factor of the pause before the next one.

        The pause is this factor times the client's `reconnect_delay`. If the server queued nothing because it cannot
        reach the queue shard of a new idempotency key, the next call has another key and follows without a pause.
        Raises the error after RECONNECTS failures, and if the first connection fails: the address is then wrong.
        """
        if not self.request and not self.lost and isinstance(error.__cause__, httpx2.ConnectError):
            raise error

        if isinstance(error, KeyUnavailable) and "unfuse-new-key" in self.headers and self._keys_tried < MAX_KEYS:
            self.headers |= fresh_key()
            self._keys_tried += 1
            return 0.0

        # The server may have queued the request under this key: it is not new any more.
        self.headers.pop("unfuse-new-key", None)
        if self.lost >= RECONNECTS:
            raise error
        self.lost += 1
        return backoff(self.lost)

    def record_event(self, chunk: ChatChunk) -> list[dict[str, Any]]:
        """Record a received event, and return the deltas of its choices."""
        self.headers.pop("unfuse-new-key", None)
        if chunk.id:
            self.headers["last-event-id"] = chunk.id
        self.lost = 0
        self.request = chunk.request or self.request
        return chunk.choices

    @property
    def cancel_path(self) -> str:
        """The path of the call that cancels the request."""
        return f"/v1/requests/{self.request}/cancel"


def parse_chat_event(message: httpx2.ServerSentEvent) -> ChatChunk | None:
    """Parse an event of a chat stream; return None for the last event.

    Raises PermanentError for an error event.
    """
    if message.data == "[DONE]":
        return None
    payload = msgspec.json.decode(message.data, type=dict[str, Any])
    if "error" in payload:
        raise PermanentError(payload["error"]["message"])
    return ChatChunk(message.id or "", str(payload.get("id") or ""), payload["choices"])


def model_path(name: str) -> str:
    """Return the path of a model's object in the API."""
    return f"/v1/models/{quote(name)}"


def without_none(**params: Any) -> dict[str, Any]:
    """Return the parameters that are not None."""
    return {name: value for name, value in params.items() if value is not None}


def backoff(failures: int) -> float:
    """Return the pause factor after some failures in a row: 2, 4, …, 32."""
    return 2.0 ** min(failures, 5)


def foreign(url: str) -> PermanentError:
    """Return the error for a URL where another server than `unfuse serve` responds."""
    return PermanentError(f"{url} does not respond like `unfuse serve`: check whether it is another server or a proxy")


def unreachable(url: str, error: httpx2.TransportError) -> TransientError:
    """Return the error for a URL where no server responds."""
    return TransientError(f"no answer from {url} ({error}): is `unfuse serve` running there?")


def checked(url: str) -> str:
    """Return the URL of a gateway without its trailing slashes.

    Raises InvalidParameter for anything but an http:// or https:// URL, and suggests a correction.
    """
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url.rstrip("/")
        host = parts.netloc if "://" in url else url
        suggestion = f"http://{host}" if urlsplit(f"http://{host}").hostname else DEFAULT_RETRIES
    except ValueError:
        suggestion = DEFAULT_RETRIES
    raise InvalidParameter(f"{url!r} is not the URL of a server: did you mean {suggestion}?", "server")
