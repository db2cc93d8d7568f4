"""Connects verbs to a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from unfuse.service.settings import load

if TYPE_CHECKING:
    from unfuse.client import Client


def client(server: str | None, api_key: str | None, config: Path | None) -> Client:
    """A client of the server that the flags or settings name; the caller closes it."""
    from unfuse.client import connect

    settings = load({"server": server, "api_key": api_key}, config).settings
    return connect(settings.server, settings.api_key)
