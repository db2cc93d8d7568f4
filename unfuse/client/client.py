"""A client of the gateway's HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self, TypeVar

import httpx2
import msgspec

from unfuse.client import calls
from unfuse.client.calls import File
from unfuse.client.chat import Chat
from unfuse.client.errors import error_of
from unfuse.client.result import Result
from unfuse.core.errors import KeyUnavailable, TransientError, UnfuseError
from unfuse.core.event import TERMINAL_EVENTS, Event

Told = TypeVar("Told")


class Request(calls.Viewed):
    """A request of this client. `view` is the request object as it was last read."""

    _client: Client

    def refresh(self) -> dict[str, Any]:
        """Read the request object again."""
        self.view = self._client.get(f"/v1/requests/{self.id}")
        return self.view

    def events(self, after: int = 0) -> Iterator[Event]:
        """The events after `after`, over lost connections, to the end. Raises TransientError if the server is gone."""
        lost = 0
        while True:
            try:
                sent = {"last-event-id": str(after)}
                for event in self._client.heard(f"/v1/requests/{self.id}/events", calls.event_of, headers=sent):
                    after, lost = event.seq, 0
                    yield event
                    if event.type in TERMINAL_EVENTS:
                        return
                if calls.is_over(self.refresh()):
                    return
            except TransientError:
                if lost >= calls.RECONNECTS:
                    raise
            lost += 1
            time.sleep(calls.pause(self._client.reconnect_delay, lost))

    def cancel(self) -> dict[str, Any]:
        """Cancel the request; one that is over does not change."""
        self.view = self._client.post(f"/v1/requests/{self.id}/cancel")
        return self.view

    def result(self) -> Result:
        """Wait for the result. Raises PermanentError with the reason if there is none."""
        for _ in self.events():
            pass
        calls.require_completed(self.refresh())
        return self._finished()

    def stop(self) -> Result:
        """Cancel the request, and return the results that are finished: none, some or all."""
        self.cancel()
        return self._finished()

    def _finished(self) -> Result:
        indexes = calls.indexes_of(self.view)
        data = [self._client.download(f"/v1/requests/{self.id}/result/{index}") for index in indexes]
        return Result(self.view, data, indexes)


class Client:
    """A client of the gateway at `url`. A refusal of the server raises the error that it was made from.

    `reconnect_delay` is the seconds before a lost event stream is first taken up again. Raises InvalidParameter for
    what is no http:// or https:// address.
    """

    def __init__(self, url: str, key: str | None = None, *, reconnect_delay: float = 0.1) -> None:
        self.url = calls.checked(url)
        self.reconnect_delay = reconnect_delay
        self._http = httpx2.Client(**calls.settings(self.url, key))

    def __repr__(self) -> str:
        return f"<Client of {self.url}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; requests go on."""
        self._http.close()

    def generate(self, prompt: str, **asked: Any) -> Result:
        """Make pictures or a video from a prompt, as `submit` does, and wait. Also raises PermanentError."""
        return self.submit(prompt, **asked).result()

    def chat(self, messages: str | Sequence[Mapping[str, Any]], **params: Any) -> Chat:
        """Answer messages, or a text of the user's; gives the parts of the answer as they come, each once.

        `params` are those of POST /v1/chat/completions, such as response_format and tools, without n. A connection that
        breaks is resumed where it broke. Closing the answer before its end cancels the request. Iterating raises
        InvalidParameter, UnknownModel, Overloaded, PermanentError, TransientError.
        """
        return Chat(self._choices(calls.conversation(messages, params)))

    def _choices(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the deltas of the only choice. Closing the iterator before the end cancels the request."""
        conversation = calls.Conversation()
        try:
            yield from self._resumed_choices(body, conversation)
        except (GeneratorExit, KeyboardInterrupt):
            with suppress(UnfuseError, RuntimeError):  # a closed client raises RuntimeError
                if conversation.request:
                    self.post(conversation.cancel_path)
            raise

    def _resumed_choices(self, body: dict[str, Any], conversation: calls.Conversation) -> Iterator[dict[str, Any]]:
        while True:
            try:
                sent = {"method": "POST", "json": body, "headers": {**conversation.headers}}
                for chunk in self.heard(calls.CHATS, calls.chunk, to_its_end=True, **sent):
                    yield from conversation.take(chunk)
                return
            except TransientError as error:
                time.sleep(self.reconnect_delay * conversation.break_off(error))

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
        call = calls.submission(prompt, calls.Pictures(image, mask, last_frame), video, params)
        for _ in range(calls.MOST_KEYS - 1):
            with suppress(KeyUnavailable):
                return Request(self, calls.object_of(self._send(call.method, call.path, **call.options)))
            call.options["headers"] |= calls.fresh_key()
        return Request(self, calls.object_of(self._send(call.method, call.path, **call.options)))

    def request(self, id: str) -> Request:
        """A request by its id. Raises NotFound."""
        return Request(self, self.get(f"/v1/requests/{id}"))

    def requests(self, status: str | None = None, limit: int = 100, after: str | None = None) -> list[dict[str, Any]]:
        """Request objects, newest first."""
        return self._list("/v1/requests", calls.given(status=status, limit=limit, after=after))

    def models(self) -> list[dict[str, Any]]:
        """Served models, with their limits and defaults."""
        return self._list("/v1/models")

    def model(self, name: str) -> dict[str, Any]:
        """One model: its state, its progress while it loads, the reason of a failure. Raises UnknownModel."""
        return self.get(calls.model_path(name))

    def add_model(self, model: str, name: str | None = None) -> dict[str, Any]:
        """Serve one more model, a folder of the server's machine or a hub name, under this name.

        Returns while it loads. Requests for it are accepted from now on. Raises InvalidParameter for what cannot be
        served, PermanentError for a name that is taken, ConfigError without an admin's key.
        """
        body = calls.given(model=model, name=name)
        return calls.object_of(self._send("POST", "/v1/models", json=body, timeout=calls.ADD_TIMEOUT_S))

    def remove_model(self, name: str) -> dict[str, Any]:
        """Accept no more requests for a model; those accepted are finished. Raises UnknownModel."""
        return calls.object_of(self._send("DELETE", calls.model_path(name)))

    def dead(self, limit: int = 100, after: str | None = None) -> list[dict[str, Any]]:
        """Dead requests, newest first, with the evidence in their errors."""
        return self._list("/v1/dead", calls.given(limit=limit, after=after))

    def retry(self, id: str) -> Request:
        """Ask anew for what was given up. Raises NotFound, PermanentError if not dead, Overloaded, TransientError."""
        return Request(self, self.post(f"/v1/dead/{id}/retry"))

    def forget_dead(self, id: str) -> None:
        """Delete a dead request, or an unreadable record. Raises NotFound for anything else."""
        self._send("DELETE", f"/v1/dead/{id}")

    def workers(self) -> list[dict[str, Any]]:
        """Registered workers."""
        return self._list("/v1/workers")

    def pools(self) -> list[dict[str, Any]]:
        """Pools, with the number of tasks that wait in each."""
        return self._list("/v1/pools")

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        """The JSON object at a path."""
        return calls.object_of(self._send("GET", path, params=params))

    def post(
        self, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """The JSON object that a POST returns."""
        return calls.object_of(self._send("POST", path, json=body or {}, headers=headers))

    def download(self, path: str) -> bytes:
        """The bytes at a path."""
        return self._send("GET", path).content

    def heard(
        self, path: str, read: Callable[[httpx2.ServerSentEvent], Told | None], *, to_its_end: bool = False, **sent: Any
    ) -> Iterator[Told]:
        """What is read of each event of one connection, up to one that is read as None.

        Raises TransientError if it breaks, and, `to_its_end`, if it ends without such a one.
        """
        try:
            with self._http.sse(path, **sent) as source:
                if source.response.is_error:
                    source.response.read()
                    raise error_of(source.response)
                for message in source:
                    if (told := read(message)) is None:
                        return
                    yield told
        except (msgspec.DecodeError, httpx2.SSEError) as error:
            raise calls.foreign(f"{self.url}{path}") from error
        except httpx2.TransportError as error:
            raise calls.unreachable(self.url, error) from error
        if to_its_end:
            raise calls.cut_short(self.url)

    def _list(self, path: str, params: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        return calls.rows_of(self.get(path, **(params or {})), f"{self.url}{path}")

    def _send(self, method: str, path: str, **options: Any) -> httpx2.Response:
        try:
            return calls.accepted(self._http.request(method, path, **options))
        except httpx2.TransportError as error:
            raise calls.unreachable(self.url, error) from error
