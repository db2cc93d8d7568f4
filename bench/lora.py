"""What adapters (LoRA) cost: a denoising step with one, beside loaded ones and without any, and changing between them.

The denoise stage of the built-in model, in this process, with one thread; seconds are those of the CPU, which others
that run beside it change less. `python -m bench.lora [ROUNDS]`
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.model import PROMPTS, Case, Model, advance
from bench.report import ratio, show
from tools.tiny import adapter
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.plan import Params
from unfuse.models import resolve_source
from unfuse.stages.base import StageInput
from unfuse.stages.denoise import Denoise, DenoiseState
from unfuse.weights.adapters import AdapterFolder

RANKS = (4, 16, 64)
SIZES = {"128²": (128, 128, 1), "128² × 9 frames": (128, 128, 9)}
ROUNDS = 21
SPARE = 2
"""Steps beyond those that are timed."""


def asked(name: str) -> Params:
    """What a request for an adapter says; nothing without a name."""
    return {"lora": name, "lora_scale": 1.0} if name else {}


def id_of(loras: AdapterFolder, name: str) -> str:
    """The hash of an adapter's content; "" without a name."""
    return loras.id_of(name) if name else ""


def stage_of(model: Model) -> Denoise:
    (stage,) = (stage for stage in model.stages.values() if isinstance(stage, Denoise))
    return stage


def begun(case: Case, own: Params, lora_id: str) -> DenoiseState:
    """A request before its first step."""
    _, task = case.model.task("denoise", case.params(0), case.made[0])
    return stage_of(case.model).start(
        StageInput({**task.params, **own}, task.tensors, derived=DerivedFacts(lora_id=lora_id))
    )


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def forward(bare: Case, adapted: Case, loras: AdapterFolder, names: list[str], rounds: int) -> dict[str, Any]:
    """Seconds of a step, over those of a model that never saw an adapter; the first step of each is not counted."""
    sides = {"none was ever loaded": (bare, "")} | {
        name or "none, beside loaded ones": (adapted, name) for name in names
    }
    taken: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for side, (case, name) in sides.items():
            stage, states = stage_of(case.model), [begun(case, asked(name), id_of(loras, name))]
            states = advance(stage, states)
            taken[side].append(seconds(lambda stage=stage, states=states: advance(stage, states)))
    plain = taken["none was ever loaded"]
    return {
        side: {"step_ms": round(median(found) * 1e3, 2), "over_no_adapter": ratio(found, plain)["p50"]}
        for side, found in taken.items()
    }


def changes(adapted: Model, single: Model, loras: AdapterFolder, names: list[str], rounds: int) -> dict[str, Any]:
    """Milliseconds of going from one adapter to another."""
    first, second = names[:2]
    ways = {
        "to one that is loaded": (adapted, first, second),
        "to none": (adapted, first, ""),
        "from none": (adapted, "", second),
        "to one that is not, another goes": (single, first, second),
    }
    taken: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for way, (model, before, after) in ways.items():
            adapters = stage_of(model)._adapters
            assert adapters is not None
            adapters.use(asked(before), id_of(loras, before))
            use = partial(adapters.use, asked(after), id_of(loras, after))
            taken[way].append(seconds(use))
    return {way: round(median(found) * 1e3, 2) for way, found in taken.items()}


def measure(source: Path, folder: Path, rounds: int, ranks: tuple[int, ...] = RANKS) -> dict[str, Any]:
    """Everything, for the model in a folder; its adapters are written into another one."""
    for rank in ranks:
        adapter(source, folder, f"rank-{rank}", rank, rank)
    loras, names = AdapterFolder(str(folder)), [f"rank-{rank}" for rank in ranks]
    bare = Model(source)
    adapted, single = (Model(source, ComputeOptions(max_loras=most), loras=str(folder)) for most in (len(ranks), 1))
    made = [bare.encode(bare.params(seed)) for seed in range(len(PROMPTS))]
    steps, size = {}, {name: (folder / f"{name}.safetensors").stat().st_size for name in names}
    for title, shape in SIZES.items():
        cases = [Case(model, made, shape, SPARE) for model in (bare, adapted)]
        steps[title] = forward(*cases, loras, [*names, ""], rounds)
    ids = [seconds(lambda: AdapterFolder(str(folder)).id_of(names[-1])) for _ in range(rounds)]
    return {
        "steps": steps,
        "change_ms": changes(adapted, single, loras, names, rounds),
        "bytes": size,
        "id_of_the_largest_ms": round(median(ids) * 1e3, 3),
    }


def main() -> None:
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if sys.argv[1:] else ROUNDS
    with tempfile.TemporaryDirectory() as folder:
        show("lora", **measure(resolve_source("unfuse/shapes"), Path(folder), rounds))


if __name__ == "__main__":
    main()
