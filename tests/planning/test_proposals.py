"""Layouts that are proposed for published models on described machines, as the documentation lists them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import convert
from msgspec.structs import replace

from tests.planning.real_models import NAMES, configuration, make_folder
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.errors import InvalidParameter
from unfuse.core.modalities import IMAGE, VIDEO, MediaLimits
from unfuse.planning.placement import CPU, Device, WorkerPlan, parse_place, taken_bytes
from unfuse.service.groups import Settings
from unfuse.service.plan import ServingPlan, plan_models, worker_specs
from unfuse.weights.fingerprints import FINGERPRINTS

GIB = 1 << 30
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "gpu-layouts.md"

MACHINES = {
    "1 × 24 GB": ([23.4], 128),
    "2 × 24 GB": ([23.4] * 2, 128),
    "1 × 80 GB": ([79.0], 128),
    "8 × 80 GB": ([79.0] * 8, 1024),
    "8 × 24 GB": ([23.4] * 8, 512),
}
"""The free GiB on each GPU, and in host memory."""

FITS = "it would fit with "


@pytest.fixture(autouse=True)
def unhashed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sparse weights of 60 GiB are not read: their fingerprint is that of their name."""
    with monkeypatch.context() as patch:
        patch.setattr(FINGERPRINTS, "content", lambda file: str(file).encode())
        yield


def devices(machine: str) -> tuple[Device, ...]:
    free, host = MACHINES[machine]
    return (Device(CPU, host * GIB), *(Device(f"cuda:{n}", int(size * GIB)) for n, size in enumerate(free)))


def proposed(folder: Path, machine: str, place: str = "", **compute: str) -> ServingPlan:
    wanted = WorkerPlan(None, parse_place(place), ComputeOptions(**compute), arena=512 << 20, auto=not place)  # type: ignore[arg-type]
    return plan_models([str(folder)], "", wanted, devices(machine))


def summary(plan: ServingPlan) -> str:
    """The layout; or for a refusal, what would fit: the first advice, and the first with quantized weights."""
    if not plan.refusal:
        assert plan.layouts
        return plan.layouts.chosen.text
    if FITS not in plan.refusal:
        return "more memory"
    advice = plan.refusal.partition(FITS)[2].split(", or with ")
    quantized = [text for text in advice[1:] if "weights in" in text][:1]
    return "; ".join([advice[0], *quantized])


@pytest.mark.parametrize("name", NAMES)
def test_documented_layouts_are_those_that_are_proposed(name: str, tmp_path: Path) -> None:
    folder = make_folder(name, tmp_path / "model")
    row = [configuration(name)["title"], *(summary(proposed(folder, machine)) for machine in MACHINES)]
    documented = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines()]
    assert [cell.replace("`", "") for cell in next(cells for cells in documented if cells[:1] == row[:1])] == row


@pytest.mark.parametrize("name", NAMES)
def test_each_proposed_layout_fits_with_its_activations(name: str, tmp_path: Path) -> None:
    folder = make_folder(name, tmp_path / "model")
    for machine in MACHINES:
        plan = proposed(folder, machine)
        taken = taken_bytes(plan.workers, plan.worker_plan)
        assert all(taken[device.name] <= device.free for device in devices(machine))


@pytest.mark.parametrize("name", NAMES)
def test_model_that_does_not_fit_a_24_gb_card_gets_quantized_weights_or_a_shorter_text(
    name: str, tmp_path: Path
) -> None:
    plan = proposed(make_folder(name, tmp_path / "model"), "1 × 24 GB")
    named = "weights in" in plan.refusal or "max_tokens" in plan.refusal
    assert not plan.refusal or named or name in ("flux2", "hunyuan-video"), "too large even with 4.5 bits"


