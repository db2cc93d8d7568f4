"""What this machine has, read without loading anything heavy."""

from __future__ import annotations

import csv
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType

import msgspec

from unfuse.arena.limits import available_memory
from unfuse.core.errors import UsageError
from unfuse.planning.placement import CPU, Device

LIBRARIES = ("torch", "diffusers", "transformers", "safetensors", "numpy", "msgspec", "pyzmq", "fastapi")
ASK_GPUS = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total,memory.free", "--format=csv,noheader,nounits")
BUILDS = ("+xpu", "+rocm")
ASK_TORCH = (sys.executable, "-m", "unfuse.parallel.devices")
GPU_ANSWER_S = 10.0
CONTROL_GROUP = Path("/sys/fs/cgroup")
"""The folder with the limits of this process's control group."""
DEVICE_NAME = re.compile(r"cpu|(cuda|xpu|mps):\d{1,4}")

VISIBLE = "CUDA_VISIBLE_DEVICES"  # with it users choose a process's GPUs, by index or the beginning of the UUID


class Gpu(msgspec.Struct, frozen=True):
    """One GPU; memory in bytes. Its kind is torch's name for devices like it."""

    name: str
    memory: int
    free: int
    kind: str = "cuda"


class Machine(msgspec.Struct, frozen=True):
    """Processors and memory in bytes that this process may use, GPUs in the order it numbers them, software."""

    system: str
    python: str
    cpus: float
    memory: int
    available: int
    gpus: tuple[Gpu, ...]
    libraries: dict[str, str | None]
    ports: dict[int, bool]


def look(ports: tuple[int, ...], group: Path = CONTROL_GROUP) -> Machine:
    """This machine, and which of these loopback ports are free."""
    return Machine(
        system=platform.platform(),
        python=platform.python_version(),
        cpus=cpus(group),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        available=available_memory(),
        gpus=gpus(),
        libraries={name: _version(name) for name in LIBRARIES},
        ports={port: is_free(port) for port in ports},
    )


def devices(caps: Mapping[str, int] = MappingProxyType({}), elsewhere: bool = False) -> tuple[Device, ...]:
    """The devices that workers may use on this machine: no GPU if torch is built without one.

    Of a device in `caps` at most so many bytes. Raises ConfigError for one that is not there. Workers `elsewhere` have
    what `caps` says, and what is here of others.
    """
    usable = () if (_version("torch") or "").endswith("+cpu") else gpus()
    free = {CPU: available_memory(), **{f"{gpu.kind}:{n}": gpu.free for n, gpu in enumerate(usable)}}
    if elsewhere:
        free |= caps
    if unknown := sorted(caps.keys() - free):
        raise UsageError(f"--device-memory {unknown[0]}: there is no such device; there are {', '.join(free)}")
    return tuple(Device(name, min(size, caps.get(name, size))) for name, size in free.items())


def devices_to_size(caps: Mapping[str, int]) -> tuple[tuple[Device, ...], bool]:
    """The devices to plan for where somebody asks what a machine needs, and whether they are this machine's.

    If a device in `caps` is not here, or has less, they are those of another machine: exactly these, and the memory of
    this host unless that is named. Raises ConfigError for what is no name of a device.
    """
    for name in caps:
        if not DEVICE_NAME.fullmatch(name):
            raise UsageError(f"--device-memory {name}: devices are called cpu, cuda:0, cuda:1, xpu:0 and so on")
    here = devices()
    free = {device.name: device.free for device in here}
    if all(size <= free.get(name, -1) for name, size in caps.items()):
        return devices(caps), True
    return tuple(Device(name, size) for name, size in ({CPU: free[CPU]} | dict(caps)).items()), False


def cpus(group: Path) -> float:
    """How many processors this process may use, by its affinity and the control group's quota."""
    allowed = float(len(os.sched_getaffinity(0)))
    file = group / "cpu.max"
    quota, period = file.read_text().split() if file.is_file() else ("max", "1")
    return allowed if quota == "max" else min(allowed, int(quota) / int(period))


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that the driver's tool reports, or torch itself where it is built for others; none without either."""
    if any(kind in (_version("torch") or "") for kind in BUILDS):
        told = subprocess.run(ASK_TORCH, capture_output=True, text=True, check=False).stdout
        lines = (line.split(",", 3) for line in told.splitlines())
        return tuple(Gpu(name, int(all_of_it), int(free), kind) for kind, free, all_of_it, name in lines)
    if shutil.which(ASK_GPUS[0]) is None:
        return ()
    answer = subprocess.run(ASK_GPUS, capture_output=True, text=True, timeout=GPU_ANSWER_S, check=False)
    if answer.returncode:
        return ()
    rows = list(csv.reader(answer.stdout.splitlines(), skipinitialspace=True))
    visible = os.environ.get(VISIBLE, ",".join(index for index, *_ in rows)).split(",")
    seen = (row for name in visible for row in rows if name and (row[0] == name or row[1].startswith(name)))
    return tuple(Gpu(name, int(total) << 20, int(free) << 20) for _, _, name, total, free in seen)


def is_free(port: int) -> bool:
    """Whether a server could listen on that port of the loopback address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None
