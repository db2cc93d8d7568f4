"""Which GPUs are found, by scripts in the place of nvidia-smi, and by commands in the place of torch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from unfuse.planning import gpus, machine
from unfuse.planning.gpus import Gpu, GpuSearch

pytestmark = pytest.mark.slow

GIB = 1 << 30

A100 = "0, GPU-aa11, NVIDIA A100, 81920, 80000, Disabled, 8.0"
L4 = "1, GPU-bb22, NVIDIA L4, 24576, 1000, [N/A], 8.9"
SLICE = '{"gpus":[{"name":"NVIDIA A100 MIG 1g.10gb","memory":7,"free":5,"kind":"cuda"}],"problem":""}'

#: What nvidia-smi answers about GPUs that it cannot describe, and what is said of that.
ODD = {
    "echo '0, GPU-cc33, NVIDIA GB10, [N/A], [N/A], [N/A], 12.1'": (
        "nvidia-smi reports '[N/A]' as the memory of NVIDIA GB10"
    ),
    "echo '0, GPU-aa11, NVIDIA A100, 81920, 80000, Enabled, 8.0'": "NVIDIA A100 is divided by MIG",
    "echo '0, GPU-dd44, Tesla T4, 15360, 15000, [N/A], [N/A]'": "reports '[N/A]' as the compute capability of Tesla T4",
    'echo "NVIDIA-SMI has failed because it couldn\'t communicate with the NVIDIA driver."; exit 9': (
        "nvidia-smi failed with exit code 9: NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA"
    ),
    "echo 'Field \"mig.mode.current\" is not a valid field to query.'; exit 2": "failed with exit code 2: Field",
    "exec sleep 60": "nvidia-smi cannot be used: no answer within 0.1 s",
    "echo No devices were found": "nvidia-smi answered 'No devices were found'",
    "exit 0": "nvidia-smi answered 'nothing'",
    "printf '\\377\\376, \\n'": "nvidia-smi answered",
}


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CUDA build of torch, and the nvidia-smi of a machine of two GPUs, the second nearly full."""
    script = tmp_path / "nvidia-smi"
    answer(script, f"echo '{A100}'; echo '{L4}'")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    monkeypatch.setattr(gpus, "version", lambda library: "2.13.0+cu130")
    monkeypatch.setattr(gpus, "ASK_TORCH", ("/nowhere/python",))
    return script


def answer(script: Path, commands: str) -> None:
    """Have nvidia-smi run these shell commands."""
    script.write_text(f"#!/bin/sh\n{commands}\n")
    script.chmod(0o755)


