"""Connect commands to a server, or to private workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from unfuse.cli.progress import progress_on
from unfuse.cli.terminal import ProgressDisplay, Terminal
from unfuse.core.errors import ConfigError
from unfuse.service.installed import require_server
from unfuse.service.loading import LoadingProgress
from unfuse.service.settings import DEFAULT, LoadedSettings, load

if TYPE_CHECKING:
    from unfuse.client import Client
    from unfuse.service.plan import ServingPlan


def client(server: str | None, api_key: str | None, config: Path | None) -> Client:
    """Return a client of the server that flags or settings name. The caller closes it."""
    from unfuse.client import connect

    settings = load({"server": server, "api_key": api_key}, config).settings
    return connect(settings.server, settings.api_key)


@contextmanager
def client_of(
    loaded: LoadedSettings, terminal: Terminal, check: Callable[[ServingPlan], object] | None = None
) -> Iterator[tuple[Client, ProgressDisplay]]:
    """Yield a client of a server or of private workers, and the progress display.

    Private workers start if no server was set, and end with the block. Servers of this machine that could be used
    instead are printed first.

    `check`: called with the plan of private workers; none of them starts if it raises.
    """
    server = "" if loaded.origins["server"] == DEFAULT else loaded.settings.server
    if not server:
        require_server("working without --server URL")
    loading = LoadingProgress(loaded.settings.serve.models)
    terminal.on_record = loading.record
    terminal.open_log()
    status = f"waiting for {server}" if server else loading
    with progress_on(terminal, lambda: status) as progress:
        if server:
            from unfuse.client import connect

            with connect(server, loaded.settings.api_key) as client:
                yield client, progress
            return
        from unfuse.service.service import private_pools

        for url in servers_here(loaded.settings.run_dir):
            terminal.write_line(
                f"a server of yours runs on this machine: to use it instead of starting workers, add --server {url}"
            )
        with private_pools(loaded, terminal, loading, check) as client:
            yield client, progress


def servers_here(run_dir: str) -> list[str]:
    """Return the URLs of this user's servers on this machine."""
    from unfuse.wire.unix_socket import running_servers

    try:
        return [f"http://127.0.0.1:{port}" for port in running_servers(run_dir)]
    except ConfigError:  # other users can enter the run folder, which the start of private workers reports
        return []
