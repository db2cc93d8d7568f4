"""Which layout is chosen: by memory, models and cores; and what others are predicted to do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from unfuse.core.compute_device import CONTEXT
from unfuse.core.compute_options import ComputeOptions, MaxLoadedModels
from unfuse.core.errors import ConfigError
from unfuse.models import read_model_spec, resolve_source
from unfuse.planning import layout
from unfuse.planning.component_memory import ComponentMemory
from unfuse.planning.layout import HostResources, LayoutSearch, predict_rate, role_shares, search_layouts
from unfuse.planning.placement import CPU, PROCESS, Device, PlacedWorker, WorkerPlan, place_workers
from unfuse.scheduler.costs import Costs

GIB = 1 << 30
CARD = read_model_spec("unfuse/shapes", resolve_source("unfuse/shapes"))
NEEDS = {
    "encoder": (ComponentMemory("text_encoder", "float32", 9 * GIB, mapped=True),),
    "denoiser": (ComponentMemory("transformer", "float32", 12 * GIB, mapped=True),),
    "decoder": (ComponentMemory("vae", "float32", GIB, mapped=True),),
}
WHOLE = 22 * GIB
GPUS = Device("cuda:0", 24 * GIB), Device("cuda:1", 24 * GIB)
FIRST = frozenset({"denoiser"})


def found(
    cores: int, *gpus: int, host: int = 1 << 45, limit: int = 0, threads: int = 0, costs: Path | None = None
) -> LayoutSearch:
    """For a model of 22 GiB on such a machine."""
    devices = (Device(CPU, host), *(Device(f"cuda:{number}", free) for number, free in enumerate(gpus)))
    wanted = WorkerPlan(None, {}, ComputeOptions(threads=threads), auto=True, first=FIRST)
    return search_layouts([CARD], NEEDS, wanted, devices, HostResources(cores, limit, costs))


@pytest.mark.parametrize(
    ("cores", "workers"), [(1, "all=1"), (2, "all=2"), (4, "all=4"), (8, "all=4"), (16, "all=4"), (64, "all=16")]
)
def test_cpu_workers_run_all_stages_and_scale_with_cores(cores: int, workers: str) -> None:
    assert found(cores).chosen.workers == workers


def test_threads_option_determines_the_number_of_workers() -> None:
    assert found(8, threads=8).chosen.workers == "all=1"
    assert found(8, threads=1).chosen.workers == "all=8"


def test_number_of_workers_is_limited_by_host_memory() -> None:
    assert found(8, host=WHOLE + 4 * PROCESS).chosen.workers == "all=4"
    assert found(8, host=WHOLE + 3 * PROCESS).chosen.workers == "all=2"  # of four threads, where three have two
    assert found(8, host=WHOLE + PROCESS).chosen.workers == "all=1"
    nothing = found(8, host=WHOLE)
    assert nothing.chosen.workers == "split"
    assert "the models do not fit" in nothing.chosen.refusal


def test_memory_limit_splits_workers_by_role() -> None:
    taken = found(2, limit=13 * GIB)
    assert taken.chosen.workers == "encoder=1,denoiser=2,decoder=1"
    assert "a worker would need 22.3 GiB, but --memory-limit allows 13.0 GiB" in taken.reason
    assert found(2, limit=23 * GIB).chosen.workers == "all=2"


@pytest.mark.parametrize(
    ("gpus", "workers"),
    [
        ((24 * GIB,), "all=1"),
        ((24 * GIB, 24 * GIB), "all=2"),
        ((24 * GIB, 16 * GIB), "all=1,denoiser=1"),
        ((16 * GIB, 16 * GIB), "split"),
        ((16 * GIB,) * 4, "encoder=1,denoiser=3,decoder=1"),
    ],
)
def test_workers_are_split_by_role_only_if_weights_exceed_one_gpu(gpus: tuple[int, ...], workers: str) -> None:
    assert found(16, *gpus).chosen.workers == workers


def test_model_that_fits_no_gpu_raises_config_error() -> None:
    wanted = found(16, 8 * GIB).chosen.apply_to(WorkerPlan(None, {}, auto=True, first=FIRST))
    with pytest.raises(ConfigError, match="the models do not fit"):
        place_workers(NEEDS, wanted, (Device(CPU, GIB), Device("cuda:0", GIB)))


def test_measured_costs_replace_estimated_role_shares(tmp_path: Path) -> None:
    assert not found(2).measured
    shares, measured = role_shares([CARD], None)
    assert not measured
    assert max(shares, key=lambda role: shares[role]) == "denoiser"

    costs = Costs(tmp_path / "costs.json")
    pools = CARD.pools()
    for stage, seconds in zip(CARD.pipeline.stages, (1.0, 3.0, 4.0), strict=True):
        work = stage.work.of(CARD.defaults)
        costs._models.setdefault(pools[stage.name], {}).setdefault("cpu", _model()).add(work, seconds)
    costs._is_saved = False
    import asyncio

    asyncio.run(costs.update_models())
    shares, measured = role_shares([CARD], tmp_path / "costs.json")
    assert measured
    assert shares == pytest.approx({"encoder": 1 / 8, "denoiser": 3 / 8, "decoder": 4 / 8})
    known = found(2, costs=tmp_path / "costs.json")
    split = next(layout for layout in known.layouts if layout.workers == "split")
    assert known.measured and split.rate / known.chosen.rate == pytest.approx(1.0)


def test_single_role_is_reported_as_the_layout_reason() -> None:
    needs, wanted = {"whole": NEEDS["denoiser"]}, WorkerPlan(None, {}, auto=True, first=frozenset({"whole"}))
    chosen = search_layouts([], needs, wanted, (Device(CPU, 1 << 45),), HostResources(2))
    assert chosen.reason == "layout all=2: each worker runs all stages, since all have the role whole"


def test_layout_message_has_one_reason_and_no_advice() -> None:
    chosen = [found(2), found(16, 24 * GIB, 16 * GIB), found(16, 16 * GIB, 16 * GIB), found(2, limit=13 * GIB)]
    for one in chosen:
        assert one.reason.startswith(f"layout {one.chosen.workers}: ")
        assert not re.search("×|rate|guess|--workers|;", one.reason)
    assert chosen[1].reason.endswith("workers run all stages on GPUs where all fit, and only denoiser on the others")
    assert "since not all fit in one worker: the models do not fit: cuda:0 would need" in chosen[2].reason


def _model() -> object:
    from unfuse.scheduler.costs import TimeModel

    return TimeModel()


@pytest.mark.parametrize("gpus", [(), (24 * GIB, 16 * GIB), (16 * GIB,) * 4])
def test_measured_costs_do_not_change_the_chosen_layout(gpus: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a restart would."""
    without = found(4, *gpus).chosen.workers
    for slow in NEEDS:
        shares = {role: 0.98 if role == slow else 0.01 for role in NEEDS}
        known = layout.role_shares([CARD], None)
        monkeypatch.setattr(layout, "role_shares", lambda _, costs, s=shares, k=known: (s, True) if costs else k)
        assert found(4, *gpus, costs=Path("some")).chosen.workers == without
        monkeypatch.undo()


