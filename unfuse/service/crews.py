"""The models of a service and the workers that it started for them, which come and go while it runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import structlog
from typing_extensions import override

from unfuse.core.errors import ConfigError, TransientError
from unfuse.launch.base import Launcher
from unfuse.launch.placement import taken
from unfuse.models.gguf_model import files_of
from unfuse.queues.base import Filter
from unfuse.scheduler.dispatcher import Dispatcher
from unfuse.scheduler.scheduler import Scheduler
from unfuse.server.errors import Refusal
from unfuse.server.joining import Joining
from unfuse.service.machine_workers import LEAVING_S
from unfuse.service.plan import Model, Plan

LOOK_S = 1.0  # seconds between two looks at which models have left
QUIET = 2  # how many looks in a row find no request of a model that left before its workers go: one may be on its way

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class _Crew:
    """The workers of one plan, and how many looks in a row found nothing left to do for models that have left.

    Its heir is the crew that was started beside it for those that stay; `next` the plan of those that are to take its
    place, with a model more.
    """

    plan: Plan
    launcher: Launcher
    quiet: int = 0
    heir: _Crew | None = None
    next: Plan | None = None

    @property
    def models(self) -> list[str]:
        return _models(self.next or self.plan)


class Crews(Joining):
    """The crews of a service: one for the models that it began with, and one for each that was added.

    `plan` decides who serves these models, where devices hold so many bytes and will hold some of them only soon; it
    raises ConfigError. `start` starts those workers, the first of which has that number among all. `changed` is told
    all plans.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        dispatcher: Dispatcher,
        plan: Callable[[Sequence[str], Counter[str], Counter[str]], Plan],
        start: Callable[[Plan, int], Launcher],
        changed: Callable[[Sequence[Plan]], object],
        drain_timeout: float,
    ) -> None:
        super().__init__()
        self._scheduler, self._dispatcher, self._drain_timeout = scheduler, dispatcher, drain_timeout
        self._plan, self._start, self._changed = plan, start, changed
        self._crews, self._started, self._changing = list[_Crew](), 0, asyncio.Lock()
        self._first: Launcher | None = None
        self._stops = asyncio.Event()
        """Set when all workers are to end, so that nobody waits long for those of a model that left."""
        self._added, self._without_crew = dict[str, None](), set[str]()

    def begin(self, plan: Plan) -> Launcher:
        """Start the workers of a plan. Where the first ones that began cannot start, it is up to the caller to end."""
        launcher = self._start(plan, self._started)
        self._first = self._first or launcher
        self._started += len(plan.workers) + 1
        self._crews.append(_Crew(plan, launcher))
        self._offer()
        return launcher

    @override
    async def add(self, name: str) -> None:
        registry = self._scheduler.registry
        async with self._changing:
            if self._scheduler.draining:
                raise Refusal(503, "stopping", "the server is stopping", headers={"retry-after": "5"})
            if name in await registry.cards():
                raise Refusal(409, "model_exists", f"model {name!r} is served already", "model")
            if any(name in crew.models for crew in self._crews):
                message = f"model {name!r} is leaving: it can be added again once its requests and workers have ended"
                raise Refusal(409, "model_leaves", message, "model", {"retry-after": "2"})
            planned, crew = await self._placed(name)
            self.refused.pop(name, None)
            await registry.admit(planned.models[0].card)
            self._added[name] = None
            if crew:
                crew.next = planned
            else:
                self.begin(planned)
            log.info("model added", model=name, workers=len(planned.workers), beside=_models(planned)[1:])

    async def look(self) -> None:
        """End the workers of models that have left, once no request of theirs is left."""
        await asyncio.sleep(LOOK_S)
        async with self._changing:
            gone = await self._scheduler.registry.gone()
            for crew in list(self._crews):
                if crew.launcher.failed.done() and crew.launcher is not self._first:
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

    @property
    def has_workers(self) -> bool:
        """Whether there are workers to end."""
        return any(crew.plan.workers for crew in self._crews)

    async def stop(self, drain_timeout: float, hurry: asyncio.Event | None = None) -> None:
        """End all workers, as a launcher does. Models that were added are remembered by nobody."""
        self._stops.set()
        async with self._changing:
            with contextlib.suppress(TransientError):
                for name in self._added:
                    await self._scheduler.registry.withdraw(name)
            await asyncio.gather(*(crew.launcher.stop(drain_timeout, hurry) for crew in self._crews))

    async def _followed(self, crew: _Crew, staying: Collection[str]) -> bool:
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

    async def _end(self, crew: _Crew, leaving: Collection[str]) -> None:
        """End a crew; the models that stay, and have no other one yet, get one, with which their requests go on."""
        await crew.launcher.stop(self._drain_timeout + LEAVING_S, self._stops)
        self._crews.remove(crew)
        self._added = {name: None for name in self._added if name not in leaving}
        self._without_crew.update(set(crew.models).difference(leaving, *(one.models for one in self._crews)))
        self._offer()
        while late := await self._unfinished(leaving):  # these came while the workers went
            await asyncio.gather(*map(self._scheduler.cancel, late))
        log.info("model removed", models=sorted(leaving))

    async def _fail(self, crew: _Crew) -> None:
        """Serve a model no more whose workers could not start, of several the last added one; its requests are
        cancelled. Those that were started beside a crew are tried again once it has ended.
        """
        if any(one.heir is crew for one in self._crews):
            self._crews.remove(crew)
            await crew.launcher.stop(0)
            return
        error, models = crew.launcher.failed.exception(), _models(crew.plan)
        blamed = [name for name in self._added if name in models][-1:] or models
        log.error("a model that was added cannot be served", models=blamed, reason=str(error))
        for name in blamed:
            self.refused[name] = str(error)
            await self._scheduler.registry.dismiss(name)
        await self._end(crew, blamed)

    async def _unfinished(self, models: Collection[str]) -> list[str]:
        """Requests of these models that are not over: those of a page of the list that has any."""
        after = None
        while page := await self._scheduler.queue.list(Filter(over=False), after=after, limit=500):
            if found := [record.context.id for record in page if record.context.model in models]:
                return found
            after = page[-1].context.id
        return []

    async def _placed(self, name: str) -> tuple[Plan, _Crew | None]:
        """The plan for one more model: beside those that are there, or with those of a crew, in whose place its workers
        come. That model is the first, which is loaded first: so it is known whether it can be. Raises ConfigError.
        """
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

    async def _planned(self, models: Sequence[str], instead: _Crew | None = None) -> Plan:
        """The plan for these models beside those that are there, or `instead` of some. Raises ConfigError."""
        missing = (await self._scheduler.registry.missing()).keys()
        others = [crew for crew in self._crews if crew is not instead]
        heirs = [crew.heir for crew in self._crews]
        loading = [crew for crew in self._crews if crew in heirs or not missing.isdisjoint(_models(crew.plan))]
        coming = _taken([crew for crew in loading if crew is not instead])
        if instead and instead not in loading:
            coming.subtract(_taken([instead]))  # which will be free
        return await asyncio.to_thread(self._plan, models, _taken(others), coming)

    def _offer(self) -> None:
        plans = [crew.plan for crew in self._crews]
        models = [model for plan in plans for model in plan.models]
        self._dispatcher.offer([(model.card.name, model.card.source, model.dtypes) for model in models])
        self._changed(plans)


def _is_here(model: Model) -> bool:
    """Whether it is all on this disk: nobody waits for a download in the place of what is there."""
    with contextlib.suppress(ConfigError):
        return bool([files_of(model.folder).weights(component) for component in model.components])
    return False


def _models(plan: Plan) -> list[str]:
    return [model.card.name for model in plan.models]


def _taken(crews: Sequence[_Crew]) -> Counter[str]:
    """The bytes that they take together, by device."""
    return sum((taken(crew.plan.workers, crew.plan.wanted) for crew in crews), Counter())
