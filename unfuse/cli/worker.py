"""`unfuse worker`."""

from __future__ import annotations

import socket
from typing import Annotated, Any

import msgspec
import typer

from unfuse.cli import logs
from unfuse.cli.options import COMPUTE, Config, takes
from unfuse.cli.settings import load


@takes(
    "worker.role", "worker.scheduler", "keys", "worker.model", *COMPUTE, "worker.slots", "worker.node", "arena.bytes",
    "worker.memory_limit", "lease.stall_s", "serve.drain_timeout",
)  # fmt: skip
def worker(
    flags: dict[str, Any],
    lifeline: Annotated[int | None, typer.Option(hidden=True)] = None,
    config: Config = None,
) -> None:
    """Run stages for a scheduler.

    SIGTERM and Ctrl-C finish what runs and end; a second one ends at once.
    """
    import structlog
    import uvloop

    from unfuse.cli.compose import work
    from unfuse.wire.keys import read
    from unfuse.worker.worker import WorkerOptions

    settings = load(flags, config).settings
    wanted, compute = settings.worker, settings.compute
    logs.to_stderr()
    structlog.contextvars.bind_contextvars(role=wanted.role, device=compute.device)
    options = WorkerOptions(
        role=wanted.role,
        schedulers=wanted.scheduler,
        node=wanted.node or socket.gethostname(),
        keys=read(settings.keys, "worker"),
        models=wanted.model,
        compute=msgspec.structs.replace(compute, threads=compute.threads or 1),
        slots=wanted.slots,
        arena=settings.arena.bytes,
        stall_s=settings.lease.stall_s,
        memory_limit=wanted.memory_limit,
        drain_timeout=settings.serve.drain_timeout,
    )
    uvloop.run(work(options, lifeline))
