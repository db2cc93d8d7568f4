"""The composition root: opens backends by name and hands them, opened, to scheduler and gateway.

`local` is a private service: its workers serve this process alone, and end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import secrets
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog
from anyio import to_thread

from unfuse import queues
from unfuse.client import Client
from unfuse.core.errors import ConfigError, NotFound, PermanentError, TransientError, UnfuseError, UsageError
from unfuse.core.messages import AdapterBytes, FetchAdapter, Rejected, ToScheduler, ToWorker, WorkerInfo
from unfuse.core.plan import StageSelector, roles_of
from unfuse.core.supervisor import Supervisor, first
from unfuse.edge.connections import ConnectionLimits
from unfuse.edge.keys import ApiKeys as ApiKeys
from unfuse.launch.base import Launcher
from unfuse.launch.local import ForkServers, InheritedForks, LocalLauncher
from unfuse.planning.machine import devices
from unfuse.queues.base import QueueBackend, QueueLimits, RequestStore
from unfuse.scheduler.admission import PoolArenas
from unfuse.scheduler.dispatcher import Dispatcher
from unfuse.scheduler.scheduler import Scheduler
from unfuse.server.app import HttpFrontend, create_app
from unfuse.server.gateway import Gateway
from unfuse.server.multimodal_messages import ImageFetcher
from unfuse.server.webhooks import Webhooks
from unfuse.service.addresses import from_elsewhere, running
from unfuse.service.disk import passing_folder
from unfuse.service.groups import ServeSettings
from unfuse.service.loading import LoadingProgress, LoadLines
from unfuse.service.logs import Logs
from unfuse.service.options import ServeOptions, options, plan
from unfuse.service.plan import ServingPlan, forked, specs_of
from unfuse.service.settings import DEFAULT, LoadedSettings, load
from unfuse.service.stopping import Stoppable
from unfuse.service.worker_groups import WorkerGroups
from unfuse.stores.keyed import StoredObjects, remains_at
from unfuse.stores.results import ResultStore, mark_of, open_results
from unfuse.weights.adapters import AdapterFolder
from unfuse.wire.address import UNIX, host_towards, is_loopback, unix_path
from unfuse.wire.keys import Keys
from unfuse.wire.router import Router
from unfuse.wire.run_folder import machine_id, open_run_folder
from unfuse.wire.unix_socket import private_socket, server_socket
from unfuse.worker.records import is_configured_elsewhere
from unfuse.worker.registration import pools_of

DRAIN_CHECK_S = 0.1
CLOSE_S = 0.5  # seconds that closing the queue may take at least, and that are left behind it

FORGET_S = 60.0  # seconds between two rounds of deleting old requests and results
BOUND_S = 10.0  # seconds between two looks at the bytes of all results
REMAINS_S = 10.0  # seconds between two searches for what dead workers left in durable stores
ARENAS = ("auto", "shared_memory", "spill")  # stores that keep objects in arenas

RETRY_S = 0.5  # seconds between two tries to use a queue

LOGGER = "unfuse"
"""The logger of Python's own logging that tells programs which configure it how far workers are."""

T = TypeVar("T")

log = structlog.get_logger(__name__)


class ServiceStopped(Exception):
    """The service was stopped before its queue could be used."""


