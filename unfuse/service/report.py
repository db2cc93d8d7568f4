"""Describe a plan as text: what it serves, where, and whether splitting models pays."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator
from typing import Any

from unfuse import __version__
from unfuse.arena.limits import readable_bytes
from unfuse.core.compute_device import CONTEXT
from unfuse.core.modalities import IMAGE, UPLOAD, VIDEO
from unfuse.core.model_spec import ModelSpec
from unfuse.core.text_parameters import TEXT
from unfuse.planning.placement import CPU, PROCESS
from unfuse.server.served_models import ModelNames
from unfuse.service.plan import ServingPlan

#: The prompt of the example command.
PROMPT = "a red circle on white"


class StartScreen:
    """The lines that `unfuse serve` prints while it starts.

    `plan`: the plan of the workers.
    `names`: the model of each name that clients use.
    `keyed`: whether clients need an API key.
    """

    def __init__(self, plan: ServingPlan, names: dict[str, str], *, keyed: bool) -> None:
        self._plan = plan
        self._keyed = keyed
        public_name = ModelNames(names).public_name
        self._served = {public_name(model.spec.name): model.spec for model in plan.models}

    def opening(self) -> list[str]:
        """Return the lines that list the served models and their workers."""
        models = [name if name == spec.name else f"{name} ({spec.name})" for name, spec in self._served.items()]
        return [f"serving {', '.join(models)} with unfuse {__version__}", *layout_lines(self._plan)]

    def ready(self, url: str, seconds: float) -> list[str]:
        """Return the lines with the duration of the start and an example command.

        `url`: the URL of the server.
        `seconds`: the duration of the start.
        """
        duration = f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"
        if missing_roles := self._plan.missing_roles():
            return [
                (
                    f"the workers of this machine are ready in {duration} s: requests wait for workers of other roles "
                    f"({', '.join(missing_roles)})"
                )
            ]
        return [f"ready in {duration} s: open {url}/docs, or try", f"    {self.example(url)}"]

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
    """Return the lines on the layout: its reason, its workers, and their memory."""
    lines = [
        f"{model.spec.name} is not split: {model.spec.undivided_reason}"
        for model in plan.models
        if model.spec.undivided_reason
    ]
    if not plan.workers:
        return [*lines, "no worker is started here: requests wait until one registers (unfuse worker)"]
    if plan.layouts:
        lines.append(plan.layouts.reason)
    lines += _lines_on_dtypes(plan)
    counts = Counter(f"{worker.role} on {worker.device}" for worker in plan.workers)
    workers = ", ".join(f"{count} × {worker}" for worker, count in counts.items())
    memory = ", ".join(
        f"{sums['device']} {readable_bytes(sums['takes'])} of {readable_bytes(sums['free'])} free"
        for sums in plan.memory()
    )
    return [*lines, f"workers: {workers}; memory: {memory}"]


def _lines_on_dtypes(plan: ServingPlan) -> list[str]:
    """Return a line with the dtypes on GPUs without bfloat16, if there are any."""
    names = {device.name for device in plan.devices if not device.has_bfloat16}
    workers = [worker for worker in plan.workers if names.intersection(worker.devices)]
    devices = dict.fromkeys(name for worker in workers for name in worker.devices if name in names)
    dtypes = dict.fromkeys(f"{part.component} {part.dtype}" for worker in workers for part in worker.parts)
    return [f"{', '.join(devices)} without bfloat16, so dtypes are: {', '.join(dtypes)}"] if workers else []


def split_gains(plan: ServingPlan) -> Iterator[tuple[str, int]]:
    """Yield the gains of serving in stages here: a sentence, and the saved bytes.

    The bytes are 0 for a gain that saves no memory.
    """
    used_devices = dict.fromkeys(device for worker in plan.workers for device in worker.devices)
    if len(used_devices) > 1:
        yield f"stages on {len(used_devices)} devices ({', '.join(used_devices)}) work at the same time", 0

    parts = [part for role_parts in plan.needs.values() for part in role_parts]
    total_bytes = sum(part.bytes for part in parts)
    largest_bytes = max(part.bytes for part in parts)
    # The first device is the host, which counts only if there is no other.
    freest_device = max(plan.devices[1:] or plan.devices, key=lambda device: device.free)
    if total_bytes > freest_device.free:
        limit = f"more than the {readable_bytes(freest_device.free)} free on {freest_device.name}"
        total = f"the components take {readable_bytes(total_bytes)}"
        yield f"undivided, {total}, {limit}; the largest takes {readable_bytes(largest_bytes)}", 0

    for part in parts:
        if saved := part.bytes * (len(part.models) - 1):
            yield f"one {part.component} serves {len(part.models)} models: {readable_bytes(saved)} less memory", saved
    if (copies := _denoisers(plan)) > 1:
        denoiser_bytes = sum(part.bytes for role in plan.worker_plan.first for part in plan.needs[role])
        saved = (copies - 1) * (total_bytes - denoiser_bytes)
        saving = f"{readable_bytes(saved)} less memory than as many undivided pipelines"
        yield f"{copies} denoisers share encoder and decoder: {saving}", saved


def layout_rows(plan: ServingPlan) -> list[dict[str, Any]]:
    """Return a table row for each layout, with its rate relative to the chosen layout."""
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


def split_recommendation(plan: ServingPlan) -> str:
    """Return a sentence that recommends or discourages splitting the models.

    Saved memory counts only if it exceeds the memory of the additional processes.
    """
    if plan.refusal:
        return "nothing to split: serve would refuse this"
    if plan.layouts:
        return plan.layouts.reason
    if len(plan.workers) < 2:
        return "not split: at most one worker runs here, and its stages run in turn"
    extra_processes = len(plan.workers) - max(1, _denoisers(plan))
    saved_bytes = [size for _, size in split_gains(plan)]
    # A gain of 0 bytes makes requests faster, or possible at all. It outweighs any memory.
    if 0 in saved_bytes or sum(saved_bytes) > extra_processes * PROCESS:
        return "split: it has the gains above"
    gpu_memory = (
        f" and {readable_bytes(extra_processes * CONTEXT)} of GPU memory" if plan.workers[0].device != CPU else ""
    )
    return (
        "do not split: on one device stages take turns (0.53 to 0.96 of the throughput of the best undivided set-up, "
        f"measured on two cores in docs/reference/performance/pipelines.md), and {extra_processes} more processes than "
        f"undivided take {readable_bytes(extra_processes * PROCESS)} of host memory{gpu_memory}"
    )


def _denoisers(plan: ServingPlan) -> int:
    """Return the number of workers whose role is placed first, such as denoisers."""
    return sum(worker.role in plan.worker_plan.first for worker in plan.workers)
