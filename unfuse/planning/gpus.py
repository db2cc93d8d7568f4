"""The GPUs of this machine, read without importing torch.

nvidia-smi is asked first, because it answers in less than a second. Where its answer cannot be used, torch is asked in
a process of its own, which takes seconds. Builds of torch without GPU support are asked nothing.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from unfuse.core.compute_device import BFLOAT16_CAPABILITY

ASK_GPUS = (
    "nvidia-smi",
    "--query-gpu=index,uuid,name,memory.total,memory.free,mig.mode.current,compute_cap",
    "--format=csv,noheader,nounits",
)
"""The command that lists NVIDIA GPUs."""

DRIVER_ANSWER_S = 10.0  # timeout of that command, in seconds: without persistence mode, eight GPUs take several

BUILDS = ("+xpu", "+rocm")
"""Marks in the version of torch builds for GPUs that nvidia-smi does not list."""

ASK_TORCH = (sys.executable, "-m", "unfuse.parallel.devices")
"""The command that asks torch."""

TORCH_ANSWER_S = 60.0  # timeout of that command, in seconds: it imports torch, from a disk that may be slow

VISIBLE = "CUDA_VISIBLE_DEVICES"  # users choose a process's GPUs with it, by index or the beginning of the UUID

HIDDEN = {"", "-1", "NoDevFiles"}
"""Values of that variable by which users and Slurm hide all GPUs."""

CAPABILITY = re.compile(r"\d{1,3}\.\d{1,3}")

DRIVER_FILES = tuple(map(Path, ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/nvmap", "/dev/dxg")))
"""Files of a loaded NVIDIA driver: in general, on a Jetson, and in WSL."""


class Gpu(msgspec.Struct, frozen=True):
    """One GPU."""

    #: Name of the model, as the driver reports it.
    name: str
    #: Bytes of GPU memory. 0: torch cannot use this GPU.
    memory: int
    #: Free bytes of GPU memory.
    free: int
    #: torch's device type, such as "cuda".
    kind: str = "cuda"
    #: Compute capability of an NVIDIA GPU, such as "7.5"; "" for others.
    compute_capability: str = ""
    #: Whether it has no memory of its own, and uses that of the host.
    is_integrated: bool = False

    @property
    def has_bfloat16(self) -> bool:
        """Whether the GPU computes in bfloat16. NVIDIA GPUs before BFLOAT16_CAPABILITY only emulate it, slowly."""
        major, _, minor = self.compute_capability.partition(".")
        return not major or (int(major), int(minor)) >= BFLOAT16_CAPABILITY


class GpuSearch(msgspec.Struct, frozen=True):
    """The GPUs that torch can use, and the reason if there are fewer than expected."""

    #: The GPUs, in the order of their device numbers in this process.
    gpus: tuple[Gpu, ...] = ()
    #: A sentence on GPUs that cannot be used; "" if there is nothing to say.
    problem: str = ""


class _Unusable(Exception):
    """The answer of nvidia-smi cannot be used, for the reason in the message."""


def version_of(library: str) -> str | None:
    """Return the installed version of a library; None if it is not installed."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def search_gpus() -> GpuSearch:
    """Return the GPUs that torch can use in this process, and why there are none."""
    build = version_of("torch")
    has_driver = any(file.exists() for file in DRIVER_FILES)
    if build is None or build.endswith("+cpu"):
        advice = f"torch {build} has no GPU support: install a build of torch for this GPU to use it"
        return GpuSearch(problem=advice if build and has_driver else "")
    if any(mark in build for mark in BUILDS):
        return _ask_torch(build)

    if os.environ.get(VISIBLE, "all").strip() in HIDDEN:
        return GpuSearch()
    if not has_driver and shutil.which(ASK_GPUS[0]) is None:
        return GpuSearch(problem=f"torch {build} can use no GPU, because no NVIDIA driver is loaded here")
    try:
        return GpuSearch(_ask_driver())
    except _Unusable as reason:
        search = _ask_torch(build)
        return search if search.gpus else GpuSearch(problem=f"{search.problem}; {reason}")


