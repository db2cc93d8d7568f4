"""What `unfuse worker` makes of its settings: where it is near, and who may pull from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.cli.conftest import Run
from unfuse.core.errors import ConfigError
from unfuse.core.messages import Registered, StorageLocations
from unfuse.planning.placement import Device
from unfuse.service.plan import ServingPlan, environment_of
from unfuse.service.report import layout_lines
from unfuse.service.settings import load
from unfuse.service.worker import plan_here
from unfuse.transfer.base import TransferEngine
from unfuse.wire.keys import create_keys
from unfuse.wire.run_folder import machine_id
from unfuse.worker.registration import WorkerOptions


@pytest.fixture
def composed(unfuse: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The worker of a command line, with a data folder that holds no keys: its options and engines."""
    monkeypatch.setenv("UNFUSE_DATA_DIR", str(tmp_path / "data"))
    made: list[tuple[WorkerOptions, Mapping[str, TransferEngine]]] = []

    async def work(options: WorkerOptions, engines: Mapping[str, TransferEngine], *descriptors: int | None) -> None:
        del descriptors
        made.append((options, engines))

    def call(*arguments: str) -> tuple[WorkerOptions, Mapping[str, TransferEngine]]:
        monkeypatch.setattr("unfuse.service.worker.run_worker", work)
        code, _, err = unfuse("worker", "--scheduler", "unix:/run/nobody", *arguments)
        assert code == 0, err
        for engine in made[-1][1].values():
            engine.close()
        return made.pop()

    return call


