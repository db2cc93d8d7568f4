"""The pools of a text-to-image family, and which of them holds back which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.drawings.canvas import LINE, PAD, WIDTH, Drawing
from unfuse.core.messages import WorkerInfo
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import ALL_STAGES
from unfuse.models.flux import FAMILY
from unfuse.queues.base import RegisteredWorker
from unfuse.scheduler.backpressure import AHEAD, Backpressure, InFlight
from unfuse.weights.folder import ModelFolder

BOX = 84  # height of a pool
FRAME = 8  # around the pools of one column
GAP = 42  # between two columns
TITLE = "Pools of FLUX.1 and back-pressure"
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "transformer": {
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": True,
        "in_channels": 64,
    },
    "vae": {"latent_channels": 16, "block_out_channels": [128, 256, 512, 512]},
}
"""What the family reads of the configurations of FLUX.1."""


class ConfigFolder(ModelFolder):
    """The folder of a model, of which only the configurations exist."""

    def __init__(self) -> None:
        super().__init__(Path("flux"))

    def index(self) -> dict[str, Any]:
        """The library and class of each component."""
        return {component: [library, names[0]] for component, (library, names) in FAMILY.classes.items()}

    def config(self, component: str) -> dict[str, Any]:
        """The configuration of a component."""
        return dict(CONFIGS[component])


def flux() -> ModelSpec:
    """A spec with the stages and pools of FLUX.1, without weights."""
    folder = ConfigFolder()
    defaults = {"max_sequence_length": 512}
    widths = dict.fromkeys(FAMILY.classes, 2)
    pipeline = FAMILY.pipeline(folder, FAMILY.limits(folder, defaults), widths)
    return ModelSpec(
        name="flux",
        source="",
        family=FAMILY.name,
        pipeline=pipeline,
        limits={},
        defaults={},
        weights=dict.fromkeys(FAMILY.classes, "0"),
        dtypes=dict.fromkeys(FAMILY.classes, "bfloat16"),
        classes={component: names[0] for component, (_, names) in FAMILY.classes.items()},
    )


def pressure(spec: ModelSpec) -> tuple[Backpressure, dict[str, int]]:
    """The back-pressure with one worker for each pool, and the percent of an arena that each pool leaves free."""
    pools = spec.pools()
    workers = [
        WorkerInfo(stage.name, "node", stage.role, (pools[stage.name],), stage.slots, "", 100)
        for stage in spec.pipeline.stages
    ]
    rule = Backpressure.of([spec], [RegisteredWorker(info, (spec,), 0.0) for info in workers])
    shared = WorkerInfo("all", "node", ALL_STAGES, tuple(pools.values()), 1, "", 100)
    return rule, rule.reserved_bytes(shared, InFlight())


def flow(spec: ModelSpec | None = None) -> Drawing:
    """Draw each pool by its depth from left to right, and which one holds back which below."""
    spec = spec or flux()
    rule, reserved = pressure(spec)
    stages = {pool: stage for stage, pool in spec.pools().items()}
    columns = [[pool for pool in stages if rule.depth[pool] == depth] for depth in sorted(set(rule.depth.values()))]
    drawing = Drawing(TITLE, " ".join(_sentences(rule, reserved, stages)))
    width = (WIDTH - 2 * PAD - GAP * (len(columns) - 1)) / len(columns)
    lefts = [PAD + number * (width + GAP) for number in range(len(columns))]

    top = PAD + 30
    total = max(len(column) for column in columns) * (BOX + 20) - 20
    places = dict[str, float]()  # by pool, the middle of its box
    for column, left in zip(columns, lefts, strict=True):
        drawing.text(left + width / 2, PAD + 14, "note", f"depth {columns.index(column)}", "middle")
        first = top + (total - len(column) * (BOX + 20) + 20) / 2
        if len(column) > 1:
            drawing.rect((left - FRAME, top - FRAME, left + width + FRAME, top + total + FRAME), "panel", dashed=True)
        for number, pool in enumerate(column):
            places[pool] = first + number * (BOX + 20) + BOX / 2
            _pool(drawing, spec, stages[pool], (left, places[pool], width))
            _queue(drawing, rule, pool, (left, places[pool] - BOX / 2, width))
    for left, column, readers in zip(lefts, columns, columns[1:], strict=False):
        for pool in column:
            middle, start = places[readers[0]], left + width
            bend = [(start + GAP / 2, places[pool]), (start + GAP / 2, middle)] if places[pool] != middle else []
            drawing.arrow([(start, places[pool]), *bend, (start + GAP, middle)], "blue")

    bottom = _holds(
        drawing, rule, [[*column] for column in columns], [left + width / 2 for left in lefts], (places, top + total)
    )
    drawing.height = _arena(drawing, reserved, stages, bottom + 26) + PAD
    return drawing


def _sentences(rule: Backpressure, reserved: Mapping[str, int], stages: Mapping[str, str]) -> list[str]:
    """The drawing in words."""
    return [
        *(f"Pool of {stage}: depth {rule.depth[pool]}." for pool, stage in stages.items()),
        *(
            f"{stages[pool]} gets no tasks while more than {limit} tasks wait for {stages[fed]}."
            for pool in stages
            for fed, limit in rule.later_depths.get(pool, {}).items()
        ),
        *(
            f"In a shared arena, {stages[pool]} leaves {percent} % free for later pools."
            for pool, percent in sorted(reserved.items())
        ),
    ]


def _pool(drawing: Drawing, spec: ModelSpec, name: str, place: tuple[float, float, float]) -> None:
    """Draw a pool: its stage, the class of its component and its slots."""
    stage = next(stage for stage in spec.pipeline.stages if stage.name == name)
    left, middle, width = place
    content = [("name", name), ("note", spec.classes[stage.components[0]]), ("note", f"{stage.slots} slots a worker")]
    drawing.box((left, middle - BOX / 2, left + width, middle + BOX / 2), "blue", content)


def _queue(drawing: Drawing, rule: Backpressure, pool: str, place: tuple[float, float, float]) -> None:
    """Draw the tasks that may wait for a pool before those that feed it are held back."""
    left, bottom, width = place
    limits = {limits[pool] for limits in rule.later_depths.values() if pool in limits}
    for limit in limits:
        start = left + width / 2 - limit * 5.5
        drawing.text(left + width / 2, bottom - 24, "note", f"{AHEAD} × {limit // AHEAD} tasks may wait", "middle")
        for number in range(limit):
            at = start + number * 11
            drawing.rect((at, bottom - 16, at + 8, bottom - 6), "amber", radius=2)


def _holds(
    drawing: Drawing,
    rule: Backpressure,
    columns: Sequence[Sequence[str]],
    centers: Sequence[float],
    boxes: tuple[Mapping[str, float], float],
) -> float:
    """Draw how each pool holds back those that feed it. Returns the lower edge."""
    places, lower = boxes
    level = lower + 26
    for number in range(1, len(columns)):
        limits = {limit for pool in columns[number - 1] for limit in rule.later_depths[pool].values()}
        (pool, *_), (limit,) = columns[number], limits
        start, end = centers[number] - 24, centers[number - 1] + 24
        end_y = max(places[pool] for pool in columns[number - 1]) + BOX / 2
        end_y += FRAME if len(columns[number - 1]) > 1 else 0
        drawing.arrow(
            [(start, places[pool] + BOX / 2), (start, level), (end, level), (end, end_y)], "rose", dashed=True
        )
        middle = (start + end) / 2
        drawing.text(middle, level + 22, "note", "holds back while more", "middle")
        drawing.text(middle, level + 22 + LINE, "note", f"than {limit} tasks wait", "middle")
    return level + 22 + LINE


def _arena(drawing: Drawing, reserved: Mapping[str, int], stages: Mapping[str, str], top: float) -> float:
    """Draw which share of an arena each pool may fill. Returns the lower edge."""
    drawing.text(PAD, top + 16, "title", "If a worker runs all stages: shares of its arena")
    top += 32
    for percent in sorted(set(reserved.values()), reverse=True):
        pools = [stages[pool] for pool in stages if reserved.get(pool) == percent]
        later = [stages[pool] for pool in stages if pool in reserved and reserved[pool] < percent]
        split = PAD + (WIDTH - 2 * PAD) * (1 - percent / 100)
        drawing.box((PAD, top, split, top + 40), "green", [("code", ", ".join(pools))])
        if percent:
            drawing.box(
                (split, top, WIDTH - PAD, top + 40), "grey", [("note", f"free for {', '.join(later)}")], dashed=True
            )
        top += 52
    return top - 12
