"""Start, replace and stop a service's worker groups as models are added and removed."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import structlog
from typing_extensions import override

from unfuse.core.errors import ConfigError
from unfuse.core.model_spec import ModelSpec, without_source
from unfuse.core.request import RequestRecord
from unfuse.core.supervisor import first_completed, run_in_thread
from unfuse.edge.access import ApiError
from unfuse.launch.base import Launcher
from unfuse.planning.placement import taken_bytes
from unfuse.queues.base import DeclaredModels, RequestFilter
from unfuse.scheduler.dispatcher import Dispatcher
from unfuse.scheduler.scheduler import Scheduler
from unfuse.server.served_models import AddModelProgress, ModelAdder
from unfuse.service.loading import LoadingProgress
from unfuse.service.plan import PlannedModel, ServingPlan
from unfuse.weights.gguf_model import open_files
from unfuse.worker.records import read_record

CHECK_INTERVAL_S = 1.0  # seconds between two checks for added and removed models
LAST_WORDS = b"unfuse: "  # the beginning of the line in which a command reports why it ends
LEAVING_S = 10.0  # seconds beyond the drain timeout for the workers of a removed model to stop

#: Consecutive checks without a request of a removed model before its workers stop. A request may be on its way.
QUIET = 2

#: Plans models (sources by name) beside other workers: bytes by device that these use, and bytes that are still to be
#: allocated.
Plans = Callable[[Mapping[str, str], Counter[str], Counter[str]], ServingPlan]

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class _WorkerGroup:
    """The workers of one plan, which start and stop together."""

    plan: ServingPlan
    launcher: Launcher

    #: The number of its first worker.
    first: int

    loading: LoadingProgress

    #: Why a worker could not start, as the worker logged it; "" if there is no reason.
    reason: str = ""

    #: Consecutive checks that found no request of its removed models.
    idle_checks: int = 0

    #: The group that was started beside this one, for the models that stay.
    successor: _WorkerGroup | None = None

    #: The plan that replaces this group, with one more model; None if it stays.
    replacement: ServingPlan | None = None

    @property
    def models(self) -> list[str]:
        """The names of its models, or of its replacement's."""
        return _models(self.replacement or self.plan)


