"""Describe a plan as text: what it serves, where, and whether splitting models pays."""

from __future__ import annotations

import json
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unfuse import __version__
from unfuse.arena.limits import readable_bytes
from unfuse.core.modalities import IMAGE, UPLOAD, VIDEO
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import declared_pool, readable_pool
from unfuse.core.text_parameters import TEXT
from unfuse.planning.placement import CONTEXT, CPU, PROCESS
from unfuse.server.served_models import ModelNames
from unfuse.service.plan import ServingPlan
from unfuse.worker.batches import InvarianceResult, InvarianceResults
from unfuse.worker.compute_messages import EXACTNESS

#: The prompt of the example command.
PROMPT = "a red circle on white"


class StartScreen:
    """The lines that `unfuse serve` prints while it starts.

    `plan`: what is served.
    `names`: the model of each name that clients use.
    `keyed`: whether clients need an API key.
    """

    def __init__(self, plan: ServingPlan, names: dict[str, str], *, keyed: bool) -> None:
        self._plan = plan
        self._keyed = keyed
        public_name = ModelNames(names).public_name
        self._served = {public_name(model.spec.name): model.spec for model in plan.models}

    def opening(self) -> list[str]:
        """Return the lines on which models are served, and by which workers."""
        models = [name if name == spec.name else f"{name} ({spec.name})" for name, spec in self._served.items()]
        return [f"serving {', '.join(models)} with unfuse {__version__}", *layout_lines(self._plan)]

    def ready(self, url: str, seconds: float) -> list[str]:
        """Return the lines on how long the start took, and how to try the server."""
        took = f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"
        if missing := self._plan.missing_roles():
            return [
                (
                    f"the workers of this machine are ready in {took} s: requests wait for workers of other roles "
                    f"({', '.join(missing)})"
                )
            ]
        return [f"ready in {took} s: open {url}/docs, or try", f"    {self.example(url)}"]

    def example(self, url: str) -> str:
        """Return a curl command for a request to the first model."""
        name, spec = next(iter(self._served.items()))
        path, fields, is_form = _first_request(spec)
        fields |= {"model": name} if len(self._served) > 1 else {}
        key = " -H 'authorization: Bearer KEY'" if self._keyed else ""
        if is_form:
            body = " ".join(f"-F {shlex.quote(f'{field}={value}')}" for field, value in fields.items())
        else:
            body = f"-H 'content-type: application/json' -d {shlex.quote(json.dumps(fields, ensure_ascii=False))}"
        return f"curl {url}{path}{key} {body}"


def _first_request(spec: ModelSpec) -> tuple[str, dict[str, object], bool]:
    """Return the path and fields of an example request, and whether it is a form."""
    if TEXT.is_supported_by(spec.limits):
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}, False
    needs_picture = spec.accepted_input(UPLOAD).min > 0
    if needs_picture and VIDEO.is_supported_by(spec.limits):
        return "/v1/videos", {"prompt": PROMPT, "input_reference": "@FILE"}, True
    if needs_picture:
        return "/v1/images/edits", {"prompt": PROMPT, "image": "@FILE", "response_format": "url"}, True
    if IMAGE.is_supported_by(spec.limits):
        return "/v1/images/generations", {"prompt": PROMPT, "response_format": "url"}, False
    return "/v1/videos", {"prompt": PROMPT}, False


def layout_lines(plan: ServingPlan) -> list[str]:
    """Return the lines on which workers start where, why, and their memory."""
    lines = [
        f"{model.spec.name} is not split: {model.spec.undivided_reason}"
        for model in plan.models
        if model.spec.undivided_reason
    ]
    if not plan.workers:
        return [*lines, "no worker is started here: requests wait until one registers (unfuse worker)"]
    if plan.layouts:
        lines.append(plan.layouts.reason)
    counts = Counter(f"{worker.role} on {worker.device}" for worker in plan.workers)
    workers = ", ".join(f"{count} × {worker}" for worker, count in counts.items())
    memory = ", ".join(
        f"{sums['device']} {readable_bytes(sums['takes'])} of {readable_bytes(sums['free'])} free"
        for sums in plan.memory()
    )
    return [*lines, f"workers: {workers}; memory: {memory}"]


