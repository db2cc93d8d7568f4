"""What is asked of devices by torch's own names. None is there: stand-ins answer as torch does for each kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unfuse.core.errors import ConfigError
from unfuse.parallel import devices, group

MODULES = {
    "cuda": SimpleNamespace(
        mem_get_info=lambda name: (3 << 30, 4 << 30),
        memory_reserved=lambda name: 1 << 30,
        get_device_name=lambda name: f"GPU {torch.device(name).index}",
        set_device=lambda name: None,
    ),
    "mps": SimpleNamespace(recommended_max_memory=lambda: 9 << 30, driver_allocated_memory=lambda: 2 << 30),
}
MODULES["xpu"] = MODULES["cuda"]


def stand_in(kind: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch say that so many devices of a kind are there."""
    found = torch.device(kind) if kind else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch, "get_device_module", lambda device: MODULES[torch.device(device).type])


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_accelerators_of_any_kind_are_found_through_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(kind, 2, monkeypatch)
    assert devices.accelerators() == [f"{kind}:0", f"{kind}:1"]
    free, every, held, name = (
        (7 << 30, 9 << 30, 2 << 30, "mps") if kind == "mps" else (3 << 30, 4 << 30, 1 << 30, "GPU 1")
    )
    assert devices.memory(f"{kind}:1") == (free, every)
    assert (devices.reserved_bytes(f"{kind}:1"), devices.name_of(f"{kind}:1")) == (held, name)


def test_cuda_build_without_gpus_reports_no_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in("cuda", 0, monkeypatch)
    assert devices.accelerators() == []


@pytest.mark.parametrize("name", ["xpu:0", "mps", "cuda:63", "gpu"])
def test_missing_device_raises_error_listing_available_devices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.is_present("cpu") == "cpu"
    stand_in("xpu", 2, monkeypatch)
    with pytest.raises(ConfigError, match=rf"--device {name}: torch .* has only cpu, xpu:0, xpu:1: use one of these"):
        devices.is_present(name)


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "gloo"), ("cuda:1", "cpu:gloo,cuda:nccl"), ("xpu:1", "cpu:gloo,xpu:xccl")]
)
def test_communication_backend_depends_on_the_device_kind(
    device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in("cuda", 2, monkeypatch)
    begun: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        group.dist, "init_process_group", lambda backend, **about: begun.append((backend, about["device_id"]))
    )
    group.Group(0, 2, "/nowhere/met", device, 1.0)
    assert begun == [(backend, None if device == "cpu" else torch.device(device))]


def test_device_without_communication_backend_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="--device mps:0: torch has no communication backend for ranks"):
        group.Group(0, 2, "/nowhere/met", "mps:0", 1.0)


def test_described_device_that_fails_has_no_memory_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in("cuda", 2, monkeypatch)

    def memory(name: str) -> tuple[int, int]:
        if name == "cuda:0":
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nFor debugging, see")
        return 3 << 30, 4 << 30

    monkeypatch.setattr(torch, "empty", lambda *shape, device: None)
    monkeypatch.setattr(devices, "memory", memory)
    assert devices.describe_devices() == {
        "gpus": [
            {"name": "cuda:0", "memory": 0, "free": 0, "kind": "cuda"},
            {"name": "GPU 1", "memory": 4 << 30, "free": 3 << 30, "kind": "cuda"},
        ],
        "problem": "cuda:0: CUDA error: all CUDA-capable devices are busy or unavailable",
    }


def test_build_for_gpus_without_one_gives_the_reason_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in("cuda", 0, monkeypatch)
    described = devices.describe_devices()
    assert described["gpus"] == []
    assert described["problem"].startswith("cuda: Torch not compiled with CUDA enabled")
    stand_in("", 0, monkeypatch)
    assert devices.describe_devices() == {"problem": "it is built without support for GPUs"}


def test_integrated_gpu_has_the_available_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver counts the page cache as used."""
    integrated = SimpleNamespace(
        mem_get_info=lambda name: (1, 1 << 60), get_device_properties=lambda name: SimpleNamespace(is_integrated=1)
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: integrated)
    free, total = devices.memory("cuda:0")
    assert (free > 1 << 20, total) == (True, 1 << 60)
