"""Chooses the layout: which stages share a worker, and how many workers there are (`--workers auto`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path

import msgspec
from msgspec.structs import replace

from unfuse.arena.limits import readable_bytes
from unfuse.core.compute_options import MaxLoadedModels
from unfuse.core.errors import ConfigError
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import ALL
from unfuse.planning.placement import (
    CPU,
    PROCESS,
    SPLIT,
    Device,
    Needs,
    PlacedWorker,
    WorkerPlan,
    devices_of,
    parse_workers,
    place,
)
from unfuse.scheduler.costs import UNMEASURED_S, Costs

THREADS = 4
"""The most threads of a worker on the CPU, and the least workers where there are as many cores: a forward in one thread
is never waiting for another, and on few cores two threads are slow as soon as anything else runs there."""


class HostResources(msgspec.Struct, frozen=True):
    """What there is beside devices: cores, host memory a worker may take (0: any), and the file of costs."""

    cores: int = 1
    memory_limit: int = 0
    costs: Path | None = None


class Layout(msgspec.Struct, frozen=True):
    """A layout, as `--workers` has it: predicted requests a time, and why it cannot be ("" if it can).

    The rate is that of as many cores, or GPUs, as would do nothing but compute one request after the other.
    """

    workers: str
    rate: float
    refusal: str = ""
    max_loaded_models: MaxLoadedModels = "all"

    @property
    def written(self) -> str:
        """The layout as it follows `--workers` on a command line."""
        return self.workers + (" --max-loaded-models 1" if self.max_loaded_models == "1" else "")

    def of(self, wanted: WorkerPlan) -> WorkerPlan:
        """The workers of this layout."""
        counts = parse_workers(self.workers)
        return replace(wanted, auto=False, counts=counts, max_loaded_models=self.max_loaded_models)


class LayoutSearch(msgspec.Struct, frozen=True):
    """All that were looked at, the best first, whether their stages were measured, and the roles of these."""

    found: tuple[Layout, ...]
    measured: bool
    roles: tuple[str, ...] = ()

    @property
    def chosen(self) -> Layout:
        """The best one that can be, else the split if there is one: its refusal says what would help."""
        able = (layout for layout in self.found if not layout.refusal)
        split = (layout for layout in self.found if layout.workers == SPLIT)
        return next(able, None) or next(split, self.found[0])

    @property
    def why(self) -> str:
        """One line: what was chosen, and why."""
        workers = self.chosen.workers
        main = workers.rpartition(",")[2].partition("=")[0]
        if self.chosen.max_loaded_models == "1":
            reason = "each worker has one model at a time"
            reason += ", since all do not fit together" if len(self.found) > 1 else ""
        elif ALL not in workers:
            refused = next((layout.refusal for layout in self.found if ALL in layout.workers), "")
            reason = f"each stage has workers of its own, since all do not fit in one: {refused.partition(';')[0]}"
        elif main != ALL:
            reason = f"workers run all stages on the GPUs where these fit, and only {main} on the others"
        elif len(self.roles) == 1:
            reason = f"each worker runs all stages, since all have the role {self.roles[0]}"
        else:
            reason = "each worker runs all stages, since models that fit whole keep a machine busiest"
        return f"layout {self.chosen.written}: {reason}"


def layouts(
    cards: Iterable[ModelSpec], needs: Needs, wanted: WorkerPlan, devices: tuple[Device, ...], means: HostResources
) -> LayoutSearch:
    """The layouts that could serve these models, by predicted rate; of equal ones, what is whole first.

    They stand in the order of what is guessed without any measurement, by models, memory and cores alone: what requests
    took says only how much better one is, so a restart changes nothing.
    """
    cards = list(cards)
    (shares, measured), (guessed, _) = parts(cards, means.costs), parts(cards, None)

    def judged(workers: str, loaded: MaxLoadedModels = "all") -> tuple[float, Layout]:
        """The guessed rate of a layout, by which it is ordered, and the layout."""
        layout = Layout(workers, 0.0, max_loaded_models=loaded)
        try:
            placed = place(needs, layout.of(wanted), devices)
        except ConfigError as error:
            return 0.0, replace(layout, refusal=str(error))
        refusal = _too_large(placed, means.memory_limit)
        layout = replace(layout, rate=rate(placed, shares, wanted, means), refusal=refusal)
        return rate(placed, guessed, wanted, means), layout

    names = () if wanted.max_loaded_models == "1" else _names(needs, wanted, devices, means.cores)
    found = [judged(workers) for workers in names]
    if not found or (len(cards) > 1 and all(layout.refusal for _, layout in found)):
        found.append(judged(f"{ALL}={len(devices_of(ALL, wanted, devices))}", "1"))
    ordered = sorted(found, key=lambda one: -round(one[0], 3))
    return LayoutSearch(tuple(layout for _, layout in ordered), measured, tuple(needs))


def parts(cards: Iterable[ModelSpec], costs: Path | None) -> tuple[dict[str, float], bool]:
    """The share of each role in the seconds of a request with default parameters; whether all were measured."""
    known, seconds, measured = Costs(costs), dict[str, float](), True
    for card in cards:
        pools = card.pools()
        for stage in card.pipeline.stages:
            work = stage.work.of(card.defaults)
            took = known.seconds(pools[stage.name], work)
            measured = measured and took is not None
            seconds[stage.role] = seconds.get(stage.role, 0.0) + (took or UNMEASURED_S * prod(work))
    whole = sum(seconds.values())
    return {role: part / whole for role, part in seconds.items()}, measured


def rate(
    placed: Iterable[PlacedWorker], shares: Mapping[str, float], wanted: WorkerPlan, means: HostResources
) -> float:
    """Requests at a time that these workers can do, if one core, or GPU, could do one."""
    placed = list(placed)
    gpus = {worker.device for worker in placed if not worker.on_cpu}
    threads = wanted.compute.threads or max(1, means.cores // len(placed))
    most = float(len(gpus)) if gpus else float(means.cores)

    def speed(worker: PlacedWorker) -> float:
        """On a GPU workers take turns."""
        if worker.on_cpu:
            return float(min(threads * len(worker.devices), means.cores))
        return 1.0 / sum(other.device == worker.device for other in placed)

    whole = sum(speed(worker) for worker in placed if worker.role == ALL)
    own = {role: sum(speed(worker) for worker in placed if role in worker.role.split("+")) for role in shares}
    low, high = 0.0, most
    for _ in range(40):
        middle = (low + high) / 2
        left = sum(max(0.0, middle * share - own[role]) for role, share in shares.items())
        low, high = (middle, high) if left <= whole else (low, middle)
    return low


def _names(needs: Needs, wanted: WorkerPlan, devices: tuple[Device, ...], cores: int) -> Iterator[str]:
    """Layouts to look at. The main role is the one that is placed first: that of the stages with many forwards."""
    (main, *_) = [*(role for role in needs if role in wanted.first), *needs]
    gpus = [name for name in devices_of(ALL, wanted, devices) if name != CPU]
    most = len(gpus) or max(1, cores // (wanted.compute.threads or min(THREADS, max(1, cores // THREADS))))
    for whole in range(most, 0, -1):
        more = most - whole if gpus else 0
        yield f"{ALL}={whole}" + (f",{main}={more}" if more else "")
    for count in range(most, 1, -1):
        yield ",".join(f"{role}={count if role == main else 1}" for role in needs)
    yield SPLIT


def _too_large(placed: Iterable[PlacedWorker], limit: int) -> str:
    """Why workers may not be as large as these."""
    for worker in placed:
        takes = PROCESS + sum(part.bytes for part in worker.parts)
        if limit and worker.on_cpu and takes > limit:
            return f"it would take {readable_bytes(takes)}, and --memory-limit allows {readable_bytes(limit)}"
    return ""
