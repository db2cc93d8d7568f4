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
LAST_WORDS = b"unfuse: "  # the prefix of the line in which a command reports why it ends
LEAVING_S = 10.0  # seconds that the workers of a removed model get to stop, in addition to the drain timeout

#: Consecutive checks without a request of a removed model before its workers stop. A request that was checked before
#: the removal may be submitted after it.
QUIET = 2

#: `(sources, used, unallocated)`: returns the plan for the models with these sources by name, in addition to workers
#: that run. These use `used` bytes by device, of which `unallocated` are still to be allocated.
Plans = Callable[[Mapping[str, str], Counter[str], Counter[str]], ServingPlan]

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class _WorkerGroup:
    """The workers of one plan, which start and stop together."""

    plan: ServingPlan
    launcher: Launcher

    #: The number of its first worker. The others follow.
    first: int

    #: The loading progress of its workers.
    loading: LoadingProgress

    #: Why a worker could not start, from the last line of the worker; "" if it wrote none.
    reason: str = ""

    #: Consecutive checks that found no request of its removed models.
    idle_checks: int = 0

    #: The group that was started for the remaining models, while this one still runs; None if there is none.
    successor: _WorkerGroup | None = None

    #: The plan that replaces this group, with one more model; None if it stays.
    replacement: ServingPlan | None = None

    @property
    def models(self) -> list[str]:
        """The names of its models, or of those of its replacement."""
        return _model_names(self.replacement or self.plan)


