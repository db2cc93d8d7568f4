"""The composition root of `unfuse serve`: opens backends and connects scheduler, gateway and workers.

`local` is a private service: its workers serve only this process, and end with it.
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

from unfuse import queues
from unfuse.client import Client
from unfuse.core.errors import ConfigError, TransientError, UnfuseError, UsageError
from unfuse.core.messages import WorkerInfo
from unfuse.core.plan import StageSelector, roles_of
from unfuse.core.supervisor import Supervisor, first_completed
from unfuse.edge.connections import ConnectionLimits
from unfuse.edge.keys import ApiKeys as ApiKeys
from unfuse.launch.base import Launcher
from unfuse.launch.local import ForkServers, InheritedForks, LocalLauncher
from unfuse.planning.machine import usable_devices
from unfuse.planning.placement import left_bytes
from unfuse.queues.base import QueueBackend, QueueLimits, RequestStore
from unfuse.scheduler.admission import PoolArenas
from unfuse.scheduler.dispatcher import Dispatcher
from unfuse.scheduler.scheduler import Scheduler
from unfuse.server.app import HttpFrontend, create_app
from unfuse.server.gateway import Gateway
from unfuse.server.multimodal_messages import ImageFetcher
from unfuse.server.webhooks import Webhooks
from unfuse.service.adapter_server import AdapterServer
from unfuse.service.addresses import external_address, running
from unfuse.service.disk import passing_folder
from unfuse.service.groups import ServeSettings
from unfuse.service.loading import LoadingProgress, LoadLines
from unfuse.service.logs import Logs
from unfuse.service.options import ServeOptions, log_warnings, plan_service, serve_options
from unfuse.service.plan import ServingPlan, forked, worker_specs
from unfuse.service.settings import DEFAULT, LoadedSettings, load
from unfuse.service.stopping import Stoppable
from unfuse.service.worker_groups import WorkerGroups
from unfuse.stores.keyed import StoredObjects, stored_objects
from unfuse.stores.results import ResultStore, open_results, store_id
from unfuse.wire.address import UNIX, host_towards, is_loopback, unix_path
from unfuse.wire.keys import Keys
from unfuse.wire.router import Router
from unfuse.wire.run_folder import machine_id, open_run_folder
from unfuse.wire.unix_socket import private_socket, server_socket
from unfuse.worker.records import is_configured_elsewhere
from unfuse.worker.registration import pools_of

DRAIN_CHECK_S = 0.1  # seconds between two checks for requests that callers wait for, while draining
CLOSE_S = 0.5  # least seconds for closing the queue, and seconds of the stop budget reserved for after it
FORGET_S = 60.0  # seconds between two deletions of requests and results past their retention
BOUND_S = 10.0  # seconds between two checks of the total bytes of results
REMAINS_S = 10.0  # seconds between two searches for objects that dead workers left in durable stores
RETRY_S = 0.5  # seconds between two attempts to use a queue

ARENAS = ("auto", "shared_memory", "spill")  # tensor stores that keep objects in arenas

#: The logger of Python's `logging` that gets loading progress in programs that configure it.
LOGGER = "unfuse"

T = TypeVar("T")

log = structlog.get_logger(__name__)


class ServiceStopped(Exception):
    """The service was stopped before its queue could be used."""


class QueueStart:
    """Opens the queue backend of a service, and waits while it cannot be used.

    A queue cannot be used while it is unreachable, loads its data, or has a full disk.
    `timeout_s`: the most seconds to wait in total, over all calls.
    `stop`: ends the wait when it is set.
    `on_wait`: called with the reason after each failed attempt.
    """

    def __init__(self, timeout_s: float, stop: asyncio.Event, on_wait: Callable[[str], object]) -> None:
        self._end = asyncio.get_running_loop().time() + timeout_s
        self._stop = stop
        self._on_wait = on_wait

    async def open(self, url: str) -> QueueBackend:
        """Open the queue at `url`, and return it once it can be used.

        Raises ConfigError for a URL that is no queue, TransientError if it cannot be used in time, ServiceStopped.
        """

        async def open_backend() -> QueueBackend:
            return queues.open(url)

        async def check_backend() -> None:
            await queue.check_address()
            await queue.check()

        queue = await self.until_done(open_backend)
        try:
            await self.until_done(check_backend)
        except BaseException:
            await queue.close()
            raise
        return queue

    async def until_done(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Repeat this work until it raises no TransientError, and return its result.

        The beginning and the end of the wait are logged once.
        Raises TransientError if the timeout is over, and ServiceStopped.
        """
        has_waited = False
        while True:
            try:
                result = await self._unless_stopped(work())
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
                return result
            await self._unless_stopped(asyncio.sleep(RETRY_S))

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of this work. Raises ServiceStopped if the service is stopped meanwhile."""
        task = asyncio.create_task(work)
        await first_completed(task, self._stop.wait())
        if task.cancelled():
            raise ServiceStopped
        return task.result()


class Service(Stoppable):
    """One `unfuse serve`: the gateway, the scheduler, and the workers of a plan.

    `forks`: a fork server that is running already. The service closes it, unless it is inherited.

    After `stop`, the service drains: it accepts no requests, saves or finishes running tasks, and ends within the
    drain timeout.
    """

    def __init__(
        self, options: ServeOptions, plan: ServingPlan, logs: Logs, forks: ForkServers | InheritedForks | None = None
    ) -> None:
        super().__init__(options.serve.drain_timeout)
        self._options, self._plan = options, plan
        self._logs, self._forks = logs, forks
        #: The control addresses, once they are open. Unix sockets come first.
        self.addresses: list[str] = []
        self._groups: WorkerGroups | None = None

    async def run(self, on_started: Callable[[str], None]) -> None:
        """Serve until `stop`. `on_started` is called with the URL as soon as requests are accepted.

        Raises ConfigError, and TransientError for a queue that cannot be used in time.
        """
        with contextlib.suppress(ServiceStopped):
            await self._run(on_started)

    async def _run(self, on_started: Callable[[str], None]) -> None:
        options, serve = self._options, self._options.serve
        names, listener = public_names(serve), listen(options)
        connection_limits = ConnectionLimits(serve.max_connections, serve.max_connections_per_address)
        frontend = HttpFrontend(listener, connection_limits, options.access, keyed=bool(options.keys))
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(listener.close)
            stack.push_async_callback(frontend.close)
            port = listener.getsockname()[1]
            queue_start = QueueStart(serve.queue_wait, self.stopping, frontend.wait)
            scheduler, dispatcher, groups = await stack.enter_async_context(self._open_scheduler(port, queue_start))
            results = open_results(options.storage.results)
            webhooks = Webhooks(serve.webhook_hosts, serve.webhook_secret, options.prices)
            image_fetcher = ImageFetcher(serve.image_hosts)
            stack.push_async_callback(webhooks.close)
            stack.push_async_callback(image_fetcher.close)
            gateway = Gateway(
                scheduler,
                results,
                keys=options.keys,
                names=names,
                default_params=options.default_params,
                loras=options.storage.adapters,
                strict=serve.strict_params,
                time_limits={"image": serve.image_timeout, "video": serve.video_timeout},
                store=options.storage.store.removeprefix("spill:").partition("+")[0].partition(":")[0],
                cancel_on_disconnect=serve.on_disconnect == "cancel",
                cache_results=serve.reuse_results,
                webhooks=webhooks,
                prices=options.prices,
                image_fetcher=image_fetcher,
                model_adder=groups,
                public_url=options.public_url,
                parsers=options.parsers,
                open_metrics=serve.open_metrics,
            )
            serving = frontend.serve(create_app(gateway, options.access))
            webhooks.start(scheduler, gateway.links)
            background = Supervisor()
            stack.push_async_callback(background.close)
            self._start_cleanup(background, scheduler, results)
            background.start_loop("checking the API keys for changes", options.keys.reload_if_changed)
            log_warnings(options)
            launcher = groups.start_group(self._plan)
            background.start_loop("updating the worker groups", groups.check_once)
            host = f"[{serve.host}]" if ":" in serve.host else serve.host
            on_started(f"http://{host}:{port}")
            try:
                await first_completed(asyncio.shield(serving), self.stopping.wait(), _raise(launcher.failed))
                await self._await_callers(scheduler, gateway, groups)
            finally:
                scheduler.draining = True  # waiting clients get no result, and their requests are not cancelled
                if not self.stopping.is_set():
                    self.stop()  # after an error: starts the time budget
                self._log_stop()
                dispatcher.stop_granting()
                await groups.stop(self.budget.remaining(self.reserve), self.budget.hurry)
                await frontend.close()

    def _log_stop(self) -> None:
        """Log the seconds within which the workers stop, and whether running tasks resume or finish."""
        is_durable = self._options.storage.durable_url != "none"
        outcome = "resumes after the next start" if is_durable else "finishes if time is left"
        log.info("stopping the workers", what_runs=outcome, within_s=round(self.budget.remaining(), 1))

    def _start_cleanup(self, background: Supervisor, scheduler: Scheduler, results: ResultStore) -> None:
        """Start the loops that delete expired requests, excess results and dead workers' objects."""
        serve, storage = self._options.serve, self._options.storage
        background.start_loop(
            "deleting expired requests", partial(_forget, scheduler.queue, results, serve.retention_s)
        )
        if serve.results_limit:
            enforce_limit = partial(_bound, scheduler.queue, results, serve.results_limit)
            background.start_loop("enforcing the limit of results", enforce_limit)
        stores = stored_objects(storage.store, storage.durable_url)
        background.start_loop("deleting objects of dead workers", partial(_drop_remains, scheduler, stores))

    @contextlib.asynccontextmanager
    async def _open_scheduler(
        self, port: int, queue_start: QueueStart
    ) -> AsyncIterator[tuple[Scheduler, Dispatcher, WorkerGroups]]:
        """Open the queue, the scheduler and the control addresses, and close them after the block."""
        options, serve = self._options, self._options.serve
        specs = [model.spec for model in self._plan.models]
        settings, store_kind = options.settings, options.storage.store.partition(":")[0]
        offered = [(model.spec.name, model.spec.source, model.dtypes) for model in self._plan.models]
        arenas = PoolArenas(spills=store_kind == "spill")
        queue = await queue_start.open(options.queue)
        scheduler = Scheduler(
            queue,
            limits=QueueLimits(serve.max_active, serve.max_queue, serve.max_cost or None),
            specs=specs,
            lease_ttl=settings.lease.ttl_s,
            order=serve.order,
            cache_bytes=serve.encoder_cache if store_kind in ARENAS else 0,
            costs=options.costs,
            arenas=arenas,
            scale_to_zero=options.scale_to_zero,
            cold_start_limit=serve.cold_start_timeout,
        )
        storage = msgspec.structs.replace(options.storage, results_store_id=store_id(options.storage.results))
        run_folder = open_run_folder(settings.run_dir)
        routers: list[Router] = []
        compute, node = options.workers.compute, machine_id(run_folder)
        dispatcher = Dispatcher(
            scheduler, offered, storage, compute.numerics, serve.dispatch, node, exact_only=compute.exact_only
        )
        adapter_server = AdapterServer(dispatcher, storage.adapters)
        default = [] if any(map(unix_path, options.listen)) else [f"{UNIX}{server_socket(settings.run_dir, port)}"]
        try:
            # Unix sockets come first, because workers of this machine use the first address.
            for address in sorted((*default, *options.listen), key=lambda address: not unix_path(address)):
                routers.append(
                    Router(address, adapter_server.answer, dispatcher.handle_undelivered, options.trust, run_folder)
                )
            self.addresses = [router.address for router in routers]
            await queue_start.until_done(partial(scheduler.registry.declare, specs))
            await scheduler.start()
            drain_timeout, set_arenas = serve.drain_timeout, partial(self._set_expected_arenas, arenas)
            server = f"{socket.gethostname()}:{serve.port}:{Path(settings.data_dir).absolute()}"
            self._groups = WorkerGroups(
                scheduler, dispatcher, self._planned, self._launch, set_arenas, drain_timeout, server
            )
            yield scheduler, dispatcher, self._groups
        finally:
            for router in routers:
                await router.close()
            await scheduler.close()
            await self._close_queue(queue)

    def _set_expected_arenas(self, arenas: PoolArenas, plans: Sequence[ServingPlan]) -> None:
        """Set the arenas that admission control expects until the workers of these plans register."""
        options = self._options
        if options.storage.store.partition(":")[0] in ARENAS:
            arenas.expected = [
                WorkerInfo(
                    f"{index}-{number}",
                    "",
                    worker.role,
                    pools_of(
                        [model.spec for model in plan.models], StageSelector(roles_of(worker.role)), options.resources
                    ),
                    1,
                    "",
                    options.workers.arena,
                    resources=dict(options.resources),
                )
                for index, plan in enumerate(plans)
                for number, worker in enumerate(plan.workers)
            ]

    def _planned(self, models: Mapping[str, str], used: Counter[str], unallocated: Counter[str]) -> ServingPlan:
        """Return the serving plan for these models within the memory that other workers leave.

        Raises ConfigError.

        `models`: the source of each model by name.
        `used`: bytes by device that other workers use or will use.
        `unallocated`: the part of these bytes that is not allocated yet, less the bytes that will be freed.
        """
        options = self._options
        devices = usable_devices(options.device_memory, elsewhere=options.launcher is not None)
        # The free memory was measured, so it lacks what is allocated. --device-memory is a total.
        free = {name: max(0, left) for name, left in left_bytes(unallocated, devices).items()}
        free |= {name: max(0, min(free[name], limit - used[name])) for name, limit in options.device_memory.items()}
        configured = models.keys() & {*options.serve.models}
        revision = options.serve.revision if configured else ""
        if revision and configured != models.keys():
            raise ConfigError(f"--revision {revision} applies only to the models of the command line, not to others")
        sources = options.serve.component_source if configured else ()
        serve = msgspec.structs.replace(options.serve, revision=revision, component_source=sources)
        settings = msgspec.structs.replace(options.settings, serve=serve)
        return plan_service(msgspec.structs.replace(options, settings=settings, device_memory=free), models)

    def _launch(self, plan: ServingPlan, first_number: int) -> Launcher:
        """Start the workers of a plan, numbered from `first_number`, and return their launcher."""
        options, open_launcher = self._options, self._options.launcher
        reachable_addresses = self.addresses if isinstance(options.trust, Keys) else ()
        flags = {"scheduler": self.addresses[0], "listen": host_towards(*reachable_addresses)}
        if open_launcher:  # without "listen", each worker is reached at the address that schedulers see
            flags = {
                "scheduler": next(external_address(address) for address in self.addresses if not unix_path(address))
            }
        models = tuple(model.spec.name for model in plan.models)
        specs = worker_specs(
            plan, options.settings, flags, self._logs.environment, models, elsewhere=open_launcher is not None
        )
        if open_launcher is None:
            forks = forked(plan, self._forks)
            if not isinstance(self._forks, InheritedForks):
                self._forks = None  # this launcher owns the fork server now
            open_launcher = partial(LocalLauncher, forks=forks)
        launcher = open_launcher(specs, lambda index, line: self._process_line(first_number + index, line))
        launcher.start()
        return launcher

    def _process_line(self, worker: int, line: bytes) -> None:
        """Track and log an output line of a worker. Any thread may call this."""
        if self._groups:
            self._groups.process_line(worker, line)
        self._logs.relay(worker, line)

    async def _await_callers(self, scheduler: Scheduler, gateway: Gateway, groups: WorkerGroups) -> None:
        """Wait for requests whose clients are connected, while one can finish within the stop budget.

        If there are workers, half of the budget is reserved for stopping them. All other requests continue after the
        next start, or at another server.
        """
        scheduler.draining = True
        budget = self.budget
        reserve = budget.seconds / 2 if groups.has_workers else self.reserve

        async def wait_for_callers() -> None:
            while await gateway.awaited_within(budget.remaining(reserve)):
                await asyncio.sleep(DRAIN_CHECK_S)

        await budget.limited_to(budget.remaining(reserve), wait_for_callers())

    async def _close_queue(self, queue: QueueBackend) -> None:
        """Close the queue. After `stop`, wait only within the budget: it may be unreachable."""
        if not self.stopping.is_set():
            await queue.close()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(CLOSE_S, self.budget.remaining(CLOSE_S))):
                await queue.close()


