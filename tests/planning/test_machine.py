"""What is said of a machine, against files like those of a kernel."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from unfuse.core.errors import ConfigError
from unfuse.planning import machine
from unfuse.planning.machine import Gpu


@pytest.fixture
def group(tmp_path: Path) -> Path:
    """A control group of half a processor."""
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    return tmp_path


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of two GPUs, the second nearly full."""
    tool = tmp_path / "nvidia-smi"
    rows = ["0, GPU-aa11, NVIDIA A100, 81920, 80000", "1, GPU-bb22, NVIDIA L4, 24576, 1000"]
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv(machine.VISIBLE, raising=False)
    return tool


def test_machine_report_has_memory_cpus_and_library_versions(tmp_path: Path) -> None:
    found = machine.inspect_machine((), tmp_path / "no group")

    assert 0 < found.available <= found.memory
    assert found.cpus == len(os.sched_getaffinity(0))
    assert found.libraries["msgspec"]


def test_cgroup_quota_limits_cpus_unless_max(group: Path) -> None:
    assert machine.usable_cpus(group) == 0.5
    (group / "cpu.max").write_text("max 100000\n")
    assert machine.usable_cpus(group) >= 1


def test_port_with_a_listener_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert machine.is_free(listener.getsockname()[1]) is False


@pytest.mark.slow
def test_gpus_are_read_from_nvidia_smi(driver: Path) -> None:
    first, second = machine.find_gpus()

    assert (first.name, first.memory, first.free) == ("NVIDIA A100", 80 << 30, 80000 << 20)
    assert second.free == 1000 << 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("visible", "names"),
    [("1", ["NVIDIA L4"]), ("1,0", ["NVIDIA L4", "NVIDIA A100"]), ("GPU-bb", ["NVIDIA L4"]), ("", []), ("-1", [])],
)
def test_gpu_order_follows_cuda_visible_devices(
    driver: Path, monkeypatch: pytest.MonkeyPatch, visible: str, names: list[str]
) -> None:
    monkeypatch.setenv(machine.VISIBLE, visible)
    assert [gpu.name for gpu in machine.find_gpus()] == names


@pytest.mark.slow
@pytest.mark.parametrize(("torch", "count"), [("2.13.0", 2), ("2.13.0+cu130", 2), ("2.13.0+cpu", 0)])
def test_cpu_build_of_torch_has_no_usable_gpus(
    driver: Path, monkeypatch: pytest.MonkeyPatch, torch: str, count: int
) -> None:
    monkeypatch.setattr(machine, "version", lambda library: torch)
    host, *gpus = machine.usable_devices()
    assert (host.name, host.free > 0) == ("cpu", True)
    assert [gpu.name for gpu in gpus] == [f"cuda:{number}" for number in range(count)]


@pytest.mark.slow
def test_named_device_sizes_limit_local_or_describe_another_machine(
    driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first GPU here has 80,000 MiB free, the second 1,000."""
    monkeypatch.setattr(machine, "version", lambda library: "2.13.0")

    def sized(**caps: int) -> tuple[dict[str, int], bool]:
        found, is_here = machine.devices_to_size({name.replace("_", ":"): size << 20 for name, size in caps.items()})
        return {device.name: device.free >> 20 for device in found if device.name != "cpu" or "cpu" in caps}, is_here

    assert sized() == ({"cuda:0": 80000, "cuda:1": 1000}, True)
    assert sized(cuda_0=500) == ({"cuda:0": 500, "cuda:1": 1000}, True), "of this machine, as `serve` takes it"
    assert sized(cuda_1=24576) == ({"cuda:1": 24576}, False), "another machine has what is named, and no more"
    assert sized(cuda_0=500, xpu_0=16384) == ({"cuda:0": 500, "xpu:0": 16384}, False)
    assert sized(cpu=1 << 40, cuda_3=24576) == ({"cpu": 1 << 40, "cuda:3": 24576}, False)
    for wrong in ("gpu:0", "cuda", "cuda:x", "cuda:0+cuda:1", ""):
        with pytest.raises(ConfigError, match="not a device name: use cpu, cuda:0"):
            machine.devices_to_size({wrong: 1})


@pytest.mark.slow
@pytest.mark.parametrize("build", ["2.13.0+xpu", "2.13.0+rocm6.4"])
def test_xpu_and_rocm_devices_are_queried_from_torch(monkeypatch: pytest.MonkeyPatch, build: str) -> None:
    told = "import sys; sys.stdout.write('xpu,5,7,Data Center GPU, Max\\nxpu,6,7,Arc\\n')"
    monkeypatch.setattr(machine, "version", lambda library: build)
    monkeypatch.setattr(machine, "ASK_TORCH", (sys.executable, "-c", told))
    assert machine.find_gpus() == (Gpu("Data Center GPU, Max", 7, 5, "xpu"), Gpu("Arc", 7, 6, "xpu"))
    assert [(one.name, one.free) for one in machine.usable_devices({"xpu:1": 2})][1:] == [("xpu:0", 5), ("xpu:1", 2)]
    monkeypatch.setattr(machine, "ASK_TORCH", (sys.executable, "-c", "import nothing_like_that"))
    assert machine.find_gpus() == ()


@pytest.mark.slow
@pytest.mark.parametrize("script", ["exit 9", None])
def test_missing_or_failing_nvidia_smi_means_no_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None
) -> None:
    if script:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert machine.find_gpus() == ()
