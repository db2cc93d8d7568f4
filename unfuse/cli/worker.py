"""`unfuse worker`."""

from __future__ import annotations

from typing import Annotated, Any

import structlog
import typer

from unfuse.cli.options import COMPUTE, Config, takes
from unfuse.cli.terminal import Terminal
from unfuse.service.settings import load


@takes(
    "worker.role", "worker.component", "worker.scheduler", "keys", "insecure_listen", "worker.model", *COMPUTE,
    "worker.slots", "worker.resources", "worker.node", "worker.listen", "transfer.engine", "transfer.trusted_network",
    "arena.bytes", "kv.bytes", "worker.memory_limit", "lease.stall_s", "serve.drain_timeout",
)  # fmt: skip
def worker(
    flags: dict[str, Any],
    terminal: Terminal,
    lifeline: Annotated[int | None, typer.Option(hidden=True)] = None,
    fork_server: Annotated[int | None, typer.Option(hidden=True)] = None,
    config: Config = None,
) -> None:
    """Run stages for a scheduler.

    SIGTERM and Ctrl-C finish what runs and end; a second one ends at once.
    """
    import uvloop

    from unfuse.service.transfers import engines
    from unfuse.service.worker import work, worker_options

    settings = load(flags, config).settings
    terminal.open_log()
    structlog.contextvars.bind_contextvars(role=settings.worker.role, device=settings.compute.device)
    options = worker_options(settings)
    uvloop.run(work(options, engines(settings, options.transfer), lifeline, fork_server))
