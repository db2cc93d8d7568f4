"""The composition root: opens backends by name and hands them, opened, to scheduler and gateway."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import structlog

from unfuse.core.errors import ConfigError, TransientError, UsageError
from unfuse.core.messages import Places, WorkerInfo
from unfuse.core.plan import Choice, Params, roles_of
from unfuse.core.supervisor import Supervisor
from unfuse.core.time_budget import StopBudget
from unfuse.edge.access import Access
from unfuse.edge.connections import ConnectionLimits
from unfuse.edge.keys import Keys as ApiKeys
from unfuse.launch.base import Launcher, OpenLauncher, WorkerSpec
from unfuse.launch.forks import Forks, InheritedForks
from unfuse.launch.local import LocalLauncher
from unfuse.planning.layout import Means
from unfuse.planning.machine import devices
from unfuse.planning.placement import Wanted
from unfuse.queues.base import Limits, QueueBackend, RequestStore
from unfuse.scheduler.arenas import Arenas
from unfuse.scheduler.dispatcher import Dispatcher
from unfuse.scheduler.scheduler import Scheduler
from unfuse.server import create_app
from unfuse.server.fetching import Fetching
from unfuse.server.gateway import Gateway
from unfuse.server.parsers import Parsers
from unfuse.server.prices import Prices
from unfuse.server.starting import Front
from unfuse.server.webhooks import Webhooks
from unfuse.service.addresses import from_elsewhere, running
from unfuse.service.crews import Crews
from unfuse.service.first_checks import require_libraries
from unfuse.service.groups import Serve
from unfuse.service.lending import Lending
from unfuse.service.logs import Logs
from unfuse.service.machine_workers import first
from unfuse.service.plan import Plan, plan_for
from unfuse.service.queue_start import QueueStart, ServiceStopped
from unfuse.service.settings import FIELDS
from unfuse.service.specs import WorkerSlots, forked, specs_of
from unfuse.service.stage_kinds import check_stage_kinds
from unfuse.service.stopping import share_of
from unfuse.stores.keyed import Remains, remains_at
from unfuse.stores.results import ResultStore, mark_of, open_results
from unfuse.weights.source import parse_component_sources
from unfuse.wire.address import UNIX, Trust, host_towards, is_loopback, unix_path
from unfuse.wire.keys import Keys
from unfuse.wire.router import Router
from unfuse.wire.run_folder import machine_id, open_run_folder
from unfuse.wire.unix_socket import server_socket
from unfuse.worker.registration import pools_of

DRAIN_CHECK_S = 0.1
CLOSE_S = 0.5  # seconds that closing the queue may take at least, and that are left behind it

FORGET_S = 60.0  # seconds between two rounds of deleting old requests and results
BOUND_S = 10.0  # seconds between two looks at the bytes of all results
REMAINS_S = 10.0  # seconds between two searches for what dead workers left in durable stores
ARENAS = ("auto", "shared_memory", "spill")  # stores that keep objects in arenas

log = structlog.get_logger(__name__)


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a service as they are taken, `serve`, and what is made of those that have to be read first.

    Workers come in at `listen`, where `trust` says whom to believe; unless a unix socket is among these there is one
    in `run_dir`. `worker_flags` are what the workers it starts are told beside how to compute, by flag;
    `worker_environment` by variable; each has the `slots` of its role, and these `resources`. They share what `means`
    there are, and of devices at most `device_memory`. `standard` parameters go before the models' own. The file `costs`
    remembers what stages take. Workers are started elsewhere by the `launcher`, else here. Links begin with the
    `public_url`, if there is one. `parsers` selects the parsers of answers. By its `name` the queue knows this server,
    also after it was started again.
    """

    serve: Serve
    keys: ApiKeys
    access: Access
    bounds: ConnectionLimits
    prices: Prices
    queue: str
    queue_wait: float
    places: Places
    run_dir: str
    listen: tuple[str, ...]
    trust: Trust
    worker_flags: Mapping[str, object]
    worker_environment: Mapping[str, str]
    workers: Wanted
    device_memory: Mapping[str, int]
    means: Means
    slots: WorkerSlots
    asleep: Mapping[str, int]
    resources: Mapping[str, int]
    limits: Limits
    encoder_cache: int
    costs: Path | None
    lease_ttl: float
    standard: Params
    launcher: OpenLauncher | None
    public_url: str
    parsers: Parsers
    name: str


