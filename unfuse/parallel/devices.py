"""Accelerator devices by torch's names: cpu, cuda (also ROCm), xpu, mps.

Differences between kinds of devices are queried in this module only.
"""

from __future__ import annotations

import sys

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


def set_current(device: str | torch.device) -> None:
    """Make a device the current one of this thread, on which torch makes streams and contexts.

    Every new thread starts with the first device, and would take memory there. CPUs and kinds of devices without
    numbers have no current device.
    """
    device = torch.device(device)
    if device.type == "cpu" or device.index is None:
        return
    device_module = torch.get_device_module(device)
    if hasattr(device_module, "set_device"):
        device_module.set_device(device)


def memory(device: str) -> tuple[int, int]:
    """Return (free, total) bytes of a device's memory.

    A device without memory of its own (mps) counts the host memory that it may use.
    """
    device_module = torch.get_device_module(torch.device(device))
    if hasattr(device_module, "mem_get_info"):
        free, total = device_module.mem_get_info(device)
        return int(free), int(total)

    total = int(device_module.recommended_max_memory())
    return total - reserved_bytes(device), total


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


# Run in a process of its own, because the caller has no torch: a line of kind, free, total and name for each device.
if __name__ == "__main__":
    for device in accelerators():
        fields = device.partition(":")[0], *map(str, memory(device)), name_of(device)
        sys.stdout.write(",".join(fields) + "\n")
