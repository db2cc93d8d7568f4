"""The CPUs, memory, GPUs and libraries of this machine, read without importing torch."""

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
"""The command that lists NVIDIA GPUs."""

GPU_ANSWER_S = 10.0  # timeout of that command, in seconds

BUILDS = ("+xpu", "+rocm")
"""Marks in the version of torch builds for GPUs that nvidia-smi does not list."""

ASK_TORCH = (sys.executable, "-m", "unfuse.parallel.devices")
"""The command that lists the GPUs of those builds. It is a separate process, since importing torch takes seconds."""

CONTROL_GROUP = Path("/sys/fs/cgroup")
"""The folder with the limits of this process's control group."""

DEVICE_NAME = re.compile(r"cpu|(cuda|xpu|mps):\d{1,4}")

VISIBLE = "CUDA_VISIBLE_DEVICES"  # users choose a process's GPUs with it, by index or the beginning of the UUID


class Gpu(msgspec.Struct, frozen=True):
    """One GPU."""

    #: Name of the model, as the driver reports it.
    name: str
    #: Bytes of GPU memory.
    memory: int
    #: Free bytes of GPU memory.
    free: int
    #: torch's device type, such as "cuda".
    kind: str = "cuda"


class Machine(msgspec.Struct, frozen=True):
    """What this process may use of the machine, and the installed software."""

    #: Operating system.
    system: str
    #: Version of Python.
    python: str
    #: Number of processors that this process may use.
    cpus: float
    #: Bytes of host memory.
    memory: int
    #: Bytes of host memory that are available.
    available: int
    #: The GPUs, in the order of their device numbers in this process.
    gpus: tuple[Gpu, ...]
    #: Version of each library; None: it is not installed.
    libraries: dict[str, str | None]
    #: Whether each port of the loopback address is free.
    ports: dict[int, bool]


def inspect_machine(ports: tuple[int, ...], group: Path = CONTROL_GROUP) -> Machine:
    """Return the resources and software of this machine, and which of these ports are free.

    `group` is the folder with the limits of this process's control group.
    """
    return Machine(
        system=platform.platform(),
        python=platform.python_version(),
        cpus=usable_cpus(group),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        available=available_memory(),
        gpus=find_gpus(),
        libraries={name: _version(name) for name in LIBRARIES},
        ports={port: is_free(port) for port in ports},
    )


def usable_devices(caps: Mapping[str, int] = MappingProxyType({}), elsewhere: bool = False) -> tuple[Device, ...]:
    """Return the devices that workers may use on this machine.

    There is no GPU if torch is built without GPU support. `caps` limits the bytes of devices, by name. Raises
    ConfigError for a name that this machine does not have. If workers run `elsewhere`, `caps` adds devices and replaces
    sizes instead.
    """
    gpus = () if (_version("torch") or "").endswith("+cpu") else find_gpus()
    free = {CPU: available_memory(), **{f"{gpu.kind}:{n}": gpu.free for n, gpu in enumerate(gpus)}}
    if elsewhere:
        free |= caps
    if unknown := sorted(caps.keys() - free):
        raise UsageError(f"--device-memory {unknown[0]}: no such device; available are {', '.join(free)}")
    return tuple(Device(name, min(size, caps.get(name, size))) for name, size in free.items())


def devices_to_size(caps: Mapping[str, int]) -> tuple[tuple[Device, ...], bool]:
    """Return the devices to plan for, and whether they are this machine's.

    If this machine lacks a device in `caps`, or has less memory on one, `caps` describes another machine: then exactly
    these devices are returned, with the memory of this host unless `caps` names it.

    Raises ConfigError for an invalid name.
    """
    for name in caps:
        if not DEVICE_NAME.fullmatch(name):
            raise UsageError(f"--device-memory {name}: not a device name: use cpu, cuda:0, cuda:1, xpu:0 and so on")
    devices = usable_devices()
    free = {device.name: device.free for device in devices}
    if all(size <= free.get(name, -1) for name, size in caps.items()):
        return usable_devices(caps), True
    return tuple(Device(name, size) for name, size in ({CPU: free[CPU]} | dict(caps)).items()), False


def usable_cpus(group: Path) -> float:
    """Return the number of processors this process may use.

    The CPU affinity and the control group's quota limit it.
    """
    affinity_cpus = float(len(os.sched_getaffinity(0)))
    file = group / "cpu.max"
    quota, period = file.read_text().split() if file.is_file() else ("max", "1")
    return affinity_cpus if quota == "max" else min(affinity_cpus, int(quota) / int(period))


def find_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that nvidia-smi lists, or torch for other builds; none without either."""
    if any(kind in (_version("torch") or "") for kind in BUILDS):
        listing = subprocess.run(ASK_TORCH, capture_output=True, text=True, check=False).stdout
        lines = (line.split(",", 3) for line in listing.splitlines())
        return tuple(Gpu(name, int(total), int(free), kind) for kind, free, total, name in lines)

    if shutil.which(ASK_GPUS[0]) is None:
        return ()
    completed = subprocess.run(ASK_GPUS, capture_output=True, text=True, timeout=GPU_ANSWER_S, check=False)
    if completed.returncode:
        return ()
    rows = list(csv.reader(completed.stdout.splitlines(), skipinitialspace=True))
    # nvidia-smi ignores the variable, but CUDA numbers the visible GPUs in its order
    visible = os.environ.get(VISIBLE, ",".join(index for index, *_ in rows)).split(",")
    visible_rows = (row for name in visible for row in rows if name and (row[0] == name or row[1].startswith(name)))
    return tuple(Gpu(name, int(total) << 20, int(free) << 20) for _, _, name, total, free in visible_rows)


def is_free(port: int) -> bool:
    """Return whether a server could listen on this port of the loopback address."""
    with socket.socket() as probe:
        # without it, old connections of an earlier server would make the port look used
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _version(library: str) -> str | None:
    """Return the installed version of a library; None if it is not installed."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None