def plan(options: ServeOptions, models: Mapping[str, str] | None = None) -> Plan:
    """The plan for these options, or for `models` in place of theirs, by name, with where each is.

    Raises ConfigError for models that cannot be served, or do not fit.
    """
    found = devices(options.device_memory, elsewhere=options.launcher is not None)
    for kind in options.prices.unseen([device.name for device in found]):
        log.warning("a price is set for devices that are not on this machine", kind=kind, counts="workers elsewhere")
    serve = options.serve
    sources = parse_component_sources(serve.component_source)
    if sources and len(serve.models if models is None else models) > 1:
        raise UsageError("--component-source is for one model: serve the others by another server")
    named = serve.models if models is None else models
    planned = plan_for(named, serve.revision, options.workers, found, options.means, sources=sources)
    if planned.refusal:
        raise ConfigError(planned.refusal)
    cards = [model.card for model in planned.models]
    check_stage_kinds(serve, cards)
    for worker in planned.workers:
        pools_of(cards, Choice(roles_of(worker.role)), options.resources)
    if options.launcher is None:
        require_libraries(planned, options.places.loras)
    return planned


class Service:
    """Gateway, scheduler and the workers of a plan: one `serve`. It closes `forks`, unless they are inherited."""

    def __init__(
        self, options: ServeOptions, plan: Plan, logs: Logs, forks: Forks | InheritedForks | None = None
    ) -> None:
        self._options, self._plan, self._logs, self._forks = options, plan, logs, forks
        self.addresses: list[str] = []  # the control addresses, once they are open; a unix socket is first
        self._crews: Crews | None = None
        self._stop, self._budget = asyncio.Event(), StopBudget(options.serve.drain_timeout)

    def stop(self) -> None:
        """Accept no more requests, save what runs, and end, within the drain timeout. A second call ends at once."""
        if self._stop.is_set():
            self._budget.hurry.set()
        else:
            self._budget = StopBudget(self._options.serve.drain_timeout)
        self._stop.set()

    async def run(self, started: Callable[[str], None]) -> None:
        """Serve until `stop`; `started` is called with the URL once requests are answered.

        Raises ConfigError, and TransientError for a queue that cannot be used in time.
        """
        with contextlib.suppress(ServiceStopped):
            await self._run(started)

    async def _run(self, started: Callable[[str], None]) -> None:
        options, serve = self._options, self._options.serve
        check_host(options)
        names = public_names(serve)
        listener = listen(serve.host, serve.port, options.run_dir)
        front = Front(listener, options.bounds, options.access, keyed=bool(options.keys))
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(listener.close)
            stack.push_async_callback(front.close)
            port = listener.getsockname()[1]
            start = QueueStart(options.queue_wait, self._stop, front.wait)
            scheduler, dispatcher, crews = await stack.enter_async_context(self._scheduler(port, start))
            results = open_results(options.places.results)
            webhooks = Webhooks(serve.webhook_hosts, serve.webhook_secret, options.prices)
            fetching = Fetching(serve.image_hosts)
            stack.push_async_callback(webhooks.close)
            stack.push_async_callback(fetching.close)
            gateway = Gateway(
                scheduler, results, keys=options.keys, names=names, standard=options.standard,
                loras=options.places.loras, strict=serve.strict_params,
                time_limits={"image": serve.image_timeout, "video": serve.video_timeout},
                store=options.places.store.removeprefix("spill:").partition("+")[0].partition(":")[0],
                cancels=serve.on_disconnect == "cancel", reuses=serve.reuse_results, webhooks=webhooks,
                prices=options.prices, fetching=fetching, joining=crews, public_url=options.public_url,
                parsers=options.parsers, open_metrics=serve.open_metrics,
            )  # fmt: skip
            serving = front.serve(create_app(gateway, options.access))
            webhooks.start(scheduler, gateway.links)
            remains = remains_at(options.places.store, options.places.copies)
            background = Supervisor()
            stack.push_async_callback(background.close)
            background.forever("forgetting what is over", partial(_forget, scheduler.queue, results, serve.retention_s))
            if serve.results_limit:
                bound = partial(_bound, scheduler.queue, results, serve.results_limit)
                background.forever("keeping results within their limit", bound)
            background.forever("dropping what dead workers left", partial(_drop_remains, scheduler, remains))
            background.forever("looking whether keys have changed", options.keys.look)
            if options.keys.warning:
                log.warning(options.keys.warning)
            launcher = crews.begin(self._plan)
            background.forever("looking which models come and go", crews.look)
            host = f"[{serve.host}]" if ":" in serve.host else serve.host
            started(f"http://{host}:{port}")
            try:
                await first(asyncio.shield(serving), self._stop.wait(), _raise(launcher.failed))
                await self._await_callers(scheduler, gateway, crews)
            finally:
                scheduler.draining = True  # those who wait are left, and leave nothing
                if not self._stop.is_set():
                    self.stop()
                kept = "goes on after the next start" if options.places.copies != "none" else "is finished if it can be"
                log.info("stopping the workers", what_runs=kept, within_s=round(self._budget.left(), 1))
                dispatcher.withhold()
                await crews.stop(self._budget.left(share_of(self._budget)), self._budget.hurry)
                await front.close()

    @contextlib.asynccontextmanager
    async def _scheduler(self, port: int, start: QueueStart) -> AsyncIterator[tuple[Scheduler, Dispatcher, Crews]]:
        options, serve, cards = self._options, self._options.serve, [model.card for model in self._plan.models]
        offered = [(model.card.name, model.card.source, model.dtypes) for model in self._plan.models]
        arenas = Arenas(spills=options.places.store.partition(":")[0] == "spill")
        queue = await start.open(options.queue)
        scheduler = Scheduler(
            queue, limits=options.limits, lease_ttl=options.lease_ttl, cards=cards, order=serve.order,
            cache_bytes=options.encoder_cache, costs=options.costs, arenas=arenas, asleep=options.asleep,
            wake_limit=serve.wake_limit,
        )  # fmt: skip
        places = msgspec.structs.replace(options.places, mark=mark_of(options.places.results))
        folder, routers = open_run_folder(options.run_dir), list[Router]()
        dispatcher = Dispatcher(
            scheduler, offered, places, options.workers.compute.outcome, serve.dispatch, node=machine_id(folder)
        )
        lending = Lending(dispatcher, places.loras)
        own = [] if any(map(unix_path, options.listen)) else [f"{UNIX}{server_socket(options.run_dir, port)}"]
        try:
            for address in sorted((*own, *options.listen), key=lambda address: not unix_path(address)):
                routers.append(Router(address, lending.answer, dispatcher.undelivered, options.trust, folder))
            self.addresses = [router.address for router in routers]
            await start.until_done(partial(scheduler.registry.declare, cards))
            await scheduler.start()
            drain, expect = serve.drain_timeout, partial(self._expect, arenas)
            self._crews = Crews(scheduler, dispatcher, self._planned, self._launch, expect, drain, options.name)
            yield scheduler, dispatcher, self._crews
        finally:
            for router in routers:
                await router.close()
            await scheduler.close()
            await self._close(queue)

    def _expect(self, arenas: Arenas, plans: Sequence[Plan]) -> None:
        """Have a scheduler expect the arenas of the workers that are started here."""
        options = self._options
        if options.places.store.partition(":")[0] in ARENAS:
            arenas.expected = [
                WorkerInfo(
                    f"{at}-{number}", "", worker.role,
                    pools_of([model.card for model in plan.models], Choice(roles_of(worker.role)), options.resources),
                    1, "", options.workers.arena, resources=dict(options.resources),
                )
                for at, plan in enumerate(plans) for number, worker in enumerate(plan.workers)
            ]  # fmt: skip

    def _planned(self, models: Mapping[str, str], taken: Counter[str], coming: Counter[str]) -> Plan:
        """Plan models, by name and where each is, beside others, which take or (`coming`) will take bytes of devices.

        Raises ConfigError.
        """
        options = self._options
        found = devices(options.device_memory, elsewhere=options.launcher is not None)
        left = {device.name: max(0, device.free - coming[device.name]) for device in found}
        left |= {name: max(0, min(left[name], most - taken[name])) for name, most in options.device_memory.items()}
        own = models.keys() & {*options.serve.models}
        revision = options.serve.revision if own else ""
        if revision and own != models.keys():
            raise ConfigError(f"--revision {revision} is of the models that were named there, not of one that is added")
        sources = options.serve.component_source if own else ()
        serve = msgspec.structs.replace(options.serve, revision=revision, component_source=sources)
        return plan(msgspec.structs.replace(options, serve=serve, device_memory=left), models)

    def _launch(self, planned: Plan, first: int) -> Launcher:
        """Start the workers of a plan; the first of them goes by this number."""
        specs, launcher = self._specs(planned), self._options.launcher
        if launcher is None:
            forks = forked(planned, self._forks)
            if not isinstance(self._forks, InheritedForks):
                self._forks = None
            launcher = partial(LocalLauncher, forks=forks)
        opened = launcher(specs, lambda at, line: self._hear(first + at, line))
        opened.start()
        return opened

    def _hear(self, worker: int, line: bytes) -> None:
        """Read a line of a worker, in whatever thread, and show it."""
        if self._crews:
            self._crews.hear(worker, line)
        self._logs.relay(worker, line)

    def _specs(self, planned: Plan) -> list[WorkerSpec]:
        """The workers to start. Each gets its dtypes from the scheduler, since models differ."""
        options = self._options
        pulled_by = self.addresses if isinstance(options.trust, Keys) else ()
        flags = {**options.worker_flags, "drain-timeout": options.serve.drain_timeout}
        told = {"scheduler": self.addresses[0], "listen": host_towards(*pulled_by), **flags}
        environment = {**options.worker_environment, **self._logs.environment}
        if options.launcher:  # each goes by the address that schedulers see, and has the folders of its own machine
            told = {"scheduler": next(from_elsewhere(one) for one in self.addresses if not unix_path(one))}
            told |= flags
            for folder in ("run_dir", "data_dir"):
                del environment[FIELDS[folder].variable]
        models = tuple(model.card.name for model in planned.models)
        return specs_of(planned, options.means.cores, options.slots, told, environment, models)

    async def _await_callers(self, scheduler: Scheduler, gateway: Gateway, crews: Crews) -> None:
        """Wait for the requests that callers wait for here, as long as one can be over in time.

        Half of the budget is for workers, if there are any. All other requests go on after the start, or elsewhere.
        """
        scheduler.draining, budget = True, self._budget
        reserve = budget.seconds / 2 if crews.has_workers else share_of(budget)

        async def waits() -> None:
            while await gateway.awaited_within(budget.left(reserve)):
                await asyncio.sleep(DRAIN_CHECK_S)

        await budget.within(budget.left(reserve), waits())

    async def _close(self, queue: QueueBackend) -> None:
        """Close the queue; in a stop, not beyond its budget, for a server that does not answer takes long."""
        if not self._stop.is_set():
            await queue.close()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(CLOSE_S, self._budget.left(CLOSE_S))):
                await queue.close()