async def _forget(requests: RequestStore, results: ResultStore, retention_s: float) -> None:
    """Delete requests and results that ended more than `retention_s` seconds ago."""
    await asyncio.sleep(min(FORGET_S, retention_s))
    ended_before = time.time() - retention_s
    with contextlib.suppress(TransientError):
        await requests.drop_ended_before(ended_before)
    await asyncio.to_thread(results.forget, ended_before)


async def _bound(requests: RequestStore, results: ResultStore, limit: int) -> None:
    """Delete the oldest ended requests and their results while all results exceed `limit` bytes.

    A client that reads a result meanwhile gets all of it, since an open file stays readable.
    """
    await asyncio.sleep(BOUND_S)
    stored = await asyncio.to_thread(results.stored_requests)
    excess = sum(nbytes for _, nbytes in stored.values()) - limit
    for request in await requests.ended_among(list(stored)) if excess > 0 else ():
        if excess > 0:
            await asyncio.to_thread(results.delete, request)
            excess -= stored[request][1]
            with contextlib.suppress(TransientError):  # a full disk: there is room now, and retention deletes it later
                await requests.drop(request)


async def _drop_remains(scheduler: Scheduler, stores: Sequence[StoredObjects]) -> None:
    """Delete objects of ended requests that dead workers left in durable stores."""
    await asyncio.sleep(REMAINS_S)
    for store in stores:
        with contextlib.suppress(TransientError):
            folders = await asyncio.to_thread(store.requests)
            for request in await scheduler.releasable(tuple(folders)):
                await asyncio.to_thread(store.drop, folders[request])


