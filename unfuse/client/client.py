"""The client for programs without an event loop: the asynchronous one, whose calls block the caller's thread."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from unfuse.client.async_client import AsyncClient, AsyncRequest, Chat
from unfuse.client.calls import File
from unfuse.client.result import Result
from unfuse.client.transport import BlockingTransport, iterate, run
from unfuse.core.request import Event

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