async def _forget(requests: RequestStore, results: ResultStore, retention: float) -> None:
    """Delete requests and results that ended more than `retention` seconds ago."""
    await asyncio.sleep(min(FORGET_S, retention))
    before = time.time() - retention
    with contextlib.suppress(TransientError):
        await requests.forget(before)
    await asyncio.to_thread(results.forget, before)


async def _bound(requests: RequestStore, results: ResultStore, limit: int) -> None:
    """Delete the oldest requests that are over, with their results, while these take more than `limit` bytes.

    Who reads a result meanwhile gets all of it, since a file that is open stays.
    """
    await asyncio.sleep(BOUND_S)
    kept = await asyncio.to_thread(results.kept)
    too_many = sum(nbytes for _, nbytes in kept.values()) - limit
    for request in await requests.over(list(kept)) if too_many > 0 else ():
        if too_many > 0:
            await asyncio.to_thread(results.delete, request)
            too_many -= kept[request][1]
            with contextlib.suppress(TransientError):  # of a full disk: there is more room now, and retention follows
                await requests.drop(request)


async def _drop_remains(scheduler: Scheduler, places: Sequence[Remains]) -> None:
    """Delete the objects of ended requests whose owner died, or could not delete them."""
    await asyncio.sleep(REMAINS_S)
    for place in places:
        with contextlib.suppress(TransientError):
            folders = await asyncio.to_thread(place.requests)
            for request in await scheduler.over(tuple(folders)):
                await asyncio.to_thread(place.drop, folders[request])