def have_torch_print(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the process that asks torch print this."""
    monkeypatch.setattr(gpus, "ASK_TORCH", (sys.executable, "-c", f"print({text!r})"))


def test_gpus_are_read_from_nvidia_smi(tool: Path) -> None:
    first, second = gpus.search_gpus().gpus

    assert (first.name, first.memory, first.free) == ("NVIDIA A100", 80 << 30, 80000 << 20)
    assert second.free == 1000 << 20
    assert [device.model for device in machine.usable_devices()] == ["", "NVIDIA A100", "NVIDIA L4"]


def test_gpus_before_compute_capability_8_have_no_bfloat16(tool: Path) -> None:
    answer(tool, f"echo '0, GPU-dd44, Tesla T4, 15360, 15000, [N/A], 7.5'; echo '{L4}'")
    assert [(gpu.compute_capability, gpu.has_bfloat16) for gpu in gpus.search_gpus().gpus] == [
        ("7.5", False),
        ("8.9", True),
    ]
    assert [device.has_bfloat16 for device in machine.usable_devices()] == [True, False, True]
    elsewhere = machine.usable_devices({"cuda:0": GIB}, elsewhere=True)
    assert [device.has_bfloat16 for device in elsewhere] == [True, True, True], "there, cuda:0 is another GPU"
    assert Gpu("Instinct", 7, 5).has_bfloat16


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("1", ["NVIDIA L4"]),
        ("1, 0", ["NVIDIA L4", "NVIDIA A100"]),
        ("GPU-bb", ["NVIDIA L4"]),
        ("1,7,0", ["NVIDIA L4"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_gpu_order_follows_cuda_visible_devices(
    tool: Path, monkeypatch: pytest.MonkeyPatch, visible: str, names: list[str]
) -> None:
    monkeypatch.setenv(gpus.VISIBLE, visible)
    search = gpus.search_gpus()
    assert ([gpu.name for gpu in search.gpus], search.problem) == (names, "")


@pytest.mark.parametrize("visible", ["MIG-4c5f", "MIG-GPU-aa11/1/0"])
def test_mig_instance_is_described_by_torch(tool: Path, monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv(gpus.VISIBLE, visible)
    have_torch_print(f"a line of a plugin\n{SLICE}", monkeypatch)
    assert gpus.search_gpus() == GpuSearch((Gpu("NVIDIA A100 MIG 1g.10gb", 7, 5),))


@pytest.mark.parametrize("visible", ["7", "GPU-", "0,0", "all"])
def test_visible_gpus_that_do_not_exist_are_named(tool: Path, monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv(gpus.VISIBLE, visible)
    have_torch_print('{"gpus":[],"problem":"cuda: No CUDA GPUs are available"}', monkeypatch)
    search = gpus.search_gpus()
    assert search.gpus == ()
    assert "cannot use any GPU: cuda: No CUDA GPUs are available" in search.problem
    assert search.problem.endswith(f"; CUDA_VISIBLE_DEVICES={visible} must name GPUs of this machine, each once")


@pytest.mark.parametrize("commands", ODD)
def test_odd_answer_of_nvidia_smi_lets_torch_answer(tool: Path, monkeypatch: pytest.MonkeyPatch, commands: str) -> None:
    answer(tool, commands)
    monkeypatch.setattr(gpus, "DRIVER_ANSWER_S", 0.1 if "sleep" in commands else 10)
    have_torch_print(SLICE, monkeypatch)
    assert [gpu.free for gpu in gpus.search_gpus().gpus] == [5]

    monkeypatch.setattr(gpus, "ASK_TORCH", ("/nowhere/python",))
    search = gpus.search_gpus()
    assert search.gpus == ()
    assert "torch 2.13.0+cu130 could not be asked for its GPUs: " in search.problem
    assert ODD[commands] in search.problem


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("import nothing_like_that", "could not be asked for its GPUs: ModuleNotFoundError: No module named"),
        ("print('{')", "could not be asked for its GPUs: Input data was truncated"),
        ('print(\'{"gpus":[{"memory":"[N/A]"}]}\')', "could not be asked for its GPUs: "),
        ("pass", "could not be asked for its GPUs: Input data was truncated"),
        ("import time; time.sleep(60)", "could not be asked for its GPUs: no answer within 0.2 s"),
        ('print(\'{"problem":"cuda: driver too old"}\')', "cannot use any GPU: cuda: driver too old"),
        ("import os; os.abort()", "could not be asked for its GPUs: exit code -6"),
    ],
)
@pytest.mark.parametrize("build", ["2.13.0+cu130", "2.13.0+rocm6.4"])
def test_odd_answer_of_torch_ends_in_a_sentence(
    tool: Path, monkeypatch: pytest.MonkeyPatch, program: str, problem: str, build: str
) -> None:
    answer(tool, "exit 9")
    monkeypatch.setattr(gpus, "version", lambda library: build)
    monkeypatch.setattr(gpus, "TORCH_ANSWER_S", 0.2 if "sleep" in program else 60)
    monkeypatch.setattr(gpus, "ASK_TORCH", (sys.executable, "-c", program))
    search = gpus.search_gpus()
    assert search.gpus == ()
    assert f"torch {build} {problem}" in search.problem


def test_cpu_build_of_torch_asks_nothing(tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(tool, f"touch {tmp_path}/asked")
    monkeypatch.setattr(gpus, "version", lambda library: "2.13.0+cpu")
    monkeypatch.setattr(gpus, "ASK_TORCH", ("touch", f"{tmp_path}/asked"))
    monkeypatch.setattr(gpus, "DRIVER_FILES", ())
    assert gpus.search_gpus() == GpuSearch()

    monkeypatch.setattr(gpus, "DRIVER_FILES", (tool,))
    assert gpus.search_gpus().problem.startswith("torch 2.13.0+cpu has no GPU support: install a build of torch")
    assert not (tmp_path / "asked").exists()


def test_machine_without_driver_needs_no_torch(tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(gpus, "ASK_TORCH", ("/usr/bin/touch", f"{tmp_path}/asked"))
    monkeypatch.setattr(gpus, "DRIVER_FILES", ())
    assert gpus.search_gpus().problem == "torch 2.13.0+cu130 can use no GPU, because no NVIDIA driver is loaded here"
    assert not (tmp_path / "asked").exists()


def test_container_without_nvidia_smi_asks_torch(tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(gpus, "DRIVER_FILES", (tool,))
    have_torch_print(SLICE, monkeypatch)
    assert gpus.search_gpus().gpus[0].memory == 7


@pytest.mark.parametrize("build", ["2.13.0+xpu", "2.13.0+rocm6.4"])
def test_xpu_and_rocm_devices_are_queried_from_torch(tool: Path, monkeypatch: pytest.MonkeyPatch, build: str) -> None:
    monkeypatch.setattr(gpus, "version", lambda library: build)
    two = (Gpu("Data Center GPU, Max", 7, 5, "xpu"), Gpu("Arc", 7, 6, "xpu"))
    have_torch_print(gpus.msgspec.json.encode(GpuSearch(two)).decode(), monkeypatch)
    assert gpus.search_gpus() == GpuSearch(two)
    devices = machine.usable_devices({"xpu:1": 2})[1:]
    assert [(device.name, device.free) for device in devices] == [("xpu:0", 5), ("xpu:1", 2)]


def test_integrated_gpu_is_planned_within_host_memory(tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(tool, "echo '0, GPU-cc33, NVIDIA GB10, [N/A], [N/A], [N/A], 12.1'")
    gb10 = Gpu("NVIDIA GB10", 128 * GIB, 100 * GIB, compute_capability="12.1", is_integrated=True)
    have_torch_print(gpus.msgspec.json.encode(GpuSearch((gb10,))).decode(), monkeypatch)
    host, gpu = machine.usable_devices()
    assert (host.uses_host_memory, gpu.uses_host_memory, gpu.model) == (False, True, "NVIDIA GB10")


def test_warning_names_a_gpu_that_torch_cannot_use(tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of the others stay, and nothing is placed on the one without memory."""
    answer(tool, "exit 9")
    broken = GpuSearch((Gpu("cuda:0", 0, 0), Gpu("NVIDIA L4", 7, 5)), "cuda:0: CUDA error: out of memory")
    have_torch_print(gpus.msgspec.json.encode(broken).decode(), monkeypatch)
    warnings = list[str]()
    host, *found = machine.usable_devices(warn=warnings.append)
    assert [(device.name, device.free) for device in found] == [("cuda:0", 0), ("cuda:1", 5)]
    assert warnings == ["torch 2.13.0+cu130 cannot use every GPU: cuda:0: CUDA error: out of memory"]
