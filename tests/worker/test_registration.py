"""What a worker serves of the models it is given, by its roles and components."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from tests.scheduler.model import CARD, DECODE, DENOISE, ENCODE
from unfuse.core.compute_options import ComputeOptions, parse_parallel
from unfuse.core.errors import ConfigError
from unfuse.core.messages import Registered, StorageLocations
from unfuse.core.modalities import OutputSize
from unfuse.core.plan import Pipeline, StageSelector, roles_of
from unfuse.stores.results import ID_FILE, store_id
from unfuse.worker.registration import (
    choose_ranks,
    decide_served,
    pools_of,
    require_listed_stores,
    require_result_store,
)


@pytest.mark.parametrize(
    ("role", "pools"),
    [("all", (ENCODE, DENOISE, DECODE)), ("denoiser", (DENOISE,)), ("decoder+encoder", (ENCODE, DECODE))],
)
def test_worker_serves_the_pools_of_its_roles(role: str, pools: tuple[str, ...]) -> None:
    assert pools_of([CARD, CARD], StageSelector(roles_of(role))) == pools


def test_unknown_role_error_lists_the_valid_roles() -> None:
    with pytest.raises(ConfigError, match="no stage has the role sculptor: roles are decoder, denoiser, encoder"):
        pools_of([CARD], StageSelector(roles_of("encoder+sculptor")))


def test_component_outside_the_role_error_lists_valid_components() -> None:
    with pytest.raises(
        ConfigError, match="no stage matches both --role decoder and --component: components are text_enc"
    ):
        pools_of([CARD], StageSelector(roles_of("decoder"), ("transformer",)))


def test_missing_resource_error_names_the_resources_flag() -> None:
    stages = tuple(
        replace(stage, needs={"kv": OutputSize(1)}) for stage in CARD.pipeline.stages if stage.kind == "denoise"
    )
    card = replace(CARD, pipeline=Pipeline((CARD.pipeline.stages[0], *stages)))
    assert pools_of([card], StageSelector(), {"kv": 1}) == (ENCODE, DENOISE)
    assert pools_of([card], StageSelector(roles_of("encoder"))) == (ENCODE,)
    with pytest.raises(ConfigError, match="stage denoise needs the resource kv, .*: start it with --resources kv=N"):
        pools_of([card], StageSelector())


def test_worker_without_exact_only_is_rejected_by_a_server_that_has_it() -> None:
    registered = Registered((), StorageLocations(""), 1.0, 1.0, exact_only=True)
    options: Any = SimpleNamespace(compute=ComputeOptions(), trusted_keys=None, models=())
    with pytest.raises(ConfigError, match="start this worker with --exact-only"):
        decide_served(registered, options, StageSelector())
    options.compute = ComputeOptions(exact_only=True)
    with pytest.raises(ConfigError, match="the scheduler serves no model yet"):
        decide_served(registered, options, StageSelector())


@pytest.mark.parametrize(
    ("server", "worker", "flags"),
    [
        ({}, {"batching": "batched"}, "--batching exact --noise-device cpu --vae whole$"),
        ({}, {"attention": "_native_math"}, "--vae whole --attention native$"),
        ({}, {"decode_attention": "gathered"}, "--vae whole --decode-attention in-place$"),
        ({"attention": "_native_math"}, {}, "--vae whole --attention _native_math$"),
    ],
)
def test_worker_with_other_settings_is_told_all_that_it_must_change(
    server: dict[str, Any], worker: dict[str, Any], flags: str
) -> None:
    numerics = ComputeOptions(**server).numerics
    registered = Registered((), StorageLocations(""), 1.0, 1.0, required_numerics=numerics)
    options: Any = SimpleNamespace(compute=ComputeOptions(**worker), trusted_keys=None, models=())
    with pytest.raises(ConfigError, match=flags):
        decide_served(registered, options, StageSelector())


def test_role_that_needs_an_unreachable_result_store_is_rejected(tmp_path: Path) -> None:
    url = f"disk:{tmp_path / 'results'}"
    places, stages = StorageLocations(url, results_store_id=store_id(url)), CARD.pipeline.stages
    require_result_store(stages, places)
    (tmp_path / "results" / ID_FILE).unlink()
    require_result_store([stage for stage in stages if stage.kind == "denoise"], places)
    with pytest.raises(ConfigError, match="role decoder needs .*: mount it here at the same path, .* s3://"):
        require_result_store(stages, places)
    require_result_store(stages, StorageLocations(url))


@pytest.mark.parametrize(
    "urls",
    [
        {"store": "os:system"},
        {"store": "spill:os:system+disk:/scratch"},
        {"store": "spill:shared_memory+os:system://;touch x"},
        {"store": "spill:spill:os:system"},
        {"results": "os:system://;touch x"},
        {"durable": "os:system://;touch x"},
    ],
)
def test_store_of_a_remote_scheduler_that_would_be_imported_is_rejected(urls: dict[str, str]) -> None:
    """Only the worker's own settings may name it."""
    locations = replace(StorageLocations("disk:/results"), **urls)
    with pytest.raises(ConfigError, match="which is not a part of unfuse, and a worker imports code only by its own"):
        require_listed_stores(locations, ())
    require_listed_stores(locations, urls.values())


@pytest.mark.parametrize("store", ["auto", "memory", "shared_memory", "redis://h", "spill:auto+disk:/scratch"])
def test_stores_of_unfuse_are_accepted_from_a_remote_scheduler(store: str) -> None:
    require_listed_stores(StorageLocations("s3://bucket/results", store, durable="redis://h"), ())


DENOISES = tuple(
    replace(stage, parallelism={"ulysses": 4}) for stage in CARD.pipeline.stages if stage.kind == "denoise"
)


@pytest.mark.parametrize(
    ("device", "gpus", "chosen"),
    [
        ("auto", 4, ("auto", "denoiser=ulysses:4")),
        ("auto", 1, ("auto", "")),
        ("auto", 0, ("auto", "")),
        ("auto", 3, ("auto", "denoiser=ulysses:2")),
        ("cpu", 8, ("cpu", "")),
        ("cuda:4+cuda:5+cuda:6", 8, ("cuda:4+cuda:5", "denoiser=ulysses:2")),
        ("cpu+cpu", 0, ("cpu+cpu", "denoiser=ulysses:2")),
    ],
)
def test_auto_parallelism_depends_on_the_available_devices(device: str, gpus: int, chosen: tuple[str, str]) -> None:
    """Those that are named, else all GPUs; devices beyond the ranks are left alone, and the log says so."""
    with capture_logs() as logs:
        assert choose_ranks(device, "auto", gpus, DENOISES) == chosen
    there = gpus if device == "auto" else len(device.split("+"))
    ranks = max((spread.size for spread in parse_parallel(chosen[1]).values()), default=1)
    assert {"devices": there, "ranks": ranks, "parallel": chosen[1] or "none"}.items() <= logs[0].items()
    assert [line["log_level"] for line in logs[1:]] == ["warning"] * (ranks < there)


def test_explicit_parallelism_is_not_changed() -> None:
    assert choose_ranks("auto", "denoiser=ulysses:2", 8, DENOISES) == ("auto", "denoiser=ulysses:2")
    assert choose_ranks("cuda:0", "", 8, DENOISES) == ("cuda:0", "")
    with pytest.raises(ConfigError, match="--device cuda\\+cuda:0: two ranks cannot use the same GPU"):
        choose_ranks("cuda+cuda:0", "auto", 8, DENOISES)
