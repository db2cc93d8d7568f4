"""Devices by torch's own names: cpu, cuda (ROCm's too), xpu, mps. In what kinds differ is asked for here alone."""

from __future__ import annotations

import sys

import torch

from unfuse.core.errors import ConfigError

EXCHANGES = {"cuda": "nccl", "xpu": "xccl"}
"""What ranks exchange tensors with, by kinds of devices; copies from pinned memory to these go on beside computing."""


def found() -> list[str]:
    """The devices besides the processor."""
    kind = torch.accelerator.current_accelerator()
    return [f"{kind.type}:{number}" for number in range(torch.accelerator.device_count())] if kind else []


def present(name: str) -> str:
    """That name of a device. Raises ConfigError where torch has none of it here."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"--device {name}: torch {torch.__version__} has {', '.join(['cpu', *found()])} here: name one of these, "
            f"or install a torch that is built for that kind of device ({str(error).splitlines()[0]})"
        ) from error
    return name


def memory(device: str) -> tuple[int, int]:
    """Bytes of a device that are free, and all: where it has none of its own, those of the host that it may take."""
    of_kind = torch.get_device_module(torch.device(device))
    if hasattr(of_kind, "mem_get_info"):
        return int((both := of_kind.mem_get_info(device))[0]), int(both[1])
    return (every := int(of_kind.recommended_max_memory())) - held(device), every


def held(device: str) -> int:
    """Bytes of a device that torch has taken for this process."""
    of_kind = torch.get_device_module(torch.device(device))
    has_own = hasattr(of_kind, "memory_reserved")
    return int(of_kind.memory_reserved(device) if has_own else of_kind.driver_allocated_memory())


def name_of(device: str) -> str:
    """What the maker calls a device; its kind where torch does not say."""
    of_kind = torch.get_device_module(torch.device(device))
    return str(of_kind.get_device_name(device) if hasattr(of_kind, "get_device_name") else device.partition(":")[0])


if __name__ == "__main__":
    for one in found():
        sys.stdout.write(",".join((one.partition(":")[0], *map(str, memory(one)), name_of(one))) + "\n")
