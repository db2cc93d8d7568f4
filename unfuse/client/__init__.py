"""Python's way to a gateway."""

from __future__ import annotations

from unfuse.client.chat import Chat
from unfuse.client.client import Client, Request
from unfuse.client.result import Result


def connect(url: str, key: str | None = None) -> Client:
    """A client of the gateway at `url`, such as http://127.0.0.1:8000; `key` is one of its API keys."""
    return Client(url, key)


__all__ = ["Chat", "Client", "Request", "Result", "connect"]