def test_node_id_depends_on_run_dir_not_on_hostname(composed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path(os.environ["UNFUSE_RUN_DIR"])
    one, _ = composed()
    again, _ = composed("--role", "encoder")
    monkeypatch.setenv("UNFUSE_RUN_DIR", f"{here}/other")
    elsewhere, _ = composed()

    assert (one.node, one.run_dir) == (again.node, again.run_dir) == (machine_id(here), str(here))
    assert elsewhere.node != one.node != os.uname().nodename
    assert elsewhere.run_dir == f"{here}/other"
    assert composed("--node", "rack 3")[0].node == "rack 3"


def test_transfer_engines_require_keys_or_insecure_listen(composed: Any, tmp_path: Path) -> None:
    options, engines = composed()
    assert engines == {} and not options.transfer.authentic

    options, engines = composed("--insecure-listen")
    assert set(engines) == {"tcp", "zmq"} and options.transfer.insecure and not options.transfer.secret

    create_keys(tmp_path / "keys")
    options, engines = composed("--keys", str(tmp_path / "keys"))
    assert set(engines) == {"tcp", "zmq"} and options.transfer.authentic


@pytest.mark.parametrize("flag", ["--role=denoiser", "--component=vae", "--model=unfuse/shapes"])
def test_workers_auto_rejects_flags_of_a_single_worker(unfuse: Run, flag: str) -> None:
    code, _, err = unfuse("worker", "--workers", "auto", "--scheduler", "unix:/run/nobody", flag)
    assert (code, err) == (
        2,
        f"unfuse: --workers starts workers for all models of the scheduler: leave out {flag.split('=')[0]}\n",
    )


def test_place_flag_requires_workers_flag(unfuse: Run) -> None:
    code, _, err = unfuse("worker", "--role", "denoiser", "--scheduler", "unix:/run/nobody", "--place", "denoiser=cpu")
    assert (code, err) == (
        2,
        "unfuse: --place needs --workers: select the device of a single worker by --device\n",
    )


def test_health_flag_is_for_a_single_worker_only(unfuse: Run, composed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several each would need a port of its own; and what `serve` starts does not take over that of `serve`."""
    code, _, err = unfuse("worker", "--workers", "auto", "--scheduler", "unix:/run/nobody", "--health", "127.0.0.1:1")
    assert code == 2 and err.startswith("unfuse: --health is for a single worker")
    assert composed("--health", "127.0.0.1:1")[0].health == "127.0.0.1:1"
    monkeypatch.setenv("UNFUSE_WORKER__HEALTH", "127.0.0.1:2")
    settings = load().settings
    assert settings.worker.health and environment_of(settings)["UNFUSE_WORKER__HEALTH"] == ""


def offered(results: str, mark: str = "", model: str = "unfuse/shapes") -> Registered:
    return Registered(((model, model, "float32"),), StorageLocations(results, results_store_id=mark), 15.0, 1.0)


def plan_for(welcome: Registered, workers: str) -> ServingPlan:
    loaded = load({"worker.workers": workers, "compute.device": "cpu", "arena.bytes": 1 << 20})
    return plan_here(loaded.settings, welcome)


def planned(welcome: Registered, workers: str) -> list[str]:
    """The roles of the workers that are started for that offer."""
    return [worker.role for worker in plan_for(welcome, workers).workers]


def test_auto_layout_omits_stages_that_need_unreachable_results() -> None:
    seen, unseen = offered("s3://bucket/results"), offered("disk:/nowhere", "a mark")
    assert {*planned(seen, "auto")} == {"all"}
    assert {*planned(unseen, "auto")} == {"encoder+denoiser"}
    assert planned(unseen, "all=1") == ["encoder+denoiser"]
    assert planned(unseen, "split") == ["encoder", "denoiser"]
    with pytest.raises(ConfigError, match="no stage has the role decoder: roles are encoder, denoiser"):
        planned(unseen, "decoder=1")


def test_layout_line_names_the_stages_that_run_without_results() -> None:
    plan = plan_for(offered("disk:/nowhere", "a mark"), "auto")
    layout, workers = layout_lines(plan)
    assert f"{len(plan.workers)} × encoder+denoiser on cpu" in workers
    assert layout == (
        f"layout encoder+denoiser={len(plan.workers)}: each worker runs the stages of encoder and denoiser, since the "
        "models fit in one worker, which gives the best utilization; other stages need the result folder, which this "
        "machine cannot access"
    )


def test_planning_without_runnable_stages_raises_config_error() -> None:
    nothing = replace(offered("s3://bucket/results"), models=())
    with pytest.raises(ConfigError, match="the scheduler serves no model yet"):
        planned(nothing, "auto")
    with pytest.raises(ConfigError, match="every stage of these models needs the result folder"):
        planned(offered("disk:/nowhere", "a mark", "smollm2"), "auto")


@pytest.mark.parametrize(("cores", "threads"), [(1, 4), (2, 4), (40, 4), (64, 6), (128, 12), (1024, 12)])
def test_transfer_threads_default_to_the_usable_cpu_cores(
    composed: Any, monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    """By default; cores are those that the process may use, a quota counted."""
    monkeypatch.setattr("unfuse.service.worker.usable_cpus", lambda group: float(cores))
    assert composed()[0].transfer.threads == threads
    monkeypatch.setenv("UNFUSE_TRANSFER__THREADS", "3")
    assert composed()[0].transfer.threads == 3


def test_mooncake_protocol_and_devices_come_from_settings(composed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert composed()[0].transfer.mooncake_protocol == "tcp"
    monkeypatch.setenv("UNFUSE_TRANSFER__MOONCAKE_PROTOCOL", "rdma")
    monkeypatch.setenv("UNFUSE_TRANSFER__MOONCAKE_DEVICES", "mlx5_0,mlx5_1")
    transfer = composed()[0].transfer
    assert (transfer.mooncake_protocol, transfer.mooncake_devices) == ("rdma", ("mlx5_0", "mlx5_1"))


def test_unknown_mooncake_protocol_is_a_usage_error(unfuse: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNFUSE_TRANSFER__MOONCAKE_PROTOCOL", "ib")
    code, _, said = unfuse("worker", "--scheduler", "unix:/run/nobody")
    assert code == 2 and "UNFUSE_TRANSFER__MOONCAKE_PROTOCOL" in said


def test_parallel_auto_worker_counts_usable_gpus(composed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = (Device("cpu", 1), Device("cuda:0", 1), Device("cuda:1", 1))
    monkeypatch.setattr("unfuse.service.worker.usable_devices", lambda: found)
    assert composed("--parallel", "auto")[0].gpus == 2
    found = (Device("cpu", 1), *(Device(f"cuda:{n}", 1, model=model) for n, model in enumerate(("L4", "L4", "T4"))))
    assert composed("--parallel", "auto")[0].gpus == 2, "ranks on the first two are equal"
    assert composed()[0].gpus == 0
