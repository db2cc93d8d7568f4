"""Whether a split is advised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unfuse.core.compute_options import Batching, ComputeOptions
from unfuse.planning.placement import ComponentMemory, Device, WorkerPlan, place_workers
from unfuse.service.batching_report import batching_rows
from unfuse.service.plan import ServingPlan, plan_models
from unfuse.service.report import split_gains, split_recommendation
from unfuse.worker.batch_invariance import DIFFERENT, SETTLED_AFTER, TRUSTED_AFTER, InvarianceResults
from unfuse.worker.compute_messages import EXACTNESS

ROLES = ("encoder", "denoiser", "decoder")
DEVICES = (Device("cpu", 1 << 40),)
FIRST = frozenset({"denoiser"})


@pytest.mark.parametrize(
    ("want", "free", "says"),
    [
        (
            WorkerPlan(place={"decoder": ("cpu",)}, first=FIRST),
            80,
            "stages on 2 devices (cuda:0, cpu) work at the same time",
        ),
        (
            WorkerPlan(place={role: ("cpu",) for role in ROLES}, first=FIRST),
            5,
            "undivided, the components take 10.0 GiB, more than the 5.0",
        ),
        (
            WorkerPlan({"encoder": 1, "denoiser": 2, "decoder": 1}, first=FIRST),
            80,
            "2 denoisers share encoder and decoder: 4.0 GiB less",
        ),
    ],
)
def test_split_that_uses_more_devices_or_saves_memory_is_recommended(want: WorkerPlan, free: int, says: str) -> None:
    gib = 1 << 30
    needs = {
        role: (ComponentMemory(role, "float32", size * gib, ("a",)),)
        for role, size in zip(ROLES, (3, 6, 1), strict=True)
    }
    devices = (Device("cpu", 90 * gib), Device("cuda:0", free * gib))
    found = ServingPlan((), needs, want, devices, place_workers(needs, want, devices))
    assert any(says in gain for gain, _ in split_gains(found))
    assert split_recommendation(found).startswith("split: ")


def reported(folder: Path, batching: Batching = "auto") -> dict[str, dict[str, Any]]:
    """The rows of the built-in model by the kind of their stage, without the name of the pool."""
    plan = plan_models(["unfuse/shapes"], "", WorkerPlan(compute=ComputeOptions(batching=batching)), DEVICES)
    return {row.pop("pool").partition("-")[0]: row for row in batching_rows(plan, str(folder))}


def pool_of(stage: str) -> str:
    return plan_models(["unfuse/shapes"], "", WorkerPlan(), DEVICES).models[0].spec.pools()[stage] + "@0a"


def test_batching_of_each_stage_is_reported_with_its_cost(tmp_path: Path) -> None:
    denoise, encode = pool_of("denoise"), pool_of("text_encode")
    nothing = {"exact_to": 1, "not_from": None, "because_of": "", "time": None}
    assert reported(tmp_path) == {
        "text": {"batching": "not compared yet", **nothing},
        "denoise": {"batching": "not compared yet", **nothing},
        "vae": {"batching": "one request per forward", **nothing},
    }

    seen = InvarianceResults(tmp_path / EXACTNESS)
    for size in (2, 4) * TRUSTED_AFTER:
        seen.record((denoise, (64, 64)), size, "", 0.4, 0.1 + 0.4 / size)
    seen.record((denoise, (32, 32)), 8, "")
    seen.record((encode, ()), 4, DIFFERENT, 0.2, 0.1)
    seen.record((encode, ()), 2, DIFFERENT)
    seen.record(("denoise:of-others", ()), 2, DIFFERENT)
    figures = {"exact_to": 4, "not_from": None, "because_of": "", "time": 0.5}
    assert reported(tmp_path)["denoise"] == {"batching": "exact batches up to 4", **figures}
    figures = {"exact_to": 1, "not_from": 2, "because_of": DIFFERENT, "time": 0.5}
    assert reported(tmp_path)["text"] == {"batching": "one request per forward: batches change bytes here", **figures}
    assert reported(tmp_path, "exact-or-batched")["text"]["batching"] == reported(tmp_path)["text"]["batching"]
    assert {row["batching"] for row in reported(tmp_path, "batched").values()} == {
        "batched: results within a tolerance"
    }


def test_settled_pool_is_reported_by_the_batching_that_follows(tmp_path: Path) -> None:
    seen = InvarianceResults(tmp_path / EXACTNESS, "a device")
    for _ in range(TRUSTED_AFTER):
        seen.record((pool_of("denoise"), (64, 64)), 2, "")
    for width in range(SETTLED_AFTER):
        seen.record((pool_of("denoise"), (width, 32)), 2, DIFFERENT)
    assert reported(tmp_path)["denoise"]["batching"] == "one request per forward: batches change bytes here"
    assert reported(tmp_path, "exact-or-batched")["denoise"]["batching"] == "batched: results within a tolerance"


def test_split_is_not_recommended_with_model_offload() -> None:
    needs = {role: (ComponentMemory(role, "float32", 1 << 30, ("a",)),) for role in ROLES}
    devices, want = (
        (Device("cpu", 90 << 30), Device("cuda:0", 9 << 30)),
        WorkerPlan(compute=ComputeOptions(offload="model")),
    )
    assert split_recommendation(ServingPlan((), needs, want, devices, place_workers(needs, want, devices))).startswith(
        "not split: at most one worker"
    )
