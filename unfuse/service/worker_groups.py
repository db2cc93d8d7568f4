"""The models of a service and the workers that it started for them, which come and go while it runs."""

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
from unfuse.core.supervisor import first, in_own_thread
from unfuse.edge.access import Refusal
from unfuse.launch.base import Launcher
from unfuse.planning.placement import taken
from unfuse.queues.base import DeclaredModels, RequestFilter
from unfuse.scheduler.dispatcher import Dispatcher
from unfuse.scheduler.scheduler import Scheduler
from unfuse.server.served_models import AddModel, AddModelProgress
from unfuse.service.loading import LoadingProgress
from unfuse.service.plan import PlannedModel, ServingPlan
from unfuse.weights.gguf_model import files_of
from unfuse.worker.records import read_record

LOOK_S = 1.0  # seconds between two looks at which models have left
LAST_WORDS = b"unfuse: "  # what the line begins with in which a command says why it ends
LEAVING_S = 10.0  # seconds beside the drain timeout that workers of a model that left get to end
QUIET = 2  # how many looks in a row find no request of a model that left before its workers go: one may be on its way

Plans = Callable[[Mapping[str, str], Counter[str], Counter[str]], ServingPlan]
"""Plans models, by name and where each is, beside others that take, or will take, bytes of devices."""

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class _WorkerGroup:
    """The workers of one plan, and how many looks in a row found nothing left to do for models that have left.

    `first` is the number of its first worker. Its heir is the crew that was started beside it for those that stay;
    `next` the plan of those that are to take its place, with a model more.
    """

    plan: ServingPlan
    launcher: Launcher
    first: int
    loading: LoadingProgress
    reason: str = ""
    """The reason why a worker could not start, as it logged it; "" if there is none."""
    quiet: int = 0
    heir: _WorkerGroup | None = None
    next: ServingPlan | None = None

    @property
    def models(self) -> list[str]:
        return _models(self.next or self.plan)