def public_names(serve: ServeSettings) -> dict[str, str]:
    """Return the model of each name that clients use.

    Raises UsageError if several models have another number of names.
    """
    models, names = serve.models, serve.served_model_name
    if len(models) == 1:
        return dict.fromkeys(names, models[0])
    if names and len(names) != len(models):
        raise UsageError(f"--served-model-name has {len(names)} values for {len(models)} models: set one for each")
    return dict(zip(names, models, strict=False))


def listen(options: ServeOptions) -> socket.socket:
    """Open the listening socket of the gateway. Clients that connect early wait for an answer.

    Raises ConfigError if it cannot be opened, UsageError for an address beyond loopback without API keys.
    """
    host, port = options.serve.host, options.serve.port
    if not is_loopback(host) and not options.keys:
        raise UsageError(
            f"--host {host} is reachable from other machines: set --api-keys FILE or --api-key KEY, or use 127.0.0.1"
        )

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only if the protocol is named.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        is_ours = error.errno == errno.EADDRINUSE and str(port) in running(options.settings.run_dir)
        owner = "another server of yours uses it; " if is_ours else ""
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; {owner}choose another --port") from error
    return listener


async def _raise(failed: asyncio.Future[None]) -> None:
    """Wait for this future's error, and raise it. If the future is cancelled, wait forever."""
    await asyncio.wait({failed})
    if failed.cancelled():  # the workers were stopped because their models were removed; the service continues
        await asyncio.Event().wait()
    failed.result()


