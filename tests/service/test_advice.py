"""Whether a split is advised."""

from __future__ import annotations

from pathlib import Path

import pytest

from unfuse.core.compute_options import ComputeOptions
from unfuse.core.plan import readable_pool
from unfuse.planning.component_memory import ComponentMemory
from unfuse.planning.placement import Device, WorkerPlan, place_workers
from unfuse.service.plan import ServingPlan, plan_models
from unfuse.service.report import invariance_rows, split_gains, split_recommendation
from unfuse.worker.batch_invariance import TRUSTED_AFTER, InvarianceResults
from unfuse.worker.compute_messages import EXACTNESS

ROLES = ("encoder", "denoiser", "decoder")
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


def test_batch_invariance_results_are_reported_by_pool(tmp_path: Path) -> None:
    found = plan_models(["unfuse/shapes"], "", WorkerPlan(), (Device("cpu", 1 << 40),))
    pools = found.models[0].spec.pools()
    denoise, decode, seen = f"{pools['denoise']}@0a", pools["vae_decode"], InvarianceResults(tmp_path / EXACTNESS)
    for size in (2, 4) * TRUSTED_AFTER:
        seen.record((denoise, (64, 64)), size, "")
    seen.record((denoise, (32, 32)), 8, "")
    seen.record((decode, ()), 4, "torch.conv2d")
    seen.record((decode, ()), 2, "torch.silu")
    seen.record(("denoise:of-others", ()), 2, "torch.sin")
    assert invariance_rows(found, str(tmp_path)) == [
        {"pool": readable_pool(denoise), "exact_to": 4, "not_from": None, "because_of": ""},
        {"pool": readable_pool(decode), "exact_to": 1, "not_from": 2, "because_of": "torch.silu"},
    ]


def test_split_is_not_recommended_with_model_offload() -> None:
    needs = {role: (ComponentMemory(role, "float32", 1 << 30, ("a",)),) for role in ROLES}
    devices, want = (
        (Device("cpu", 90 << 30), Device("cuda:0", 9 << 30)),
        WorkerPlan(compute=ComputeOptions(offload="model")),
    )
    assert split_recommendation(ServingPlan((), needs, want, devices, place_workers(needs, want, devices))).startswith(
        "not split: at most one worker"
    )
