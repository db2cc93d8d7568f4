"""`unfuse worker`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import structlog
import typer
from msgspec.structs import asdict

from unfuse.cli.options import COMPUTE, Config, takes
from unfuse.cli.terminal import Terminal
from unfuse.core.plan import SLOTS
from unfuse.service.groups import OWN_ARENA, Fault, Settings
from unfuse.service.settings import load

if TYPE_CHECKING:
    from unfuse.transfer.base import TransferEngine, TransferOptions


log = structlog.get_logger(__name__)


@takes(
    "worker.role", "worker.component", "worker.scheduler", "keys", "insecure_listen", "worker.model", *COMPUTE,
    "worker.slots", "worker.node", "worker.listen", "transfer.engine", "transfer.trusted_network", "arena.bytes",
    "worker.memory_limit", "lease.stall_s", "serve.drain_timeout",
)  # fmt: skip
def worker(
    flags: dict[str, Any],
    terminal: Terminal,
    lifeline: Annotated[int | None, typer.Option(hidden=True)] = None,
    config: Config = None,
) -> None:
    """Run stages for a scheduler.

    SIGTERM and Ctrl-C finish what runs and end; a second one ends at once.
    """
    import uvloop

    from unfuse.cli.compose import work
    from unfuse.service.meeting import schedulers, trust
    from unfuse.transfer.base import TransferOptions
    from unfuse.wire.address import host_towards
    from unfuse.wire.keys import Keys
    from unfuse.wire.run_folder import machine_id, open_run_folder
    from unfuse.worker.worker import WorkerOptions

    settings = load(flags, config).settings
    trusted, run_folder = trust(settings, "worker"), open_run_folder(settings.run_dir)
    wanted, compute = settings.worker, settings.compute
    terminal.open_log()
    structlog.contextvars.bind_contextvars(role=wanted.role, device=compute.device)
    addresses, secret = schedulers(settings), trusted.secret if isinstance(trusted, Keys) else ""
    options = WorkerOptions(
        role=wanted.role,
        components=wanted.component,
        schedulers=addresses,
        node=wanted.node or machine_id(run_folder),
        trust=trusted,
        models=wanted.model,
        compute=msgspec.structs.replace(compute, threads=compute.threads or 1),
        slots=wanted.slots or SLOTS.get(wanted.role, 1),
        arena=settings.arena.bytes or OWN_ARENA,
        stall_s=settings.lease.stall_s,
        memory_limit=wanted.memory_limit,
        drain_timeout=settings.serve.drain_timeout,
        orphan_s=settings.store.orphan_s,
        transfer=TransferOptions(
            host=wanted.listen or host_towards(*(addresses if secret or settings.insecure_listen else ())),
            secret=secret,
            insecure=settings.insecure_listen,
            **{name: value for name, value in asdict(settings.transfer).items() if name != "engine"},
        ),
        run_dir=str(run_folder),
    )
    uvloop.run(work(options, engines(settings, options.transfer), lifeline))


def engines(settings: Settings, options: TransferOptions) -> dict[str, TransferEngine]:
    """The engines that are set, at fault if that is; none where nothing would prove who they serve.

    Raises ConfigError for one that cannot run, or must not.
    """
    from unfuse.transfer import open_engine

    if not options.authentic:
        log.info("other machines cannot pull tensors from this worker: it has no --keys")
        return {}
    opened = {name: open_engine(name, options) for name in settings.transfer.engine}
    if open_to_all := [name for name, engine in opened.items() if not engine.enforces_refs]:
        log.warning(
            "whoever reaches this worker can read and overwrite its tensors; rdma is not verified", by=open_to_all
        )
    if settings.fault == Fault():
        return opened
    from unfuse.testing.transfer_faults import Faults, FaultyEngine

    return {name: FaultyEngine(engine, Faults(**asdict(settings.fault))) for name, engine in opened.items()}