def split_gains(plan: ServingPlan) -> Iterator[tuple[str, int]]:
    """Yield what serving in stages gains on this machine, as sentences with saved bytes.

    The bytes are 0 for gains that save no memory.
    """
    used = dict.fromkeys(device for worker in plan.workers for device in worker.devices)
    if len(used) > 1:
        yield f"stages on {len(used)} devices ({', '.join(used)}) work at the same time", 0

    parts = [part for role_parts in plan.needs.values() for part in role_parts]
    whole = sum(part.bytes for part in parts)
    largest = max(part.bytes for part in parts)
    best = max(plan.devices[1:] or plan.devices, key=lambda device: device.free)
    if whole > best.free:
        room = f"more than the {readable_bytes(best.free)} free on {best.name}"
        takes = f"the components take {readable_bytes(whole)}"
        yield f"undivided, {takes}, {room}; the largest takes {readable_bytes(largest)}", 0
    for part in parts:
        if saved := part.bytes * (len(part.models) - 1):
            yield f"one {part.component} serves {len(part.models)} models: {readable_bytes(saved)} less memory", saved
    if (copies := _denoisers(plan)) > 1:
        denoiser = sum(part.bytes for role in plan.worker_plan.first for part in plan.needs[role])
        saved = (copies - 1) * (whole - denoiser)
        less = f"{readable_bytes(saved)} less memory than as many undivided pipelines"
        yield f"{copies} denoisers share encoder and decoder: {less}", saved


def layout_rows(plan: ServingPlan) -> list[dict[str, Any]]:
    """Return a table row for each layout; the chosen one has the rate 1."""
    if plan.layouts is None:
        return []
    chosen_rate = plan.layouts.chosen.rate or 1.0
    return [
        {"layout": layout.text, "rate": round(layout.rate / chosen_rate, 2), "refusal": layout.refusal}
        for layout in plan.layouts.layouts
    ]


def prediction_basis(plan: ServingPlan) -> str:
    """Return a sentence on the origin of the layouts' predicted rates."""
    measured = plan.layouts is not None and plan.layouts.measured
    return f"rates are {'based on measurements on this machine' if measured else 'estimates without measurements'}"


def invariance_rows(plan: ServingPlan, data_dir: str) -> list[dict[str, Any]]:
    """Return the batch invariance results of a plan's pools, one table row each.

    `exact_to`: the largest batch size that changes no byte.
    `not_from`: the smallest that does, or None.
    `because_of`: the function that makes the difference.
    """
    pools = {pool for model in plan.models for pool in model.spec.pools().values()}
    results: defaultdict[str, list[InvarianceResult]] = defaultdict(list)
    for result in InvarianceResults(Path(data_dir, EXACTNESS)).all():
        if declared_pool(result.pool) in pools:
            results[result.pool].append(result)

    rows = []
    for pool, of_pool in sorted(results.items()):
        variant = (result for result in of_pool if result.variant_function)
        smallest = min(variant, key=lambda result: result.size, default=InvarianceResult())
        largest = max((result.size for result in of_pool if result.is_trusted), default=1)
        rows.append(
            {
                "pool": readable_pool(pool),
                "exact_to": largest,
                "not_from": smallest.size or None,
                "because_of": smallest.variant_function,
            }
        )
    return rows


def split_recommendation(plan: ServingPlan) -> str:
    """Return a sentence on whether to split the models.

    Saved memory counts only if it exceeds the memory of the additional processes.
    """
    if plan.refusal:
        return "nothing to split: serve would refuse this"
    if plan.layouts:
        return plan.layouts.reason
    if len(plan.workers) < 2:
        return "not split: at most one worker runs here, and its stages run in turn"
    more = len(plan.workers) - max(1, _denoisers(plan))
    saved = [size for _, size in split_gains(plan)]
    if 0 in saved or sum(saved) > more * PROCESS:
        return "split: it has the gains above"
    contexts = f" and {readable_bytes(more * CONTEXT)} of GPU memory" if plan.workers[0].device != CPU else ""
    return (
        "do not split: on one device stages take turns (0.53 to 0.96 of the throughput of the best undivided set-up, "
        f"measured on two cores in docs/performance.md), and {more} more processes than undivided take "
        f"{readable_bytes(more * PROCESS)} of host memory{contexts}"
    )


def _denoisers(plan: ServingPlan) -> int:
    """Return the number of workers whose role is placed first."""
    return sum(worker.role in plan.worker_plan.first for worker in plan.workers)