class QueueStart:
    """Opens the queue of a service, and waits for one that is away, that loads its data, or whose disk is full:
    `longest_s` seconds at most in all, or until `stop` is set.

    `waits` is called with the reason whenever the queue could not be used.
    """

    def __init__(self, longest_s: float, stop: asyncio.Event, waits: Callable[[str], object]) -> None:
        self._end = asyncio.get_running_loop().time() + longest_s
        self._stop, self._on_wait = stop, waits

    async def open(self, url: str) -> QueueBackend:
        """Open the queue at `url` and see that it works. Raises ConfigError if it can never be the queue.

        Raises TransientError if it does not work in time, and ServiceStopped.
        """

        async def opened() -> QueueBackend:
            return queues.open(url)

        async def answers() -> None:
            await queue.reach()
            await queue.check()

        queue = await self.until_done(opened)
        try:
            await self.until_done(answers)
        except BaseException:
            await queue.close()
            raise
        return queue

    async def until_done(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Repeat this work until the queue does not fail it. Raises TransientError (too long) and ServiceStopped.

        That the start waits is logged once, and that it goes on.
        """
        has_waited = False
        while True:
            try:
                done = await self._unless_stopped(work())
            except TransientError as error:
                if asyncio.get_running_loop().time() >= self._end:
                    raise
                if not has_waited:
                    log.warning("the queue cannot be used yet: waiting for it", reason=str(error))
                has_waited = True
                self._on_wait(str(error))
            else:
                if has_waited:
                    log.info("the queue can be used now")
                return done
            await self._unless_stopped(asyncio.sleep(RETRY_S))

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Do this work. Raises ServiceStopped when the service is stopped before it is done."""
        working = asyncio.create_task(work)
        await first(working, self._stop.wait())
        if working.cancelled():
            raise ServiceStopped
        return working.result()


class AdapterServer:
    """Answers workers: of adapters in the folder `loras` itself, of all else by the dispatcher."""

    def __init__(self, dispatcher: Dispatcher, loras: str) -> None:
        self._dispatcher, self._loras = dispatcher, AdapterFolder(loras) if loras else None

    async def answer(self, peer: bytes, message: ToScheduler) -> ToWorker | None:
        """The reply to one message."""
        if not isinstance(message, FetchAdapter):
            return await self._dispatcher.answer(peer, message)
        if self._loras is None:
            return Rejected("no lora is served here: start the server with --loras FOLDER")
        try:
            return AdapterBytes(*await to_thread.run_sync(self._loras.part, message.name, message.id, message.offset))
        except (NotFound, PermanentError) as error:
            return Rejected(str(error))
        except OSError as error:
            return Rejected(f"lora {message.name!r} cannot be read: {error.strerror}")


class Service(Stoppable):
    """Gateway, scheduler and the workers of a plan: one `serve`. It closes `forks`, unless they are inherited.

    At `stop` it accepts no more requests, saves what runs, and ends, within the drain timeout.
    """

    def __init__(
        self, options: ServeOptions, plan: ServingPlan, logs: Logs, forks: ForkServers | InheritedForks | None = None
    ) -> None:
        super().__init__(options.serve.drain_timeout)
        self._options, self._plan, self._logs, self._forks = options, plan, logs, forks
        self.addresses: list[str] = []  # the control addresses, once they are open; a unix socket is first
        self._crews: WorkerGroups | None = None

    async def run(self, started: Callable[[str], None]) -> None:
        """Serve until `stop`; `started` is called with the URL once requests are answered.

        Raises ConfigError, and TransientError for a queue that cannot be used in time.
        """
        with contextlib.suppress(ServiceStopped):
            await self._run(started)

    async def _run(self, started: Callable[[str], None]) -> None:
        options, serve = self._options, self._options.serve
        names, listener = public_names(serve), listen(options)
        bounds = ConnectionLimits(serve.max_connections, serve.max_connections_per_address)
        front = HttpFrontend(listener, bounds, options.access, keyed=bool(options.keys))
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(listener.close)
            stack.push_async_callback(front.close)
            port = listener.getsockname()[1]
            start = QueueStart(serve.queue_wait, self.stopping, front.wait)
            scheduler, dispatcher, crews = await stack.enter_async_context(self._scheduler(port, start))
            results = open_results(options.places.results)
            webhooks = Webhooks(serve.webhook_hosts, serve.webhook_secret, options.prices)
            image_fetcher = ImageFetcher(serve.image_hosts)
            stack.push_async_callback(webhooks.close)
            stack.push_async_callback(image_fetcher.close)
            gateway = Gateway(
                scheduler, results, keys=options.keys, names=names, standard=options.standard,
                loras=options.places.loras, strict=serve.strict_params,
                time_limits={"image": serve.image_timeout, "video": serve.video_timeout},
                store=options.places.store.removeprefix("spill:").partition("+")[0].partition(":")[0],
                cancels=serve.on_disconnect == "cancel", reuses=serve.reuse_results, webhooks=webhooks,
                prices=options.prices, image_fetcher=image_fetcher, joining=crews, public_url=options.public_url,
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
                await first(asyncio.shield(serving), self.stopping.wait(), _raise(launcher.failed))
                await self._await_callers(scheduler, gateway, crews)
            finally:
                scheduler.draining = True  # those who wait are left, and leave nothing
                if not self.stopping.is_set():
                    self.stop()
                kept = "goes on after the next start" if options.places.copies != "none" else "is finished if it can be"
                log.info("stopping the workers", what_runs=kept, within_s=round(self.budget.left(), 1))
                dispatcher.withhold()
                await crews.stop(self.budget.left(self.reserve), self.budget.hurry)
                await front.close()

    @contextlib.asynccontextmanager
    async def _scheduler(
        self, port: int, start: QueueStart
    ) -> AsyncIterator[tuple[Scheduler, Dispatcher, WorkerGroups]]:
        options, serve, cards = self._options, self._options.serve, [model.card for model in self._plan.models]
        settings, kind = options.settings, options.places.store.partition(":")[0]
        offered = [(model.card.name, model.card.source, model.dtypes) for model in self._plan.models]
        arenas = PoolArenas(spills=kind == "spill")
        queue = await start.open(options.queue)
        scheduler = Scheduler(
            queue, limits=QueueLimits(serve.max_active, serve.max_queue, serve.max_cost or None), cards=cards,
            lease_ttl=settings.lease.ttl_s, order=serve.order, cache_bytes=serve.encoder_cache if kind in ARENAS else 0,
            costs=options.costs, arenas=arenas, asleep=options.asleep, wake_limit=serve.wake_limit,
        )  # fmt: skip
        places = msgspec.structs.replace(options.places, mark=mark_of(options.places.results))
        folder, routers = open_run_folder(settings.run_dir), list[Router]()
        dispatcher = Dispatcher(
            scheduler, offered, places, options.workers.compute.outcome, serve.dispatch, node=machine_id(folder)
        )
        lending = AdapterServer(dispatcher, places.loras)
        own = [] if any(map(unix_path, options.listen)) else [f"{UNIX}{server_socket(settings.run_dir, port)}"]
        try:
            for address in sorted((*own, *options.listen), key=lambda address: not unix_path(address)):
                routers.append(Router(address, lending.answer, dispatcher.undelivered, options.trust, folder))
            self.addresses = [router.address for router in routers]
            await start.until_done(partial(scheduler.registry.declare, cards))
            await scheduler.start()
            drain, expect = serve.drain_timeout, partial(self._expect, arenas)
            name = f"{socket.gethostname()}:{serve.port}:{Path(settings.data_dir).absolute()}"
            self._crews = WorkerGroups(scheduler, dispatcher, self._planned, self._launch, expect, drain, name)
            yield scheduler, dispatcher, self._crews
        finally:
            for router in routers:
                await router.close()
            await scheduler.close()
            await self._close(queue)

    def _expect(self, arenas: PoolArenas, plans: Sequence[ServingPlan]) -> None:
        """Have a scheduler expect the arenas of the workers that are started here."""
        options = self._options
        if options.places.store.partition(":")[0] in ARENAS:
            arenas.expected = [
                WorkerInfo(
                    f"{at}-{number}",
                    "",
                    worker.role,
                    pools_of(
                        [model.card for model in plan.models], StageSelector(roles_of(worker.role)), options.resources
                    ),
                    1,
                    "",
                    options.workers.arena,
                    resources=dict(options.resources),
                )
                for at, plan in enumerate(plans)
                for number, worker in enumerate(plan.workers)
            ]

    def _planned(self, models: Mapping[str, str], taken: Counter[str], coming: Counter[str]) -> ServingPlan:
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
        settings = msgspec.structs.replace(options.settings, serve=serve)
        return plan(msgspec.structs.replace(options, settings=settings, device_memory=left), models)

    def _launch(self, planned: ServingPlan, first: int) -> Launcher:
        """Start the workers of a plan; the first of them goes by this number."""
        options, launcher = self._options, self._options.launcher
        pulled_by = self.addresses if isinstance(options.trust, Keys) else ()
        told = {"scheduler": self.addresses[0], "listen": host_towards(*pulled_by)}
        if launcher:  # each goes by the address that schedulers see
            told = {"scheduler": next(from_elsewhere(one) for one in self.addresses if not unix_path(one))}
        models, more = tuple(model.card.name for model in planned.models), self._logs.environment
        specs = specs_of(planned, options.settings, told, more, models, elsewhere=launcher is not None)
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

    async def _await_callers(self, scheduler: Scheduler, gateway: Gateway, crews: WorkerGroups) -> None:
        """Wait for the requests that callers wait for here, as long as one can be over in time.

        Half of the budget is for workers, if there are any. All other requests go on after the start, or elsewhere.
        """
        scheduler.draining, budget = True, self.budget
        reserve = budget.seconds / 2 if crews.has_workers else self.reserve

        async def waits() -> None:
            while await gateway.awaited_within(budget.left(reserve)):
                await asyncio.sleep(DRAIN_CHECK_S)

        await budget.within(budget.left(reserve), waits())

    async def _close(self, queue: QueueBackend) -> None:
        """Close the queue; in a stop, not beyond its budget, for a server that does not answer takes long."""
        if not self.stopping.is_set():
            await queue.close()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(CLOSE_S, self.budget.left(CLOSE_S))):
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


async def _drop_remains(scheduler: Scheduler, places: Sequence[StoredObjects]) -> None:
    """Delete the objects of ended requests whose owner died, or could not delete them."""
    await asyncio.sleep(REMAINS_S)
    for place in places:
        with contextlib.suppress(TransientError):
            folders = await asyncio.to_thread(place.requests)
            for request in await scheduler.over(tuple(folders)):
                await asyncio.to_thread(place.drop, folders[request])


def public_names(serve: ServeSettings) -> dict[str, str]:
    """The models by the names that clients use. Raises ConfigError if a name is ambiguous."""
    models, names = serve.models, serve.served_model_name
    if len(models) == 1:
        return dict.fromkeys(names, models[0])
    if names and len(names) != len(models):
        raise UsageError(f"--served-model-name is given {len(names)} times for {len(models)} models: once for each")
    return dict(zip(names, models, strict=False))


def listen(options: ServeOptions) -> socket.socket:
    """Open the gateway's socket, where clients may connect and wait from now on.

    Raises ConfigError, also for an address that others can reach where no key keeps them out.
    """
    host, port = options.serve.host, options.serve.port
    if not is_loopback(host) and not options.keys:
        raise UsageError(
            f"--host {host} can be reached by others: set --api-keys FILE or --api-key KEY, or use 127.0.0.1"
        )

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named, or asyncio leaves Nagle on
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # from now on the port is taken, and early clients wait
    except OSError as error:
        listener.close()
        is_ours = error.errno == errno.EADDRINUSE and str(port) in running(options.settings.run_dir)
        own = "a server of yours has it; " if is_ours else ""
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; {own}choose another --port") from error
    return listener


async def _raise(failed: asyncio.Future[None]) -> None:
    await asyncio.wait({failed})
    if failed.cancelled():  # its workers were ended, since their models have left: that is no reason to end
        await asyncio.Event().wait()
    failed.result()


@contextmanager
def local(model: str | None = None, *, threads: int | None = None) -> Iterator[Client]:
    """A client of workers that serve this process alone while the block lasts; `model` is a name, a folder or a hub id.

    `threads` is CPU threads per worker. Everything else is as the environment sets it. How far the workers are with
    loading is written to standard error; or, by a program that configures logging, to its log as `info`; or nowhere, if
    UNFUSE_LOG__LEVEL is set. Raises ConfigError.
    """
    loaded = load({"serve.models": [model] if model else None, "compute.threads": threads})
    logs, loading = Logs(loaded.settings.log), LoadingProgress(loaded.settings.serve.models)
    say = _teller(logs, loaded.settings.log.level)
    if not structlog.is_configured():
        logs.open_log()
    lines: AbstractContextManager[object] = nullcontext()
    if say:
        logs.heard = loading.hear
        lines = LoadLines(", ".join(loaded.settings.serve.models), loading, say)
    with lines, own_pools(loaded, logs, loading) as client:
        yield client


def _teller(logs: Logs, level: str) -> Callable[[str], object] | None:
    """Return what writes a line on loading where this program wants it; None if it wants no such lines."""
    if is_configured_elsewhere():
        tell: Callable[[str], object] = structlog.get_logger(LOGGER).info
        return tell
    if logging.getLogger(LOGGER).hasHandlers():
        return logging.getLogger(LOGGER).info
    return (lambda line: logs.say(f"unfuse: {line}")) if level == "auto" else None


def without_keys(loaded: LoadedSettings) -> LoadedSettings:
    """Return the settings without API keys, which are those of a server elsewhere."""
    serve = msgspec.structs.replace(loaded.settings.serve, api_key=(), api_keys=())
    return LoadedSettings(msgspec.structs.replace(loaded.settings, api_key="", serve=serve), loaded.origins)


@contextmanager
def own_pools(
    loaded: LoadedSettings,
    logs: Logs,
    loading: LoadingProgress | None = None,
    check: Callable[[ServingPlan], object] | None = None,
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
def _served(options: ServeOptions, planned: ServingPlan, logs: Logs) -> Iterator[Client]:
    """A service for this process alone, on a free port with a random key; it ends with the block.

    Raises ConfigError if a worker cannot start, in place of any other error that follows from it.
    """
    key = secrets.token_urlsafe(24)
    own = f"{UNIX}{private_socket(options.settings.run_dir)}"
    settings = msgspec.structs.replace(options.settings, serve=msgspec.structs.replace(options.serve, port=0))
    options = msgspec.structs.replace(options, settings=settings, listen=(own,), keys=ApiKeys((key,)))
    service = Service(options, planned, logs)
    ready: Future[tuple[asyncio.AbstractEventLoop, str]] = Future()

    def started(url: str) -> None:
        ready.set_result((asyncio.get_running_loop(), url))

    def fail(over: Future[None]) -> None:
        if (error := over.exception()) and not ready.done():
            ready.set_exception(error)

    def stop(ready: Future[tuple[asyncio.AbstractEventLoop, str]]) -> None:
        """End the service at once, as soon as it has started."""
        with suppress(RuntimeError):  # the service has ended by itself
            for _ in range(2 if ready.exception() is None else 0):
                ready.result()[0].call_soon_threadsafe(service.stop)

    with ThreadPoolExecutor(1, "unfuse") as thread:
        over = thread.submit(lambda: asyncio.run(service.run(started)))
        over.add_done_callback(fail)
        try:
            with Client(ready.result()[1], key, reconnect_delay=0.0) as client:
                yield client
        except UnfuseError:
            if over.done():
                over.result()
            raise
        finally:
            ready.add_done_callback(stop)
