"""Run one worker, or all workers of this machine, and check schedulers for them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from unfuse import __version__
from unfuse.core.compute_options import AUTO
from unfuse.core.errors import ConfigError
from unfuse.core.messages import Register, Registered, Rejected, WorkerInfo
from unfuse.core.model_spec import ModelSpec
from unfuse.core.supervisor import first_completed
from unfuse.launch.local import HURRY_SIGNAL, ForkServers, LocalLauncher
from unfuse.models import read_model_spec
from unfuse.planning.machine import CONTROL_GROUP, usable_cpus, usable_devices
from unfuse.planning.placement import CPU, Device, WorkerPlan, devices_of, is_cpu_only
from unfuse.service.addresses import schedulers, worker_trusted_keys
from unfuse.service.groups import STANDALONE_ARENA, Settings
from unfuse.service.logs import Logs
from unfuse.service.plan import (
    ServingPlan,
    device_memory,
    forked,
    host_resources,
    plan_models,
    resources,
    roles_apart,
    worker_plan,
    worker_specs,
)
from unfuse.service.private_files import warn_of_wide_permissions
from unfuse.service.settings import FIELDS
from unfuse.service.stopping import AT_ONCE_S, Stoppable, end_after
from unfuse.stores.results import is_same_store
from unfuse.transfer.base import TransferEngine, TransferOptions, threads_for
from unfuse.weights.fingerprints import FINGERPRINTS
from unfuse.weights.source import is_local, parse_component_sources, resolve_source
from unfuse.wire.address import Trust, host_towards, unix_path
from unfuse.wire.dealer import Dealer
from unfuse.wire.keys import Keys
from unfuse.wire.run_folder import machine_id, open_run_folder
from unfuse.worker.health import health_server
from unfuse.worker.link import SchedulerLink
from unfuse.worker.registration import WorkerOptions
from unfuse.worker.worker import Worker


def worker_options(settings: Settings) -> WorkerOptions:
    """Return the options of a worker for these settings.

    As a side effect, fingerprints of weights are cached in the data folder.
    Raises ConfigError, and InvalidParameter if several servers run and the settings name none.
    """
    FINGERPRINTS.cache_in(Path(settings.data_dir))
    worker = settings.worker
    compute = settings.compute
    run_folder = open_run_folder(settings.run_dir)
    addresses = schedulers(settings)
    trusted = worker_trusted_keys(settings, addresses)
    wire_secret = trusted.secret if isinstance(trusted, Keys) else ""
    transfer = msgspec.structs.asdict(settings.transfer)
    del transfer["engine"]

    return WorkerOptions(
        role=worker.role,
        max_loaded_models=worker.max_loaded_models,
        components=worker.component,
        schedulers=addresses,
        node=worker.node or machine_id(run_folder),
        trusted_keys=trusted,
        models=worker.model,
        compute=msgspec.structs.replace(compute, threads=compute.threads or 1),
        slots=worker.slots,
        resources=resources(settings),
        arena=settings.arena.bytes or STANDALONE_ARENA,
        kv=settings.kv.bytes,
        buffer=settings.buffer.tokens,
        stall_s=settings.lease.stall_s,
        memory_limit=worker.memory_limit,
        drain_timeout=settings.serve.drain_timeout,
        orphan_s=settings.store.orphan_s,
        transfer=TransferOptions(
            host=worker.listen or host_towards(*(addresses if wire_secret or settings.insecure_listen else ())),
            secret=wire_secret,
            insecure=settings.insecure_listen,
            **(transfer | {"threads": transfer["threads"] or threads_for(usable_cpus(CONTROL_GROUP))}),
        ),
        run_dir=str(run_folder),
        data_dir=settings.data_dir,
        own_stores=frozenset((settings.serve.store, settings.serve.results, settings.serve.durable)),
        health=worker.health,
        component_sources=parse_component_sources(settings.serve.component_source),
        gpus=_equal_gpus(usable_devices()) if compute.parallel == AUTO else 0,
    )


def _equal_gpus(devices: Iterable[Device]) -> int:
    """Return how many of the first GPUs are of one model.

    The ranks of a worker that chooses its devices use the first ones.
    """
    models = [device.model for device in devices if device.name != CPU]
    return next((index for index, model in enumerate(models) if model != models[0]), len(models))


async def _run(worker: Worker, health: str) -> None:
    """Run a worker, and answer health probes at the address `health`, if there is one."""
    async with health_server(health, lambda: worker.unavailable_reason):
        await worker.run()


def _obey_signals(worker: Worker, drain_timeout: float, *, is_started_by_another: bool) -> None:
    """Install the signal handlers that drain the worker or stop it at once.

    `run_worker` documents them.
    """
    loop = asyncio.get_running_loop()

    def stop(may_hurry: bool) -> None:
        if not worker.draining:
            end_after(drain_timeout)
            worker.drain()
        elif may_hurry:
            hurry()

    def hurry() -> None:
        end_after(AT_ONCE_S)
        worker.stop_now()

    loop.add_signal_handler(HURRY_SIGNAL, hurry)
    loop.add_signal_handler(signal.SIGTERM, stop, not is_started_by_another)
    if is_started_by_another:
        # Ctrl-C reaches the whole process group. The starter then drains this worker by SIGTERM.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    else:
        loop.add_signal_handler(signal.SIGINT, stop, True)


async def run_worker(
    options: WorkerOptions, engines: Mapping[str, TransferEngine], lifeline: int | None, fork_server: int | None
) -> None:
    """Run a worker until SIGTERM or SIGINT drains it, or `lifeline` closes.

    A second signal stops it at once. Raises ConfigError.

    `options`: the options of the worker.
    `engines`: its transfer engines by name.
    `lifeline`: the reading end of a pipe whose other end the worker's parent process keeps open, or None.
    `fork_server`: the descriptor of a socket to a fork server, or None.

    A worker with a lifeline ignores SIGINT, and only HURRY_SIGNAL stops it at once. A second SIGTERM does not: systemd
    may send one to all processes, in addition to that of the parent. Without a fork server, a worker on CPUs that swaps
    models starts its own.
    """
    loop = asyncio.get_running_loop()
    fork_launchers: list[LocalLauncher] = []

    def forks(folders: Sequence[str], swaps: bool) -> socket.socket | None:
        """Return a socket to the fork server, or None if the worker needs none.

        `folders`: the folders of the models.
        `swaps`: whether the worker swaps models, and so starts compute processes often.
        """
        if fork_server is not None:
            return socket.socket(fileno=fork_server)
        compute = options.compute
        if compute.parallel == AUTO:  # the layout is chosen later, among the same devices
            compute = msgspec.structs.replace(compute, parallel="")
        if not swaps or not is_cpu_only(devices_of(options.role, WorkerPlan(compute=compute), usable_devices())):
            return None
        fork_servers = ForkServers(folders)
        fork_launchers.append(LocalLauncher((), forks=fork_servers))  # the launcher restarts the server when it dies
        fork_launchers[0].start()
        return socket.socket(fileno=os.dup(fork_servers.socket_fd))

    if lifeline is None:  # otherwise the process that started this one has logged it
        warn_of_wide_permissions(options.data_dir)
    worker = Worker(options, engines, forks)
    running = asyncio.create_task(_run(worker, options.health))

    _obey_signals(worker, options.drain_timeout, is_started_by_another=lifeline is not None)
    if lifeline is not None:
        loop.add_reader(lifeline, running.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await running
    finally:
        for launcher in fork_launchers:
            await launcher.stop(0)


#: The registration of a worker without pools. The answer lists the models and the storage of the scheduler.
STRANGER = Register(WorkerInfo("", "", "", (), 0, "", 0))


class MachineWorkers(Stoppable):
    """All workers of this machine, for schedulers elsewhere (`unfuse worker --workers auto`).

    The workers are placed, restarted and stopped like those that `unfuse serve` starts.

    `logs`: gets the workers' log lines.
    """

    def __init__(self, settings: Settings, logs: Logs) -> None:
        super().__init__(settings.serve.drain_timeout)
        self._settings = settings
        self._logs = logs

    async def run(self, on_planned: Callable[[ServingPlan], object]) -> None:
        """Run the workers until `stop`. Raises ConfigError if one cannot start.

        `on_planned`: called with the plan before the workers start.
        """
        planning = asyncio.create_task(self._plan())
        await first_completed(planning, self.stopping.wait())
        if self.stopping.is_set():
            return
        plan = planning.result()
        settings = self._settings
        warn_of_wide_permissions(settings.data_dir)
        on_planned(plan)

        flags = {"node": settings.worker.node} if settings.worker.node else {}
        scheduler = FIELDS["worker.scheduler"]
        environment = {**self._logs.environment, scheduler.variable: scheduler.written(schedulers(settings))}
        specs = worker_specs(plan, settings, flags, environment)
        launcher = LocalLauncher(specs, self._logs.relay, forks=forked(plan))
        launcher.start()
        try:
            await first_completed(asyncio.shield(launcher.failed), self.stopping.wait())
        finally:
            if not self.stopping.is_set():
                self.stop()  # starts the time budget, also after an error
            await launcher.stop(self.budget.remaining(self.reserve), self.budget.hurry)

    async def _plan(self) -> ServingPlan:
        """Return the plan of this machine's workers for the models of a scheduler.

        It waits until a scheduler answers.
        """
        addresses = schedulers(self._settings)
        link = SchedulerLink(addresses, worker_trusted_keys(self._settings, addresses), lambda: None)
        try:
            registered = await link.register(STRANGER)
        finally:
            await link.close()
        return await asyncio.to_thread(plan_here, self._settings, registered)


def plan_here(settings: Settings, registered: Registered) -> ServingPlan:
    """Return the plan of this machine's workers for the models that a scheduler serves.

    Roles that need the result store are planned only if it can be reached here. Raises ConfigError.
    """
    if not registered.models:
        raise ConfigError("the scheduler serves no model yet: start it with one")
    FINGERPRINTS.cache_in(Path(settings.data_dir))
    compute = settings.compute
    storage = registered.storage
    # The scheduler's dtypes take precedence over "auto" here, because all workers of a pool must have the same ones.
    dtypes = ",".join(dict.fromkeys(",".join(dtype for _, _, dtype in registered.models).split(",")))
    compute = compute if compute.dtype != "auto" else replace(compute, dtype=dtypes)
    serve = replace(settings.serve, workers=settings.worker.workers)
    plan = plan_models(
        [source for _, source, _ in registered.models],
        "",
        worker_plan(replace(settings, serve=serve, compute=compute)),
        usable_devices(device_memory(settings)),
        host_resources(settings),
        has_results=is_same_store(storage.results, storage.results_store_id),
    )
    if plan.refusal:
        raise ConfigError(plan.refusal)
    return plan


#: The most seconds that a check waits for an answer.
ANSWER_S = 6.0

#: Seconds by which the clocks of two machines may differ.
CLOCKS_S = 5.0


class CheckResult(msgspec.Struct, frozen=True):
    """The result of one check of `unfuse doctor`."""

    #: What was checked: port, key, version, clock, models or results.
    what: str

    #: Whether the check succeeded.
    ok: bool

    #: The result in a sentence, with advice if the check failed.
    says: str


async def checks(settings: Settings) -> list[CheckResult]:
    """Check port, key, version, clock, models and results of each named scheduler.

    The checks of a scheduler end with its port, key or version if that check fails.
    """
    results: list[CheckResult] = []
    for address in schedulers(settings):
        port_result = await _check_port(address)
        results.append(port_result)
        if not port_result.ok:
            continue

        sent_at = time.time()
        try:
            registered = await _register(address, worker_trusted_keys(settings, [address]))
        except (ConfigError, ConnectionError) as error:
            results.append(CheckResult("key", False, str(error)))
            continue
        if isinstance(registered, str):
            results.append(CheckResult("version", False, registered))
            continue

        results.append(CheckResult("key", True, f"{address} accepts the key of this machine"))
        # The scheduler read its clock between these two times. Halfway, the error is at most half a round trip.
        answered_at = (sent_at + time.time()) / 2
        results += [_check_version(registered), _check_clock(registered, answered_at)]
        results += [*_check_models(registered), _check_results(registered)]
    return results


async def _check_port(address: str) -> CheckResult:
    """Check that a scheduler's socket exists, or that its TCP port accepts a connection."""
    if path := unix_path(address):
        exists = path.exists()
        return CheckResult(
            "port",
            exists,
            f"the socket {path} exists"
            if exists
            else f"the socket {path} does not exist: start `unfuse serve` on this machine",
        )
    parts = urlsplit(address)
    host, port = parts.hostname or "", parts.port or 0
    try:
        async with asyncio.timeout(ANSWER_S):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        advice = f"start the server there by `unfuse serve --listen {address}`, or correct the port"
        return CheckResult("port", False, f"{host} is reachable, but nothing listens on port {port}: {advice}")
    except OSError as error:
        reason = "no response" if isinstance(error, TimeoutError) else error.strerror or str(error)
        advice = f"correct the address, or allow TCP connections to port {port} in firewalls and networks"
        return CheckResult("port", False, f"{host} cannot be reached ({reason}): {advice}")
    writer.close()
    return CheckResult("port", True, f"{host}:{port} can be reached")


