"""A burst of pictures on four workers: fixed ones, with a role each, against flexible ones, which change roles.

The real scheduler, dispatcher and rule of swaps, with workers that sleep instead of computing, on an event loop on
which waiting takes no time: no other load of the machine shows, and a run of minutes takes seconds. What stages of a
picture take is given (about what the built-in model takes on one core), and so is what loading takes. All of a burst
comes at once. Utilisation: the share of the workers' time, from the first request to the last result, in which stages
were computed.
`python -m bench.flexible [PICTURES]`
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

import unfuse.models
from bench.report import quantile, show, table
from tools.asking import asking
from unfuse.core.messages import (
    Heartbeat,
    HeartbeatReply,
    LeasesGranted,
    Register,
    RequestTasks,
    StorageLocations,
    TaskCompleted,
    WorkerInfo,
)
from unfuse.core.model_spec import ModelSpec
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import StageSelector, roles_of
from unfuse.core.request import ResultFile, Timings
from unfuse.core.task import Lease
from unfuse.core.worker_status import WorkerStatus
from unfuse.models import read_model_spec
from unfuse.queues.base import RequestFilter
from unfuse.queues.memory import MemoryQueue
from unfuse.scheduler.dispatcher import Dispatcher
from unfuse.scheduler.scheduler import Scheduler
from unfuse.testing.virtual_time import VirtualClock, in_virtual_time

ROLES = "encoder", "denoiser", "decoder"
BURSTS = {"20 steps": (0.02, 0.6, 0.08), "2 steps": (0.02, 0.06, 0.08)}
"""Seconds of each role's stage, by what is asked for."""

SIDES = {
    "fixed 1 + 2 + 1": ["encoder", "denoiser", "denoiser", "decoder"],
    "fixed 1 + 1 + 2": ["encoder", "denoiser", "decoder", "decoder"],
    "flexible": [",".join(ROLES[at % 3 :] + ROLES[: at % 3]) for at in range(4)],
}
"""Four workers by their `--role`. Flexible ones begin with one role each, as after a quiet time."""

LOADS = (0.5, 2.0)
PICTURES = 200
ASK_S, BEAT_S = 0.1, 1.0
PARAMS = {"prompt": "a red circle on white", "width": 64, "height": 64, "num_frames": 1}


@dataclass
class Worker:
    """One that has the roles of `words`, one at a time, and takes what it is said to take."""

    dispatcher: Dispatcher
    card: ModelSpec
    number: int
    words: str
    load_s: float
    seconds: Mapping[str, float]
    busy_s: float = 0.0
    swaps: int = 0
    holds: str = ""
    going: str = ""
    held: list[Lease] = field(default_factory=list)

    async def run(self) -> None:
        sets = {word: tuple(self.card.pools(StageSelector(roles_of(word))).values()) for word in self.words.split(",")}
        self.name, pools = f"worker-{self.number}", tuple(pool for found in sets.values() for pool in found)
        info = WorkerInfo(self.name, "node", self.words, pools, 1, f"unix:@{self.number}", 1 << 40)
        if len(sets) > 1:
            self.holds = next(iter(sets))
            info = replace(info, swappable_models=sets, status=WorkerStatus(loaded=self.holds, load_s=self.load_s))
        await self.dispatcher.answer(self.name.encode(), Register(info, (self.card,)))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beat())
            group.create_task(self._work())

    async def _beat(self) -> None:
        while True:
            status = WorkerStatus(loaded=self.holds, load_s=self.load_s)
            beat = Heartbeat(tuple(lease.claim for lease in self.held), status=status)
            pulse = await self.dispatcher.answer(self.name.encode(), beat)
            if isinstance(pulse, HeartbeatReply) and pulse.swap_to:
                self.going = pulse.swap_to
            await asyncio.sleep(BEAT_S)

    async def _work(self) -> None:
        while True:
            if self.going and self.going != self.holds:
                self.holds = ""
                await asyncio.sleep(self.load_s)
                self.holds, self.going, self.swaps = self.going, "", self.swaps + 1
            answer = await self.dispatcher.answer(
                self.name.encode(), RequestTasks(1, None, ASK_S, loaded_model=self.holds)
            )
            for lease in answer.leases if isinstance(answer, LeasesGranted) else ():
                await self._make(lease)

    async def _make(self, lease: Lease) -> None:
        self.held, task = [lease], lease.task
        took = self.seconds[task.planned.kind]
        await asyncio.sleep(took)
        self.busy_s += took
        made = ObjectRef(
            f"{task.request}-{task.stage}",
            self.name,
            "node",
            task.request,
            task.stage,
            task.attempt,
            1,
            0,
            (),
            (),
            b"",
            0.0,
        )
        files = (ResultFile(0, "image/png", 1, ""),) if task.planned.final else ()
        done = TaskCompleted(
            lease.claim, None if task.planned.final else made, files, Timings(run_s=took, steps=1, batch=1.0)
        )
        await self.dispatcher.answer(self.name.encode(), done)
        self.held = []


@in_virtual_time
async def burst(words: list[str], seconds: tuple[float, ...], load_s: float, pictures: int) -> dict[str, object]:
    """What became of so many pictures that were asked for at once, when the model was known already."""
    clock = VirtualClock()
    card = read_model_spec("shapes", Path(unfuse.models.__file__).with_name("shapes"), "auto")
    kinds = {stage.kind: dict(zip(ROLES, seconds, strict=True))[stage.role] for stage in card.pipeline.stages}
    scheduler = Scheduler(MemoryQueue(clock), specs=[card], clock=clock)
    dispatcher = Dispatcher(scheduler, [(card.name, card.source, "auto")], StorageLocations("memory:"))
    workers = [Worker(dispatcher, card, at, word, load_s, kinds) for at, word in enumerate(words)]
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    await asyncio.sleep(0.5)
    ended: list[float] = []

    async def one(seed: int) -> None:
        record = await scheduler.submit(*asking(card, card.defaults | PARAMS | {"seed": seed}))
        async for _ in scheduler.queue.watch(record.context.id):
            pass
        ended.append(clock.now() - began)

    began = clock.now()
    await one(0)
    await asyncio.sleep(10 * load_s)
    ended.clear()
    before, began = sum(worker.busy_s for worker in workers), clock.now()
    await asyncio.gather(*(one(seed) for seed in range(1, pictures + 1)))
    wall, busy = clock.now() - began, sum(worker.busy_s for worker in workers) - before
    assert len(await scheduler.queue.list(RequestFilter(status="completed"), limit=2 * pictures)) == pictures + 1
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await scheduler.close()
    return {
        "utilisation": round(busy / wall / len(workers), 2),
        "p50 s": round(quantile(ended, 0.5), 1),
        "p95 s": round(quantile(ended, 0.95), 1),
        "all s": round(wall, 1),
        "swaps": sum(w.swaps for w in workers),
    }


def main() -> None:
    pictures = int(sys.argv[1]) if sys.argv[1:] else PICTURES
    found = {
        f"{what}, {side}, loading {load_s:g} s": burst(words, seconds, load_s, pictures)
        for what, seconds in BURSTS.items()
        for load_s in LOADS
        for side, words in SIDES.items()
        if side == "flexible" or load_s == LOADS[0]
    }
    table(f"a burst of {pictures}", found)
    show("flexible", pictures=pictures, stage_seconds=BURSTS, found=found)


if __name__ == "__main__":
    main()
