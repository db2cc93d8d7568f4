"""What settings make of a service."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import fields
from structlog.testing import capture_logs

from tools.server import environment, unfuse
from unfuse.core.codec import decode, encode
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.errors import ConfigError, UsageError
from unfuse.core.messages import StorageLocations
from unfuse.edge.keys import ApiKey
from unfuse.planning.gpus import GpuSearch
from unfuse.service.groups import SHARED_ARENA, Transfer
from unfuse.service.loading import LoadingProgress
from unfuse.service.logs import Logs
from unfuse.service.options import ServeOptions, plan_service, serve_options
from unfuse.service.plan import environment_of, worker_specs
from unfuse.service.service import Service, private_pools, public_names
from unfuse.service.settings import load


def test_private_service_ignores_api_key_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given the key that client verbs send, or a key file that is not here, then `generate` draws here all the same."""
    environment = {"UNFUSE_API_KEY": "short", "UNFUSE_SERVE__API_KEYS": "/nowhere/keys", "UNFUSE_DATA_DIR": "/d"}
    loaded = load({}, None, environment)
    composed: list[ServeOptions] = []
    monkeypatch.setattr("unfuse.service.service.plan_service", composed.append)
    with pytest.raises(AttributeError, match="workers"), private_pools(loaded, Logs(), LoadingProgress(())):
        pass
    assert not composed[0].keys
    with pytest.raises(UsageError, match="there is no key file|at least 16"):
        serve_options(loaded)


def test_settings_map_to_serve_options() -> None:
    environment = {"UNFUSE_DATA_DIR": "/d", "UNFUSE_API_KEY": "k" * 16}
    environment |= {
        "UNFUSE_SERVE__WORKERS": "encoder=1,denoiser=3,decoder=1",
        "UNFUSE_SERVE__PLACE": "decoder=cpu",
        "UNFUSE_RUN_DIR": "/r",
    }
    environment |= {
        "UNFUSE_SERVE__DURABLE": "disk:DATA_DIR/copies",
        "UNFUSE_SERVE__DURABLE_STAGES": "denoise,text_encode",
    }
    environment |= {
        "UNFUSE_STORE__ORPHAN_S": "77",
        "UNFUSE_TRANSFER__ENGINE": "zmq,tcp",
        "UNFUSE_TRANSFER__TRUSTED_NETWORK": "true",
    }

    composed = serve_options(load({"serve.max_active": 7}, None, environment))

    kinds = ("denoise", "text_encode")
    assert composed.storage == StorageLocations("disk:/d", durable="disk:/d/copies", durable_kinds=kinds)
    assert decode(encode(composed.storage), StorageLocations) == composed.storage, "workers are told"
    assert load({}, None, environment_of(composed.settings)).settings.transfer == Transfer(
        engine=("zmq", "tcp"), trusted_network=True
    )
    assert load({}, None, environment_of(composed.settings)).settings.run_dir == "/r"
    assert load({}, None, environment_of(composed.settings)).settings.store.orphan_s == 77.0
    assert composed.keys.find("k" * 16) == ApiKey("default", admin=True)
    assert composed.workers.counts == {"encoder": 1, "denoiser": 3, "decoder": 1}
    assert composed.workers.place == {"decoder": ("cpu",)}
    assert composed.workers.arena == SHARED_ARENA
    assert composed.queue == "sqlite:/d/queue.db"
    assert serve_options(load({"serve.workers": "none"}, None, environment)).workers.counts == {}


@pytest.mark.parametrize(
    ("settings", "encoder", "denoiser"),
    [
        ({}, "0", "0"),
        ({"serve.slots": ("denoiser=1",)}, "0", "1"),
        ({"worker.slots": 3}, "3", "3"),
        ({"serve.slots": ("encoder=7",), "worker.slots": 3}, "7", "3"),
    ],
)
def test_worker_slots_are_set_per_role_or_for_all_roles(settings: dict[str, Any], encoder: str, denoiser: str) -> None:
    """0 leaves it to what their stages say."""
    chosen = serve_options(load({"serve.workers": "split", **settings}, None, {}))
    slots = {spec.role: spec.flags["slots"] for spec in worker_specs(plan_service(chosen), chosen.settings, {}, {})}
    assert (slots["encoder"], slots["denoiser"]) == (encoder, denoiser)


@pytest.mark.parametrize("text", ["nonsense=1", "encoder=1,sculptor=2", "perhaps"])
def test_unknown_worker_role_raises_config_error(text: str) -> None:
    chosen = serve_options(load({"serve.workers": text}, None, {}))
    with pytest.raises(ConfigError, match=r"no stage has the role \w+: roles are encoder, denoiser, decoder, and all"):
        plan_service(chosen)


