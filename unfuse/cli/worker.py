"""`unfuse worker`: run one worker, or all workers of this machine."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import structlog
import typer

from unfuse.cli.progress import progress_on
from unfuse.cli.serve import print_memory
from unfuse.cli.terminal import Terminal
from unfuse.cli.verbs import COMPUTE, Config, setting_options
from unfuse.core.compute_options import AUTO, parse_parallel
from unfuse.core.errors import UsageError
from unfuse.service.groups import Settings
from unfuse.service.settings import FIELDS, load
from unfuse.service.stopping import READY, STOPPING, notify

if TYPE_CHECKING:
    from unfuse.service.plan import ServingPlan


@setting_options(
    "worker.workers",
    "serve.place",
    "serve.device_memory",
    "worker.role",
    "worker.max_loaded_models",
    "worker.component",
    "worker.scheduler",
    "keys",
    "insecure_listen",
    "worker.model",
    "serve.component_source",
    *COMPUTE,
    "worker.slots",
    "worker.resources",
    "worker.node",
    "worker.listen",
    "worker.health",
    "transfer.engine",
    "transfer.trusted_network",
    "arena.bytes",
    "kv.bytes",
    "worker.memory_limit",
    "lease.stall_s",
    "serve.drain_timeout",
)
def worker(
    flags: dict[str, Any],
    terminal: Terminal,
    lifeline: Annotated[int | None, typer.Option(hidden=True)] = None,
    fork_server: Annotated[int | None, typer.Option(hidden=True)] = None,
    config: Config = None,
) -> None:
    """Run one worker for a scheduler, or with --workers all workers of this machine.

    SIGTERM or Ctrl-C saves or finishes running tasks, then stops. A second signal stops at once.

    Example: unfuse worker --role denoiser --device cuda:0 --scheduler tcp://10.0.0.1:8001
    """
    import uvloop

    from unfuse.service.addresses import await_scheduler, engines
    from unfuse.service.worker import run_worker, worker_options

    settings = load(flags, config).settings
    if settings.worker.workers or settings.compute.parallel != AUTO:
        parse_parallel(settings.compute.parallel)  # raises for a wrong value before waiting for a scheduler
    if settings.worker.workers:
        if excluded := [
            name
            for name in ("worker.role", "worker.component", "worker.model", "serve.component_source")
            if flags.get(name)
        ]:
            raise UsageError(
                f"--workers starts workers for all models of the scheduler: leave out {FIELDS[excluded[0]].flag}"
            )
        if settings.worker.health:
            raise UsageError("--health is for a single worker: leave it out with --workers")
        work_all(settings, terminal)
        return
    if flags.get("serve.place"):
        raise UsageError("--place needs --workers: select the device of a single worker by --device")
    terminal.open_log()
    await_scheduler(settings)
    structlog.contextvars.bind_contextvars(role=settings.worker.role, device=settings.compute.device)
    options = worker_options(settings)
    uvloop.run(run_worker(options, engines(settings, options.transfer), lifeline, fork_server))


def work_all(settings: Settings, terminal: Terminal) -> None:
    """Run all workers of this machine until SIGINT or SIGTERM stops them."""
    import asyncio

    import uvloop

    from unfuse.service.addresses import await_scheduler, schedulers
    from unfuse.service.loading import LoadingProgress
    from unfuse.service.report import layout_lines
    from unfuse.service.stopping import AT_ONCE_S, end_after
    from unfuse.service.worker import MachineWorkers

    terminal.open_log()
    await_scheduler(settings)
    scheduler_names = " or ".join(schedulers(settings))
    loading = LoadingProgress([f"the models of {scheduler_names}"])
    terminal.on_record = loading.record
    with ExitStack() as progress:
        progress.enter_context(progress_on(terminal, lambda: loading))

        async def run_workers() -> None:
            workers = MachineWorkers(settings, terminal)
            loop = asyncio.get_running_loop()

            def stop() -> None:
                end_after(AT_ONCE_S if workers.stopping.is_set() else settings.serve.drain_timeout)
                notify(STOPPING)
                workers.stop()

            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop)

            def ready(count: int) -> None:
                progress.close()
                terminal.write_line(f"{count} worker{'s' * (count > 1)} of this machine work for {scheduler_names}")
                notify(READY)

            def on_planned(plan: ServingPlan) -> None:
                for line in layout_lines(plan):
                    terminal.write_line(line)
                if terminal.is_detailed:
                    print_memory(plan, terminal.write_line)

                # Log records are read in another thread, which must not call `ready` itself.
                roles = [worker.role for worker in plan.workers]
                loading.expect_workers(roles, lambda: loop.call_soon_threadsafe(ready, len(roles)))

            await workers.run(on_planned)

        uvloop.run(run_workers())
