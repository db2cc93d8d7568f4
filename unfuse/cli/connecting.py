"""Connects verbs to a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from unfuse.cli.progress import progress_on
from unfuse.cli.terminal import Progress, Terminal
from unfuse.service.installed import require_server
from unfuse.service.loading import Loading
from unfuse.service.settings import DEFAULT, Loaded, load

if TYPE_CHECKING:
    from unfuse.client import Client


def client(server: str | None, api_key: str | None, config: Path | None) -> Client:
    """A client of the server that the flags or settings name; the caller closes it."""
    from unfuse.client import connect

    settings = load({"server": server, "api_key": api_key}, config).settings
    return connect(settings.server, settings.api_key)


@contextmanager
def client_of(loaded: Loaded, terminal: Terminal) -> Iterator[tuple[Client, Progress]]:
    """A client of the server that was named, or of private workers that end with the block; and its progress."""
    server = "" if loaded.origins["server"] == DEFAULT else loaded.settings.server
    if not server:
        require_server("working without --server URL")
    loading = Loading(loaded.settings.serve.models)
    terminal.heard = loading.hear
    terminal.open_log()
    status = f"waiting for {server}" if server else loading
    with progress_on(terminal, lambda: status) as progress:
        if server:
            from unfuse.client import connect

            with connect(server, loaded.settings.api_key) as client:
                yield client, progress
            return
        from unfuse.service.local import own_pools

        with own_pools(loaded, terminal, loading) as client:
            yield client, progress
