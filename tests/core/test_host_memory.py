"""How much memory there is, by the machine and by its control groups."""

from pathlib import Path

import pytest

from unfuse.core.host_memory import available_memory

MIB = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 1000 MiB available and no control group."""
    write(tmp_path, "proc/meminfo", f"MemTotal: 4096000 kB\nMemAvailable: {1000 * 1024} kB\nHugePages_Total: 0\n")
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    return tmp_path


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def group(root: Path, folder: str, limit: str, used: int, stat: str, names: tuple[str, str]) -> None:
    for name, text in zip((*names, "memory.stat"), (f"{limit}\n", f"{used}\n", stat), strict=True):
        write(root, f"sys/fs/cgroup/{folder}/{name}", text)


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
V2 = ("memory.max", "memory.current")


def test_available_memory_without_cgroups_is_mem_available(root: Path) -> None:
    assert available_memory(root) == 1000 * MIB


def test_available_memory_of_this_machine_is_positive() -> None:
    assert 0 < available_memory() < 1 << 50


def test_cgroup_v2_limit_applies_and_inactive_file_pages_count_as_free(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/app\n")
    group(root, "app", str(500 * MIB), 200 * MIB, f"anon 1\ninactive_file {50 * MIB}\n", V2)
    assert available_memory(root) == 350 * MIB


def test_tightest_limit_of_all_ancestor_cgroups_applies(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/pod/app\n")
    group(root, "pod/app", "max", 0, "", V2)
    group(root, "pod", str(300 * MIB), 100 * MIB, "", V2)
    assert available_memory(root) == 200 * MIB


def test_limit_of_the_root_cgroup_of_a_container_applies(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/docker/0123\n")
    group(root, ".", str(400 * MIB), 100 * MIB, "", V2)
    assert available_memory(root) == 300 * MIB


def test_cgroup_v1_limit_applies(root: Path) -> None:
    write(root, "proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/app\n0::/\n")
    group(root, "memory/app", str(600 * MIB), 200 * MIB, f"total_inactive_file {MIB}\n", V1)
    assert available_memory(root) == 401 * MIB


def test_cgroup_over_its_limit_has_no_available_memory(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/app\n")
    group(root, "app", str(100 * MIB), 150 * MIB, "", V2)
    assert available_memory(root) == 0