class WorkerGroups(ModelAdder):
    """The worker groups of a service: of the configured models, and of added ones.

    `plan`: returns the plan for models beside other workers; raises ConfigError.
    `start`: starts the workers of a plan, numbered from the given number, and has their log lines passed to
    `process_line`.
    `changed`: called with all plans whenever they change.
    `drain_timeout`: seconds that workers get to finish or save their tasks when they are stopped.
    `server`: the name under which added models are recorded in the queue.

    A server serves the models recorded under its name again when it starts. A model that is added at a server without
    workers is offered to workers by all such servers.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        dispatcher: Dispatcher,
        plan: Plans,
        start: Callable[[ServingPlan, int], Launcher],
        changed: Callable[[Sequence[ServingPlan]], object],
        drain_timeout: float,
        server: str = "",
    ) -> None:
        self._scheduler = scheduler
        self._dispatcher = dispatcher
        self._drain_timeout = drain_timeout
        self._plan = plan
        self._start = start
        self._changed = changed
        self._server = server

        self._groups: list[_WorkerGroup] = []
        #: The group of the configured models.
        self._first: _WorkerGroup | None = None
        #: The number of the next worker to start.
        self._next_number = 0
        #: Held while groups are changed.
        self._changing = asyncio.Lock()
        #: Set once all workers are to stop, so that stopping the group of a removed model does not take long.
        self._stopping = asyncio.Event()

        #: The sources of added models by name, in the order in which they were added.
        self._sources: dict[str, str] = {}
        #: Names of recorded models that are served again.
        self._restored: set[str] = set()
        #: Names of models whose group was removed, and that need another one.
        self._ungrouped: set[str] = set()
        #: Models that cannot be served: the number of checks in which requests may still arrive, and the reason.
        self._unservable: dict[str, tuple[int, str]] = {}
        self._has_warned = False

    def start_group(self, plan: ServingPlan) -> Launcher:
        """Start the workers of a plan as a group, and return their launcher.

        If workers of the first group cannot start, it is up to the caller to stop the service.
        """
        number = self._next_number
        self._next_number += len(plan.workers) + 1
        group = _WorkerGroup(plan, self._start(plan, number), number, LoadingProgress(_models(plan)))
        group.loading.expect_workers([worker.role for worker in plan.workers])
        self._first = self._first or group
        self._groups.append(group)
        self._offer()
        return group.launcher

    def process_line(self, number: int, line: bytes) -> None:
        """Read a line that the worker of this number wrote. Any thread may call this."""
        for group in list(self._groups):
            if not 0 <= number - group.first <= len(group.plan.workers):
                continue
            if line.startswith(LAST_WORDS):
                group.reason = line.removeprefix(LAST_WORDS).decode(errors="replace").strip()
            elif record := read_record(line):
                group.loading.record(number - group.first, record)

    @override
    def progress(self, name: str) -> AddModelProgress | None:
        latest = next((group for group in reversed(self._groups) if name in _models(group.plan)), None)
        progress = latest.loading.earliest() if latest else None
        return AddModelProgress(progress.phase, progress.done, progress.total) if progress else None

    @override
    async def add(self, name: str, source: str) -> None:
        registry = self._scheduler.registry
        async with self._changing:
            if self._scheduler.draining:
                raise _refusal_stopping()
            if name in await registry.model_specs():
                raise _refusal_exists(name)
            if any(name in group.models for group in self._groups):
                message = f"model {name!r} is being removed: add it again when its requests and workers have ended"
                raise ApiError(409, "model_leaves", message, "name", {"retry-after": "2"})
            planned, group = await self._placed(name, source)
            if not await registry.admit(planned.models[0].spec, self._owner):
                del self._sources[name]
                raise _refusal_exists(name)  # at another server, meanwhile
            self._restored.discard(name)
            self._start_added(planned, group)
            log.info("model added", model=name, workers=len(planned.workers), beside=_models(planned)[1:])

    async def check_once(self) -> None:
        """Check once: restore recorded models, and stop or replace groups of removed and failed models."""
        await asyncio.sleep(CHECK_INTERVAL_S)
        async with self._changing:
            await self._restore_models()
            await self._warn_of_unserved()
            gone = await self._scheduler.registry.dismissed_models()
            for group in list(self._groups):
                if group.launcher.failed.done() and group is not self._first:
                    await self._fail_group(group)
                elif group.replacement:
                    await group.launcher.stop(self._drain_timeout + LEAVING_S, self._stopping)
                    self._groups.remove(group)
                    self.start_group(group.replacement)
                elif removed := gone.intersection(group.models):
                    group.idle_checks = 0 if await self._unfinished(removed) else group.idle_checks + 1
                    staying = set(group.models).difference(removed)
                    if group.idle_checks >= QUIET and await self._is_succeeded(group, staying):
                        await self._end_group(group, removed)
            self._ungrouped -= gone
            if self._ungrouped:
                self.start_group(await self._planned(sorted(self._ungrouped)))
                self._ungrouped.clear()
            await self._fail_late_requests()

    @property
    def has_workers(self) -> bool:
        """Whether there are workers to stop."""
        return any(group.plan.workers for group in self._groups)

    async def stop(self, drain_timeout: float, hurry: asyncio.Event | None = None) -> None:
        """Drain and stop all workers, within `drain_timeout` seconds, or at once if `hurry` is set."""
        self._stopping.set()
        async with self._changing:
            await asyncio.gather(*(group.launcher.stop(drain_timeout, hurry) for group in self._groups))

    @property
    def _owner(self) -> str:
        """The server name recorded with models added here; "" stands for all servers without workers."""
        return self._server if self._first is None or self._first.plan.workers else ""

    def _is_ours(self, record: DeclaredModels) -> bool:
        """Whether a recorded model is served by this server.

        A model that failed without a server name was never served, and is not tried again.
        """
        if record.failure and not record.server:
            return False
        return record.server == self._owner or not self._scheduler.queue.shared

    async def _restore_models(self) -> None:
        """Serve models that were added before this start, or at another server without workers."""
        registry = self._scheduler.registry
        served = {name for group in self._groups for name in group.models}
        for name, record in (await registry.admin_records()).items():
            if name in self._restored or not self._is_ours(record) or self._scheduler.draining:
                continue
            if name in registry.configured:
                await registry.withdraw(name)  # it is one of the configured models now
            elif name not in served and not (record.withdrawn and await self._forget_removed(name)):
                await self._serve_again(record)
                self._restored.add(name)

    async def _warn_of_unserved(self) -> None:
        """Log once which models have requests in the queue, but are not served."""
        if self._has_warned:
            return

        served = {
            *await self._scheduler.registry.model_specs(),
            *(name for group in self._groups for name in group.models),
        }
        waiting = Counter[str]()
        async for page in self._pages():
            waiting.update(
                record.context.request.model for record in page if record.context.request.model not in served
            )
        for model, count in waiting.items():
            message = "requests wait for a model that is not served: start the server with it, add it, or cancel them"
            log.warning(message, model=model, requests=count)
        self._has_warned = True

    async def _forget_removed(self, name: str) -> bool:
        """Delete the record of a removed model, and return True, unless it has unfinished requests."""
        if await self._unfinished([name]):
            return False
        await self._scheduler.registry.delete_dismissed(name)
        return True

    async def _serve_again(self, record: DeclaredModels) -> None:
        """Serve a recorded model again.

        If it cannot be served, its requests fail with the reason.
        """
        registry = self._scheduler.registry
        spec, *_ = record.models
        try:
            planned, group = await self._placed(spec.name, spec.source)
        except (ConfigError, OSError) as error:
            if self._owner or not self._scheduler.queue.shared:
                await self._fail_model(spec, str(error), self._server)
            else:
                log.warning("a model that was added cannot be offered to workers", model=spec.name, reason=str(error))
            return
        current = planned.models[0].spec
        if current.pools() != spec.pools():
            await self._end_requests([spec.name], "its files, or --dtype, have changed since the request was accepted")
        if not record.withdrawn and (record.failure or current != spec):
            await registry.admit(current, self._owner, overwrite=True)
        self._start_added(planned, group)
        log.info("a model that was added is served again", model=spec.name, workers=len(planned.workers))

    def _start_added(self, planned: ServingPlan, replaced: _WorkerGroup | None) -> None:
        """Start the workers of a plan with one more model.

        If they replace a group, they start at the next check.
        """
        self._unservable.pop(planned.models[0].spec.name, None)
        if replaced:
            replaced.replacement = planned
        else:
            self.start_group(planned)

    async def _fail_model(self, spec: ModelSpec, reason: str, server: str) -> None:
        """Record why a model cannot be served, and fail its requests with that reason.

        The `server`, if any, tries the model again when it starts.
        """
        reason = without_source(reason, spec.source, spec.name)
        log.error("a model that was added cannot be served", model=spec.name, reason=reason)
        await self._scheduler.registry.fail_model(spec, reason, server)
        self._sources.pop(spec.name, None)
        self._unservable[spec.name] = QUIET, reason
        await self._end_requests([spec.name], reason)
        await self._scheduler.registry.delete_dismissed(spec.name)

    async def _fail_late_requests(self) -> None:
        """Fail requests that were accepted while their model turned out to be unservable."""
        for name, (checks_left, reason) in list(self._unservable.items()):
            await self._end_requests([name], reason)
            self._unservable[name] = checks_left - 1, reason
            if not checks_left:
                del self._unservable[name]

    async def _end_requests(self, models: Collection[str], reason: str = "") -> None:
        """Fail all requests of these models with the reason, or cancel them without one."""
        scheduler = self._scheduler
        while requests := await self._unfinished(models):
            await asyncio.gather(
                *(
                    scheduler.fail_unserved(request, reason) if reason else scheduler.cancel(request)
                    for request in requests
                )
            )

    async def _is_succeeded(self, group: _WorkerGroup, staying: Collection[str]) -> bool:
        """Whether a group may end: its successor's workers are registered, or it has none.

        A successor is started for the `staying` models if its workers fit beside the group.
        """
        if group.successor is None and staying:
            with contextlib.suppress(ConfigError):
                planned = await self._planned(sorted(staying))
                if len(planned.workers) >= len(group.plan.workers):
                    self.start_group(planned)
                    group.successor = self._groups[-1]
        if group.successor is None or group.successor not in self._groups:
            return True
        workers = await self._scheduler.registry.workers()
        registered = sum({spec.name for spec in worker.models} <= set(staying) for worker in workers)
        return registered >= len(group.successor.plan.workers)

    async def _end_group(self, group: _WorkerGroup, removed: Collection[str]) -> None:
        """Stop a group whose `removed` models have no requests.

        Its other models get another group if they have none; their requests continue there.
        """
        await group.launcher.stop(self._drain_timeout + LEAVING_S, self._stopping)
        self._remove_group(group, removed)
        await self._end_requests(removed)  # requests that arrived while the workers stopped
        for name in removed:
            self._sources.pop(name, None)
            self._restored.discard(name)
            await self._scheduler.registry.delete_dismissed(name)
        log.info("model removed", models=sorted(removed))

    async def _fail_group(self, group: _WorkerGroup) -> None:
        """Stop a group whose workers cannot start, and fail requests of the faulty model.

        Of several models, the last added one counts as faulty. A successor fails no model: it is tried again once the
        other group has ended.
        """
        error = group.launcher.failed.exception()
        models = {model.spec.name: model.spec for model in group.plan.models}
        is_successor = any(other.successor is group for other in self._groups)
        await group.launcher.stop(0 if is_successor else self._drain_timeout + LEAVING_S)
        # All lines of the workers are read now, including the reason of the failure.

        if is_successor:
            self._groups.remove(group)
            return

        faulty = [name for name in self._sources if name in models][-1:] or [*models]
        self._remove_group(group, faulty)
        for name in faulty:
            again = self._server if name in self._restored else ""
            await self._fail_model(models[name], group.reason or str(error), again)

    def _remove_group(self, group: _WorkerGroup, removed: Collection[str]) -> None:
        """Remove a stopped group from the list.

        Its other models get another group at the end of a check.
        """
        self._groups.remove(group)
        self._ungrouped.update(set(group.models).difference(removed, *(other.models for other in self._groups)))
        self._offer()

    async def _unfinished(self, models: Collection[str]) -> list[str]:
        """Return ids of unfinished requests of these models, of the first page with any."""
        async for page in self._pages():
            if ids := [record.context.id for record in page if record.context.request.model in models]:
                return ids
        return []

    async def _pages(self) -> AsyncIterator[Sequence[RequestRecord]]:
        """Yield the unfinished requests of the queue, in pages."""
        after = None
        while page := await self._scheduler.queue.list(RequestFilter(is_over=False), after=after, limit=500):
            yield page
            after = page[-1].context.id

    async def _placed(self, name: str, source: str) -> tuple[ServingPlan, _WorkerGroup | None]:
        """Return the plan for one more model, and the group that it replaces, or None.

        The model is the first of the plan, and so is loaded first: if it cannot be loaded, that shows at once.
        Raises ConfigError.
        """
        self._sources[name] = source
        try:
            planned, group = await self._plan_beside_or_with(name)
        except BaseException:
            del self._sources[name]
            raise
        self._sources[name] = planned.models[0].spec.source
        return planned, group

    async def _plan_beside_or_with(self, name: str) -> tuple[ServingPlan, _WorkerGroup | None]:
        """Return a plan for this model alone, or else together with a group's models.

        The second value is that group, or None.
        """
        try:
            return await self._planned([name]), None
        except ConfigError as alone:
            successors = [group.successor for group in self._groups]
            for group in [group for group in self._groups if group.successor is None and group not in successors]:
                with contextlib.suppress(ConfigError):
                    planned = await self._planned([name, *group.models], group)
                    if _is_here(planned.models[0]):
                        return planned, group
                    alone = ConfigError(
                        f"{alone}; download its files by `unfuse pull`, so that it can be swapped with other models"
                    )
            raise alone

    async def _planned(self, models: Sequence[str], replaced: _WorkerGroup | None = None) -> ServingPlan:
        """Return the serving plan for these models within the memory that running groups leave.

        The memory of the `replaced` group counts as free. Raises ConfigError, and ApiError as soon as all workers are
        to stop, even while a slow hub is read.
        """
        missing = (await self._scheduler.registry.unavailable_pools()).keys()
        others = [group for group in self._groups if group is not replaced]
        successors = [group.successor for group in self._groups]
        loading = [
            group for group in self._groups if group in successors or not missing.isdisjoint(_models(group.plan))
        ]
        unallocated = _taken_bytes([group for group in loading if group is not replaced])
        if replaced and replaced not in loading:
            unallocated.subtract(_taken_bytes([replaced]))  # these bytes will be free
        sources = {name: self._sources.get(name, name) for name in models}
        planning = asyncio.create_task(run_in_thread(partial(self._plan, sources, _taken_bytes(others), unallocated)))
        await first_completed(planning, self._stopping.wait())
        if planning.cancelled():
            raise _refusal_stopping()
        return planning.result()

    def _offer(self) -> None:
        """Offer the models of all groups to workers, and report the changed plans."""
        plans = [group.plan for group in self._groups]
        models = [model for plan in plans for model in plan.models]
        self._dispatcher.set_offered_models([(model.spec.name, model.spec.source, model.dtypes) for model in models])
        self._changed(plans)


def _refusal_exists(name: str) -> ApiError:
    return ApiError(409, "model_exists", f"a model {name!r} is served already: send another name", "name")


def _refusal_stopping() -> ApiError:
    return ApiError(503, "stopping", "the server is stopping", headers={"retry-after": "5"})


def _is_here(model: PlannedModel) -> bool:
    """Whether all weights of a model are on this disk.

    A group is replaced only then, so that no request of its models waits for a download.
    """
    with contextlib.suppress(ConfigError):
        return bool([open_files(model.folder).weights(component) for component in model.components])
    return False


def _models(plan: ServingPlan) -> list[str]:
    return [model.spec.name for model in plan.models]


def _taken_bytes(groups: Sequence[_WorkerGroup]) -> Counter[str]:
    """Return the bytes that these groups use together, by device."""
    return sum((taken_bytes(group.plan.workers, group.plan.worker_plan) for group in groups), Counter())
