"""The largest pictures and videos for which GPUs have memory, by predicted activations."""

from __future__ import annotations

from collections.abc import Sequence

from unfuse.core.model_spec import ModelSpec
from unfuse.planning.component_memory import ComponentMemory
from unfuse.planning.placement import Device, PlacedWorker, WorkerPlan, left_bytes, taken_bytes

#: What formulas may be wrong by. A size is refused only if it does not fit with so much less.
TOLERANCE = 0.1


def size_limits(
    spec: ModelSpec, placed: Sequence[PlacedWorker], plan: WorkerPlan, devices: Sequence[Device]
) -> dict[str, int | float]:
    """Return the limits of a model's requests, reduced to what fits on its GPUs.

    Activations grow with the pixels of a picture, and those of a denoiser with the pixels of all frames. Limits of
    models on CPUs are unchanged.
    """
    limits = dict(spec.limits)
    default = {name: spec.defaults.get(name) for name in ("width", "height", "num_frames")}
    if "max_pixels" not in limits or not all(isinstance(value, int) and value > 0 for value in default.values()):
        return limits
    pixels, frames = int(str(default["width"])) * int(str(default["height"])), int(str(default["num_frames"]))

    left = left_bytes(taken_bytes(placed, plan), devices)
    for worker in placed:
        if worker.on_cpu:
            continue
        free = min(left[name] for name in worker.devices)
        for part in worker.parts:
            if spec.name not in part.models or not part.activations or not _grows(part, plan):
                continue
            growth = _headroom(part, worker, plan, free) / part.activations / (1 - TOLERANCE)
            if frames == 1 or part.component.startswith("vae"):
                limits["max_pixels"] = min(limits["max_pixels"], max(pixels, int(pixels * growth)))
            else:
                largest = max(pixels * frames, int(pixels * frames * growth))
                limits["max_video_pixels"] = min(limits.get("max_video_pixels") or largest, largest)
    return limits


def _grows(part: ComponentMemory, plan: WorkerPlan) -> bool:
    """Return whether a component's activations grow with the size of the result.

    A decode that does not fit is repeated in tiles, unless `--exact-only` forbids it.
    """
    names = ("transformer", "unet", "vae") if plan.compute.exact_only else ("transformer", "unet")
    return part.component.startswith(names)


def _headroom(part: ComponentMemory, worker: PlacedWorker, plan: WorkerPlan, free: int) -> int:
    """Return the bytes that a component's activations may take on a rank.

    `free`: the bytes that the plan leaves on the device of the rank.
    """
    offloads = [(other, other.offload(plan.compute.offload)) for other in worker.parts]
    last = max((other.resident(how) for other, how in offloads if how != "none"), default=0)
    # weights on the device while each component computes, besides those that never leave it
    resident = [last if how == "none" else other.resident(how) for other, how in offloads]
    peak = max(size + other.activations for size, (other, _) in zip(resident, offloads, strict=True))
    return free + peak - resident[worker.parts.index(part)]
