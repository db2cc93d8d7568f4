"""A server of the built-in model whose workers exist on paper: who is started, ended and refused."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.models.conftest import SHAPES
from tools.asking import asking
from unfuse.core.clock import SystemClock
from unfuse.core.messages import StorageLocations
from unfuse.core.model_spec import ModelSpec
from unfuse.launch.base import Launcher
from unfuse.planning.placement import PROCESS
from unfuse.queues.base import QueueBackend
from unfuse.queues.memory import MemoryQueue
from unfuse.scheduler.dispatcher import Dispatcher
from unfuse.scheduler.scheduler import Scheduler
from unfuse.service.logs import Logs
from unfuse.service.options import plan_service as plan_of, serve_options as options_of
from unfuse.service.plan import ServingPlan
from unfuse.service.service import Service
from unfuse.service.settings import load
from unfuse.service.worker_groups import WorkerGroups

ONE = 64 + 18
"""MiB for an arena and one of the models, which take 15, and no second denoiser of 8."""


class Started(Launcher):
    """Workers of a plan that exist on paper."""

    def __init__(self, plan: ServingPlan) -> None:
        self.models, self.stopped = [model.spec.name for model in plan.models], False
        self.max_loaded_models = plan.worker_plan.max_loaded_models
        self.failed = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        """Nothing is to be started."""

    async def stop(self, drain_timeout: float, hurry: asyncio.Event | None = None) -> None:
        self.stopped = True
        if not self.failed.done():
            self.failed.cancel()


class Machine:
    """A scheduler, its crews, all launchers of workers that were started, in order, and what plans were asked with."""

    def __init__(
        self, mib: int, queue: QueueBackend | None = None, server: str = "here:8000", workers: str = "auto"
    ) -> None:
        self.scheduler = Scheduler(queue or MemoryQueue(SystemClock()))
        dispatcher = Dispatcher(self.scheduler, [], StorageLocations("memory:"))
        room = f"cpu={PROCESS + (mib << 20)}"
        given = {"serve.device_memory": (room,), "arena.bytes": 64 << 20, "compute.device": "cpu"}
        options = options_of(load({**given, "serve.workers": workers}, None, {}))
        self.service = Service(options, plan_of(options), Logs())
        self.hub_answers, self.hub_is_asked = threading.Event(), threading.Event()
        self.hub_answers.set()
        self.launchers, self.offered, self.asked = list[Started](), list[list[str]](), list[list[int]]()
        self.crews = WorkerGroups(self.scheduler, dispatcher, self.plan, self.start, self.changed, 1.0, server)

    def plan(self, models: Mapping[str, str], others: Counter[str], coming: Counter[str]) -> ServingPlan:
        self.asked.append([others["cpu"], coming["cpu"]])
        self.hub_is_asked.set()
        self.hub_answers.wait()
        return self.service._planned(models, others, coming)

    def start(self, plan: ServingPlan, first: int) -> Started:
        self.launchers.append(Started(plan))
        return self.launchers[-1]

    def changed(self, plans: Sequence[ServingPlan]) -> None:
        self.offered.append(sorted(model.spec.name for plan in plans for model in plan.models))

    async def begin(self) -> None:
        """Serve the built-in model."""
        first = self.plan({"unfuse/shapes": "unfuse/shapes"}, Counter(), Counter())
        await self.scheduler.registry.declare([model.spec for model in first.models])
        self.crews.start_group(first)

    @property
    def live(self) -> list[list[str]]:
        return [launcher.models for launcher in self.launchers if not launcher.stopped]

    async def served(self) -> set[str]:
        return {*await self.scheduler.registry.model_specs()}

    async def ask(self, model: str) -> str:
        """The id of a request for a model, which waits."""
        return await self.ask_card((await self.scheduler.registry.model_specs())[model])

    async def ask_card(self, card: ModelSpec) -> str:
        """The same of the model of a card, whether or not it is served."""
        params = card.defaults | {"prompt": "a red circle", "seed": 1, "num_frames": 1}
        return (await self.scheduler.submit(*asking(card, params))).context.id

    async def look(self, times: int = 1) -> None:
        for _ in range(times):
            await self.crews.check_once()


def shifted(folder: Path, shift: float) -> str:
    """A copy of the built-in model with a noise scheduler of its own."""
    shutil.copytree(SHAPES, folder)
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"shift": shift}))
    return str(folder)
