"""What this machine has, read without loading anything heavy."""

from __future__ import annotations

import csv
import os
import platform
import shutil
import socket
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

LIBRARIES = ("torch", "diffusers", "transformers", "safetensors", "numpy", "msgspec", "pyzmq", "fastapi")
ASK_GPUS = ("nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits")
GPU_ANSWER_S = 10.0


class Gpu(msgspec.Struct, frozen=True):
    """One GPU; memory in bytes."""

    name: str
    memory: int
    free: int


class Machine(msgspec.Struct, frozen=True):
    """Processors this process may use, memory in bytes (`limit` is the control group's, None for none), software."""

    system: str
    python: str
    cpus: float
    memory: int
    available: int
    limit: int | None
    gpus: tuple[Gpu, ...]
    libraries: dict[str, str | None]
    ports: dict[int, bool]


def look(ports: tuple[int, ...], group: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> Machine:
    """This machine, and which of these loopback ports are free."""
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    memory = {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines}
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    available = memory["MemAvailable"]
    return Machine(
        system=platform.platform(),
        python=platform.python_version(),
        cpus=cpus(group),
        memory=memory["MemTotal"],
        available=available if limit is None else min(available, max(0, limit - (used or 0))),
        limit=limit,
        gpus=gpus(),
        libraries={name: _version(name) for name in LIBRARIES},
        ports={port: is_free(port) for port in ports},
    )


def cpus(group: Path) -> float:
    """Processors this process may use: those it may run on, or fewer by the control group's quota."""
    allowed = float(len(os.sched_getaffinity(0)))
    file = group / "cpu.max"
    quota, period = file.read_text().split() if file.is_file() else ("max", "1")
    return allowed if quota == "max" else min(allowed, int(quota) / int(period))


def gpus() -> tuple[Gpu, ...]:
    """GPUs by their driver's own tool; none where there is no such tool or no device behind it."""
    if shutil.which(ASK_GPUS[0]) is None:
        return ()
    answer = subprocess.run(ASK_GPUS, capture_output=True, text=True, timeout=GPU_ANSWER_S, check=False)
    if answer.returncode:
        return ()
    rows = csv.reader(answer.stdout.splitlines(), skipinitialspace=True)
    return tuple(Gpu(name, int(total) << 20, int(free) << 20) for name, total, free in rows)


def is_free(port: int) -> bool:
    """Whether a server could listen on that port of the loopback address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _number(file: Path) -> int | None:
    text = file.read_text().strip() if file.is_file() else "max"
    return None if text == "max" else int(text)


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None
