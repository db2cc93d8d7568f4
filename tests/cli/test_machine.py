"""What is said of a machine, against files like those of a kernel."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from unfuse.cli import machine


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc of a machine with 8 GiB, half of it available."""
    (tmp_path / "meminfo").write_text("MemTotal:        8388608 kB\nMemAvailable:    4194304 kB\nHugePages_Total: 0\n")
    return tmp_path


@pytest.fixture
def group(tmp_path: Path) -> Path:
    """A control group of half a processor and 1 GiB, of which a quarter is used."""
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text(f"{1 << 30}\n")
    (tmp_path / "memory.current").write_text(f"{1 << 28}\n")
    return tmp_path


def test_a_machine_without_limits_has_all_its_memory(proc: Path, tmp_path: Path) -> None:
    found = machine.look((), tmp_path / "no group", proc)

    assert (found.memory, found.available, found.limit) == (8 << 30, 4 << 30, None)
    assert found.cpus == len(os.sched_getaffinity(0))
    assert found.libraries["msgspec"]


def test_the_control_group_limits_memory_and_processors(proc: Path, group: Path) -> None:
    found = machine.look((), group, proc)

    assert (found.limit, found.available, found.cpus) == (1 << 30, 3 << 28, 0.5)


def test_an_unlimited_control_group_is_no_limit(proc: Path, group: Path) -> None:
    (group / "cpu.max").write_text("max 100000\n")
    (group / "memory.max").write_text("max\n")

    found = machine.look((), group, proc)

    assert found.limit is None
    assert found.cpus >= 1


def test_a_port_that_someone_listens_on_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert machine.is_free(listener.getsockname()[1]) is False


def test_gpus_are_what_the_drivers_tool_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA A100, 81920, 80000'\necho 'NVIDIA A100, 81920, 1000'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    first, second = machine.gpus()

    assert (first.name, first.memory, first.free) == ("NVIDIA A100", 80 << 30, 80000 << 20)
    assert second.free == 1000 << 20


@pytest.mark.parametrize("script", ["exit 9", None])
def test_no_driver_means_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None) -> None:
    if script:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert machine.gpus() == ()
