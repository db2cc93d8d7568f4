"""Pools of one's own: workers that start for this process, and end with it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from unfuse.cli.serve import options
from unfuse.cli.settings import Loaded, load

if TYPE_CHECKING:
    from unfuse.client import Client


def local(model: str | None = None, *, threads: int | None = None) -> AbstractContextManager[Client]:
    """A client of workers that serve this process alone while the block lasts; `model` is a name, a folder or a hub id.

    `threads` is CPU threads per worker. Everything else is as the environment sets it. Raises ConfigError.
    """
    return own_pools(load({"serve.models": [model] if model else None, "compute.threads": threads}))


def own_pools(loaded: Loaded) -> AbstractContextManager[Client]:
    """What `local` gives, for these settings."""
    import structlog

    from unfuse.cli import compose, logs

    if not structlog.is_configured():
        logs.to_stderr(logs.WARNING)
    return compose.local(options(loaded))
