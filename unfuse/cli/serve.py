"""`unfuse serve`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unfuse.cli import logs
from unfuse.cli.options import Config, setting
from unfuse.cli.settings import DEFAULT, Loaded, Size, load
from unfuse.core.errors import ConfigError

if TYPE_CHECKING:
    from unfuse.cli.compose import ServeOptions


SHARED_ARENA = Size.parse("512MiB")
"""Memory of each worker that shares its machine with the others of one `serve`, unless it is set."""


def serve(
    models: Annotated[
        list[str] | None, typer.Argument(help="Models to serve [default: unfuse/shapes].", metavar="MODEL")
    ] = None,
    host: Annotated[str | None, setting("serve.host")] = None,
    port: Annotated[int | None, setting("serve.port")] = None,
    api_key: Annotated[list[str] | None, setting("serve.api_key", metavar="KEY|FILE")] = None,
    queue: Annotated[str | None, setting("serve.queue")] = None,
    results: Annotated[str | None, setting("serve.results")] = None,
    workers: Annotated[bool | None, setting("serve.workers", "--workers/--no-workers")] = None,
    listen: Annotated[str | None, setting("serve.listen")] = None,
    device: Annotated[str | None, setting("compute.device")] = None,
    dtype: Annotated[str | None, setting("compute.dtype")] = None,
    threads: Annotated[int | None, setting("compute.threads")] = None,
    arena: Annotated[str | None, setting("arena.bytes", "--arena")] = None,
    encoders: Annotated[int | None, setting("serve.encoders")] = None,
    denoisers: Annotated[int | None, setting("serve.denoisers")] = None,
    decoders: Annotated[int | None, setting("serve.decoders")] = None,
    max_active: Annotated[int | None, setting("serve.max_active")] = None,
    max_queue: Annotated[int | None, setting("serve.max_queue")] = None,
    drain_timeout: Annotated[float | None, setting("serve.drain_timeout")] = None,
    config: Config = None,
) -> None:
    """Serve models over HTTP, each stage from its own workers.

    SIGTERM and Ctrl-C stop accepting and finish what runs; a second one stops at once.
    """
    flags = {
        "serve.models": models or None, "serve.host": host, "serve.port": port, "serve.api_key": api_key or None,
        "serve.queue": queue, "serve.results": results, "serve.workers": workers, "serve.listen": listen,
        "serve.encoders": encoders, "serve.denoisers": denoisers, "serve.decoders": decoders,
        "serve.max_active": max_active, "serve.max_queue": max_queue, "serve.drain_timeout": drain_timeout,
        "compute.device": device, "compute.dtype": dtype, "compute.threads": threads, "arena.bytes": arena,
    }  # fmt: skip
    run(options(load(flags, config)))


def options(loaded: Loaded) -> ServeOptions:
    """What is composed for these settings."""
    from unfuse.cli.compose import ServeOptions
    from unfuse.queues.base import Limits

    settings = loaded.settings
    wanted = settings.serve
    counts = {"encoder": wanted.encoders, "denoiser": wanted.denoisers, "decoder": wanted.decoders}
    return ServeOptions(
        models=wanted.models,
        host=wanted.host,
        port=wanted.port,
        keys=keys((*wanted.api_key, *filter(None, [settings.api_key]))),
        queue=wanted.queue,
        results=wanted.results.replace("DATA_DIR", settings.data_dir),
        listen=wanted.listen,
        workers=counts if wanted.workers else {},
        device=settings.compute.device,
        dtype=settings.compute.dtype,
        threads=settings.compute.threads,
        arena=SHARED_ARENA if loaded.origins["arena.bytes"] == DEFAULT else settings.arena.bytes,
        limits=Limits(wanted.max_active, wanted.max_queue),
        lease_ttl=settings.lease.ttl_s,
        retention=wanted.retention_s,
        drain_timeout=wanted.drain_timeout,
    )


def keys(given: tuple[str, ...]) -> dict[str, str]:
    """Tenants by key. What names a file stands for its lines, each `NAME KEY` or a key alone (tenant `default`)."""
    tenants: dict[str, str] = {}
    for entry in given:
        path = Path(entry)
        for line in path.read_text().splitlines() if path.is_file() else [entry]:
            words = line.split()
            if len(words) > 2:
                raise ConfigError(f"a line of the key file {entry} is not NAME KEY")
            if words:
                tenants[words[-1]] = words[0] if len(words) == 2 else "default"
    return tenants


def run(options: ServeOptions) -> None:
    """Serve until stopped by a signal."""
    import asyncio

    import uvloop

    from unfuse.cli.compose import Service

    async def serving() -> None:
        service = Service(options)

        def stop(number: int) -> None:
            stopped_by.append(number)
            service.stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        await service.run(lambda url: typer.echo(f"unfuse serves {', '.join(options.models)} at {url}", err=True))

    logs.to_stderr()
    stopped_by: list[int] = []
    uvloop.run(serving())
    if signal.SIGINT in stopped_by:
        raise KeyboardInterrupt