@pytest.mark.parametrize(("given", "slots"), [((), "0"), (("denoiser=3", "decoder=2"), "2")])
def test_worker_of_several_roles_has_the_smallest_number_of_slots(given: tuple[str, ...], slots: str) -> None:
    chosen = serve_options(load({"serve.workers": "all=1", "serve.slots": given}, None, {}))
    assert [spec.flags["slots"] for spec in worker_specs(plan_service(chosen), chosen.settings, {}, {})] == [slots]


@pytest.mark.parametrize("name", [field.name for field in fields(ComputeOptions) if field.default is False])
def test_options_without_a_value_reach_workers_as_variables(name: str) -> None:
    """A flag like --exact-only takes no value, so a worker would refuse one."""
    chosen = serve_options(load({"serve.workers": "all=1", f"compute.{name}": True}, None, {}))
    (spec,) = worker_specs(plan_service(chosen), chosen.settings, {}, {})
    assert not {"True", "False"} & {*spec.arguments}
    assert getattr(load({}, None, spec.environment).settings.compute, name) is True


def test_worker_is_started_with_max_loaded_models() -> None:
    chosen = serve_options(load({"serve.workers": "all=1", "worker.max_loaded_models": "1"}, None, {}))
    (spec,) = worker_specs(plan_service(chosen), chosen.settings, {}, {})
    assert (spec.role, spec.flags["max-loaded-models"]) == ("all", "1")


@pytest.mark.parametrize(
    "other",
    [
        {"serve.workers": "split"},
        {"serve.workers": "all=1,denoiser=1"},
        {"serve.place": "denoiser=cpu"},
        {"compute.parallel": "denoiser=cfg:2"},
        {"serve.workers": "all=1", "compute.parallel": "denoiser=cfg:2"},
    ],
)
def test_max_loaded_models_needs_workers_of_all_stages(other: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="--max-loaded-models 1 needs workers of all stages: write --workers all=1"):
        serve_options(load({"worker.max_loaded_models": "1", **other}, None, {}))


@pytest.mark.parametrize(
    ("text", "workers"),
    [
        ("split", ["encoder", "denoiser", "decoder"]),
        ("none", []),
        ("all=2", ["all", "all"]),
        ("encoder+decoder=1,denoiser=2", ["encoder+decoder", "denoiser", "denoiser"]),
    ],
)
def test_workers_option_determines_the_started_roles(text: str, workers: list[str]) -> None:
    chosen = serve_options(load({"serve.workers": text}, None, {}))
    assert [worker.role for worker in plan_service(chosen).workers] == workers


@pytest.mark.parametrize(
    ("models", "names", "public"),
    [
        (["a"], [], {}),
        (["a"], ["x", "y"], {"x": "a", "y": "a"}),
        (["a", "b"], ["x", "y"], {"x": "a", "y": "b"}),
        (["a", "b"], [], {}),
    ],
)
def test_served_model_names_map_to_models(models: list[str], names: list[str], public: dict[str, str]) -> None:
    assert (
        public_names(load({"serve.models": models, "serve.served_model_name": names}, None, {}).settings.serve)
        == public
    )


def test_memory_store_for_several_processes_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="use shared_memory"):
        serve_options(load({"serve.store": "memory"}, None, {}))