def _ask_driver() -> tuple[Gpu, ...]:
    """Return the visible GPUs that nvidia-smi lists. Raises _Unusable."""
    try:
        code, output, errors = _run(ASK_GPUS, DRIVER_ANSWER_S)
    except (OSError, TimeoutError) as error:
        raise _Unusable(f"nvidia-smi cannot be used: {error}") from error
    if code:
        raise _Unusable(f"nvidia-smi failed with exit code {code}: {_line(output or errors) or 'no message'}")

    rows = [[field.strip() for field in row] for row in csv.reader(output.splitlines(), skipinitialspace=True) if row]
    if not rows or any(len(row) != ASK_GPUS[1].count(",") + 1 for row in rows):
        raise _Unusable(f"nvidia-smi answered {_line(output) or 'nothing'!r}")
    return tuple(_read_gpu(row) for row in _visible_rows(rows))


def _read_gpu(row: Sequence[str]) -> Gpu:
    """Return the GPU of a row. Raises _Unusable."""
    _, _, name, total, free, mig_mode, capability = row
    if mig_mode == "Enabled":
        raise _Unusable(f"{name} is divided by MIG, and nvidia-smi lists only whole GPUs")
    if not (total.isdecimal() and free.isdecimal()):  # an integrated GPU uses host memory and has "[N/A]"
        raise _Unusable(f"nvidia-smi reports {total!r} as the memory of {name}")
    if not CAPABILITY.fullmatch(capability):
        raise _Unusable(f"nvidia-smi reports {capability!r} as the compute capability of {name}")
    return Gpu(name, int(total) << 20, int(free) << 20, compute_capability=capability)


def _visible_rows(rows: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Return the rows of GPUs that this process can see, in CUDA's order.

    Raises _Unusable. nvidia-smi ignores the variable, but CUDA numbers the GPUs in its order. An unknown name ends the
    list, and a
    repeated one makes it empty.
    """
    if VISIBLE not in os.environ:
        return [*rows]
    visible = list[Sequence[str]]()
    for name in map(str.strip, os.environ[VISIBLE].split(",")):
        if name.startswith("MIG"):
            raise _Unusable(f"{VISIBLE} names {name}, and nvidia-smi lists only whole GPUs")
        matching = [row for row in rows if row[0] == name or (name.startswith("GPU-") and row[1].startswith(name))]
        if len(matching) != 1:
            break
        visible += matching
    if not visible or len({row[0] for row in visible}) < len(visible):
        raise _Unusable(f"{VISIBLE}={os.environ[VISIBLE]} must name GPUs of this machine, each once")
    return visible


def _ask_torch(build: str) -> GpuSearch:
    """Return the GPUs that torch lists in another process."""
    failure = f"torch {build} could not be asked for its GPUs"
    try:
        code, output, errors = _run(ASK_TORCH, TORCH_ANSWER_S)
    except (OSError, TimeoutError) as error:
        return GpuSearch(problem=f"{failure}: {error}")
    if code:
        return GpuSearch(problem=f"{failure}: {_line(errors, -1) or f'exit code {code}'}")
    try:
        search = msgspec.json.decode(_line(output, -1), type=GpuSearch)
    except msgspec.MsgspecError as error:
        return GpuSearch(problem=f"{failure}: {error}")
    if search.gpus and not search.problem:
        return search
    return GpuSearch(search.gpus, f"torch {build} cannot use {'every' if search.gpus else 'any'} GPU: {search.problem}")


def _run(command: Sequence[str], timeout_s: float) -> tuple[int, str, str]:
    """Run a command; return its exit code, output and errors.

    Raises TimeoutError and OSError.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()
        with suppress(subprocess.TimeoutExpired):  # a process that waits for a broken driver cannot be killed
            process.wait(1)
        raise TimeoutError(f"no answer within {timeout_s:g} s") from None
    return process.returncode, output, errors


def _line(text: str, index: int = 0) -> str:
    """Return the line at `index` that is not blank; "" without any."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[index] if lines else ""
