"""Accelerator devices by torch's names: cpu, cuda (also ROCm), xpu, mps.

Differences between kinds of devices are queried in this module only.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

from unfuse.core.errors import ConfigError

#: The torch.distributed backend by which ranks exchange tensors, for each kind of accelerator that has one. Copies from
#: pinned memory to these devices overlap with computing.
EXCHANGES = {"cuda": "nccl", "xpu": "xccl"}


def accelerators() -> list[str]:
    """Return the names of the accelerators of this machine, without the CPU."""
    kind = torch.accelerator.current_accelerator()
    return [f"{kind.type}:{index}" for index in range(torch.accelerator.device_count())] if kind else []


def is_present(name: str) -> str:
    """Return this device name if torch can use the device here.

    Raises ConfigError otherwise; the message lists the devices that torch has here.
    """
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"--device {name}: torch {torch.__version__} has only {', '.join(['cpu', *accelerators()])}: use one of "
            f"these, or install a build of torch for that kind of device ({str(error).splitlines()[0]})"
        ) from error
    return name


def memory(device: str) -> tuple[int, int]:
    """Return (free, total) bytes of a device's memory.

    A device without memory of its own (mps, integrated GPUs) counts the host memory that it may use.
    """
    device_module = torch.get_device_module(torch.device(device))
    if hasattr(device_module, "mem_get_info"):
        free, total = device_module.mem_get_info(device)
        return (min(int(total), _available_host_memory()) if _is_integrated(device) else int(free)), int(total)

    total = int(device_module.recommended_max_memory())
    return total - reserved_bytes(device), total


def _is_integrated(device: str) -> bool:
    """Whether a device uses host memory.

    CUDA then counts the page cache as used, though the kernel frees it on demand.
    """
    device_module = torch.get_device_module(torch.device(device))
    properties = (
        device_module.get_device_properties(device) if hasattr(device_module, "get_device_properties") else None
    )
    return bool(getattr(properties, "is_integrated", False))


def _available_host_memory() -> int:
    """Return the bytes of host memory that can be allocated without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def reserved_bytes(device: str) -> int:
    """Return the bytes of a device that torch has reserved for this process."""
    device_module = torch.get_device_module(torch.device(device))
    reports_reserved = hasattr(device_module, "memory_reserved")
    return int(device_module.memory_reserved(device) if reports_reserved else device_module.driver_allocated_memory())


def name_of(device: str) -> str:
    """Return the product name of a device, or its kind if that is unknown."""
    device_module = torch.get_device_module(torch.device(device))
    if hasattr(device_module, "get_device_name"):
        return str(device_module.get_device_name(device))
    return device.partition(":")[0]


def describe_devices() -> dict[str, Any]:
    """Return this machine's accelerators, and why one cannot be used.

    It has the fields of `planning.gpus.GpuSearch`. A device that torch cannot use has no memory, so that the others are
    at their numbers.
    """
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return {"problem": "it is built without support for GPUs"}
    names = accelerators()
    gpus = list[dict[str, Any]]()
    problems = list[str]()
    for name in names or [kind.type]:
        gpu: dict[str, Any] = {"name": name, "memory": 0, "free": 0, "kind": kind.type}
        try:
            torch.empty(0, device=name)
            free, total = memory(name)
            gpu |= {"name": name_of(name), "memory": total, "free": free}
        except Exception as error:  # errors of drivers have no common base
            problems.append(f"{name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
        gpus.append(gpu)
    return {"gpus": gpus if names else [], "problem": "; ".join(problems)}


# Run in a process of its own, because the caller has no torch.
if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(describe_devices()).decode() + "\n")
