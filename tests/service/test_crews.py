"""A crew that is exchanged for one without a model that has left: the others go on with workers all the time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from typing_extensions import override

from tools.cards import IDLE, PICTURES, STILL
from unfuse.core.clock import SystemClock
from unfuse.core.errors import ConfigError
from unfuse.core.messages import StorageLocations, WorkerInfo
from unfuse.launch.base import Launcher
from unfuse.planning.placement import PlacedWorker, WorkerPlan
from unfuse.queues.memory import MemoryQueue
from unfuse.scheduler.dispatcher import Dispatcher
from unfuse.scheduler.scheduler import Scheduler
from unfuse.service.plan import PlannedModel, ServingPlan
from unfuse.service.worker_groups import QUIET, WorkerGroups

CARDS = {card.name: card for card in (PICTURES, IDLE, STILL)}


class Staff(Launcher):
    """Workers that are there once they are told to come."""

    def __init__(self, queue: MemoryQueue, plan: ServingPlan, number: int) -> None:
        self.queue, self.cards = queue, [model.spec for model in plan.models]
        self.ids = [f"{number}-{place}" for place in range(len(plan.workers))]
        self.failed, self.has_ended = asyncio.get_running_loop().create_future(), False

    @override
    def start(self) -> None:
        """They come one by one."""

    async def comes(self, place: int = 0) -> None:
        pools = tuple(pool for card in self.cards for pool in card.pools().values())
        await self.queue.register(WorkerInfo(self.ids[place], "node", "all", pools, 1, "", 0), self.cards)

    @override
    async def stop(self, drain_timeout: float, hurry: asyncio.Event | None = None) -> None:
        self.failed.cancel()
        self.has_ended = True
        for id in self.ids:
            await self.queue.unregister(id)


class House:
    """Crews of a machine with room for so many workers, of which each crew should have two."""

    def __init__(self, room: int) -> None:
        self.queue, self.room, self.crews = MemoryQueue(SystemClock()), room, list[Staff]()
        self.scheduler = Scheduler(self.queue, specs=[*CARDS.values()])
        dispatcher = Dispatcher(self.scheduler, [], StorageLocations(""))
        self._all = WorkerGroups(self.scheduler, dispatcher, self._plan, self._start, lambda plans: None, 0.0)

    async def begin(self, *models: str) -> None:
        await self.scheduler.registry.declare([CARDS[name] for name in models])
        self._all.start_group(self._plan({name: name for name in models}, Counter(), Counter()))
        await self.all_come()

    def _plan(self, models: Mapping[str, str], taken: Counter[str], coming: Counter[str]) -> ServingPlan:
        there = sum(len(crew.ids) for crew in self.crews if not crew.has_ended)
        if not (free := min(2, self.room - there)):
            raise ConfigError("there is no room")
        worker = PlacedWorker("all", "cpu", ())
        told = tuple(PlannedModel(CARDS[name], Path(), "float32", {}) for name in models)
        return ServingPlan(told, {}, WorkerPlan(), (), (worker,) * free)

    def _start(self, plan: ServingPlan, number: int) -> Launcher:
        self.crews.append(Staff(self.queue, plan, number))
        return self.crews[-1]

    async def all_come(self) -> None:
        for place in range(len(self.crews[-1].ids)):
            await self.crews[-1].comes(place)

    async def dismiss(self, *models: str) -> None:
        for name in models:
            await self.scheduler.registry.dismiss(name)

    async def look(self, times: int = 1) -> None:
        for _ in range(times):
            await self._all.check_once()

    @property
    def there(self) -> list[tuple[set[str], bool]]:
        """The models of each crew that was started, and whether it has ended."""
        return [({card.name for card in crew.cards}, crew.has_ended) for crew in self.crews]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unfuse.service.worker_groups.CHECK_INTERVAL_S", 0.0)


async def test_old_worker_group_stops_after_the_new_group_is_ready() -> None:
    """Given room for both crews, then the first one ends once all workers of the second are there, and not before."""
    house, stays = House(4), {PICTURES.name}
    await house.begin(PICTURES.name, IDLE.name)
    await house.dismiss(IDLE.name)
    await house.look(QUIET + 3)
    both = {PICTURES.name, IDLE.name}
    assert house.there == [(both, False), (stays, False)]
    await house.crews[1].comes(0)
    await house.look(3)
    assert house.there == [(both, False), (stays, False)], "one of two is not enough"
    await house.crews[1].comes(1)
    await house.look(3)
    assert house.there == [(both, True), (stays, False)]
    assert PICTURES.name not in await house.scheduler.registry.unavailable_pools()


@pytest.mark.parametrize("room", [2, 3])
async def test_old_worker_group_stops_first_if_memory_is_short(room: int) -> None:
    """Given room for one crew, or for a smaller one beside it, then the first one ends, and the next has it all."""
    house = House(room)
    await house.begin(PICTURES.name, IDLE.name)
    await house.dismiss(IDLE.name)
    await house.look(QUIET)
    assert house.there == [({PICTURES.name, IDLE.name}, True), ({PICTURES.name}, False)]
    assert len(house.crews[1].ids) == 2


async def test_worker_group_that_fails_beside_another_is_started_again_alone() -> None:
    house, stays = House(4), {PICTURES.name}
    await house.begin(PICTURES.name, IDLE.name)
    await house.dismiss(IDLE.name)
    await house.look(QUIET)
    house.crews[1].failed.set_exception(ConfigError("out of memory"))
    await house.look(2)
    assert house.there == [({PICTURES.name, IDLE.name}, True), (stays, True), (stays, False)]
    assert {*await house.scheduler.registry.model_specs()} >= stays


async def test_second_removal_during_an_exchange_replaces_the_new_group() -> None:
    house, stays = House(8), {PICTURES.name}
    await house.begin(PICTURES.name, IDLE.name, STILL.name)
    await house.dismiss(IDLE.name)
    await house.look(QUIET)
    await house.dismiss(STILL.name)
    await house.look(QUIET)
    assert [models for models, _ in house.there] == [{*CARDS}, {PICTURES.name, STILL.name}, stays]
    await house.all_come()
    await house.look(QUIET)
    assert [ended for _, ended in house.there] == [True, True, False]