@contextmanager
def local(model: str | None = None, *, threads: int | None = None) -> Iterator[Client]:
    """Start private workers, and yield a client of them. They end with the block.

    `model`: a name, a folder or a hub id; None uses the model of the environment variables, as for other settings.
    `threads`: CPU threads per worker.

    Loading progress is written to standard error; or, in a program that configures logging, to its log as `info`; or
    nowhere, if UNFUSE_LOG__LEVEL is set. Raises ConfigError.
    """
    loaded = load({"serve.models": [model] if model else None, "compute.threads": threads})
    logs, loading = Logs(loaded.settings.log), LoadingProgress(loaded.settings.serve.models)
    write_line = _progress_writer(logs, loaded.settings.log.level)
    if not structlog.is_configured():
        logs.open_log()
    lines: AbstractContextManager[object] = nullcontext()
    if write_line:
        logs.on_record = loading.record
        lines = LoadLines(", ".join(loaded.settings.serve.models), loading, write_line)
    with lines, private_pools(loaded, logs, loading) as client:
        yield client


def _progress_writer(logs: Logs, level: str) -> Callable[[str], object] | None:
    """Return a function that writes a line of loading progress, or None without output."""
    if is_configured_elsewhere():
        log_line: Callable[[str], object] = structlog.get_logger(LOGGER).info
        return log_line
    if logging.getLogger(LOGGER).hasHandlers():
        return logging.getLogger(LOGGER).info
    return (lambda line: logs.write_line(f"unfuse: {line}")) if level == "auto" else None


