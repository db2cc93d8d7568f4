"""Chooses the layout for `--workers auto`: how many workers, and which stages share one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from math import prod
from pathlib import Path

import msgspec
from msgspec.structs import replace

from unfuse.arena.limits import readable_bytes
from unfuse.core.compute_options import MaxLoadedModels
from unfuse.core.errors import ConfigError
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import ALL_STAGES, roles_of
from unfuse.planning.component_memory import Needs
from unfuse.planning.placement import (
    CPU,
    PROCESS,
    SPLIT,
    Device,
    PlacedWorker,
    WorkerPlan,
    devices_of,
    parse_workers,
    place_workers,
)
from unfuse.scheduler.costs import UNMEASURED_S, Costs

THREADS = 4
"""The most threads of a worker on the CPU, and the fewest workers if there are as many cores.

A forward in one thread waits for no other thread, and on few cores two threads are slow as soon as anything else runs.
"""


class HostResources(msgspec.Struct, frozen=True):
    """The resources of a machine, except its devices."""

    #: Number of CPU cores.
    cores: int = 1
    #: Bytes of host memory that one worker may use; 0: no limit.
    memory_limit: int = 0
    #: File with the measured costs of stages; None: there is none.
    costs: Path | None = None


class Layout(msgspec.Struct, frozen=True):
    """A layout with its predicted rate."""

    #: The value of `--workers`.
    workers: str
    #: Predicted rate, in units of one core (or GPU) that computes one request after the other.
    rate: float
    #: Why the layout is impossible; "": it is possible.
    refusal: str = ""
    #: "1": a worker loads one model at a time (model swapping). "all": it loads all models at its start.
    max_loaded_models: MaxLoadedModels = "all"

    @property
    def text(self) -> str:
        """The layout as it follows `--workers` on a command line."""
        return self.workers + (" --max-loaded-models 1" if self.max_loaded_models == "1" else "")

    def apply_to(self, plan: WorkerPlan) -> WorkerPlan:
        """Return the plan with the workers of this layout."""
        counts = parse_workers(self.workers)
        return replace(
            plan,
            auto=False,
            counts=counts,
            max_loaded_models=self.max_loaded_models,
            is_layout_free=plan.auto or plan.is_layout_free,
        )


class LayoutSearch(msgspec.Struct, frozen=True):
    """The compared layouts, the best first."""

    #: The layouts, the best first.
    layouts: tuple[Layout, ...]
    #: Whether the costs of all stages were measured.
    measured: bool
    #: The roles of the models' stages.
    roles: tuple[str, ...] = ()
    #: Whether the models have further stages, which need a result folder that this machine cannot access.
    is_partial: bool = False

    @property
    def chosen(self) -> Layout:
        """The best possible layout.

        If none is possible, it is the split, whose refusal names what would help.
        """
        possible = (layout for layout in self.layouts if not layout.refusal)
        split = (layout for layout in self.layouts if layout.workers == SPLIT)
        return next(possible, None) or next(split, self.layouts[0])

    @property
    def reason(self) -> str:
        """One line with the chosen layout and the reason."""
        workers = self.chosen.workers
        stages = f"the stages of {' and '.join(self.roles)}" if self.is_partial else "all stages"
        main_role = workers.rpartition(",")[2].partition("=")[0]
        if self.chosen.max_loaded_models == "1":
            reason = "each worker loads one model at a time"
            reason += ", since not all fit at the same time" if len(self.layouts) > 1 else ""
        elif ALL_STAGES not in workers:
            refusal = next((layout.refusal for layout in self.layouts if ALL_STAGES in layout.workers), "")
            reason = f"each stage has its own workers, since not all fit in one worker: {refusal.partition(';')[0]}"
        elif main_role != ALL_STAGES:
            reason = f"workers run {stages} on GPUs where all fit, and only {main_role} on the others"
        elif len(self.roles) == 1:
            reason = f"each worker runs {stages}" + (
                "" if self.is_partial else f", since all have the role {self.roles[0]}"
            )
        else:
            reason = f"each worker runs {stages}, since the models fit in one worker, which gives the best utilization"
        if self.is_partial:
            text = self.chosen.text.replace(ALL_STAGES, "+".join(self.roles), 1)
            return f"layout {text}: {reason}; other stages need the result folder, which this machine cannot access"
        return f"layout {self.chosen.text}: {reason}"


def search_layouts(
    specs: Iterable[ModelSpec], needs: Needs, plan: WorkerPlan, devices: tuple[Device, ...], host: HostResources
) -> LayoutSearch:
    """Return the layouts that could serve these models, the best first.

    They are sorted by the rate that is guessed from models, memory and cores, without measured costs, so that a restart
    never changes the order. Of equal layouts, the one with whole models comes first. `Layout.rate` is predicted from
    measured costs, where there are any.
    """
    specs = list(specs)
    shares, measured = role_shares(specs, host.costs)
    guessed_shares, _ = role_shares(specs, None)

    def evaluate(workers: str, max_loaded_models: MaxLoadedModels = "all") -> tuple[float, Layout]:
        """Return the guessed rate of a layout, by which layouts are sorted, and the layout."""
        layout = Layout(workers, 0.0, max_loaded_models=max_loaded_models)
        try:
            placed = place_workers(needs, layout.apply_to(plan), devices)
        except ConfigError as error:
            return 0.0, replace(layout, refusal=str(error))
        refusal = _too_large(placed, host.memory_limit)
        layout = replace(layout, rate=predict_rate(placed, shares, plan, host), refusal=refusal)
        return predict_rate(placed, guessed_shares, plan, host), layout

    candidates = () if plan.max_loaded_models == "1" else _candidates(needs, plan, devices, host.cores)
    evaluated = [evaluate(workers) for workers in candidates]
    if not evaluated or (len(specs) > 1 and all(layout.refusal for _, layout in evaluated)):
        evaluated.append(evaluate(f"{ALL_STAGES}={len(devices_of(ALL_STAGES, plan, devices))}", "1"))
    # rounded, so that layouts of equal rates keep their order: those with whole models come first
    ordered = sorted(evaluated, key=lambda pair: -round(pair[0], 3))
    return LayoutSearch(tuple(layout for _, layout in ordered), measured, tuple(needs))


def role_shares(specs: Iterable[ModelSpec], costs: Path | None) -> tuple[dict[str, float], bool]:
    """Return each role's share of a request's seconds, and whether all were measured.

    The request has the default parameters. Without the file `costs`, shares are guessed.
    """
    measured_costs = Costs(costs)
    seconds: dict[str, float] = {}
    measured = True
    for spec in specs:
        pools = spec.pools()
        for stage in spec.pipeline.stages:
            work = stage.work.of(spec.defaults)
            stage_seconds = measured_costs.seconds(pools[stage.name], work)
            measured = measured and stage_seconds is not None
            seconds[stage.role] = seconds.get(stage.role, 0.0) + (stage_seconds or UNMEASURED_S * prod(work))
    total = sum(seconds.values())
    return {role: role_seconds / total for role, role_seconds in seconds.items()}, measured


def predict_rate(
    placed: Iterable[PlacedWorker], shares: Mapping[str, float], plan: WorkerPlan, host: HostResources
) -> float:
    """Return the predicted rate of these workers.

    Its unit is one core (or GPU) that computes one request after the other. `shares` is each role's share of the
    seconds of a request.

    The work of any group of roles must fit on the devices of their workers. So the slowest group limits the rate.
    """
    placed = list(placed)
    gpus = {worker.device for worker in placed if not worker.on_cpu}
    threads = plan.compute.threads or max(1, host.cores // len(placed))

    # By role, the speed of each device that has workers of it. Workers on a GPU take turns, and use it whole.
    speeds: dict[str, dict[str, float]] = {role: {} for role in shares}
    for index, worker in enumerate(placed):
        device, speed = worker.device, 1.0
        if worker.on_cpu:
            device, speed = f"{CPU} {index}", float(min(threads * len(worker.devices), host.cores))
        for role in shares.keys() & (roles_of(worker.role) or shares.keys()):
            speeds[role][device] = speed

    rates = [float(len(gpus) or host.cores)]
    for size in range(1, len(shares) + 1):
        for group in combinations(shares, size):
            if (share := sum(shares[role] for role in group)) > 0:
                group_speeds = {device: speed for role in group for device, speed in speeds[role].items()}
                rates.append(sum(group_speeds.values()) / share)
    return min(rates)


def _candidates(needs: Needs, plan: WorkerPlan, devices: tuple[Device, ...], cores: int) -> Iterator[str]:
    """Yield the values of `--workers` to compare.

    The main role, whose workers are placed first, is that of the stages with many forwards.
    """
    (main_role, *_) = [*(role for role in needs if role in plan.first), *needs]
    gpus = [name for name in devices_of(ALL_STAGES, plan, devices) if name != CPU]
    max_workers = len(gpus) or max(1, cores // (plan.compute.threads or min(THREADS, max(1, cores // THREADS))))
    for all_stages_count in range(max_workers, 0, -1):
        main_count = max_workers - all_stages_count if gpus else 0
        yield f"{ALL_STAGES}={all_stages_count}" + (f",{main_role}={main_count}" if main_count else "")
    for count in range(max_workers, 1, -1):
        yield ",".join(f"{role}={count if role == main_role else 1}" for role in needs)
    yield SPLIT


def _too_large(placed: Iterable[PlacedWorker], limit: int) -> str:
    """Return why one of these workers exceeds the memory limit; "" if none does."""
    for worker in placed:
        size = PROCESS + sum(part.bytes for part in worker.parts)
        if limit and worker.on_cpu and size > limit:
            return f"a worker would need {readable_bytes(size)}, but --memory-limit allows {readable_bytes(limit)}"
    return ""
