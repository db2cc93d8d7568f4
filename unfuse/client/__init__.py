"""The Python client of a gateway: `connect` for blocking calls, `aconnect` for asyncio."""

from __future__ import annotations

from unfuse.client.client import AsyncChat, AsyncClient, AsyncRequest, Chat, Client, Request
from unfuse.client.result import Result


def connect(url: str, key: str | None = None) -> Client:
    """Return a blocking client of a gateway.

    `url`: the gateway's address, such as http://127.0.0.1:8000.
    `key`: one of its API keys, or None if it has none.
    """
    return Client(url, key)


def aconnect(url: str, key: str | None = None) -> AsyncClient:
    """Return an asynchronous client of a gateway: `async with aconnect(url) as client`.

    The parameters are those of `connect`.
    """
    return AsyncClient(url, key)


__all__ = ["AsyncChat", "AsyncClient", "AsyncRequest", "Chat", "Client", "Request", "Result", "aconnect", "connect"]