def without_keys(loaded: LoadedSettings) -> LoadedSettings:
    """Return the settings without API keys, which are those of another server."""
    serve = msgspec.structs.replace(loaded.settings.serve, api_key=(), api_keys=())
    return LoadedSettings(msgspec.structs.replace(loaded.settings, api_key="", serve=serve), loaded.origins)


@contextmanager
def private_pools(
    loaded: LoadedSettings,
    logs: Logs,
    loading: LoadingProgress | None = None,
    check: Callable[[ServingPlan], object] | None = None,
) -> Iterator[Client]:
    """Start private workers for these settings, and yield their client.

    The workers end with the block.
    `logs`: gets the workers' log lines.
    `loading`: the progress that tracks the workers, or None.
    `check`: called with the plan; no worker starts if it raises.

    No file remains: results are in a temporary folder that is deleted, and stage costs are not recorded.
    """
    options = serve_options(without_keys(loaded))
    plan = plan_service(options)
    if check:
        check(plan)
    if loading:
        loading.expect_workers([worker.role for worker in plan.workers])
    with passing_folder() as folder:
        storage = msgspec.structs.replace(options.storage, results=f"disk:{folder}?fsync=no")
        queue = "memory" if loaded.origins["serve.queue"] == DEFAULT else options.queue
        options = msgspec.structs.replace(options, storage=storage, costs=None, queue=queue)
        with _served(options, plan, logs) as client:
            yield client


