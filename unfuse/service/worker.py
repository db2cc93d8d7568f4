"""One worker: its options by the settings, and running it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from unfuse.core.spread import AUTO
from unfuse.launch.forks import Forks
from unfuse.launch.local import HURRY, LocalLauncher
from unfuse.planning.machine import CONTROL_GROUP, cpus, devices
from unfuse.planning.placement import CPU, Wanted, devices_of, only_cpu
from unfuse.service.addresses import schedulers, worker_trust
from unfuse.service.groups import OWN_ARENA, Settings, Transfer
from unfuse.service.resources import resources
from unfuse.service.stopping import AT_ONCE_S, end_after
from unfuse.transfer.base import TransferEngine, TransferOptions, threads_for
from unfuse.weights.fingerprints import FINGERPRINTS
from unfuse.weights.source import parse_component_sources
from unfuse.wire.address import host_towards
from unfuse.wire.keys import Keys
from unfuse.wire.run_folder import machine_id, open_run_folder
from unfuse.worker.health import answering
from unfuse.worker.options import WorkerOptions
from unfuse.worker.worker import Worker


def worker_options(settings: Settings) -> WorkerOptions:
    """Return the options of a worker. Fingerprints of weights are cached in its data folder.

    Raises ConfigError, and InvalidParameter if several servers run and none is named.
    """
    FINGERPRINTS.remember_in(Path(settings.data_dir))
    wanted, compute, run_folder = settings.worker, settings.compute, open_run_folder(settings.run_dir)
    addresses = schedulers(settings)
    trusted = worker_trust(settings, addresses)
    secret = trusted.secret if isinstance(trusted, Keys) else ""
    return WorkerOptions(
        role=wanted.role,
        hold=wanted.hold,
        components=wanted.component,
        schedulers=addresses,
        node=wanted.node or machine_id(run_folder),
        trust=trusted,
        models=wanted.model,
        compute=msgspec.structs.replace(compute, threads=compute.threads or 1),
        slots=wanted.slots,
        resources=resources(settings),
        arena=settings.arena.bytes or OWN_ARENA,
        kv=settings.kv.bytes,
        buffer=settings.buffer.tokens,
        stall_s=settings.lease.stall_s,
        memory_limit=wanted.memory_limit,
        drain_timeout=settings.serve.drain_timeout,
        orphan_s=settings.store.orphan_s,
        transfer=TransferOptions(
            host=wanted.listen or host_towards(*(addresses if secret or settings.insecure_listen else ())),
            secret=secret,
            insecure=settings.insecure_listen,
            **_transfer(settings.transfer),
        ),
        run_dir=str(run_folder),
        data_dir=settings.data_dir,
        health=wanted.health,
        component_sources=parse_component_sources(settings.serve.component_source),
        gpus=sum(device.name != CPU for device in devices()) if compute.parallel == AUTO else 0,
    )


def _transfer(settings: Transfer) -> dict[str, Any]:
    """The options of transfer engines that settings have, with threads by the cores that this process may use."""
    own = {name: value for name, value in msgspec.structs.asdict(settings).items() if name != "engine"}
    return own | {"threads": settings.threads or threads_for(cpus(CONTROL_GROUP))}


async def _run(worker: Worker, health: str) -> None:
    async with answering(health, lambda: worker.lacking):
        await worker.run()


def _obey_signals(worker: Worker, drain_timeout: float, *, is_started_by_another: bool) -> None:
    """Have signals drain the worker, and hurry it, as `work` says."""
    loop = asyncio.get_running_loop()

    def stop(hurries: bool) -> None:
        if not worker.draining:
            end_after(drain_timeout)
            worker.drain()
        elif hurries:
            hurry()

    def hurry() -> None:
        end_after(AT_ONCE_S)
        worker.hurry()

    loop.add_signal_handler(HURRY, hurry)
    loop.add_signal_handler(signal.SIGTERM, stop, not is_started_by_another)
    if is_started_by_another:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    else:
        loop.add_signal_handler(signal.SIGINT, stop, True)


async def work(
    options: WorkerOptions, engines: Mapping[str, TransferEngine], lifeline: int | None, fork_server: int | None
) -> None:
    """Run a worker until SIGTERM or SIGINT drains it, a second one hurries it, or `lifeline` closes.

    `lifeline` is the reading end of a pipe held by whoever started the worker. A worker that has one leaves Ctrl-C,
    which reaches the whole process group, to its starter, and hurries by HURRY alone: a service manager may send
    SIGTERM to all processes, beside its starter. `fork_server` is the descriptor of a socket to one; without it a
    worker on CPUs that loads weights again and again starts one of its own. Raises ConfigError.
    """
    loop, own = asyncio.get_running_loop(), list[LocalLauncher]()

    def forks(models: Sequence[str], often: bool) -> socket.socket | None:
        if fork_server is not None:
            return socket.socket(fileno=fork_server)
        compute = options.compute
        if compute.parallel == AUTO:  # which is not decided yet, and chooses among the same devices
            compute = msgspec.structs.replace(compute, parallel="")
        if not often or not only_cpu(devices_of(options.role, Wanted(compute=compute), devices())):
            return None
        begun = Forks(models)
        own.append(LocalLauncher((), forks=begun))  # which starts it again when it dies
        own[0].start()
        return socket.socket(fileno=os.dup(begun.asks))

    worker = Worker(options, engines, forks)
    running = asyncio.create_task(_run(worker, options.health))

    _obey_signals(worker, options.drain_timeout, is_started_by_another=lifeline is not None)
    if lifeline is not None:
        loop.add_reader(lifeline, running.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await running
    finally:
        for launcher in own:
            await launcher.stop(0)
