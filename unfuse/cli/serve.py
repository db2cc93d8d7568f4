"""`unfuse serve`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import asdict

from unfuse.arena.limits import readable_bytes
from unfuse.cli import show
from unfuse.cli.options import COMPUTE, Config, takes
from unfuse.cli.progress import progress_on
from unfuse.cli.terminal import Terminal
from unfuse.core.errors import ConfigError
from unfuse.core.plan import SLOTS
from unfuse.service.groups import SHARED_ARENA, Settings
from unfuse.service.loading import Loading
from unfuse.service.settings import FIELDS, Loaded, load

if TYPE_CHECKING:
    from unfuse.cli.compose import ServeOptions
    from unfuse.core.messages import Places
    from unfuse.core.plan import Params
    from unfuse.launch.placement import Wanted
    from unfuse.service.plan import Plan


ADMIN = "admin"
"""The tenant of an admin key that has no name."""

PLACING = ("serve.place", "serve.encoders", "serve.denoisers", "serve.decoders", "arena.bytes")
"""Which workers run where, beside how they compute."""


@takes(
    "serve.host", "serve.port", "serve.api_key", "serve.admin_key", "serve.allowed_hosts", "serve.allowed_origins",
    "serve.trusted_proxies", "serve.max_connections", "serve.max_connections_per_address",
    "serve.served_model_name", "serve.revision", "serve.queue", "serve.results", "serve.store", "serve.durable",
    "serve.durable_stages", "serve.encode", "serve.checkpoint", "serve.loras", "serve.workers", "serve.listen", "keys",
    "insecure_listen", "transfer.engine", "transfer.trusted_network", *PLACING, *COMPUTE, "worker.memory_limit",
    "lease.stall_s", "serve.slots", "serve.image_timeout", "serve.video_timeout", "serve.max_active", "serve.max_queue",
    "serve.max_cost", "serve.order", "serve.dispatch", "serve.encoder_cache", "serve.feature_cache",
    "serve.strict_params", "serve.drain_timeout",
)  # fmt: skip
def serve(
    flags: dict[str, Any],
    terminal: Terminal,
    models: Annotated[
        list[str] | None, typer.Argument(help="Models to serve [default: unfuse/shapes].", metavar="MODEL")
    ] = None,
    config: Config = None,
) -> None:
    """Serve models over HTTP, each stage from its own workers.

    SIGTERM and Ctrl-C stop accepting and finish what runs; a second one stops at once.
    """
    run(options(load({**flags, "serve.models": models or None}, config)), terminal)


def wanted(loaded: Loaded) -> Wanted:
    """The workers that these settings ask for."""
    from unfuse.launch.placement import Wanted, parse_place

    settings, serve = loaded.settings, loaded.settings.serve
    counts = {"encoder": serve.encoders, "denoiser": serve.denoisers, "decoder": serve.decoders}
    place = parse_place(serve.place)
    if not serve.workers:
        return Wanted({}, {}, settings.compute)
    return Wanted(counts, place, settings.compute, settings.arena.bytes or SHARED_ARENA)


def options(loaded: Loaded) -> ServeOptions:
    """What is composed for these settings."""
    from unfuse.cli.compose import ServeOptions
    from unfuse.queues.base import Limits
    from unfuse.server.access import Access
    from unfuse.server.connections import Bounds
    from unfuse.service.meeting import keys_folder, listens, trust

    settings, serve = loaded.settings, loaded.settings.serve
    listen = listens(settings)
    admins = keys(serve.admin_key, ADMIN)
    return ServeOptions(
        models=serve.models,
        revision=serve.revision,
        names=serve.served_model_name,
        host=serve.host,
        port=serve.port,
        keys=admins | keys((*serve.api_key, *filter(None, [settings.api_key]))),
        admins=frozenset(admins),
        access=Access(serve.allowed_hosts, serve.allowed_origins, serve.trusted_proxies),
        bounds=Bounds(serve.max_connections, serve.max_connections_per_address),
        queue=serve.queue.replace("DATA_DIR", settings.data_dir),
        places=places(settings),
        run_dir=settings.run_dir,
        listen=listen,
        trust=trust(settings, "scheduler"),
        worker_environment={
            FIELDS[name].variable: FIELDS[name].written(value)
            for name, value in (
                ("run_dir", settings.run_dir),
                ("insecure_listen", settings.insecure_listen),
                ("store.orphan_s", settings.store.orphan_s),
                *((f"transfer.{key}", value) for key, value in asdict(settings.transfer).items()),
            )
        },
        worker_flags={
            "keys": keys_folder(settings, "worker"),
            "memory-limit": settings.worker.memory_limit,
            "stall-s": settings.lease.stall_s,
            **({"listen": settings.worker.listen} if settings.worker.listen else {}),
        },
        workers=wanted(loaded),
        slots=slots(serve.slots, settings.worker.slots),
        time_limits={"image": serve.image_timeout, "video": serve.video_timeout},
        limits=Limits(serve.max_active, serve.max_queue, serve.max_cost or None),
        order=serve.order,
        dispatch=serve.dispatch,
        encoder_cache=serve.encoder_cache if "shared_memory" in serve.store or "auto" in serve.store else 0,
        costs=Path(settings.data_dir, "costs.json"),
        lease_ttl=settings.lease.ttl_s,
        retention=serve.retention_s,
        drain_timeout=serve.drain_timeout,
        standard=standard(settings),
        strict=serve.strict_params,
    )


def slots(given: tuple[str, ...], each: int = 0) -> dict[str, int]:
    """Slots by role: what is `given` for it, else `each`, else what is usual. Raises ConfigError for what is none."""
    found = {role: each or usual for role, usual in SLOTS.items()}
    for entry in given:
        role, _, count = entry.partition("=")
        if role not in SLOTS or not count.isdecimal() or not int(count):
            raise ConfigError(f"--slots {entry}: write ROLE=N, like denoiser=2; the roles are {', '.join(SLOTS)}")
        found[role] = int(count)
    return found


def standard(settings: Settings) -> Params:
    """Parameters that requests have unless they say otherwise. Raises ConfigError for what exact pools cannot do."""
    threshold = settings.serve.feature_cache
    if settings.compute.batching == "batched":
        return {"feature_cache": threshold}
    if threshold:
        raise ConfigError(f"--feature-cache {threshold:g} skips work and is not exact: add --batching batched")
    return {}


def places(settings: Settings) -> Places:
    """Where these settings have workers keep things; DATA_DIR stands for the data folder. Raises ConfigError."""
    from unfuse.core.messages import Places
    from unfuse.worker.checkpoints import Policy

    serve = settings.serve
    Policy.parse(serve.checkpoint)
    if serve.store == "memory":
        raise ConfigError("the store memory lies within one process, and workers are several: use shared_memory")
    results, store, durable = (
        url.replace("DATA_DIR", settings.data_dir) for url in (serve.results, serve.store, serve.durable)
    )
    encodings = dict(entry.partition("=")[::2] for entry in serve.encode)
    if wrong := set(encodings.values()) - {"bf16", "fp16"}:
        raise ConfigError(f"--encode {min(wrong) or serve.encode[0]}: write KIND=bf16 or KIND=fp16, like denoise=bf16")
    if serve.loras and not Path(serve.loras).is_dir():
        raise ConfigError(f"--loras {serve.loras}: there is no such folder")
    loras, spill = str(Path(serve.loras).resolve()) if serve.loras else "", settings.spill
    return Places(
        results, store, spill.threshold, spill.capacity, durable, serve.durable_stages, encodings,
        serve.checkpoint, loras,
    )  # fmt: skip


def keys(given: tuple[str, ...], tenant: str = "default") -> dict[str, str]:
    """Tenants by key. What names a file stands for its lines, each `NAME KEY` or a key alone (that of `tenant`)."""
    tenants: dict[str, str] = {}
    for entry in given:
        for line in _key_lines(entry):
            words = line.split()
            if len(words) > 2:
                raise ConfigError("a line of a key file, or a key that is given, is not NAME KEY")
            if words:
                tenants[words[-1]] = words[0] if len(words) == 2 else tenant
    return tenants


def _key_lines(entry: str) -> list[str]:
    try:
        return Path(entry).read_text().splitlines() if os.path.isfile(entry) else [entry]
    except (OSError, ValueError) as error:
        raise ConfigError(f"the key file {entry} cannot be read: {error}") from error


def key_notes(keys: Mapping[str, str], admins: Collection[str]) -> list[str]:
    """What to say at the start of who may see workers, pools and other tenants' requests."""
    if keys and not admins:
        nobody = "no key is an admin's: workers, pools and other tenants' requests are closed (--admin-key)"
        return ["the one API key is an admin's" if len(keys) == 1 else nobody]
    return []


