"""All workers of a machine, for schedulers that run elsewhere (`unfuse worker --workers auto`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from msgspec.structs import replace

from unfuse.core.errors import ConfigError
from unfuse.core.messages import Hello, Welcome, WorkerInfo
from unfuse.core.time_budget import StopBudget
from unfuse.launch.local import LocalLauncher
from unfuse.planning.machine import devices
from unfuse.service.addresses import schedulers, worker_trust
from unfuse.service.groups import Settings
from unfuse.service.logs import Logs
from unfuse.service.plan import Plan, plan_for, wanted
from unfuse.service.resources import device_memory, means
from unfuse.service.settings import FIELDS
from unfuse.service.specs import WorkerSlots, environment_of, flags_of, forked, specs_of
from unfuse.service.stopping import share_of
from unfuse.stores.results import sees
from unfuse.weights.fingerprints import FINGERPRINTS
from unfuse.worker.link import Link

STRANGER = Hello(WorkerInfo("", "", "", (), 0, "", 0))  # a worker without pools, which asks what there is to serve
LEAVING_S = 10.0  # seconds beside the drain timeout that workers of a model that left get to end


class MachineWorkers:
    """They are placed, and kept running, as those are that `serve` starts."""

    def __init__(self, settings: Settings, logs: Logs) -> None:
        self._settings, self._logs = settings, logs
        self._stop, self._budget = asyncio.Event(), StopBudget(settings.serve.drain_timeout)

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Have the workers end within the drain timeout, as `serve` does. A second call ends them at once."""
        if self._stop.is_set():
            self._budget.hurry.set()
        else:
            self._budget = StopBudget(self._settings.serve.drain_timeout)
        self._stop.set()

    async def run(self, starting: Callable[[Plan], object]) -> None:
        """Run them until `stop`; `starting` is called with what is started. Raises ConfigError if one cannot start."""
        planning = asyncio.create_task(self._plan())
        await first(planning, self._stop.wait())
        if self._stop.is_set():
            return
        planned, settings = planning.result(), self._settings
        starting(planned)
        named = {"node": settings.worker.node} if settings.worker.node else {}
        told = {**flags_of(settings), "drain-timeout": settings.serve.drain_timeout, **named}
        scheduler = FIELDS["worker.scheduler"]
        environment = {
            **environment_of(settings), **self._logs.environment,
            scheduler.variable: scheduler.written(schedulers(settings)),
        }  # fmt: skip
        specs = specs_of(planned, means(settings).cores, WorkerSlots.of(settings), told, environment)
        launcher = LocalLauncher(specs, self._logs.relay, forks=forked(planned))
        launcher.start()
        try:
            await first(asyncio.shield(launcher.failed), self._stop.wait())
        finally:
            if not self._stop.is_set():
                self.stop()
            await launcher.stop(self._budget.left(share_of(self._budget)), self._budget.hurry)

    async def _plan(self) -> Plan:
        """Ask a scheduler what to serve, until one answers, and decide who of that is started here."""
        return await asyncio.to_thread(plan_here, self._settings, await offered(self._settings))


async def offered(settings: Settings) -> Welcome:
    """What the schedulers offer to workers that come; asked until one answers."""
    link = Link(addresses := schedulers(settings), worker_trust(settings, addresses), lambda: None)
    try:
        return await link.hello(STRANGER)
    finally:
        await link.close()


def plan_here(settings: Settings, welcome: Welcome) -> Plan:
    """This machine's workers for that offer; those for results only if they are seen here. Raises ConfigError."""
    if not welcome.models:
        raise ConfigError("the scheduler serves no model yet: start it with one")
    FINGERPRINTS.remember_in(Path(settings.data_dir))
    compute, places = settings.compute, welcome.places
    dtypes = ",".join(dict.fromkeys(",".join(dtype for _, _, dtype in welcome.models).split(",")))
    compute = compute if compute.dtype != "auto" else replace(compute, dtype=dtypes)
    serve = replace(settings.serve, workers=settings.worker.workers)
    planned = plan_for(
        [source for _, source, _ in welcome.models], "", wanted(replace(settings, serve=serve, compute=compute)),
        devices(device_memory(settings)), means(settings), results=sees(places.results, places.mark),
    )  # fmt: skip
    if planned.refusal:
        raise ConfigError(planned.refusal)
    return planned


async def first(*works: Awaitable[object]) -> None:
    """Wait until one ends, and raise its exception; the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
