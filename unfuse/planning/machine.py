"""The CPUs, memory, GPUs and libraries of this machine, read without importing torch."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from unfuse.core.errors import UsageError
from unfuse.core.host_memory import available_memory
from unfuse.planning.gpus import Gpu, search_gpus, version_of
from unfuse.planning.placement import CPU, Device

LIBRARIES = ("torch", "diffusers", "transformers", "safetensors", "numpy", "msgspec", "pyzmq", "fastapi")

CONTROL_GROUP = Path("/sys/fs/cgroup")
"""The folder with the limits of this process's control group."""

DEVICE_NAME = re.compile(r"cpu|(cuda|xpu|mps):\d{1,4}")


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
    #: A sentence on GPUs that cannot be used; "" if there is nothing to say.
    gpu_problem: str
    #: Version of each library; None: it is not installed.
    libraries: dict[str, str | None]
    #: Whether each port of the loopback address is free.
    ports: dict[int, bool]


def inspect_machine(ports: tuple[int, ...], group: Path = CONTROL_GROUP) -> Machine:
    """Return the resources and software of this machine, and which of these ports are free.

    `group` is the folder with the limits of this process's control group.
    """
    search = search_gpus()
    return Machine(
        system=platform.platform(),
        python=platform.python_version(),
        cpus=usable_cpus(group),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        available=available_memory(),
        gpus=search.gpus,
        gpu_problem=search.problem,
        libraries={name: version_of(name) for name in LIBRARIES},
        ports={port: is_free(port) for port in ports},
    )


def usable_devices(
    caps: Mapping[str, int] = MappingProxyType({}), elsewhere: bool = False, warn: Callable[[str], object] = str
) -> tuple[Device, ...]:
    """Return the devices that workers may use on this machine.

    There is no GPU if torch is built without GPU support. `caps` limits the bytes of devices, by name. Raises
    ConfigError for a name that this machine does not have. If workers run `elsewhere`, `caps` adds devices and replaces
    sizes instead. `warn` is called with a sentence on GPUs that cannot be used, if there are any.
    """
    search = search_gpus()
    if search.problem:
        warn(search.problem)
    gpus = {f"{gpu.kind}:{n}": gpu for n, gpu in enumerate(search.gpus)}
    free = {CPU: available_memory(), **{name: gpu.free for name, gpu in gpus.items()}}
    if elsewhere:  # a device of this name is another GPU there
        free |= caps
        gpus = {name: gpu for name, gpu in gpus.items() if name not in caps}
    if unknown := sorted(caps.keys() - free):
        raise UsageError(f"--device-memory {unknown[0]}: no such device; available are {', '.join(free)}")
    return tuple(_device(name, min(size, caps.get(name, size)), gpus.get(name)) for name, size in free.items())


def _device(name: str, free: int, gpu: Gpu | None) -> Device:
    """Return a device with these free bytes.

    `gpu` is None for the host, and for GPUs of other machines.
    """
    if gpu is None:
        return Device(name, free)
    return Device(name, free, gpu.has_bfloat16, gpu.name, gpu.is_integrated)


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