class WorkerGroups(AddModel):
    """The crews of a service: one for the models that it began with, and one for each that was added.

    `plan` decides who serves these models, by name and where they are, where devices hold so many bytes and will hold
    some of them only soon; it raises ConfigError. `start` starts those workers, the first of which has that number
    among all; their lines are for `hear`. `changed` is told all plans.

    What is added is recorded in the queue, as this `server`'s, and served again by the server of that name when it
    starts. What is added at a server that starts no workers is offered to workers by all such servers.
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
        self._scheduler, self._dispatcher, self._drain_timeout = scheduler, dispatcher, drain_timeout
        self._plan, self._start, self._changed, self._server = plan, start, changed, server
        self._crews, self._started, self._changing = list[_WorkerGroup](), 0, asyncio.Lock()
        self._first: _WorkerGroup | None = None
        self._stops = asyncio.Event()
        """Set when all workers are to end, so that nobody waits long for those of a model that left."""
        self._sources = dict[str, str]()
        """Where models are that were added, by name, in the order in which they were."""
        self._restored, self._without_crew = set[str](), set[str]()
        self._given_up = dict[str, tuple[int, str]]()
        """Models that cannot be served: for how many looks requests may still come, and the reason."""
        self._has_warned = False

    def begin(self, plan: ServingPlan) -> Launcher:
        """Start the workers of a plan. Where the first ones that began cannot start, it is up to the caller to end."""
        number, self._started = self._started, self._started + len(plan.workers) + 1
        crew = _WorkerGroup(plan, self._start(plan, number), number, LoadingProgress(_models(plan)))
        crew.loading.expect([worker.role for worker in plan.workers])
        self._first = self._first or crew
        self._crews.append(crew)
        self._offer()
        return crew.launcher

    def hear(self, number: int, line: bytes) -> None:
        """Read what the worker of that number writes, in whatever thread."""
        for crew in list(self._crews):
            if not 0 <= number - crew.first <= len(crew.plan.workers):
                continue
            if line.startswith(LAST_WORDS):
                crew.reason = line.removeprefix(LAST_WORDS).decode(errors="replace").strip()
            elif record := read_record(line):
                crew.loading.hear(number - crew.first, record)

    @override
    def progress(self, name: str) -> AddModelProgress | None:
        latest = next((crew for crew in reversed(self._crews) if name in _models(crew.plan)), None)
        found = latest.loading.earliest() if latest else None
        return AddModelProgress(found.phase, found.done, found.total) if found else None

    @override
    async def add(self, name: str, source: str) -> None:
        registry = self._scheduler.registry
        async with self._changing:
            if self._scheduler.draining:
                raise _stopping()
            if name in await registry.cards():
                raise _exists(name)
            if any(name in crew.models for crew in self._crews):
                message = f"model {name!r} is leaving: it can be added again once its requests and workers have ended"
                raise Refusal(409, "model_leaves", message, "name", {"retry-after": "2"})
            planned, crew = await self._placed(name, source)
            if not await registry.admit(planned.models[0].card, self._owner):
                del self._sources[name]
                raise _exists(name)  # at another server, meanwhile
            self._restored.discard(name)
            self._serve(planned, crew)
            log.info("model added", model=name, workers=len(planned.workers), beside=_models(planned)[1:])

    async def look(self) -> None:
        """Serve again what was added before, and end workers of models that have left."""
        await asyncio.sleep(LOOK_S)
        async with self._changing:
            await self._restore()
            await self._warn_of_unserved()
            gone = await self._scheduler.registry.gone()
            for crew in list(self._crews):
                if crew.launcher.failed.done() and crew is not self._first:
                    await self._fail(crew)
                elif crew.next:
                    await crew.launcher.stop(self._drain_timeout + LEAVING_S, self._stops)
                    self._crews.remove(crew)
                    self.begin(crew.next)
                elif leaving := gone.intersection(crew.models):
                    crew.quiet = 0 if await self._unfinished(leaving) else crew.quiet + 1
                    if crew.quiet >= QUIET and await self._followed(crew, set(crew.models).difference(leaving)):
                        await self._end(crew, leaving)
            self._without_crew -= gone
            if self._without_crew:
                self.begin(await self._planned(sorted(self._without_crew)))
                self._without_crew.clear()
            await self._give_up_late()

    @property
    def has_workers(self) -> bool:
        """Whether there are workers to end."""
        return any(crew.plan.workers for crew in self._crews)

    async def stop(self, drain_timeout: float, hurry: asyncio.Event | None = None) -> None:
        """End all workers, as a launcher does."""
        self._stops.set()
        async with self._changing:
            await asyncio.gather(*(crew.launcher.stop(drain_timeout, hurry) for crew in self._crews))

    @property
    def _owner(self) -> str:
        """Who serves again what is added here: this server, or all that start no workers."""
        return self._server if self._first is None or self._first.plan.workers else ""

    def _is_ours(self, record: DeclaredModels) -> bool:
        """Whether a model that was added is served here. One that never was is not tried again."""
        if record.failed and not record.server:
            return False
        return record.server == self._owner or not self._scheduler.queue.shared

    async def _restore(self) -> None:
        """Serve what was added before this server started, or at another one that starts no workers either."""
        registry, served = self._scheduler.registry, {name for crew in self._crews for name in crew.models}
        for name, record in (await registry.recorded()).items():
            if name in self._restored or not self._is_ours(record) or self._scheduler.draining:
                continue
            if name in registry.configured:
                await registry.withdraw(name)  # it is named at the start now
            elif name not in served and not (record.gone and await self._left(name)):
                await self._serve_again(record)
                self._restored.add(name)

    async def _warn_of_unserved(self) -> None:
        """Say once which models nobody serves whose requests a queue from before this start still has."""
        if self._has_warned:
            return
        served = {*await self._scheduler.registry.cards(), *(name for crew in self._crews for name in crew.models)}
        waiting = Counter[str]()
        async for page in self._pages():
            waiting.update(
                record.context.request.model for record in page if record.context.request.model not in served
            )
        for model, count in waiting.items():
            message = "requests wait for a model that is not served: start the server with it, add it, or cancel them"
            log.warning(message, model=model, requests=count)
        self._has_warned = True

    async def _left(self, name: str) -> bool:
        """Whether a model that was removed needs no workers, since no request of it is left."""
        if await self._unfinished([name]):
            return False
        await self._scheduler.registry.left(name)
        return True

    async def _serve_again(self, record: DeclaredModels) -> None:
        """Serve a model as it was added. Where that fails, its requests fail with the reason."""
        registry, (card, *_) = self._scheduler.registry, record.cards
        try:
            planned, crew = await self._placed(card.name, card.source)
        except (ConfigError, OSError) as error:
            if self._owner or not self._scheduler.queue.shared:
                await self._refuse(card, str(error), self._server)
            else:
                log.warning("a model that was added cannot be offered to workers", model=card.name, reason=str(error))
            return
        found = planned.models[0].card
        if found.pools() != card.pools():
            await self._end_requests([card.name], "its files, or --dtype, have changed since the request was accepted")
        if not record.gone and (record.failed or found != card):
            await registry.admit(found, self._owner, again=True)
        self._serve(planned, crew)
        log.info("a model that was added is served again", model=card.name, workers=len(planned.workers))

    def _serve(self, planned: ServingPlan, instead: _WorkerGroup | None) -> None:
        """Start the workers of a plan for one model more, beside the others or `instead` of a crew."""
        self._given_up.pop(planned.models[0].card.name, None)
        if instead:
            instead.next = planned
        else:
            self.begin(planned)

    async def _refuse(self, card: ModelSpec, reason: str, server: str) -> None:
        """Serve a model no more that cannot be served; its requests fail with the reason, which is recorded.

        The `server`, if any, tries it again when it starts.
        """
        reason = without_source(reason, card.source, card.name)
        log.error("a model that was added cannot be served", model=card.name, reason=reason)
        await self._scheduler.registry.fail(card, reason, server)
        self._sources.pop(card.name, None)
        self._given_up[card.name] = QUIET, reason
        await self._end_requests([card.name], reason)
        await self._scheduler.registry.left(card.name)

    async def _give_up_late(self) -> None:
        """Fail requests that were accepted while their model was found to be one that cannot be served."""
        for name, (looks, reason) in list(self._given_up.items()):
            await self._end_requests([name], reason)
            self._given_up[name] = looks - 1, reason
            if not looks:
                del self._given_up[name]

    async def _end_requests(self, models: Collection[str], reason: str = "") -> None:
        """End the requests of these models: with a reason they fail, else they are cancelled."""
        scheduler = self._scheduler
        while late := await self._unfinished(models):
            await asyncio.gather(
                *(scheduler.give_up(request, reason) if reason else scheduler.cancel(request) for request in late)
            )

    async def _followed(self, crew: _WorkerGroup, staying: Collection[str]) -> bool:
        """Whether a crew may end: all workers are there that go on with its models, or have no room beside it."""
        if crew.heir is None and staying:
            with contextlib.suppress(ConfigError):
                planned = await self._planned(sorted(staying))
                if len(planned.workers) >= len(crew.plan.workers):
                    self.begin(planned)
                    crew.heir = self._crews[-1]
        if crew.heir is None or crew.heir not in self._crews:
            return True
        workers = await self._scheduler.registry.workers()
        there = sum({card.name for card in worker.cards} <= set(staying) for worker in workers)
        return there >= len(crew.heir.plan.workers)

    async def _end(self, crew: _WorkerGroup, leaving: Collection[str]) -> None:
        """End a crew; the models that stay, and have no other one yet, get one, with which their requests go on."""
        await crew.launcher.stop(self._drain_timeout + LEAVING_S, self._stops)
        self._dissolve(crew, leaving)
        await self._end_requests(leaving)  # these came while the workers went
        for name in leaving:
            self._sources.pop(name, None)
            self._restored.discard(name)
            await self._scheduler.registry.left(name)
        log.info("model removed", models=sorted(leaving))

    async def _fail(self, crew: _WorkerGroup) -> None:
        """Serve a model no more whose workers could not start, of several the last added one; its requests fail.

        Those that were started beside a crew are tried again once it has ended.
        """
        error, models = crew.launcher.failed.exception(), {model.card.name: model.card for model in crew.plan.models}
        is_heir = any(one.heir is crew for one in self._crews)
        await crew.launcher.stop(0 if is_heir else self._drain_timeout + LEAVING_S)  # all they write is heard then
        if is_heir:
            self._crews.remove(crew)
            return
        blamed = [name for name in self._sources if name in models][-1:] or [*models]
        self._dissolve(crew, blamed)
        for name in blamed:
            again = self._server if name in self._restored else ""
            await self._refuse(models[name], crew.reason or str(error), again)

    def _dissolve(self, crew: _WorkerGroup, leaving: Collection[str]) -> None:
        """Forget a crew that has ended. Models that stay get another one at the end of a look."""
        self._crews.remove(crew)
        self._without_crew.update(set(crew.models).difference(leaving, *(one.models for one in self._crews)))
        self._offer()

    async def _unfinished(self, models: Collection[str]) -> list[str]:
        """Requests of these models that are not over: those of a page of the list that has any."""
        async for page in self._pages():
            if found := [record.context.id for record in page if record.context.request.model in models]:
                return found
        return []

    async def _pages(self) -> AsyncIterator[Sequence[RequestRecord]]:
        """The requests that are not over, in pages of the list."""
        after = None
        while page := await self._scheduler.queue.list(RequestFilter(over=False), after=after, limit=500):
            yield page
            after = page[-1].context.id

    async def _placed(self, name: str, source: str) -> tuple[ServingPlan, _WorkerGroup | None]:
        """The plan for one more model: beside those that are there, or with those of a crew, in whose place its workers
        come. That model is the first, which is loaded first: so it is known whether it can be. Raises ConfigError.
        """
        self._sources[name] = source
        try:
            planned, crew = await self._beside_or_with(name)
        except BaseException:
            del self._sources[name]
            raise
        self._sources[name] = planned.models[0].card.source
        return planned, crew

    async def _beside_or_with(self, name: str) -> tuple[ServingPlan, _WorkerGroup | None]:
        try:
            return await self._planned([name]), None
        except ConfigError as alone:
            heirs = [crew.heir for crew in self._crews]
            for crew in [crew for crew in self._crews if crew.heir is None and crew not in heirs]:
                with contextlib.suppress(ConfigError):
                    planned = await self._planned([name, *crew.models], crew)
                    if _is_here(planned.models[0]):
                        return planned, crew
                    alone = ConfigError(f"{alone}; it can take turns with others once its files are here: unfuse pull")
            raise alone

    async def _planned(self, models: Sequence[str], instead: _WorkerGroup | None = None) -> ServingPlan:
        """The plan for these models beside those that are there, or `instead` of some.

        Raises ConfigError, and Refusal once all workers are to end, which does not wait for a hub that is slow.
        """
        missing = (await self._scheduler.registry.missing()).keys()
        others = [crew for crew in self._crews if crew is not instead]
        heirs = [crew.heir for crew in self._crews]
        loading = [crew for crew in self._crews if crew in heirs or not missing.isdisjoint(_models(crew.plan))]
        coming = _taken([crew for crew in loading if crew is not instead])
        if instead and instead not in loading:
            coming.subtract(_taken([instead]))  # which will be free
        found_by = {name: self._sources.get(name, name) for name in models}
        planning = asyncio.create_task(in_own_thread(partial(self._plan, found_by, _taken(others), coming)))
        await first(planning, self._stops.wait())
        if planning.cancelled():
            raise _stopping()
        return planning.result()

    def _offer(self) -> None:
        plans = [crew.plan for crew in self._crews]
        models = [model for plan in plans for model in plan.models]
        self._dispatcher.offer([(model.card.name, model.card.source, model.dtypes) for model in models])
        self._changed(plans)


def _exists(name: str) -> Refusal:
    return Refusal(409, "model_exists", f"a model {name!r} is served already: send another name", "name")


def _stopping() -> Refusal:
    return Refusal(503, "stopping", "the server is stopping", headers={"retry-after": "5"})


def _is_here(model: PlannedModel) -> bool:
    """Whether it is all on this disk: nobody waits for a download in the place of what is there."""
    with contextlib.suppress(ConfigError):
        return bool([files_of(model.folder).weights(component) for component in model.components])
    return False


def _models(plan: ServingPlan) -> list[str]:
    return [model.card.name for model in plan.models]


def _taken(crews: Sequence[_WorkerGroup]) -> Counter[str]:
    """The bytes that they take together, by device."""
    return sum((taken(crew.plan.workers, crew.plan.wanted) for crew in crews), Counter())
