"""`unfuse serve`: serve models over HTTP."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unfuse.arena.limits import readable_bytes
from unfuse.cli import show
from unfuse.cli.progress import progress_on
from unfuse.cli.terminal import Terminal
from unfuse.cli.verbs import COMPUTE, PLACING, Config, setting_options
from unfuse.launch.local import ForkServers, InheritedForks
from unfuse.planning.machine import usable_devices
from unfuse.planning.placement import CPU, NONE
from unfuse.service.groups import Settings
from unfuse.service.loading import LoadingProgress
from unfuse.service.settings import load
from unfuse.service.stopping import READY, STOPPING, notify

if TYPE_CHECKING:
    from unfuse.service.options import ServeOptions
    from unfuse.service.plan import ServingPlan


@setting_options(
    "serve.host",
    "serve.port",
    "serve.api_key",
    "serve.api_keys",
    "serve.open_metrics",
    "serve.allowed_hosts",
    "serve.allowed_origins",
    "serve.trusted_proxies",
    "serve.public_url",
    "serve.max_connections",
    "serve.max_connections_per_address",
    "serve.image_hosts",
    "serve.webhook_hosts",
    "serve.webhook_secret",
    "serve.served_model_name",
    "serve.revision",
    "serve.component_source",
    "serve.queue",
    "serve.queue_wait",
    "serve.results",
    "serve.store",
    "serve.durable",
    "serve.results_limit",
    "serve.retention_s",
    "serve.price",
    "serve.durable_stages",
    "serve.encode",
    "serve.checkpoint",
    "serve.loras",
    "serve.listen",
    "keys",
    "insecure_listen",
    "transfer.engine",
    "transfer.trusted_network",
    *PLACING,
    *COMPUTE,
    "worker.memory_limit",
    "lease.stall_s",
    "serve.slots",
    "serve.scale_to_zero",
    "worker.resources",
    "serve.launcher",
    "serve.image_timeout",
    "serve.video_timeout",
    "serve.max_active",
    "serve.max_queue",
    "serve.max_cost",
    "serve.cold_start_timeout",
    "serve.order",
    "serve.dispatch",
    "serve.encoder_cache",
    "serve.feature_cache",
    "serve.tool_call_parser",
    "serve.reasoning_parser",
    "serve.strict_params",
    "serve.on_disconnect",
    "serve.reuse_results",
    "serve.drain_timeout",
)
def serve(
    flags: dict[str, Any],
    terminal: Terminal,
    models: Annotated[
        list[str] | None, typer.Argument(help="Models to serve [default: unfuse/shapes].", metavar="MODEL")
    ] = None,
    fork_server: Annotated[int | None, typer.Option(hidden=True)] = None,
    config: Config = None,
) -> None:
    """Serve models over HTTP, each stage from its own workers.

    SIGTERM or Ctrl-C stops accepting requests and saves running tasks, which resume after the next start. A second
    signal stops at once.

    Example: unfuse serve unfuse/shapes --port 8000
    """
    started_at = time.monotonic()
    loaded = load({**flags, "serve.models": models or None}, config)
    with start_fork_server_early(loaded.settings, fork_server) as forks:
        from unfuse.service.options import serve_options

        run(serve_options(loaded), terminal, forks, started_at)


@contextmanager
def start_fork_server_early(
    settings: Settings, inherited: int | None = None
) -> Iterator[ForkServers | InheritedForks | None]:
    """Start a fork server before this process imports anything heavy, since its imports take longest.

    It is closed after the block. Yields None unless all workers run on CPUs and all models are local.

    `inherited`: the descriptor of a socket to a fork server of the parent process, which is used instead.
    """
    if inherited is not None:
        with closing(InheritedForks(inherited)) as forks:
            yield forks
        return

    from unfuse.weights.source import is_local

    serve = settings.serve
    is_on_cpu = settings.compute.device in (CPU, "auto") and not serve.place
    has_local_models = all(map(is_local, serve.models))
    if (
        serve.workers == NONE
        or serve.launcher != "local"
        or not (is_on_cpu and has_local_models)
        or len(usable_devices()) > 1
    ):
        yield None
        return
    with closing(ForkServers(serve.models)) as forks:
        yield forks


def print_memory(plan: ServingPlan, write_line: Callable[[str], object]) -> None:
    """Print the memory of each component of each worker, and the sum for each device.

    `write_line`: called with each line.
    """
    columns = ["worker", "role", "device", "component", "dtype", "memory", "activations", "models"]
    for line in show.table(plan.rows(), columns, "no worker is started here"):
        write_line(line)
    for component, times in plan.repeats().items():
        write_line(f"{component} is listed {times} times in a worker: each stage that uses it loads its own copy")
    for sums in plan.memory():
        used = f"{sums['device']}: {readable_bytes(sums['takes'])} of {readable_bytes(sums['free'])} free, including"
        if sums["device"] == CPU:
            write_line(f"{used} processes and arenas; activations need additional memory")
        else:
            write_line(f"{used} processes, and activations of one request of the default size")


class _StartReport:
    """Prints the lines of a start: what is served, where, and when it is ready.

    `called_at`: the monotonic time at which the command was called, in seconds.
    """

    def __init__(self, options: ServeOptions, plan: ServingPlan, terminal: Terminal, called_at: float) -> None:
        from unfuse.service.report import StartScreen
        from unfuse.service.service import public_names

        self._options = options
        self._plan = plan
        self._terminal = terminal
        self._started_at = called_at
        self._screen = StartScreen(plan, public_names(options.serve), keyed=bool(options.keys))
        self._url = ""

    def opening(self) -> None:
        """Print the served models and their workers."""
        self._print(self._screen.opening())
        if self._terminal.is_detailed:
            print_memory(self._plan, self._terminal.write_line)

    def started(self, url: str, addresses: Sequence[str]) -> None:
        """Print the URL for clients, and how workers elsewhere connect to the control addresses."""
        from unfuse.service.addresses import connect_instructions, keys_folder

        self._url = url
        options = self._options
        self._print(filter(None, [options.keys.admin_note]))
        self._print(connect_instructions(options.trust, keys_folder(options.settings, "worker"), addresses))
        self._print([f"requests are accepted at {url}"])

    def ready(self) -> None:
        """Print the duration of the start, and an example command.

        Without workers on this machine, this is called before requests are accepted, and prints nothing.
        """
        if self._url:
            self._print(self._screen.ready(self._url, time.monotonic() - self._started_at))

    def _print(self, lines: Iterable[str]) -> None:
        """Print these lines on the terminal."""
        for line in lines:
            self._terminal.write_line(line)


def run(
    options: ServeOptions, terminal: Terminal, forks: ForkServers | InheritedForks | None, called_at: float
) -> None:
    """Serve until a signal stops it, and raise KeyboardInterrupt if that was SIGINT.

    `called_at`: the monotonic time at which the command was called, in seconds.
    """
    stopped_by: list[int] = []
    loading = LoadingProgress(options.serve.models)
    terminal.on_record = loading.record
    terminal.open_log()
    with ExitStack() as progress:
        progress.enter_context(progress_on(terminal, lambda: loading))
        # These imports take seconds, during which progress is shown already.
        import asyncio

        import uvloop

        from unfuse.service.options import plan_service
        from unfuse.service.service import Service, listen
        from unfuse.service.stopping import AT_ONCE_S, end_after

        async def serving() -> None:
            service = Service(options, plan, terminal, forks)
            loop = asyncio.get_running_loop()

            def stop(number: int) -> None:
                end_after(AT_ONCE_S if stopped_by else options.serve.drain_timeout)
                stopped_by.append(number)
                notify(STOPPING)
                service.stop()

            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop, number)

            def ready() -> None:
                progress.close()
                report.ready()

            # Log records are read in another thread, which must not call `ready` itself.
            loading.expect_workers([worker.role for worker in plan.workers], lambda: loop.call_soon_threadsafe(ready))

            def started(url: str) -> None:
                report.started(url, service.addresses)
                notify(READY)

            await service.run(started)

        listen(options).close()  # a port in use is reported before the models are read
        plan = plan_service(options)
        report = _StartReport(options, plan, terminal, called_at)
        report.opening()
        uvloop.run(serving())
    if signal.SIGINT in stopped_by:
        raise KeyboardInterrupt