async def _register(address: str, trusted: Trust) -> Registered | str:
    """Return a scheduler's answer to a registration, or why it does not support this version.

    Raises ConnectionError if the scheduler does not accept this machine's key.
    """
    dealer = Dealer(address, trusted)
    try:
        answer = await dealer.call(STRANGER, ANSWER_S)
    except (TimeoutError, ConnectionError) as error:
        raise ConnectionError(
            f"{address} does not accept this machine's key ({str(error) or 'no response'}): copy worker.key again "
            "from the scheduler's --keys folder, which `unfuse serve` prints when it starts"
        ) from error
    finally:
        await dealer.close()
    if isinstance(answer, Registered):
        return answer
    reason = answer.message if isinstance(answer, Rejected) else type(answer).__name__
    return (
        f"{address} does not support version {__version__} of this machine ({reason}): install the same version on "
        "both machines"
    )


def _check_version(registered: Registered) -> CheckResult:
    """Check that the scheduler has the version of this machine."""
    remote_version = registered.version
    if remote_version == __version__:
        return CheckResult("version", True, f"both machines have {__version__}")
    advice = f"install the same version here: pip install 'unfuse[serve]=={remote_version}'"
    says = f"this machine has unfuse {__version__}, the scheduler has {remote_version}: {advice}"
    return CheckResult("version", False, says)