@given(
    st.fixed_dictionaries({role: st.floats(0.01, 1.0) for role in NEEDS}),
    st.integers(0, 3),
    st.tuples(*[st.integers(0, 3)] * 3),
    st.integers(1, 8),
)
def test_predicted_rate_equals_the_optimal_distribution_of_work(
    seconds: Mapping[str, float], whole: int, own: tuple[int, ...], cores: int
) -> None:
    """By trying every way to share a little work out: never more than that, and no way does much more."""
    shares = {role: part / sum(seconds.values()) for role, part in seconds.items()}
    counts = {"all": whole, **dict(zip(NEEDS, own, strict=True))}
    placed = [PlacedWorker(role, CPU, ()) for role, count in counts.items() for _ in range(count)]
    if not placed:
        return
    found = predict_rate(placed, shares, WorkerPlan(None, {}, ComputeOptions(threads=1)), HostResources(cores))
    assert found <= cores + 1e-6
    spare = sum(max(0.0, found * shares[role] - counts[role]) for role in shares)
    assert spare <= whole + 1e-6
    more = found * 1.01
    if more < cores:
        assert sum(max(0.0, more * shares[role] - counts[role]) for role in shares) > whole - 1e-6


def test_predicted_rate_counts_workers_on_one_gpu_as_sequential() -> None:
    shares = {"encoder": 0.2, "denoiser": 0.6, "decoder": 0.2}
    one = [PlacedWorker(role, "cuda:0", ()) for role in shares]
    assert predict_rate(one, shares, WorkerPlan(None, {}), HostResources(16)) == pytest.approx(1.0)
    two = [
        PlacedWorker("denoiser", "cuda:1", ()),
        *(PlacedWorker(role, "cuda:0", ()) for role in ("encoder", "decoder")),
    ]
    assert predict_rate(two, shares, WorkerPlan(None, {}), HostResources(16)) == pytest.approx(1 / 0.6, abs=0.01)
    assert CONTEXT > 0


