"""The memory limits of this process: the machine's and those of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

#: By controller in /proc/self/cgroup ("" is version 2): limit, usage, and the reclaimable line of memory.stat.
CGROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated before the kernel swaps or kills.

    The machine and the control groups of this process limit them.
    """
    meminfo = _table(root / "proc/meminfo")
    return max(0, min(int(meminfo["MemAvailable:"]) * 1024, *_group_room(root)))


def _group_room(root: Path) -> Iterator[int]:
    """Yield the free bytes of each control group of this process and its parents."""
    yield 1 << 62  # no limit: `min` needs two numbers, even without control groups
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in {"", "memory"} & set(controllers.split(",")):
            mount = root / "sys/fs/cgroup" / controller
            group = PurePosixPath(path).relative_to("/")
            for folder in (group, *group.parents):
                yield from _room_of(mount / folder, *CGROUP_FILES[controller])


def _room_of(folder: Path, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    """Yield the free bytes of one control group, if it has a limit."""
    if not (folder / limit).is_file() or (limit_text := (folder / limit).read_text().strip()) == "max":
        return
    used_bytes = int((folder / usage).read_text())
    # The kernel reclaims unused pages of files before it refuses memory.
    yield int(limit_text) - used_bytes + int(_table(folder / "memory.stat").get(reclaimable, "0"))


def _table(path: Path) -> dict[str, str]:
    """Return the second word of each line by the first."""
    return {line.split()[0]: line.split()[1] for line in path.read_text().splitlines() if len(line.split()) > 1}
