"""The client for asyncio: what `client.py` does, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Self, TypeVar

import httpx2
import msgspec

from unfuse.client import calls
from unfuse.client.calls import File
from unfuse.client.chat import AsyncChat
from unfuse.client.errors import error_of
from unfuse.client.result import Result
from unfuse.core.errors import KeyUnavailable, TransientError, UnfuseError
from unfuse.core.event import TERMINAL_EVENTS, Event

Told = TypeVar("Told")


class AsyncRequest(calls.Viewed):
    """A request of this client. `view` is the request object as it was last read."""

    _client: AsyncClient

    async def refresh(self) -> dict[str, Any]:
        """Read the request object again."""
        self.view = await self._client.get(f"/v1/requests/{self.id}")
        return self.view

    async def events(self, after: int = 0) -> AsyncIterator[Event]:
        """The events after number `after`, as `Request.events` has them."""
        lost = 0
        while True:
            try:
                sent = {"last-event-id": str(after)}
                async for event in self._client.heard(f"/v1/requests/{self.id}/events", calls.event_of, headers=sent):
                    after, lost = event.seq, 0
                    yield event
                    if event.type in TERMINAL_EVENTS:
                        return
                if calls.is_over(await self.refresh()):
                    return
            except TransientError:
                if lost >= calls.RECONNECTS:
                    raise
            lost += 1
            await asyncio.sleep(calls.pause(self._client.reconnect_delay, lost))

    async def cancel(self) -> dict[str, Any]:
        """Cancel the request; one that is over does not change."""
        self.view = await self._client.post(f"/v1/requests/{self.id}/cancel")
        return self.view

    async def result(self) -> Result:
        """Wait for the result. Raises PermanentError with the reason if there is none."""
        async for _ in self.events():
            pass
        calls.require_completed(await self.refresh())
        return await self._finished()

    async def stop(self) -> Result:
        """Cancel the request, and return the results that are finished: none, some or all."""
        await self.cancel()
        return await self._finished()

    async def _finished(self) -> Result:
        indexes = calls.indexes_of(self.view)
        data = [await self._client.download(f"/v1/requests/{self.id}/result/{index}") for index in indexes]
        return Result(self.view, data, indexes)


class AsyncClient:
    """A client of the gateway at `url`, for one event loop. What it raises, and what it is asked, is as with Client."""

    def __init__(self, url: str, key: str | None = None, *, reconnect_delay: float = 0.1) -> None:
        self.url = calls.checked(url)
        self.reconnect_delay = reconnect_delay
        self._http = httpx2.AsyncClient(**calls.settings(self.url, key))

    def __repr__(self) -> str:
        return f"<AsyncClient of {self.url}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; requests go on."""
        await self._http.aclose()

    async def generate(self, prompt: str, **asked: Any) -> Result:
        """Make pictures or a video from a prompt, as `submit` does, and wait."""
        return await (await self.submit(prompt, **asked)).result()

    async def submit(
        self, prompt: str, *, image: File | Sequence[File] | None = None, mask: File | None = None,
        last_frame: File | None = None, video: bool | None = None, **params: object,
    ) -> AsyncRequest:  # fmt: skip
        """Ask for pictures or a video, as `Client.submit` does; a picture's file is read in a thread."""
        call = await asyncio.to_thread(calls.submission, prompt, calls.Pictures(image, mask, last_frame), video, params)
        for _ in range(calls.MOST_KEYS - 1):
            with suppress(KeyUnavailable):
                return AsyncRequest(self, calls.object_of(await self._send(call.method, call.path, **call.options)))
            call.options["headers"] |= calls.fresh_key()
        return AsyncRequest(self, calls.object_of(await self._send(call.method, call.path, **call.options)))

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

    async def model(self, name: str) -> dict[str, Any]:
        """One model, as `Client.model` returns it."""
        return await self.get(calls.model_path(name))

    async def add_model(self, model: str, name: str | None = None) -> dict[str, Any]:
        """Serve one more model, as `Client.add_model` does."""
        body = calls.given(model=model, name=name)
        return calls.object_of(await self._send("POST", "/v1/models", json=body, timeout=calls.ADD_TIMEOUT_S))

    async def remove_model(self, name: str) -> dict[str, Any]:
        """Accept no more requests for a model, as `Client.remove_model` does."""
        return calls.object_of(await self._send("DELETE", calls.model_path(name)))

    async def list(self, path: str, **params: Any) -> list[dict[str, Any]]:
        """The rows at a path, such as /v1/models, /v1/workers, /v1/pools or /v1/dead."""
        return calls.rows_of(await self.get(path, **params), f"{self.url}{path}")

    async def get(self, path: str, **params: Any) -> dict[str, Any]:
        """The JSON object at a path."""
        return calls.object_of(await self._send("GET", path, params=params))

    async def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object that a POST returns."""
        return calls.object_of(await self._send("POST", path, json=body or {}))

    async def download(self, path: str) -> bytes:
        """The bytes at a path."""
        return (await self._send("GET", path)).content

    async def heard(
        self, path: str, read: Callable[[httpx2.ServerSentEvent], Told | None], *, to_its_end: bool = False, **sent: Any
    ) -> AsyncIterator[Told]:
        """What is read of each event of one connection, up to one that is read as None.

        Raises TransientError if it breaks, and, `to_its_end`, if it ends without such a one.
        """
        try:
            async with self._http.sse(path, **sent) as source:
                if source.response.is_error:
                    await source.response.aread()
                    raise error_of(source.response)
                async for message in source:
                    if (told := read(message)) is None:
                        return
                    yield told
        except (msgspec.DecodeError, httpx2.SSEError) as error:
            raise calls.foreign(f"{self.url}{path}") from error
        except httpx2.TransportError as error:
            raise calls.unreachable(self.url, error) from error
        if to_its_end:
            raise calls.cut_short(self.url)

    async def _choices(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the deltas of the only choice. Closing the iterator before the end cancels the request."""
        conversation = calls.Conversation()
        try:
            async with aclosing(self._resumed_choices(body, conversation)) as choices:
                async for choice in choices:
                    yield choice
        except (GeneratorExit, asyncio.CancelledError):
            with suppress(UnfuseError, RuntimeError):  # a closed client raises RuntimeError
                if conversation.request:
                    await self.post(conversation.cancel_path)
            raise

    async def _resumed_choices(
        self, body: dict[str, Any], conversation: calls.Conversation
    ) -> AsyncGenerator[dict[str, Any], None]:
        while True:
            try:
                sent = {"method": "POST", "json": body, "headers": {**conversation.headers}}
                async for chunk in self.heard(calls.CHATS, calls.chunk, to_its_end=True, **sent):
                    for choice in conversation.take(chunk):
                        yield choice
                return
            except TransientError as error:
                await asyncio.sleep(self.reconnect_delay * conversation.break_off(error))

    async def _send(self, method: str, path: str, **options: Any) -> httpx2.Response:
        try:
            return calls.accepted(await self._http.request(method, path, **options))
        except httpx2.TransportError as error:
            raise calls.unreachable(self.url, error) from error