def _check_clock(registered: Registered, now: float) -> CheckResult:
    """Check that the scheduler's clock differs from `now` by at most CLOCKS_S.

    `now`: the time of this machine's clock when the scheduler answered, in Unix seconds.
    """
    if not registered.now:
        return CheckResult("clock", True, "the scheduler does not report its time")
    ahead_s = now - registered.now
    if abs(ahead_s) <= CLOCKS_S:
        return CheckResult("clock", True, f"both clocks agree within {CLOCKS_S:g} s")
    direction = "ahead of" if ahead_s > 0 else "behind"
    advice = "synchronize both by NTP (timedatectl set-ntp true); until then, times in logs and of files are misleading"
    return CheckResult("clock", False, f"the clock here is {abs(ahead_s):.0f} s {direction} the scheduler's: {advice}")


def _check_models(registered: Registered) -> Iterator[CheckResult]:
    """Check that the sources of the served models can be resolved here."""
    for name, source, _ in registered.models:
        try:
            resolve_source(source, None, ())
        except ConfigError as error:
            if source.startswith("/"):
                advice = "copy that folder to the same path here, or serve the model by its hub name"
                yield CheckResult(
                    "models",
                    False,
                    f"{name} is in {source} on the scheduler's machine, but not on this machine: {advice}",
                )
            else:
                yield CheckResult("models", False, str(error))
        else:
            location = (
                "is on this machine"
                if is_local(source)
                else f"is downloaded when a worker starts, or now by `unfuse pull {name}`"
            )
            yield CheckResult("models", True, f"{name} {location}")
    if not registered.models:
        yield CheckResult("models", False, "the scheduler serves no model yet: start it with one")


def _check_results(registered: Registered) -> CheckResult:
    """Check which stages can run here, by whether the result store is accessible."""
    storage = registered.storage
    if is_same_store(storage.results, storage.results_store_id):
        return CheckResult("results", True, "this machine can run all stages")

    specs: list[ModelSpec] = []
    for _, source, _ in registered.models:
        with suppress(ConfigError):  # the check of models reports it
            specs.append(read_model_spec(source, resolve_source(source, None, ())))
    roles = roles_apart(specs)
    advice = (
        "to run them here, mount that folder at the same path, or start the server with --results s3://BUCKET/PREFIX"
    )
    if specs and not roles:
        says = f"this machine cannot access {storage.results}, which every stage of these models needs: {advice}"
        return CheckResult("results", False, says)
    runnable = f" of the roles {', '.join(roles)} can run here, the others" if roles else " that need it"
    return CheckResult(
        "results",
        True,
        f"this machine cannot access {storage.results}: stages{runnable} need workers on the scheduler's machine; "
        f"{advice}",
    )