def test_advice_is_accepted_when_it_is_followed(tmp_path: Path) -> None:
    folder = make_folder("flux1", tmp_path / "model")
    assert "--offload model" in proposed(folder, "1 × 24 GB").refusal
    assert not proposed(folder, "1 × 24 GB", offload="model").refusal
    assert "--vae tiled" in proposed(hunyuan := make_folder("hunyuan-video", tmp_path / "video"), "1 × 80 GB").refusal
    assert not proposed(hunyuan, "1 × 80 GB", vae="tiled").refusal


def test_sharding_is_advised_where_half_of_a_transformer_fits(tmp_path: Path) -> None:
    plan = proposed(make_folder("wan2.1", tmp_path / "model"), "2 × 24 GB", place="encoder=cpu,decoder=cpu")
    assert "it would fit with --parallel denoiser=shard:2" in plan.refusal


def test_offload_is_advised_for_shards_that_do_not_fit(tmp_path: Path) -> None:
    """Each card would have half of both transformers, which is more than it has free."""
    folder = make_folder("wan2.2", tmp_path / "model")
    plain = ComputeOptions(parallel="denoiser=shard:2")
    refused, followed = (
        plan_models([str(folder)], "", WorkerPlan(compute=options), devices("2 × 24 GB"))
        for options in (plain, replace(plain, offload="model"))
    )
    assert "it would fit with --offload model, or with" in refused.refusal
    assert not followed.refusal
    taken = taken_bytes(followed.workers, followed.worker_plan)
    transformers = sum(part.bytes for worker in followed.workers for part in worker.parts if part.is_sharded)
    assert taken["cuda:0"] < 24 * GIB < 2 * transformers < taken[CPU]


def test_offload_is_not_advised_for_weights_that_torchao_quantized(tmp_path: Path) -> None:
    folder = make_folder("flux1", tmp_path / "model")
    file = folder / "transformer" / "config.json"
    described = {"_type": "Int8WeightOnlyConfig", "_data": {}}
    settings = {"quant_method": "torchao", "quant_type": {"default": described}}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))
    refusal = proposed(folder, "1 × 24 GB").refusal
    assert "cuda:0 would need" in refusal
    assert "--offload" not in refusal


def test_kv_caches_share_what_weights_and_activations_leave(tmp_path: Path) -> None:
    folder = make_folder("llama-3.1-8b", tmp_path / "model")
    (worker,) = proposed(folder, "1 × 80 GB").workers
    weights, cache = (part.bytes for part in worker.parts)
    assert weights == 2 * 8030261248
    assert 0.85 < cache / (79 * GIB - weights) < 0.99

    two = WorkerPlan({"language": 2}, {}, ComputeOptions(), arena=512 << 20)
    plan = plan_models([str(folder)], "", two, (Device(CPU, 128 * GIB), Device("cuda:0", 79 * GIB)))
    first, second = (worker.parts[-1].bytes for worker in plan.workers)
    assert first == second
    assert 16 * GIB < first < cache / 2
    assert taken_bytes(plan.workers, two)["cuda:0"] <= 79 * GIB
    capped = plan_models([str(folder)], "", WorkerPlan(auto=True), (Device(CPU, 128 * GIB), Device("cuda:0", 40 * GIB)))
    assert capped.workers[0].parts[-1].bytes < 25 * GIB


def test_workers_on_gpus_get_the_planned_kv_cache(tmp_path: Path) -> None:
    folder = make_folder("llama-3.1-8b", tmp_path / "model")
    plan = proposed(folder, "1 × 80 GB")
    (spec,) = worker_specs(plan, Settings(), {}, {})
    assert spec.flags["kv"] == str(plan.workers[0].parts[-1].bytes)
    on_cpu = plan_models([str(folder)], "", WorkerPlan({"all": 1}), (Device(CPU, 128 * GIB),))
    assert worker_specs(on_cpu, Settings(), {}, {})[0].flags["kv"] == "0"


