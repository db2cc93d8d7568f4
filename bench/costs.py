"""How far predicted seconds of a stage are from those it takes, at sizes that were never measured.

The built-in model in pools of `unfuse serve`, one request at a time, all cases in a random order, ROUNDS times. Some of
the cases are learned from, in the order in which they came; the others are predicted. `noise` is how far a case's own
measurements are from their median: what no prediction can beat; `of medians` compares predictions with these. `one
rate` is what was there before: for each kind of stage a running average of the seconds of a pixel × frame × step.
`python -m bench.costs [ROUNDS]`
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from bench.report import NO_CACHE, quantile, show, table
from tools.server import Server, serving
from unfuse.core.plan import compile_plan
from unfuse.core.request import GenerationRequest, RequestContext, StageState, Timings
from unfuse.models import find, resolve_source
from unfuse.scheduler.costs import Costs
from unfuse.testing.queue_samples import request_context

ROUNDS = 3
NEWEST = 0.1
"""Weight of the newest measurement in the running average."""


class Case(NamedTuple):
    """What is asked for."""

    width: int
    height: int
    frames: int
    steps: int
    guidance: float = 4.0


class Measured(NamedTuple):
    """Timings by kind of stage."""

    case: Case
    timings: dict[str, Timings]


LEARNED = [Case(side, side, frames, steps) for side in (64, 128, 256) for frames in (1, 9) for steps in (5, 20)]
HELD_OUT = [
    *(
        Case(*size, frames, steps)
        for size in ((96, 96), (192, 128), (224, 224))
        for frames in (1, 5)
        for steps in (10, 30)
    ),
    *(Case(side, side, frames, 15, 1.0) for side in (96, 192) for frames in (1, 5)),
    *(Case(side, side, 13, 10) for side in (96, 192)),
]
"""Within what was learned from, but for steps (30 to its 20), frames (13 to its 9), and guidance (none)."""

CARD = find(folder := resolve_source("unfuse/shapes")).model_spec("unfuse/shapes", folder)


def context(case: Case, number: int, timings: dict[str, Timings] | None = None) -> RequestContext:
    """The request of a case, over if there are timings."""
    width, height, frames, steps, guidance = case
    asked = {"width": width, "height": height, "num_frames": frames, "num_inference_steps": steps}
    params = CARD.defaults | asked | {"guidance_scale": guidance}
    plan = compile_plan(CARD.pipeline, CARD.pools(), params, [{"index": 0}])
    took = timings or {}
    stages = {s.name: StageState("done", 1, timings=took[s.kind]) for s in plan.stages if s.kind in took}
    return request_context(GenerationRequest(f"req_{number}", CARD.name, params), plan, stages=stages)


def measure(server: Server, cases: Iterable[Case]) -> list[Measured]:
    """Each case once, one after the other."""
    names, found = {field.name for field in msgspec.structs.fields(Timings)}, []
    for seed, case in enumerate(cases):
        asked: dict[str, Any] = {"num_inference_steps": case.steps, "guidance_scale": case.guidance}
        asked |= {"prompt": "a red circle on white", "seed": seed, "size": f"{case.width}x{case.height}"}
        asked |= {"num_frames": case.frames, "output_format": "mp4"}
        id = server.post("/v1/videos", asked)["id"]
        stages = server.finished(id)["stages"]
        kinds = {stage["name"].partition(".")[0]: stage for stage in stages}
        found.append(Measured(case, {k: Timings(**{n: stage[n] for n in names}) for k, stage in kinds.items()}))
    return found


def seconds(measured: Measured) -> dict[str, float]:
    by_kind = {kind: timings.run_s for kind, timings in measured.timings.items()}
    return by_kind | {"all": sum(by_kind.values())}


def with_law(learned: Sequence[Measured], asked: Sequence[Case]) -> list[dict[str, float]]:
    """Predictions of the scheduler's cost model."""
    costs = Costs()
    for number, one in enumerate(learned):
        costs.learn(context(one.case, number, one.timings))
    plans = [costs.with_cost(context(case, -1)).plan for case in asked]
    found = [{stage.kind: stage.cost for stage in plan.stages} for plan in plans]
    return [one | {"all": sum(one.values())} for one in found]


def with_one_rate(learned: Sequence[Measured], asked: Sequence[Case]) -> list[dict[str, float]]:
    """Predictions of one running average for each kind of stage."""
    rates: dict[str, float] = {}
    for one in learned:
        for kind, timings in one.timings.items():
            rate = timings.run_s / prod(one.case[:4])
            rates[kind] = rates.get(kind, rate) + NEWEST * (rate - rates.get(kind, rate))
    found = [{kind: rate * prod(case[:4]) for kind, rate in rates.items()} for case in asked]
    return [one | {"all": sum(one.values())} for one in found]


def medians(measured: Sequence[Measured]) -> list[dict[str, float]]:
    """For each measurement the median of its case."""
    by_case: dict[Case, list[dict[str, float]]] = defaultdict(list)
    for one in measured:
        by_case[one.case].append(seconds(one))
    return [{kind: median(s[kind] for s in by_case[one.case]) for kind in seconds(one)} for one in measured]


def errors(predicted: Sequence[dict[str, float]], taken: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median and 90th percentile of relative errors, in percent of what it took."""
    found = {}
    for kind in taken[0]:
        off = [abs(p[kind] / one[kind] - 1) * 100 for p, one in zip(predicted, taken, strict=True)]
        found[kind] = {"median": round(median(off), 1), "p90": round(quantile(off, 0.9), 1)}
    return found


def compare(learned: Sequence[Measured], held_out: Sequence[Measured]) -> dict[str, Any]:
    """Errors of each way to predict what was held out, by stage."""
    asked, first = [one.case for one in held_out], learned[: len({one.case for one in learned})]
    law, rate, usual = with_law(learned, asked), with_one_rate(learned, asked), medians(held_out)
    taken = [seconds(one) for one in held_out]
    return {
        "law": errors(law, taken),
        f"law, of the first {len(first)}": errors(with_law(first, asked), taken),
        "one rate": errors(rate, taken),
        "noise": errors(usual, taken),
        "law, of medians": errors(law, usual),
        "one rate, of medians": errors(rate, usual),
    }


def main() -> None:
    rounds, dice = int(sys.argv[1]) if sys.argv[1:] else ROUNDS, random.Random(1)
    order = [case for _ in range(rounds) for case in dice.sample(LEARNED + HELD_OUT, len(LEARNED + HELD_OUT))]
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), "--workers", "split", "--threads", "1", "--arena", "64MiB", *NO_CACHE) as server,
    ):
        server.ready()
        measure(server, LEARNED[:1])
        found = measure(server, order)
    learned = [one for one in found if one.case in LEARNED]
    held_out = [one for one in found if one.case not in LEARNED]
    rows = compare(learned, held_out)
    ran = {kind: sorted(seconds(one)[kind] for one in held_out) for kind in seconds(held_out[0])}
    spread = {kind: [round(s, 3) for s in (some[0], median(some), some[-1])] for kind, some in ran.items()}
    show("costs", learned=len(learned), held_out=len(held_out), seconds=spread, percent=rows)
    table(
        "off by, median and p90",
        {way: {kind: f"{one['median']}, {one['p90']} %" for kind, one in kinds.items()} for way, kinds in rows.items()},
    )


if __name__ == "__main__":
    main()
