"""The client of a gateway, for asyncio; and for programs without an event loop, whose calls block their thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
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
    """A request of this client. `view` is the request object as it was last read."""

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
        """Read the request object again."""
        self.view = await self._client.get(f"/v1/requests/{self.id}")
        return self.view

    async def events(self, after: int = 0) -> AsyncGenerator[Event, None]:
        """The events after `after`, over lost connections, to the end. Raises TransientError if the server is gone."""
        lost = 0
        while True:
            sent = {"last-event-id": str(after)}
            events = self._client.stream(f"/v1/requests/{self.id}/events", calls.event_of, headers=sent)
            try:
                async for event in events:
                    after, lost = event.seq, 0
                    yield event
                    if event.type in TERMINAL_EVENTS:
                        return
                if (await self.refresh())["status"] not in ("queued", "in_progress"):
                    return
            except TransientError:
                if lost >= calls.RECONNECTS:
                    raise
            finally:
                await events.aclose()
            lost += 1
            await self._client.pause(calls.backoff(lost))

    async def cancel(self) -> dict[str, Any]:
        """Cancel the request; one that is over does not change."""
        self.view = await self._client.post(f"/v1/requests/{self.id}/cancel")
        return self.view

    async def result(self) -> Result:
        """Wait for the result. Raises PermanentError with the reason if there is none."""
        async for _ in self.events():
            pass
        view = await self.refresh()
        if view["status"] != "completed":
            reason = (view["error"] or {}).get("message") or f"it was {view['status']}"
            raise PermanentError(f"request {self.id} has no result: {reason}")
        return await self._finished()

    async def stop(self) -> Result:
        """Cancel the request, and return the results that are finished: none, some or all."""
        await self.cancel()
        return await self._finished()

    async def _finished(self) -> Result:
        """Return the files of the request, without those that a safety checker flagged."""
        indexes = [place_of(file) for file in self.view["result"] if not file.get("flagged")]
        data = [await self._client.download(f"/v1/requests/{self.id}/result/{index}") for index in indexes]
        return Result(self.view, data, indexes)


class AsyncClient:
    """A client of the gateway at `url`, for one event loop. A refusal raises the error that it was made from.

    `reconnect_delay` is the seconds before a lost event stream is first taken up again. `transport` is how calls are
    made; `Client` has another one. Raises InvalidParameter for what is no http:// or https:// address.
    """

    def __init__(
        self, url: str, key: str | None = None, *, reconnect_delay: float = 0.1,
        transport: type[AsyncTransport | BlockingTransport] = AsyncTransport,
    ) -> None:  # fmt: skip
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
        """Close the connections; requests go on."""
        await self._transport.close()

    async def generate(self, prompt: str, **asked: Any) -> Result:
        """Make pictures or a video from a prompt, as `Client.generate` does."""
        return await (await self.submit(prompt, **asked)).result()

    async def submit(
        self, prompt: str, *, image: File | Sequence[File] | None = None, mask: File | None = None,
        last_frame: File | None = None, video: bool | None = None, **params: object,
    ) -> AsyncRequest:  # fmt: skip
        """Ask for pictures or a video, as `Client.submit` does; a picture's file is read in a thread."""
        path, options = await self._transport.call(calls.submission, prompt, image, mask, last_frame, video, params)
        for _ in range(calls.MOST_KEYS - 1):
            with suppress(KeyUnavailable):
                return AsyncRequest(self, await self._json("POST", path, **options))
            options["headers"] |= calls.fresh_key()
        return AsyncRequest(self, await self._json("POST", path, **options))

    def chat(self, messages: str | Sequence[Mapping[str, Any]], **params: Any) -> AsyncChat:
        """Answer messages, or a text of the user's, as `Client.chat` does."""
        return AsyncChat(self._choices(calls.conversation(messages, params)))

    async def request(self, id: str) -> AsyncRequest:
        """A request by its id. Raises NotFound."""
        return AsyncRequest(self, await self.get(f"/v1/requests/{id}"))

    async def requests(
        self, status: str | None = None, limit: int = 100, after: str | None = None
    ) -> list[dict[str, Any]]:
        """Request objects, newest first."""
        return await self.list("/v1/requests", **calls.given(status=status, limit=limit, after=after))

    async def models(self) -> list[dict[str, Any]]:
        """Served models, with their limits and defaults."""
        return await self.list("/v1/models")

    async def model(self, name: str) -> dict[str, Any]:
        """One model: its state, its progress while it loads, the reason of a failure. Raises UnknownModel."""
        return await self.get(calls.model_path(name))

    async def add_model(self, model: str, name: str | None = None) -> dict[str, Any]:
        """Serve one more model, a folder of the server's machine or a hub name, under this name.

        Returns while it loads. Requests for it are accepted from now on. Raises InvalidParameter for what cannot be
        served, PermanentError for a name that is taken, ConfigError without an admin's key.
        """
        body = calls.given(model=model, name=name)
        return await self._json("POST", "/v1/models", json=body, timeout=calls.ADD_TIMEOUT_S)

    async def remove_model(self, name: str) -> dict[str, Any]:
        """Accept no more requests for a model; those accepted are finished. Raises UnknownModel."""
        return await self._json("DELETE", calls.model_path(name))

    async def dead(self, limit: int = 100, after: str | None = None) -> list[dict[str, Any]]:
        """Dead requests, newest first, with the evidence in their errors."""
        return await self.list("/v1/dead", **calls.given(limit=limit, after=after))

    async def retry(self, id: str) -> AsyncRequest:
        """Ask anew for what was given up. Raises NotFound, PermanentError if not dead, Overloaded, TransientError."""
        return AsyncRequest(self, await self.post(f"/v1/dead/{id}/retry"))

    async def forget_dead(self, id: str) -> None:
        """Delete a dead request, or an unreadable record. Raises NotFound for anything else."""
        await self._send("DELETE", f"/v1/dead/{id}")

    async def workers(self) -> list[dict[str, Any]]:
        """Registered workers."""
        return await self.list("/v1/workers")

    async def pools(self) -> list[dict[str, Any]]:
        """Pools, with the number of tasks that wait in each."""
        return await self.list("/v1/pools")

    async def list(self, path: str, **params: Any) -> list[dict[str, Any]]:
        """The rows at a path, such as /v1/models, /v1/workers, /v1/pools or /v1/dead."""
        rows = (await self.get(path, **params)).get("data")
        if not isinstance(rows, list):
            raise calls.foreign(f"{self.url}{path}")
        return rows

    async def get(self, path: str, **params: Any) -> dict[str, Any]:
        """The JSON object at a path."""
        return await self._json("GET", path, params=params)

    async def post(
        self, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """The JSON object that a POST returns."""
        return await self._json("POST", path, json=body or {}, headers=headers)

    async def download(self, path: str) -> bytes:
        """The bytes at a path."""
        return (await self._send("GET", path)).content

    async def stream(
        self, path: str, read: Callable[[httpx2.ServerSentEvent], T | None], *, to_its_end: bool = False, **sent: Any
    ) -> AsyncGenerator[T, None]:
        """Yield what is read of each event of one connection, up to one that is read as None.

        Raises TransientError if it breaks, and, `to_its_end`, if it ends without such a one.
        """
        try:
            async with aclosing(self._transport.events(path, **sent)) as events:
                async for event in events:
                    if (item := read(event)) is None:
                        return
                    yield item
        except (msgspec.DecodeError, httpx2.SSEError) as error:
            raise calls.foreign(f"{self.url}{path}") from error
        except httpx2.TransportError as error:
            raise calls.unreachable(self.url, error) from error
        if to_its_end:
            raise TransientError(f"{self.url} ended an answer before it was whole")

    async def pause(self, factor: float) -> None:
        """Wait this many times the `reconnect_delay`."""
        await self._transport.sleep(self.reconnect_delay * factor)

    async def _choices(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the deltas of the only choice. Closing the iterator before the end cancels the request."""
        conversation = calls.ChatStreamState()
        try:
            async with aclosing(self._resumed_choices(body, conversation)) as choices:
                async for choice in choices:
                    yield choice
        except (GeneratorExit, asyncio.CancelledError, KeyboardInterrupt):
            with suppress(UnfuseError, RuntimeError):  # a closed client raises RuntimeError
                if conversation.request:
                    await self.post(conversation.cancel_path)
            raise

    async def _resumed_choices(
        self, body: dict[str, Any], conversation: calls.ChatStreamState
    ) -> AsyncGenerator[dict[str, Any], None]:
        while True:
            sent = {"method": "POST", "json": body, "headers": {**conversation.headers}}
            chunks = self.stream(calls.CHATS, calls.chunk, to_its_end=True, **sent)
            try:
                async for chunk in chunks:
                    for choice in conversation.take(chunk):
                        yield choice
                return
            except TransientError as error:
                await self.pause(conversation.break_off(error))
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
        """Return the response of a call. Raises the error that a refusal was made from."""
        try:
            response = await self._transport.request(method, path, **options)
        except httpx2.TransportError as error:
            raise calls.unreachable(self.url, error) from error
        if response.is_error:
            raise error_of(response)
        return response


class ReceivedAnswer:
    """The answer received so far; complete after the last delta.

    `tool_calls` have the form that messages of a chat have. `reasoning` is the text before the answer, if the server
    parses reasoning. `finish_reason` says why the answer ended.
    """

    def __init__(self) -> None:
        self.text = ""
        self.reasoning = ""
        self.tool_calls: list[dict[str, Any]] = []
        self.finish_reason: str | None = None

    def take(self, choice: dict[str, Any]) -> str:
        """Read what is told of the only choice; returns the text that it adds."""
        delta: dict[str, Any] = choice["delta"]
        self.reasoning += str(delta.get("reasoning_content") or "")
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                self.tool_calls.append({key: value for key, value in call.items() if key != "index"})
            else:
                self.tool_calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        self.finish_reason = choice["finish_reason"] or self.finish_reason
        part = str(delta.get("content") or "")
        self.text += part
        return part

    @property
    def message(self) -> dict[str, Any]:
        """The answer so far, as the next messages have it."""
        if self.tool_calls:
            return {"role": "assistant", "content": self.text or None, "tool_calls": self.tool_calls}
        return {"role": "assistant", "content": self.text}


class Chat(ReceivedAnswer, Iterator[str]):
    """The parts of an answer, as they come, each once."""

    def __init__(self, choices: Iterator[dict[str, Any]]) -> None:
        super().__init__()
        self._choices = choices

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        return self.take(next(self._choices))


class AsyncChat(ReceivedAnswer, AsyncIterator[str]):
    """The same, for `async for`. `choices` yields what the parts are read from."""

    def __init__(self, choices: AsyncGenerator[dict[str, Any], None]) -> None:
        super().__init__()
        self.choices = choices

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        return self.take(await anext(self.choices))


P = ParamSpec("P")
T = TypeVar("T")


def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """Return the blocking form of a method of `_async`, the asynchronous twin of each object of this module."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run(method(self._async, *args, **kwargs))

    return call


class Request:
    """A request of this client. `view` is the request object as it was last read."""

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
        """The events after `after`, over lost connections, to the end. Raises TransientError if the server is gone."""
        return iterate(self._async.events(after))

    refresh = blocking(AsyncRequest.refresh)
    cancel = blocking(AsyncRequest.cancel)
    result = blocking(AsyncRequest.result)
    stop = blocking(AsyncRequest.stop)


class Client:
    """A client of the gateway at `url`. A refusal of the server raises the error that it was made from.

    `reconnect_delay` is the seconds before a lost event stream is first taken up again. Raises InvalidParameter for
    what is no http:// or https:// address. Several threads may use one client at once.
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

    def generate(self, prompt: str, **asked: Any) -> Result:
        """Make pictures or a video from a prompt, as `submit` does, and wait. Also raises PermanentError."""
        return run(self._async.generate(prompt, **asked))

    def submit(
        self, prompt: str, *, image: File | Sequence[File] | None = None, mask: File | None = None,
        last_frame: File | None = None, video: bool | None = None, **params: object,
    ) -> Request:  # fmt: skip
        """Ask for pictures or a video; `params` are those of POST /v1/images/generations or /v1/videos.

        It is a video if `video` says so, or else if `params` ask for what only a video has: seconds, frames, mp4.
        `image` is the picture to start from, as a file's path or its bytes, for a model that takes one, or several of
        them, `mask` another one that is transparent where the first is to change, `last_frame` one that a video ends
        with which begins with the first.
        Raises InvalidParameter, UnknownModel, Overloaded, TransientError.
        """
        submitted = self._async.submit(prompt, image=image, mask=mask, last_frame=last_frame, video=video, **params)
        return Request(self, run(submitted).view)

    def chat(self, messages: str | Sequence[Mapping[str, Any]], **params: Any) -> Chat:
        """Answer messages, or a text of the user's; gives the parts of the answer as they come, each once.

        `params` are those of POST /v1/chat/completions, such as response_format and tools, without n. A connection that
        breaks is resumed where it broke. Closing the answer before its end cancels the request. Iterating raises
        InvalidParameter, UnknownModel, Overloaded, PermanentError, TransientError.
        """
        return Chat(iterate(self._async.chat(messages, **params).choices))

    def request(self, id: str) -> Request:
        """A request by its id. Raises NotFound."""
        return Request(self, self.get(f"/v1/requests/{id}"))

    def retry(self, id: str) -> Request:
        """Ask anew for what was given up. Raises NotFound, PermanentError if not dead, Overloaded, TransientError."""
        return Request(self, self.post(f"/v1/dead/{id}/retry"))

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        """The JSON object at a path."""
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
