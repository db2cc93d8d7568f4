"""How much more memory this process may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CGROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By controller in /proc/self/cgroup ("" is version 2): limit, usage, and the line of memory.stat to reclaim."""


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be allocated before the kernel swaps or kills, by the machine and its control groups."""
    meminfo = _table(root / "proc/meminfo")
    return max(0, min(int(meminfo["MemAvailable:"]) * 1024, *_group_room(root)))


def readable_bytes(count: int) -> str:
    """A number of bytes for people to read: 1.5 GiB."""
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, 4)
    return f"{count / 1024**power:.1f} {'KMGT'[power - 1]}iB"


def _group_room(root: Path) -> Iterator[int]:
    yield 1 << 62
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in {"", "memory"} & set(controllers.split(",")):
            mount = root / "sys/fs/cgroup" / controller
            group = PurePosixPath(path).relative_to("/")
            for folder in (group, *group.parents):
                yield from _room_of(mount / folder, *CGROUP_FILES[controller])


def _room_of(folder: Path, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    if not (folder / limit).is_file() or (most := (folder / limit).read_text().strip()) == "max":
        return
    used = int((folder / usage).read_text())
    yield int(most) - used + int(_table(folder / "memory.stat").get(reclaimable, "0"))


def _table(path: Path) -> dict[str, str]:
    return {line.split()[0]: line.split()[1] for line in path.read_text().splitlines() if len(line.split()) > 1}
