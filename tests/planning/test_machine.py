"""What is said of a machine, against files like those of a kernel."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from unfuse.core.errors import ConfigError
from unfuse.planning import machine
from unfuse.planning.gpus import Gpu, GpuSearch


@pytest.fixture
def group(tmp_path: Path) -> Path:
    """A control group of half a processor."""
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    return tmp_path


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


def test_named_device_sizes_limit_local_or_describe_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first GPU here has 80,000 MiB free, the second 1,000."""
    here = GpuSearch((Gpu("NVIDIA A100", 80 << 30, 80000 << 20), Gpu("NVIDIA L4", 24 << 30, 1000 << 20)))
    monkeypatch.setattr(machine, "search_gpus", lambda: here)

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