def tell(plan: Plan, say: Callable[[str], object]) -> None:
    """Say which workers run where and what each of their components takes, line by line."""
    columns = ["worker", "role", "device", "component", "dtype", "memory", "models"]
    for line in show.table(plan.rows(), columns, "no worker is started here"):
        say(line)
    for sums in plan.memory():
        takes = f"{readable_bytes(sums['takes'])} of {readable_bytes(sums['free'])} free, processes and arenas counted"
        say(f"{sums['device']}: {takes}; activations come on top")


def run(options: ServeOptions, terminal: Terminal) -> None:
    """Serve until stopped by a signal."""
    stopped_by: list[int] = []
    loading = Loading(options.models)
    terminal.heard = loading.hear
    terminal.open_log()
    with ExitStack() as shown:
        shown.enter_context(progress_on(terminal, lambda: loading))
        import asyncio

        import uvloop

        from unfuse.cli.compose import Service, plan
        from unfuse.service.meeting import invitations

        async def serving() -> None:
            service, loop = Service(options, found, terminal), asyncio.get_running_loop()

            def stop(number: int) -> None:
                stopped_by.append(number)
                service.stop()

            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop, number)
            loading.expect([worker.role for worker in found.workers], lambda: loop.call_soon_threadsafe(shown.close))

            def started(url: str) -> None:
                for line in (
                    *key_notes(options.keys, options.admins),
                    *invitations(options.trust, str(options.worker_flags["keys"]), service.addresses),
                    f"unfuse serves {', '.join(options.models)} at {url}",
                ):
                    terminal.say(line)

            await service.run(started)

        found = plan(options)
        tell(found, terminal.say)
        uvloop.run(serving())
    if signal.SIGINT in stopped_by:
        raise KeyboardInterrupt
