"""A private service: its workers serve this process alone, and end with it."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

import msgspec
import structlog

from unfuse.client import Client
from unfuse.core.errors import UnfuseError
from unfuse.edge.keys import Keys
from unfuse.service.leftovers import passing_folder
from unfuse.service.load_lines import LoadLines
from unfuse.service.loading import Loading
from unfuse.service.logs import Logs
from unfuse.service.options import options
from unfuse.service.plan import Plan
from unfuse.service.service import ServeOptions, Service, plan
from unfuse.service.settings import DEFAULT, Loaded, load
from unfuse.wire.address import UNIX
from unfuse.wire.unix_socket import private_socket
from unfuse.worker.records import is_configured_elsewhere

LOGGER = "unfuse"
"""The logger of Python's own logging that tells programs which configure it how far workers are."""


@contextmanager
def local(model: str | None = None, *, threads: int | None = None) -> Iterator[Client]:
    """A client of workers that serve this process alone while the block lasts; `model` is a name, a folder or a hub id.

    `threads` is CPU threads per worker. Everything else is as the environment sets it. How far the workers are with
    loading is written to standard error; or, by a program that configures logging, to its log as `info`; or nowhere, if
    UNFUSE_LOG__LEVEL is set. Raises ConfigError.
    """
    loaded = load({"serve.models": [model] if model else None, "compute.threads": threads})
    logs, loading = Logs(loaded.settings.log), Loading(loaded.settings.serve.models)
    say = _teller(logs, loaded.settings.log.level)
    if not structlog.is_configured():
        logs.open_log()
    if say is None:
        with own_pools(loaded, logs) as client:
            yield client
        return
    logs.heard = loading.hear
    with LoadLines(", ".join(loaded.settings.serve.models), loading, say), own_pools(loaded, logs, loading) as client:
        yield client


def _teller(logs: Logs, level: str) -> Callable[[str], object] | None:
    """Return what writes a line on loading where this program wants it; None if it wants no such lines."""
    if is_configured_elsewhere():
        tell: Callable[[str], object] = structlog.get_logger(LOGGER).info
        return tell
    if logging.getLogger(LOGGER).hasHandlers():
        return logging.getLogger(LOGGER).info
    return (lambda line: logs.say(f"unfuse: {line}")) if level == "auto" else None


def without_keys(loaded: Loaded) -> Loaded:
    """Return the settings without API keys, which are those of a server elsewhere."""
    serve = msgspec.structs.replace(loaded.settings.serve, api_key=(), api_keys=())
    return Loaded(msgspec.structs.replace(loaded.settings, api_key="", serve=serve), loaded.origins)


@contextmanager
def own_pools(
    loaded: Loaded, logs: Logs, loading: Loading | None = None, check: Callable[[Plan], object] | None = None
) -> Iterator[Client]:
    """What `local` returns, for these settings; `loading` learns which workers are started.

    No worker starts if `check` raises for their plan. Their lines go to `logs`. They leave nothing behind: their
    results lie in a temporary folder that goes with the block, and what stages took is not remembered.
    """
    chosen = options(without_keys(loaded))
    planned = plan(chosen)
    if check:
        check(planned)
    if loading:
        loading.expect([worker.role for worker in planned.workers])
    with passing_folder() as folder:
        places = msgspec.structs.replace(chosen.places, results=f"disk:{folder}?fsync=no")
        queue = "memory" if loaded.origins["serve.queue"] == DEFAULT else chosen.queue
        chosen = msgspec.structs.replace(chosen, places=places, costs=None, queue=queue)
        with _served(chosen, planned, logs) as client:
            yield client


@contextmanager
def _served(options: ServeOptions, planned: Plan, logs: Logs) -> Iterator[Client]:
    """A service for this process alone, on a free port with a random key; it ends with the block.

    Raises ConfigError if a worker cannot start, in place of any other error that follows from it.
    """
    key = secrets.token_urlsafe(24)
    own = f"{UNIX}{private_socket(options.run_dir)}"
    serve = msgspec.structs.replace(options.serve, port=0)
    options = msgspec.structs.replace(options, serve=serve, listen=(own,), keys=Keys((key,)))
    ready: Future[tuple[asyncio.AbstractEventLoop, Service, str]] = Future()

    def fail(over: Future[None]) -> None:
        if (error := over.exception()) and not ready.done():
            ready.set_exception(error)

    with ThreadPoolExecutor(1, "unfuse") as thread:
        over = thread.submit(lambda: asyncio.run(_serve_in_thread(Service(options, planned, logs), ready)))
        over.add_done_callback(fail)
        try:
            with Client(ready.result()[2], key, reconnect_delay=0.0) as client:
                yield client
        except UnfuseError:
            if over.done():
                over.result()
            raise
        finally:
            ready.add_done_callback(_stop)


def _stop(ready: Future[tuple[asyncio.AbstractEventLoop, Service, str]]) -> None:
    """End a service as soon as it has started, at once."""
    if ready.exception() is None:
        loop, service, _ = ready.result()
        with suppress(RuntimeError):  # the service has ended by itself
            for _ in range(2):
                loop.call_soon_threadsafe(service.stop)


async def _serve_in_thread(service: Service, ready: Future[tuple[asyncio.AbstractEventLoop, Service, str]]) -> None:
    loop = asyncio.get_running_loop()
    await service.run(lambda url: ready.set_result((loop, service, url)))
