"""`unfuse worker`."""

from __future__ import annotations

import socket
from typing import Annotated

import typer

from unfuse.cli import logs
from unfuse.cli.options import Config, setting
from unfuse.cli.settings import load


def worker(
    role: Annotated[str | None, setting("worker.role")] = None,
    scheduler: Annotated[str | None, setting("worker.scheduler")] = None,
    model: Annotated[list[str] | None, setting("worker.model")] = None,
    device: Annotated[str | None, setting("compute.device")] = None,
    dtype: Annotated[str | None, setting("compute.dtype")] = None,
    slots: Annotated[int | None, setting("worker.slots")] = None,
    node: Annotated[str | None, setting("worker.node")] = None,
    arena: Annotated[str | None, setting("arena.bytes", "--arena")] = None,
    threads: Annotated[int | None, setting("compute.threads")] = None,
    lifeline: Annotated[int | None, typer.Option(hidden=True)] = None,
    config: Config = None,
) -> None:
    """Run stages for a scheduler.

    SIGTERM and Ctrl-C finish what runs and end; a second one ends at once.
    """
    flags = {
        "worker.role": role, "worker.scheduler": scheduler, "worker.model": model or None, "worker.slots": slots,
        "worker.node": node, "compute.device": device, "compute.dtype": dtype, "compute.threads": threads,
        "arena.bytes": arena,
    }  # fmt: skip
    settings = load(flags, config).settings

    import uvloop

    from unfuse.cli.compose import work
    from unfuse.worker.worker import WorkerOptions

    logs.to_stderr()
    wanted = settings.worker
    options = WorkerOptions(
        role=wanted.role,
        scheduler=wanted.scheduler,
        node=wanted.node or socket.gethostname(),
        models=wanted.model,
        device=settings.compute.device,
        dtype=settings.compute.dtype,
        slots=wanted.slots,
        arena=settings.arena.bytes,
        threads=settings.compute.threads or 1,
        drain_timeout=settings.serve.drain_timeout,
    )
    uvloop.run(work(options, lifeline))
