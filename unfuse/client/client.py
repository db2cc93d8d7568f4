"""The Python clients of a gateway: `AsyncClient` for asyncio, `Client` for blocking calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx2
import msgspec

from unfuse.client import calls
from unfuse.client.calls import AsyncTransport, BlockingTransport, File, error_of, iterate, run
from unfuse.client.result import Result, place_of
from unfuse.core.errors import KeyUnavailable, PermanentError, TransientError, UnfuseError
from unfuse.core.request import TERMINAL_EVENTS, Event


class AsyncRequest:
    """A submitted request, for asyncio: its events, its result, and its cancellation.

    `view` is the request object as it was last read. Raises PermanentError for an object without an id: the server at
    the client's URL is then another one.
    """

    def __init__(self, client: AsyncClient, view: dict[str, Any]) -> None:
        if not isinstance(view.get("id"), str):
            raise calls.foreign(client.url)
        self._client = client
        self.view = view

    def __repr__(self) -> str:
        return f"<AsyncRequest {self.id}: {self.view['status']}>"

    @property
    def id(self) -> str:
        """The id of the request."""
        return str(self.view["id"])

    async def refresh(self) -> dict[str, Any]:
        """Read the request object again, and return it."""
        self.view = await self._client.get(f"/v1/requests/{self.id}")
        return self.view

    async def events(self, after: int = 0) -> AsyncGenerator[Event, None]:
        """Yield the events with a sequence number above `after`, until the request is over.

        A broken connection is resumed. Raises TransientError if RECONNECTS resumptions in a row bring no event.
        """
        failures = 0
        while True:
            headers = {"last-event-id": str(after)}
            events = self._client.stream(f"/v1/requests/{self.id}/events", calls.parse_request_event, headers=headers)
            try:
                async for event in events:
                    after = event.seq
                    failures = 0
                    yield event
                    if event.type in TERMINAL_EVENTS:
                        return
                # The connection may end without the last event: the request object shows whether the request is over.
                if (await self.refresh())["status"] not in ("queued", "in_progress"):
                    return
            except TransientError:
                if failures >= calls.RECONNECTS:
                    raise
            finally:
                await events.aclose()
            failures += 1
            await self._client.pause(calls.backoff(failures))

    async def cancel(self) -> dict[str, Any]:
        """Cancel the request, and return its object. A request that is over does not change."""
        self.view = await self._client.post(f"/v1/requests/{self.id}/cancel")
        return self.view

    async def result(self) -> Result:
        """Wait for the result. Raises PermanentError, with the reason, unless the request completes."""
        async for _ in self.events():
            pass
        view = await self.refresh()
        if view["status"] != "completed":
            reason = (view["error"] or {}).get("message") or f"it was {view['status']}"
            raise PermanentError(f"request {self.id} has no result: {reason}")
        return await self._download_result()

    async def stop(self) -> Result:
        """Cancel the request, and return the results that are finished: none, some or all."""
        await self.cancel()
        return await self._download_result()

    async def _download_result(self) -> Result:
        """Download the files of the request, without those that a safety checker flagged."""
        indexes = [place_of(file) for file in self.view["result"] if not file.get("flagged")]
        data = [await self._client.download(f"/v1/requests/{self.id}/result/{index}") for index in indexes]
        return Result(self.view, data, indexes)


class AsyncClient:
    """An asynchronous client of one gateway, for one event loop.

    `url`: the gateway's address. Raises InvalidParameter unless it is an http:// or https:// URL.
    `key`: an API key, or None.
    `reconnect_delay`: seconds before a broken event stream is first resumed; later pauses are longer.
    `transport`: the class that sends calls; `Client` passes `BlockingTransport`.

    Each call raises the `unfuse.core.errors` exception that an error response stands for.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        reconnect_delay: float = 0.1,
        transport: type[AsyncTransport | BlockingTransport] = AsyncTransport,
    ) -> None:
        self.url = calls.checked(url)
        self.reconnect_delay = reconnect_delay
        self._transport = transport(calls.settings(self.url, key))

    def __repr__(self) -> str:
        return f"<AsyncClient of {self.url}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Submitted requests continue on the server."""
        await self._transport.close()

    async def generate(self, prompt: str, **params: Any) -> Result:
        """Generate pictures or a video, and return the result. `Client.generate` documents the parameters."""
        return await (await self.submit(prompt, **params)).result()

    async def submit(
        self,
        prompt: str,
        *,
        image: File | Sequence[File] | None = None,
        mask: File | None = None,
        last_frame: File | None = None,
        video: bool | None = None,
        **params: object,
    ) -> AsyncRequest:
        """Submit a request for pictures or a video. `Client.submit` documents the parameters.

        Files are read in a thread.
        """
        path, options = await self._transport.call(calls.submit_call, prompt, image, mask, last_frame, video, params)
        for _ in range(calls.MAX_KEYS - 1):
            with suppress(KeyUnavailable):
                return AsyncRequest(self, await self._json("POST", path, **options))
            options["headers"] |= calls.fresh_key()
        return AsyncRequest(self, await self._json("POST", path, **options))

    def chat(self, messages: str | Sequence[Mapping[str, Any]], **params: Any) -> AsyncChat:
        """Stream the answer to chat messages. `Client.chat` documents the parameters."""
        return AsyncChat(self._choices(calls.chat_body(messages, params)))

    async def request(self, id: str) -> AsyncRequest:
        """Return the request with this id. Raises NotFound."""
        return AsyncRequest(self, await self.get(f"/v1/requests/{id}"))

    async def requests(
        self, status: str | None = None, limit: int = 100, after: str | None = None
    ) -> list[dict[str, Any]]:
        """Return request objects, newest first.

        `status`: only requests of this status.
        `limit`: the most objects to return.
        `after`: the id of a request; the list starts behind it.
        """
        return await self.list("/v1/requests", **calls.without_none(status=status, limit=limit, after=after))

    async def models(self) -> list[dict[str, Any]]:
        """Return the served models, with their limits and defaults."""
        return await self.list("/v1/models")

    async def model(self, name: str) -> dict[str, Any]:
        """Return a model's state, its loading progress, or the reason of its failure. Raises UnknownModel."""
        return await self.get(calls.model_path(name))

    async def add_model(self, model: str, name: str | None = None) -> dict[str, Any]:
        """Start serving another model, and return its object while it loads.

        `model`: a folder on the server's machine, or a name on the Hugging Face hub.
        `name`: the name that clients use.

        Requests for the model are accepted from now on. Raises InvalidParameter for a model that cannot be served,
        PermanentError for a name that is in use, ConfigError without an admin's key.
        """
        body = calls.without_none(model=model, name=name)
        return await self._json("POST", "/v1/models", json=body, timeout=calls.ADD_TIMEOUT_S)

    async def remove_model(self, name: str) -> dict[str, Any]:
        """Stop accepting requests for a model; accepted ones are finished. Raises UnknownModel."""
        return await self._json("DELETE", calls.model_path(name))

    async def dead(self, limit: int = 100, after: str | None = None) -> list[dict[str, Any]]:
        """Return dead letters: requests that failed too often, newest first, with evidence in their errors.

        `limit`: the most objects to return.
        `after`: the id of a request; the list starts behind it.
        """
        return await self.list("/v1/dead", **calls.without_none(limit=limit, after=after))

    async def retry(self, id: str) -> AsyncRequest:
        """Submit a dead request again, as a new request.

        Raises NotFound, PermanentError if the request is not dead, Overloaded, TransientError.
        """
        return AsyncRequest(self, await self.post(f"/v1/dead/{id}/retry"))

    async def forget_dead(self, id: str) -> None:
        """Delete a dead request, or an unreadable record of the queue.

        Raises NotFound for any other id.
        """
        await self._send("DELETE", f"/v1/dead/{id}")

    async def workers(self) -> list[dict[str, Any]]:
        """Return the registered workers."""
        return await self.list("/v1/workers")

    async def pools(self) -> list[dict[str, Any]]:
        """Return the pools, with the number of queued tasks of each."""
        return await self.list("/v1/pools")

    async def list(self, path: str, **params: Any) -> list[dict[str, Any]]:
        """Return the objects of a list, such as /v1/models, /v1/workers, /v1/pools or /v1/dead.

        Raises PermanentError if the response is no list.
        """
        rows = (await self.get(path, **params)).get("data")
        if not isinstance(rows, list):
            raise calls.foreign(f"{self.url}{path}")
        return rows

    async def get(self, path: str, **params: Any) -> dict[str, Any]:
        """Return the JSON object at a path. `params` form the query string."""
        return await self._json("GET", path, params=params)

    async def post(
        self, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """POST a JSON body to a path, and return the JSON object of the response."""
        return await self._json("POST", path, json=body or {}, headers=headers)

    async def download(self, path: str) -> bytes:
        """Return the bytes at a path."""
        return (await self._send("GET", path)).content

    async def stream(
        self,
        path: str,
        parse: Callable[[httpx2.ServerSentEvent], T | None],
        *,
        to_its_end: bool = False,
        **options: Any,
    ) -> AsyncGenerator[T, None]:
        """Yield the parsed server-sent events of one connection.

        `parse`: parses an event; the stream ends at an event that is parsed as None.
        `to_its_end`: also raise TransientError if the connection ends without that event.
        `options`: options of the call.

        Raises TransientError if the connection breaks, PermanentError for events of another server.
        """
        try:
            async with aclosing(self._transport.events(path, **options)) as events:
                async for event in events:
                    if (item := parse(event)) is None:
                        return
                    yield item
        except (msgspec.DecodeError, httpx2.SSEError) as error:
            raise calls.foreign(f"{self.url}{path}") from error
        except httpx2.TransportError as error:
            raise calls.unreachable(self.url, error) from error
        if to_its_end:
            raise TransientError(f"{self.url} closed the connection before its response was complete")

    async def pause(self, factor: float) -> None:
        """Wait `factor` times the `reconnect_delay`."""
        await self._transport.sleep(self.reconnect_delay * factor)

    async def _choices(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the deltas of the only choice.

        Closing the generator before its end cancels the request.
        """
        state = calls.ChatStreamState()
        try:
            async with aclosing(self._resumed_choices(body, state)) as choices:
                async for choice in choices:
                    yield choice
        except (GeneratorExit, asyncio.CancelledError, KeyboardInterrupt):
            # A request with an idempotency key continues when its client disconnects, so it has to be cancelled.
            with suppress(UnfuseError, RuntimeError):  # a closed client raises RuntimeError
                if state.request:
                    await self.post(state.cancel_path)
            raise

    async def _resumed_choices(
        self, body: dict[str, Any], state: calls.ChatStreamState
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the deltas of the choices, reconnecting after transient errors."""
        while True:
            options = {"method": "POST", "json": body, "headers": {**state.headers}}
            chunks = self.stream(calls.CHATS, calls.parse_chat_event, to_its_end=True, **options)
            try:
                async for chunk in chunks:
                    for choice in state.record_event(chunk):
                        yield choice
                return
            except TransientError as error:
                await self.pause(state.record_failure(error))
            finally:
                await chunks.aclose()

    async def _json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """Return the JSON object of a response. Raises PermanentError for anything else."""
        response = await self._send(method, path, **options)
        try:
            return msgspec.json.decode(response.content, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            raise calls.foreign(str(response.url)) from None

    async def _send(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """Return the response of a call. Raises the error of an error response."""
        try:
            response = await self._transport.request(method, path, **options)
        except httpx2.TransportError as error:
            raise calls.unreachable(self.url, error) from error
        if response.is_error:
            raise error_of(response)
        return response


class ReceivedAnswer:
    """The chat answer received so far; complete after the last delta."""

    def __init__(self) -> None:
        #: The content received so far.
        self.text = ""

        #: The text before the answer, if the server parses reasoning.
        self.reasoning = ""

        #: The tool calls, in the form that they have in chat messages.
        self.tool_calls: list[dict[str, Any]] = []

        #: Why the answer ended, such as "stop" or "length"; None before its end.
        self.finish_reason: str | None = None

    def add_delta(self, choice: dict[str, Any]) -> str:
        """Add a delta of the only choice, and return the text that it adds."""
        delta: dict[str, Any] = choice["delta"]
        self.reasoning += str(delta.get("reasoning_content") or "")
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                self.tool_calls.append({key: value for key, value in call.items() if key != "index"})
            else:
                self.tool_calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        self.finish_reason = choice["finish_reason"] or self.finish_reason
        new_text = str(delta.get("content") or "")
        self.text += new_text
        return new_text

    @property
    def message(self) -> dict[str, Any]:
        """The answer so far as an assistant message, to be appended to the conversation."""
        if self.tool_calls:
            return {"role": "assistant", "content": self.text or None, "tool_calls": self.tool_calls}
        return {"role": "assistant", "content": self.text}


class Chat(ReceivedAnswer, Iterator[str]):
    """A streamed chat answer. Iterating yields the text of each delta, once.

    Closing it before its end cancels the request. As a context manager, it is closed at the end of the block.

    `choices` yields the deltas.
    """

    def __init__(self, choices: Generator[dict[str, Any], None, None]) -> None:
        super().__init__()
        self._choices = choices

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        return self.add_delta(next(self._choices))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the request, if the answer is not at its end."""
        self._choices.close()


class AsyncChat(ReceivedAnswer, AsyncIterator[str]):
    """A streamed chat answer for `async for`. Iterating yields the text of each delta, once.

    Closing it before its end cancels the request. As a context manager, it is closed at the end of the block.

    `choices` yields the deltas.
    """

    def __init__(self, choices: AsyncGenerator[dict[str, Any], None]) -> None:
        super().__init__()
        self.choices = choices

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        return self.add_delta(await anext(self.choices))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel the request, if the answer is not at its end."""
        await self.choices.aclose()


P = ParamSpec("P")
T = TypeVar("T")


def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """Return the blocking form of an asynchronous method.

    It is called on `_async`, the asynchronous twin of each blocking object.
    """

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run(method(self._async, *args, **kwargs))

    return call


class Request:
    """A submitted request: its events, its result, and its cancellation.

    The methods are those of `AsyncRequest`; each blocks until it is done.
    """

    def __init__(self, client: Client, view: dict[str, Any]) -> None:
        self._async = AsyncRequest(client._async, view)

    def __repr__(self) -> str:
        return f"<Request {self.id}: {self.view['status']}>"

    @property
    def id(self) -> str:
        """The id of the request."""
        return self._async.id

    @property
    def view(self) -> dict[str, Any]:
        """The request object as it was last read."""
        return self._async.view

    def events(self, after: int = 0) -> Iterator[Event]:
        """Yield the events with a sequence number above `after`, until the request is over.

        A broken connection is resumed. Raises TransientError if RECONNECTS resumptions in a row bring no event.
        """
        return iterate(self._async.events(after))

    refresh = blocking(AsyncRequest.refresh)
    cancel = blocking(AsyncRequest.cancel)
    result = blocking(AsyncRequest.result)
    stop = blocking(AsyncRequest.stop)


class Client:
    """A blocking client of one gateway. Several threads may use one client at once.

    `url`: the gateway's address. Raises InvalidParameter unless it is an http:// or https:// URL.
    `key`: an API key, or None.
    `reconnect_delay`: seconds before a broken event stream is first resumed; later pauses are longer.

    Each call raises the `unfuse.core.errors` exception that an error response stands for.
    """

    def __init__(self, url: str, key: str | None = None, *, reconnect_delay: float = 0.1) -> None:
        self._async = AsyncClient(url, key, reconnect_delay=reconnect_delay, transport=BlockingTransport)
        self.url = self._async.url

    def __repr__(self) -> str:
        return f"<Client of {self.url}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(self, prompt: str, **params: Any) -> Result:
        """Submit a request for pictures or a video, and wait for its result.

        The parameters and errors are those of `submit`. Also raises PermanentError if the request does not complete.
        """
        return run(self._async.generate(prompt, **params))

    def submit(
        self,
        prompt: str,
        *,
        image: File | Sequence[File] | None = None,
        mask: File | None = None,
        last_frame: File | None = None,
        video: bool | None = None,
        **params: object,
    ) -> Request:
        """Submit a request for pictures or a video, and return it at once.

        `image`: the picture to start from, for a model that accepts one, or several of them.
        `mask`: a picture that is transparent where `image` is to change.
        `last_frame`: the picture that a video ends with; the video begins with `image`.
        `video`: whether to make a video. By default it depends on `params` and `last_frame`: seconds, frames or mp4
        are for videos only.
        `params`: the parameters of POST /v1/images/generations or /v1/videos.

        Pictures are given as a file's path or as bytes.
        Raises InvalidParameter, UnknownModel, Overloaded, TransientError.
        """
        submission = self._async.submit(prompt, image=image, mask=mask, last_frame=last_frame, video=video, **params)
        return Request(self, run(submission).view)

    def chat(self, messages: str | Sequence[Mapping[str, Any]], **params: Any) -> Chat:
        """Stream the answer to chat messages.

        `messages`: chat messages in OpenAI's format, or the text of a single user message.
        `params`: the parameters of POST /v1/chat/completions, such as response_format and tools, without n.

        A broken connection is resumed where it broke. Closing the answer before its end cancels the request. Iterating
        raises InvalidParameter, UnknownModel, Overloaded, PermanentError, TransientError.
        """
        return Chat(iterate(self._async.chat(messages, **params).choices))

    def request(self, id: str) -> Request:
        """Return the request with this id. Raises NotFound."""
        return Request(self, self.get(f"/v1/requests/{id}"))

    def retry(self, id: str) -> Request:
        """Submit a dead request again, as a new request.

        Raises NotFound, PermanentError if the request is not dead, Overloaded, TransientError.
        """
        return Request(self, self.post(f"/v1/dead/{id}/retry"))

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        """Return the JSON object at a path. `params` form the query string."""
        return run(self._async.get(path, **params))

    requests = blocking(AsyncClient.requests)
    models = blocking(AsyncClient.models)
    model = blocking(AsyncClient.model)
    add_model = blocking(AsyncClient.add_model)
    remove_model = blocking(AsyncClient.remove_model)
    dead = blocking(AsyncClient.dead)
    forget_dead = blocking(AsyncClient.forget_dead)
    workers = blocking(AsyncClient.workers)
    pools = blocking(AsyncClient.pools)
    post = blocking(AsyncClient.post)
    download = blocking(AsyncClient.download)
    close = blocking(AsyncClient.close)