@contextmanager
def _served(options: ServeOptions, plan: ServingPlan, logs: Logs) -> Iterator[Client]:
    """Run a private service on a free port with a random key; yield its client.

    The service ends with the block. Raises ConfigError if a worker cannot start, instead of the client's error that
    follows from it.
    """
    key = secrets.token_urlsafe(24)
    address = f"{UNIX}{private_socket(options.settings.run_dir)}"
    settings = msgspec.structs.replace(options.settings, serve=msgspec.structs.replace(options.serve, port=0))
    options = msgspec.structs.replace(options, settings=settings, listen=(address,), keys=ApiKeys((key,)))
    service = Service(options, plan, logs)
    ready: Future[tuple[asyncio.AbstractEventLoop, str]] = Future()

    def started(url: str) -> None:
        ready.set_result((asyncio.get_running_loop(), url))

    def fail(service_end: Future[None]) -> None:
        if (error := service_end.exception()) and not ready.done():
            ready.set_exception(error)

    def stop(ready: Future[tuple[asyncio.AbstractEventLoop, str]]) -> None:
        """Stop the service once it has started. The second call skips the draining."""
        with suppress(RuntimeError):  # the service has ended by itself
            for _ in range(2 if ready.exception() is None else 0):
                ready.result()[0].call_soon_threadsafe(service.stop)

    with ThreadPoolExecutor(1, "unfuse") as executor:
        service_end = executor.submit(lambda: asyncio.run(service.run(started)))
        service_end.add_done_callback(fail)
        try:
            with Client(ready.result()[1], key, reconnect_delay=0.0) as client:
                yield client
        except UnfuseError:
            if service_end.done():
                service_end.result()
            raise
        finally:
            ready.add_done_callback(stop)
