"""Pools of one's own: workers that start for this process, and end with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import msgspec

from unfuse.cli.serve import options
from unfuse.service.logs import Logs
from unfuse.service.remains import passing_folder
from unfuse.service.settings import DEFAULT, Loaded, load

if TYPE_CHECKING:
    from unfuse.client import Client
    from unfuse.service.loading import Loading


def local(model: str | None = None, *, threads: int | None = None) -> AbstractContextManager[Client]:
    """A client of workers that serve this process alone while the block lasts; `model` is a name, a folder or a hub id.

    `threads` is CPU threads per worker. Everything else is as the environment sets it. Raises ConfigError.
    """
    return own_pools(load({"serve.models": [model] if model else None, "compute.threads": threads}))


@contextmanager
def own_pools(loaded: Loaded, logs: Logs | None = None, loading: Loading | None = None) -> Iterator[Client]:
    """What `local` gives, for these settings; `loading` is told which workers are started.

    Their lines go to `logs`. They leave nothing behind: their results lie in a temporary folder that goes with
    the block, and what stages took is not remembered.
    """
    import structlog

    from unfuse.cli import compose

    if logs is None:
        logs = Logs(loaded.settings.log)
        if not structlog.is_configured():
            logs.open_log()
    chosen = options(loaded)
    planned = compose.plan(chosen)
    if loading:
        loading.expect([worker.role for worker in planned.workers])
    with passing_folder() as folder:
        places = msgspec.structs.replace(chosen.places, results=f"disk:{folder}?fsync=no")
        queue = "memory" if loaded.origins["serve.queue"] == DEFAULT else chosen.queue
        chosen = msgspec.structs.replace(chosen, places=places, costs=None, queue=queue)
        with compose.local(chosen, planned, logs) as client:
            yield client