def public_names(serve: Serve) -> dict[str, str]:
    """The models by the names that clients use. Raises ConfigError if a name is ambiguous."""
    models, names = serve.models, serve.served_model_name
    if len(models) == 1:
        return dict.fromkeys(names, models[0])
    if names and len(names) != len(models):
        raise UsageError(f"--served-model-name is given {len(names)} times for {len(models)} models: once for each")
    return dict(zip(names, models, strict=False))


def check_host(options: ServeOptions) -> None:
    """Raise ConfigError for an address that others can reach, where no key keeps them out."""
    host = options.serve.host
    if not is_loopback(host) and not options.keys:
        raise UsageError(
            f"--host {host} can be reached by others: set --api-keys FILE or --api-key KEY, or use 127.0.0.1"
        )


def check_address(options: ServeOptions) -> None:
    """Raise ConfigError for an address where this server could not listen, or must not. Then nothing need be read."""
    check_host(options)
    listen(options.serve.host, options.serve.port, options.run_dir).close()


def listen(host: str, port: int, run_dir: str) -> socket.socket:
    """Open the gateway's socket, where clients may connect and wait from now on. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named, or asyncio leaves Nagle on
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # from now on the port is taken, and early clients wait
    except OSError as error:
        listener.close()
        own = "a server of yours has it; " if error.errno == errno.EADDRINUSE and str(port) in running(run_dir) else ""
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; {own}choose another --port") from error
    return listener


async def _raise(failed: asyncio.Future[None]) -> None:
    await asyncio.wait({failed})
    if failed.cancelled():  # its workers were ended, since their models have left: that is no reason to end
        await asyncio.Event().wait()
    failed.result()