@pytest.mark.parametrize("slow", NEEDS)
def test_worker_with_little_work_does_not_halve_the_rate_of_its_gpu(slow: str) -> None:
    """Given four GPUs, when a third denoiser makes encoder and decoder share one, then the slower has most of it."""
    shares = {role: 0.98 if role == slow else 0.01 for role in NEEDS}
    gpus = Device(CPU, 1 << 45), *(Device(f"cuda:{number}", 16 * GIB) for number in range(4))
    rates = []
    for count in (1, 2, 3):
        wanted = WorkerPlan({"encoder": 1, "denoiser": count, "decoder": 1}, {}, first=FIRST)
        rates.append(predict_rate(place_workers(NEEDS, wanted, gpus), shares, wanted, HostResources(16)))
    expected = (1, 2, 3) if slow == "denoiser" else (1, 1, 1)
    assert rates == pytest.approx([count / 0.98 for count in expected], rel=0.02)


TWO = {
    role: tuple(replace(part, models=(name,)) for name in ("one", "two") for part in parts)
    for role, parts in NEEDS.items()
}
"""Two models of 22 GiB that share nothing."""


def of_two(*gpus: int, host: int = 1 << 45, limit: int = 0, loaded: MaxLoadedModels = "all") -> LayoutSearch:
    devices = (Device(CPU, host), *(Device(f"cuda:{number}", free) for number, free in enumerate(gpus)))
    wanted = WorkerPlan(None, {}, ComputeOptions(), auto=True, first=FIRST, max_loaded_models=loaded)
    return search_layouts([CARD, replace(CARD, name="two")], TWO, wanted, devices, HostResources(4, limit))


def test_models_that_fit_only_one_at_a_time_use_model_swapping() -> None:
    assert of_two(80 * GIB, 80 * GIB).chosen.workers == "all=2"
    found = of_two(24 * GIB, 24 * GIB)
    assert found.chosen.text == "all=2 --max-loaded-models 1"
    assert found.reason == (
        "layout all=2 --max-loaded-models 1: each worker loads one model at a time, since not all fit at the same time"
    )
    workers = place_workers(
        TWO, found.chosen.apply_to(WorkerPlan(None, {}, ComputeOptions(), auto=True)), (Device(CPU, 1 << 45), *GPUS)
    )
    assert [(worker.role, worker.device) for worker in workers] == [("all", "cuda:0"), ("all", "cuda:1")]
    assert {sum(part.bytes for part in worker.parts) for worker in workers} == {WHOLE}
    assert of_two(host=WHOLE + 2 * PROCESS).chosen.text == "all=1 --max-loaded-models 1"
    assert of_two(limit=WHOLE + PROCESS).chosen.text == "all=1 --max-loaded-models 1"
    assert of_two(limit=24 * GIB + PROCESS).chosen.workers == "encoder=1,denoiser=4,decoder=1"


def test_max_loaded_models_1_is_applied_when_requested() -> None:
    found = of_two(80 * GIB, loaded="1")
    assert [layout.text for layout in found.layouts] == ["all=1 --max-loaded-models 1"]
    assert found.reason == "layout all=1 --max-loaded-models 1: each worker loads one model at a time"
    assert "the models do not fit" in of_two(8 * GIB, loaded="1").chosen.refusal


def test_models_that_do_not_fit_alone_are_rejected() -> None:
    found = of_two(8 * GIB)
    assert found.chosen.workers == "split"
    assert "the models do not fit" in found.chosen.refusal
