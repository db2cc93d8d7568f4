"""Says whether it pays to serve models in stages on this machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unfuse.arena.limits import readable_bytes
from unfuse.core.pool import declared
from unfuse.planning.placement import CONTEXT, CPU, PROCESS
from unfuse.service.plan import Plan
from unfuse.worker.exactness import Exactness, Verdict
from unfuse.worker.options import EXACTNESS


def gains(plan: Plan) -> Iterator[tuple[str, int]]:
    """What serving in stages gains on this machine, one reason each, with the bytes if it saves memory."""
    used = dict.fromkeys(device for worker in plan.workers for device in worker.devices)
    if len(used) > 1:
        yield f"stages on {len(used)} devices ({', '.join(used)}) work at the same time", 0
    parts = [part for held in plan.needs.values() for part in held]
    whole, largest = sum(part.bytes for part in parts), max(part.bytes for part in parts)
    best = max(plan.devices[1:] or plan.devices, key=lambda device: device.free)
    if whole > best.free:
        room = f"more than the {readable_bytes(best.free)} free on {best.name}"
        takes = f"the components take {readable_bytes(whole)}"
        yield f"undivided, {takes}, {room}; the largest takes {readable_bytes(largest)}", 0
    for part in parts:
        if saved := part.bytes * (len(part.models) - 1):
            yield f"one {part.component} serves {len(part.models)} models: {readable_bytes(saved)} less memory", saved
    if (copies := _denoisers(plan)) > 1:
        held = sum(part.bytes for role in plan.wanted.first for part in plan.needs[role])
        saved = (copies - 1) * (whole - held)
        less = f"{readable_bytes(saved)} less memory than as many undivided pipelines"
        yield f"{copies} denoisers share encoder and decoder: {less}", saved


def layouts_of(plan: Plan) -> list[dict[str, Any]]:
    """`serve`'s layouts with their predicted rates: the chosen one's is 1."""
    if plan.layouts is None:
        return []
    whole = plan.layouts.chosen.rate or 1.0
    return [
        {"layout": layout.written, "rate": round(layout.rate / whole, 2), "refusal": layout.refusal}
        for layout in plan.layouts.found
    ]


def basis_of(plan: Plan) -> str:
    """What the predicted rates of the layouts come from."""
    measured = plan.layouts is not None and plan.layouts.measured
    return f"rates are {'by what stages took here' if measured else 'a guess: nothing was measured here yet'}"


def batches_of(plan: Plan, data_dir: str) -> list[dict[str, Any]]:
    """How requests share forwards in the pools of these models, as comparing has shown here: of each pool the largest
    batch that changes no byte, the smallest that does, and the function that is to blame for it.
    """
    pools = {pool for model in plan.models for pool in model.card.pools().values()}
    found: defaultdict[str, list[Verdict]] = defaultdict(list)
    for one in Exactness(Path(data_dir, EXACTNESS)).all():
        if declared(one.pool) in pools:
            found[one.pool].append(one)
    rows = []
    for pool, seen in sorted(found.items()):
        worst = min((one for one in seen if one.blame), key=lambda one: one.size, default=Verdict())
        largest = max((one.size for one in seen if one.is_trusted), default=1)
        rows.append({"pool": pool, "exact_to": largest, "not_from": worst.size or None, "because_of": worst.blame})
    return rows


def verdict(plan: Plan) -> str:
    """Whether to split, in a sentence. Saved memory counts only if it is more than the extra processes take."""
    if plan.refusal:
        return "nothing to split: serve would refuse this"
    if plan.layouts:
        return plan.layouts.why
    if len(plan.workers) < 2:
        return "not split: one worker at most runs here, the stages in turn"
    more = len(plan.workers) - max(1, _denoisers(plan))
    saved = [size for _, size in gains(plan)]
    if 0 in saved or sum(saved) > more * PROCESS:
        return "split: it gains what is said above"
    contexts = f" and {readable_bytes(more * CONTEXT)} of GPU memory" if plan.workers[0].device != CPU else ""
    return (
        "do not split: on one device stages take turns (0.53 to 0.96 of the throughput of the best undivided set-up, "
        f"measured on two cores in docs/performance.md), and {more} more processes than undivided take "
        f"{readable_bytes(more * PROCESS)} of host memory{contexts}"
    )


def _denoisers(plan: Plan) -> int:
    return sum(worker.role in plan.wanted.first for worker in plan.workers)
