"""Accelerator devices by torch's names: cpu, cuda (also ROCm), xpu, mps.

Differences between kinds of devices are queried in this module only.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from functools import cache
from typing import Any

import msgspec
import torch

from unfuse.core.compute_device import BFLOAT16_CAPABILITY
from unfuse.core.errors import ConfigError, DeviceUnusable
from unfuse.core.host_memory import available_memory
from unfuse.core.retries import first_line, is_out_of_memory
from unfuse.core.worker_status import DeviceId

#: The torch.distributed backend by which ranks exchange tensors, for each kind of accelerator that has one. Copies from
#: pinned memory to these devices overlap with computing.
EXCHANGES = {"cuda": "nccl", "xpu": "xccl"}

#: Rows and columns of the matrices of a device's check.
SIDE = 16


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
            f"these, or install a build of torch for that kind of device ({first_line(error)})"
        ) from error
    return name


def set_current(device: str | torch.device) -> None:
    """Make a device the current one of this thread.

    Streams and contexts are made on the current device. Every new thread starts with the first device, and would take
    memory there. CPUs and kinds of devices without numbers have no current device.
    """
    device = torch.device(device)
    if device.type == "cpu" or device.index is None:
        return
    device_module = torch.get_device_module(device)
    if hasattr(device_module, "set_device"):
        device_module.set_device(device)


@cache
def check(name: str) -> None:
    """Multiply two small matrices on a device and read the product back.

    Raises DeviceUnusable if that fails or gives another result; the message names the device and the build of torch. A
    device that passed in this process is not checked again.
    """
    try:
        matrix = torch.full((SIDE, SIDE), 2.0, device=name)
        product = set((matrix @ matrix).flatten().tolist())
    except RuntimeError as error:
        raise DeviceUnusable(f"{describe(name)} failed its check: {advice(name, error)}") from error
    if product != {4.0 * SIDE}:
        reason = "it computed a wrong product: restart the machine, or use another device"
        raise DeviceUnusable(f"{describe(name)} failed its check: {reason}")


def advice(name: str, error: RuntimeError) -> str:
    """Return the first line of an error of a device's check, and what to do."""
    reason = first_line(error)
    if is_out_of_memory(error):
        return f"{reason}: stop other processes on this device, or use another one"
    if "no kernel image" not in reason:
        return f"{reason}: restart the process or the machine, or use another device"
    capability = ".".join(map(str, torch.cuda.get_device_capability(name)))
    kernels = " ".join(torch.cuda.get_arch_list()) or "no GPU"
    return (
        f"torch {torch.__version__} has no kernels for compute capability {capability}, only for {kernels}: install a "
        f"build of torch for this GPU, or use another device ({reason})"
    )


def require_dtypes(name: str, dtypes: Collection[str]) -> None:
    """Raise ConfigError if a device does not compute in one of these dtypes.

    NVIDIA GPUs compute in bfloat16 since BFLOAT16_CAPABILITY. Older ones only emulate it, slowly.
    """
    if torch.device(name).type != "cuda" or torch.version.hip is not None or "bfloat16" not in dtypes:
        return
    if (capability := torch.cuda.get_device_capability(name)) < BFLOAT16_CAPABILITY:
        raise ConfigError(
            f"{describe(name)} does not compute in bfloat16, because its compute capability is "
            f"{'.'.join(map(str, capability))}: start the server with --dtype float16, or with --dtype float32 for "
            "models that need a larger range"
        )


def describe(name: str) -> str:
    """Return the index, product name and UUID of a device, where torch can read them."""
    try:
        device = identity(name)
        product = name_of(name) if not name.startswith("cpu") else ""
    except (RuntimeError, AssertionError):  # a device that failed may not answer
        return f"the device {name}"
    details = ", ".join(filter(None, [product, device.uuid]))
    return f"the device {device.index} ({details})" if details else f"the device {device.index}"


def identity(name: str) -> DeviceId:
    """Return the index and UUID of a device; without UUID if torch has none."""
    device = torch.device(name)
    if device.type in ("cpu", "mps"):
        return DeviceId(device.type)
    device_module = torch.get_device_module(device)
    index = device_module.current_device() if device.index is None else device.index
    has_properties = hasattr(device_module, "get_device_properties")
    uuid = str(getattr(device_module.get_device_properties(index), "uuid", "")) if has_properties else ""
    prefix = "GPU-" if uuid and device.type == "cuda" and torch.version.hip is None else ""  # as nvidia-smi lists it
    return DeviceId(f"{device.type}:{index}", prefix + uuid)


def memory(device: str) -> tuple[int, int]:
    """Return (free, total) bytes of a device's memory.

    A device without memory of its own (mps, integrated GPUs) counts the host memory that it may use.
    """
    device_module = torch.get_device_module(torch.device(device))
    if hasattr(device_module, "mem_get_info"):
        free, total = device_module.mem_get_info(device)
        return (min(int(total), available_memory()) if is_integrated(device) else int(free)), int(total)

    total = int(device_module.recommended_max_memory())
    return total - reserved_bytes(device), total


def is_integrated(device: str) -> bool:
    """Whether a device uses host memory.

    CUDA then counts the page cache as used, though the kernel frees it on demand.
    """
    return device.startswith("mps") or bool(getattr(_properties(device), "is_integrated", False))


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
            gpu |= {"name": name_of(name), "memory": total, "free": free, "compute_capability": _capability(name)}
            gpu |= {"is_integrated": is_integrated(name)}
        except Exception as error:  # errors of drivers have no common base
            problems.append(f"{name}: {first_line(error)}")
        gpus.append(gpu)
    return {"gpus": gpus if names else [], "problem": "; ".join(problems)}


def _capability(device: str) -> str:
    """Return the compute capability of an NVIDIA GPU, such as "7.5"; "" for other devices."""
    properties = _properties(device)
    if torch.device(device).type != "cuda" or torch.version.hip is not None or not hasattr(properties, "major"):
        return ""
    return f"{properties.major}.{properties.minor}"


def _properties(device: str) -> Any:
    """Return what torch reports of a device; None for kinds of devices without properties."""
    device_module = torch.get_device_module(torch.device(device))
    return device_module.get_device_properties(device) if hasattr(device_module, "get_device_properties") else None


def synchronize(device: str) -> None:
    """Wait until a device has computed all that this process has queued."""
    module = torch.get_device_module(torch.device(device))
    if device.startswith("mps"):
        module.synchronize()
    else:
        module.synchronize(device)


# Run in a process of its own, because the caller has no torch.
if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(describe_devices()).decode() + "\n")