class WorkerGroups(ModelAdder):
    """The worker groups of a service, for its configured and its added models.

    `plan`: plans models; raises ConfigError for models that cannot be served, or do not fit.
    `start_workers`: starts the workers of a plan, numbered from this number, and passes their log lines to
    `process_line`.
    `on_plans_changed`: called with the plans of all groups whenever they change.
    `drain_timeout`: seconds that workers get to finish or save their tasks when they are stopped.
    `server`: the name under which models that are added here are recorded in the queue.

    When a server starts, it serves the models again that are recorded under its name. A model that is added at a server
    without workers is offered to workers by all such servers.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        dispatcher: Dispatcher,
        plan: Plans,
        start_workers: Callable[[ServingPlan, int], Launcher],
        on_plans_changed: Callable[[Sequence[ServingPlan]], object],
        drain_timeout: float,
        server: str = "",
    ) -> None:
        self._scheduler = scheduler
        self._dispatcher = dispatcher
        self._drain_timeout = drain_timeout
        self._plan = plan
        self._start = start_workers
        self._changed = on_plans_changed
        self._server = server

        self._groups: list[_WorkerGroup] = []
        #: The group of the configured models.
        self._first: _WorkerGroup | None = None
        #: The number of the next group's first worker.
        self._next_number = 0
        #: Held while groups are changed.
        self._changing = asyncio.Lock()
        #: Set once all workers are to stop. A group that is being stopped then skips the rest of its drain timeout.
        self._stopping = asyncio.Event()

        #: The sources of added models by name, in the order in which they were added.
        self._sources: dict[str, str] = {}
        #: Names of recorded models that this server serves again after a restart.
        self._restored: set[str] = set()
        #: Names of models whose group was removed, and that need another group.
        self._ungrouped: set[str] = set()
        #: Models that cannot be served: the number of checks in which requests may still arrive, and the reason.
        self._unservable: dict[str, tuple[int, str]] = {}
        #: Whether requests of models that are not served were looked for, which happens once.
        self._has_warned = False

    def start_group(self, plan: ServingPlan) -> Launcher:
        """Start the workers of a plan as a group, and return their launcher.

        If workers of the first group cannot start, the caller must stop the service.
        """
        number = self._next_number
        self._next_number += len(plan.workers) + 1  # the number after the last worker is that of the fork server
        group = _WorkerGroup(plan, self._start(plan, number), number, LoadingProgress(_model_names(plan)))
        group.loading.expect_workers([worker.role for worker in plan.workers])
        self._first = self._first or group
        self._groups.append(group)
        self._offer()
        return group.launcher

    def process_line(self, number: int, line: bytes) -> None:
        """Track loading progress and errors in a line of a worker, from any thread."""
        for group in list(self._groups):
            if not 0 <= number - group.first <= len(group.plan.workers):
                continue
            if line.startswith(LAST_WORDS):
                group.reason = line.removeprefix(LAST_WORDS).decode(errors="replace").strip()
            elif record := read_record(line):
                group.loading.record(number - group.first, record)

    @override
    def progress(self, name: str) -> AddModelProgress | None:
        latest = next((group for group in reversed(self._groups) if name in _model_names(group.plan)), None)
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
            plan, group = await self._plan_added_model(name, source)
            if not await registry.admit(plan.models[0].spec, self._owner):
                del self._sources[name]
                raise _refusal_exists(name)  # at another server, meanwhile
            self._restored.discard(name)
            self._start_added(plan, group)
            log.info("model added", model=name, workers=len(plan.workers), beside=_model_names(plan)[1:])

    async def check_once(self) -> None:
        """Wait for an interval, then restore recorded models, and stop or replace groups.

        Groups of removed and failed models are stopped, and groups with a replacement are replaced.
        """
        await asyncio.sleep(CHECK_INTERVAL_S)
        async with self._changing:
            await self._restore_models()
            await self._warn_of_unserved()
            dismissed = await self._scheduler.registry.dismissed_models()
            for group in list(self._groups):
                if group.launcher.failed.done() and group is not self._first:
                    await self._fail_group(group)
                elif group.replacement:
                    # The replacement needs the memory of this group, so the group stops first.
                    await group.launcher.stop(self._drain_timeout + LEAVING_S, self._stopping)
                    self._groups.remove(group)
                    self.start_group(group.replacement)
                elif removed := dismissed.intersection(group.models):
                    group.idle_checks = 0 if await self._unfinished(removed) else group.idle_checks + 1
                    remaining = set(group.models).difference(removed)
                    if group.idle_checks >= QUIET and await self._may_end(group, remaining):
                        await self._end_group(group, removed)
            self._ungrouped -= dismissed
            if self._ungrouped:
                self.start_group(await self._make_plan(sorted(self._ungrouped)))
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
        """The server name for records of models that are added here.

        "" stands for all servers without workers.
        """
        return self._server if self._first is None or self._first.plan.workers else ""

    def _is_ours(self, record: DeclaredModels) -> bool:
        """Whether this server serves a recorded model.

        A model that failed, and is recorded without a server name, was never served and is not tried again.
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
        """Log once the models that have requests in the queue but are not served."""
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
        """Delete the record of a removed model unless it has unfinished requests.

        Returns whether the record was deleted.
        """
        if await self._unfinished([name]):
            return False
        await self._scheduler.registry.delete_dismissed(name)
        return True

    async def _serve_again(self, record: DeclaredModels) -> None:
        """Serve a recorded model again.

        If the model cannot be served, its requests fail with the reason.
        """
        registry = self._scheduler.registry
        spec, *_ = record.models
        try:
            plan, replaced = await self._plan_added_model(spec.name, spec.source)
        except (ConfigError, OSError) as error:
            if self._owner or not self._scheduler.queue.shared:
                await self._fail_model(spec, str(error), self._server)
            else:  # another server may be able to offer it, so its requests wait
                log.warning("a model that was added cannot be offered to workers", model=spec.name, reason=str(error))
            return
        current_spec = plan.models[0].spec
        if current_spec.pools() != spec.pools():
            await self._end_requests([spec.name], "its files, or --dtype, have changed since the request was accepted")
        if not record.withdrawn and (record.failure or current_spec != spec):
            await registry.admit(current_spec, self._owner, overwrite=True)
        self._start_added(plan, replaced)
        log.info("a model that was added is served again", model=spec.name, workers=len(plan.workers))

    def _start_added(self, plan: ServingPlan, replaced: _WorkerGroup | None) -> None:
        """Start the workers of a plan with one more model.

        If they replace a group, they start after the next check has stopped that group.
        """
        self._unservable.pop(plan.models[0].spec.name, None)
        if replaced:
            replaced.replacement = plan
        else:
            self.start_group(plan)

    async def _fail_model(self, spec: ModelSpec, reason: str, server: str) -> None:
        """Record why a model cannot be served, and fail its requests with that reason.

        `server`: the server that tries the model again when it starts, or "".
        """
        reason = without_source(reason, spec.source, spec.name)
        log.error("a model that was added cannot be served", model=spec.name, reason=reason)
        await self._scheduler.registry.fail_model(spec, reason, server)
        self._sources.pop(spec.name, None)
        self._unservable[spec.name] = QUIET, reason
        await self._end_requests([spec.name], reason)
        await self._scheduler.registry.delete_dismissed(spec.name)

    async def _fail_late_requests(self) -> None:
        """Fail requests that were accepted while their model failed."""
        for name, (checks_left, reason) in list(self._unservable.items()):
            await self._end_requests([name], reason)
            self._unservable[name] = checks_left - 1, reason
            if not checks_left:
                del self._unservable[name]

    async def _end_requests(self, models: Collection[str], reason: str = "") -> None:
        """Fail all requests of these models with the reason. Without one, cancel them."""
        scheduler = self._scheduler
        while requests := await self._unfinished(models):
            await asyncio.gather(
                *(
                    scheduler.fail_unserved(request, reason) if reason else scheduler.cancel(request)
                    for request in requests
                )
            )

    async def _may_end(self, group: _WorkerGroup, remaining: Collection[str]) -> bool:
        """Whether a group may end: it has no successor, or its successor is registered.

        A successor is started for the `remaining` models if as many workers fit in addition to the group.
        """
        if group.successor is None and remaining:
            with contextlib.suppress(ConfigError):  # it does not fit now: it starts after the group has ended
                plan = await self._make_plan(sorted(remaining))
                # A smaller successor would save a minute now, and stay smaller for good.
                if len(plan.workers) >= len(group.plan.workers):
                    self.start_group(plan)
                    group.successor = self._groups[-1]
        if group.successor is None or group.successor not in self._groups:
            return True
        workers = await self._scheduler.registry.workers()
        registered_count = sum({spec.name for spec in worker.models} <= set(remaining) for worker in workers)
        return registered_count >= len(group.successor.plan.workers)

    async def _end_group(self, group: _WorkerGroup, removed: Collection[str]) -> None:
        """Stop a group, some of whose models were `removed` and have no requests any more.

        Its other models get another group if they have none. Their requests continue there.
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
        """Stop a group whose workers cannot start, and fail the requests of the faulty model.

        If the group has several models, the last added one counts as faulty. If the group is a successor, no model
        fails: another group is started for its models once its predecessor has ended.
        """
        error = group.launcher.failed.exception()
        models = {model.spec.name: model.spec for model in group.plan.models}
        is_successor = any(other.successor is group for other in self._groups)
        await group.launcher.stop(0 if is_successor else self._drain_timeout + LEAVING_S)

        # `stop` returns after all lines were read, so `group.reason` is complete now.
        if is_successor:
            self._groups.remove(group)
            return

        faulty = [name for name in self._sources if name in models][-1:] or [*models]
        self._remove_group(group, faulty)
        for name in faulty:
            retrying_server = self._server if name in self._restored else ""
            await self._fail_model(models[name], group.reason or str(error), retrying_server)

    def _remove_group(self, group: _WorkerGroup, removed: Collection[str]) -> None:
        """Remove a stopped group from the list.

        Its models other than the `removed` ones get another group at the end of the check.
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

    async def _plan_added_model(self, name: str, source: str) -> tuple[ServingPlan, _WorkerGroup | None]:
        """Return the plan for one more model, and the group that it replaces, or None.

        The model is the first of the plan, and so is loaded first. If it cannot be loaded, the group fails early.
        Raises ConfigError.
        """
        self._sources[name] = source
        try:
            plan, replaced = await self._plan_beside_or_with(name)
        except BaseException:
            del self._sources[name]
            raise
        self._sources[name] = plan.models[0].spec.source
        return plan, replaced

    async def _plan_beside_or_with(self, name: str) -> tuple[ServingPlan, _WorkerGroup | None]:
        """Return a plan for this model, alone or together with a group's models.

        The second value is that group, or None. Raises ConfigError if neither fits.
        """
        try:
            return await self._make_plan([name]), None
        except ConfigError as refusal:
            successors = [group.successor for group in self._groups]
            for group in [group for group in self._groups if group.successor is None and group not in successors]:
                with contextlib.suppress(ConfigError):
                    plan = await self._make_plan([name, *group.models], group)
                    if _is_downloaded(plan.models[0]):
                        return plan, group
                    refusal = ConfigError(
                        f"{refusal}; download its files by `unfuse pull`, so that it can be swapped with other models"
                    )
            raise refusal

    async def _make_plan(self, models: Sequence[str], replaced: _WorkerGroup | None = None) -> ServingPlan:
        """Return the serving plan for these models within the memory that running groups leave.

        The memory of the `replaced` group counts as free. Raises ConfigError. Raises ApiError as soon as all workers
        are to stop, even during a slow read from the hub.
        """
        unavailable_pools = (await self._scheduler.registry.unavailable_pools()).keys()
        others = [group for group in self._groups if group is not replaced]
        successors = [group.successor for group in self._groups]
        loading = [
            group
            for group in self._groups
            if group in successors or not unavailable_pools.isdisjoint(_model_names(group.plan))
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
        """Offer the models of all groups to workers, and call `on_plans_changed`."""
        plans = [group.plan for group in self._groups]
        models = [model for plan in plans for model in plan.models]
        self._dispatcher.set_offered_models([(model.spec.name, model.spec.source, model.dtypes) for model in models])
        self._changed(plans)


def _refusal_exists(name: str) -> ApiError:
    return ApiError(409, "model_exists", f"a model {name!r} is served already: send another name", "name")


def _refusal_stopping() -> ApiError:
    return ApiError(503, "stopping", "the server is stopping", headers={"retry-after": "5"})


def _is_downloaded(model: PlannedModel) -> bool:
    """Whether all weights of a model are on a disk of this machine.

    Only then does the model join a group, so that no request of the group's other models waits for a download.
    """
    with contextlib.suppress(ConfigError):
        return bool([open_files(model.folder).weights(component) for component in model.components])
    return False


def _model_names(plan: ServingPlan) -> list[str]:
    return [model.spec.name for model in plan.models]


def _taken_bytes(groups: Sequence[_WorkerGroup]) -> Counter[str]:
    """Return the bytes that these groups use together, by device."""
    return sum((taken_bytes(group.plan.workers, group.plan.worker_plan) for group in groups), Counter())
