"""Python's way to a gateway."""

from __future__ import annotations

from unfuse.client.client import AsyncChat, AsyncClient, AsyncRequest, Chat, Client, Request
from unfuse.client.result import Result


def connect(url: str, key: str | None = None) -> Client:
    """A client of the gateway at `url`, such as http://127.0.0.1:8000; `key` is one of its API keys."""
    return Client(url, key)


def aconnect(url: str, key: str | None = None) -> AsyncClient:
    """The same for asyncio: `async with aconnect(url) as client`."""
    return AsyncClient(url, key)


__all__ = ["AsyncChat", "AsyncClient", "AsyncRequest", "Chat", "Client", "Request", "Result", "aconnect", "connect"]