def test_a_kv_option_replaces_the_planned_cache(tmp_path: Path) -> None:
    folder = make_folder("llama-3.1-8b", tmp_path / "model")
    (worker,) = plan_models([str(folder)], "", WorkerPlan(auto=True, kv=20 * GIB), devices("1 × 80 GB")).workers
    assert worker.parts[-1].bytes == 20 * GIB
    refused = plan_models([str(folder)], "", WorkerPlan(auto=True, kv=70 * GIB), devices("1 × 80 GB")).refusal
    assert "cuda:0 would need" in refused


def test_a_denoiser_without_decoder_is_planned_with_the_vae_of_previews(tmp_path: Path) -> None:
    folder = make_folder("flux1", tmp_path / "model")
    plan = plan_models([str(folder)], "", WorkerPlan({"denoiser": 1, "decoder": 1}), devices("1 × 80 GB"))
    (together,) = plan_models([str(folder)], "", WorkerPlan({"denoiser+decoder": 1}), devices("1 × 80 GB")).workers
    vae = plan.models[0].components["vae"].memory
    denoiser, _ = (worker.device_bytes(plan.worker_plan)["cuda:0"] for worker in plan.workers)
    transformer = plan.models[0].components["transformer"]
    assert denoiser - vae - transformer.memory - transformer.activations == 727 << 20
    assert [part.component for part in together.parts].count("vae") == 1


def test_sizes_without_memory_are_refused_with_the_largest_that_fits(tmp_path: Path) -> None:
    """A picture on a card with a quantized denoiser, and a video on one of 80 GB."""
    folder = make_folder("flux1", tmp_path / "flux")
    large, small = (proposed(folder, machine, offload=offload).models[0].spec for machine, offload in ROOMS)
    assert large.limits["max_pixels"] == 2048 * 2048
    assert 1024 * 1024 < small.limits["max_pixels"] < 2048 * 2048
    with pytest.raises(InvalidParameter, match=r"size 2048x2048 is not supported: .* the nearest is 1\d{3}x1\d{3}"):
        IMAGE.complete_params(convert(small.limits, MediaLimits), small.defaults, {"size": "2048x2048"}, None)


def test_decodes_limit_sizes_only_where_they_must_not_be_tiled(tmp_path: Path) -> None:
    folder = make_folder("flux1", tmp_path / "flux")
    card = (Device(CPU, 128 * GIB), Device("cuda:0", 41 * GIB))
    tiled, exact = (
        plan_models([str(folder)], "", WorkerPlan(compute=ComputeOptions(exact_only=only), auto=True), card)
        for only in (False, True)
    )
    assert exact.models[0].spec.limits["max_pixels"] < 2048 * 2048 == tiled.models[0].spec.limits["max_pixels"]


ROOMS = (("1 × 80 GB", "none"), ("1 × 24 GB", "model"))


def test_videos_without_memory_are_refused_with_the_most_frames_that_fit(tmp_path: Path) -> None:
    spec = proposed(make_folder("wan2.2", tmp_path / "wan"), "1 × 80 GB").models[0].spec
    limits = convert(spec.limits, MediaLimits)
    assert limits.max_video_pixels > 832 * 480 * 81
    accepted = VIDEO.complete_params(limits, spec.defaults, {"num_frames": 81}, None)
    assert accepted["num_frames"] == 81
    narrow = replace(limits, max_video_pixels=832 * 480 * 90)
    with pytest.raises(InvalidParameter, match="ask for at most 89 frames of this size"):
        VIDEO.complete_params(narrow, spec.defaults, {"num_frames": 121}, None)


def test_limits_on_cpus_are_those_of_the_model(tmp_path: Path) -> None:
    folder = make_folder("flux1", tmp_path / "flux")
    on_cpu = plan_models([str(folder)], "", WorkerPlan(auto=True), (Device(CPU, 128 * GIB),)).models[0].spec
    assert on_cpu.limits["max_pixels"] == 2048 * 2048
    assert on_cpu.limits["max_video_pixels"] == 0