def test_served_names_that_do_not_match_models_raise_config_error() -> None:
    given = {"serve.models": ["a", "b"], "serve.served_model_name": ["x"]}
    with pytest.raises(ConfigError, match="has 1 values for 2 models"):
        public_names(load(given, None, {}).settings.serve)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({}, "add --batching batched"),
        ({"compute.parallel": "denoiser=ring:2"}, "cannot be used with --parallel denoiser"),
    ],
)
def test_default_feature_cache_with_exact_or_ring_raises_config_error(more: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        serve_options(load({"serve.feature_cache": 0.1, **more}, None, {}))


@pytest.mark.parametrize(
    ("spread", "says"),
    [
        ("denoiser=ulysses:5", "ulysses:5 does not divide 4: use ulysses:4"),
        ("decoder=ulysses:2", "ulysses is not supported for this role"),
        ("painter=ring:2", "no stage has that role"),
        ("denoiser=ring", "needs a number of ranks"),
    ],
)
def test_invalid_parallel_option_raises_config_error(spread: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_service(serve_options(load({"serve.models": ["unfuse/shapes"], "compute.parallel": spread}, None, {})))


def opened_elsewhere(address: str) -> Any:
    """A launcher that is named in the settings. It starts nothing, and keeps what it was to start."""
    del address
    return lambda specs, hear: SimpleNamespace(specs=specs, start=lambda: None)


def test_remote_workers_get_the_scheduler_address_but_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from all addresses; where theirs are they say themselves, and their run folders are their own."""
    monkeypatch.setattr("unfuse.wire.address.OUTSIDE", "127.0.0.1")
    environment = {"UNFUSE_DATA_DIR": str(tmp_path), "UNFUSE_RUN_DIR": "/r", "UNFUSE_SERVE__WORKERS": "all=2"}
    environment |= {
        "UNFUSE_SERVE__LAUNCHER": f"{__name__}:opened_elsewhere",
        "UNFUSE_SERVE__LISTEN": "tcp://0.0.0.0:7",
        "UNFUSE_SERVE__DEVICE_MEMORY": "cpu=900GiB,cuda:0=80GiB",
    }
    chosen = serve_options(load({}, None, environment))
    service = Service(chosen, planned := plan_service(chosen), Logs())
    service.addresses = ["unix:/r/7.sock", "tcp://0.0.0.0:7"]

    one, _ = service._launch(planned, 0).specs  # type: ignore[attr-defined]

    assert {device.name: device.free for device in planned.devices} == {"cpu": 900 << 30, "cuda:0": 80 << 30}
    assert (one.flags["scheduler"], one.flags["keys"]) == ("tcp://127.0.0.1:7", str(tmp_path / "keys"))
    assert "listen" not in one.flags
    assert one.arguments[-2:] == ["--model", "unfuse/shapes"], "whatever is added later"
    assert "UNFUSE_RUN_DIR" not in one.environment
    assert "UNFUSE_STORE__ORPHAN_S" in one.environment
    secret = (tmp_path / "keys" / "worker.key").read_text().split()[1]
    assert secret not in repr(one)


def test_remote_launcher_needs_a_tcp_listen_address(tmp_path: Path) -> None:
    environment = {"UNFUSE_DATA_DIR": str(tmp_path), "UNFUSE_SERVE__LAUNCHER": "ray"}
    with pytest.raises(ConfigError, match="--launcher ray needs --listen tcp://HOST:PORT"):
        serve_options(load({}, None, environment))


@pytest.mark.parametrize(
    ("flag", "said", "entry"),
    [
        ("serve.encode", ("text_encode=bf16", "text_encod=int4"), "--encode text_encod=int4: there is no stage kind"),
        ("serve.encode", ("=bf16",), "--encode =bf16: there is no stage kind ''"),
        ("serve.encode", ("text_encode.0=bf16",), "there is no stage kind 'text_encode.0'"),
        ("serve.durable_stages", ("denoise", "nonsense"), "--durable-stages nonsense: there is no stage kind 'nonsens"),
    ],
)
def test_unknown_stage_kind_raises_config_error_listing_known_kinds(
    flag: str, said: tuple[str, ...], entry: str, tmp_path: Path
) -> None:
    loaded = load({"serve.models": ("unfuse/shapes",), flag: said}, None, {"UNFUSE_DATA_DIR": str(tmp_path)})
    with pytest.raises(ConfigError, match=re.escape(entry)) as refused:
        plan_service(serve_options(loaded))
    assert "decode, denoise, image_encode, prefill, redraw_encode, text_encode, vae_decode" in str(refused.value)


def test_stage_kinds_of_other_models_are_accepted(tmp_path: Path) -> None:
    """A model that is added later may have them."""
    said = {"serve.encode": ("prefill=int4",), "serve.durable_stages": ("vision_encode", "text_encode")}
    plan_service(
        serve_options(load({"serve.models": ("unfuse/shapes",)} | said, None, {"UNFUSE_DATA_DIR": str(tmp_path)}))
    )


@pytest.mark.slow
def test_serve_exits_with_an_error_for_an_unknown_stage_kind(tmp_path: Path) -> None:
    command = unfuse("serve", "unfuse/shapes", "--encode", "nonsense=int4", "--port", "0")
    ran = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 2 and "there is no stage kind 'nonsense'" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_log_of_a_start_says_why_no_gpu_can_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    search = GpuSearch(problem="torch 2.13.0+cu130 cannot use any GPU: cuda: the driver is too old")
    monkeypatch.setattr("unfuse.planning.machine.search_gpus", lambda: search)
    options = serve_options(load({"serve.models": ("unfuse/shapes",), "data_dir": str(tmp_path)}, None, {}))
    with capture_logs() as records:
        plan_service(options)
    assert [record["reason"] for record in records if record["event"] == "GPUs cannot be used"] == [search.problem]
