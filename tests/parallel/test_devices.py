"""What is asked of devices by torch's own names. None is there: stand-ins answer as torch does for each kind."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Thread, current_thread, get_ident
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from unfuse.core.compute_options import ComputeOptions
from unfuse.core.errors import ConfigError, DeviceUnusable
from unfuse.core.worker_status import DeviceId
from unfuse.parallel import devices, group
from unfuse.parallel.accelerator import Accelerator
from unfuse.parallel.pairs import TorchPairs
from unfuse.stages.undivided import PausedCall, UndividedStage
from unfuse.worker.compute import _device, _join_group, compute_device

MODULES = {
    "cuda": SimpleNamespace(
        mem_get_info=lambda name: (3 << 30, 4 << 30),
        memory_reserved=lambda name: 1 << 30,
        memory_allocated=lambda name: 1 << 29,
        get_device_name=lambda name: f"GPU {torch.device(name).index}",
        set_device=lambda name: None,
        current_device=lambda: 0,
        get_device_properties=lambda index: SimpleNamespace(uuid=f"0000-{index}", major=7, minor=5),
    ),
    "mps": SimpleNamespace(recommended_max_memory=lambda: 9 << 30, driver_allocated_memory=lambda: 2 << 30),
}
MODULES["xpu"] = MODULES["cuda"]


def stand_in(kind: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch say that so many devices of a kind are there."""
    found = torch.device(kind) if kind else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch, "get_device_module", lambda device: MODULES[torch.device(device).type])


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_accelerators_of_any_kind_are_found_through_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(kind, 2, monkeypatch)
    assert devices.accelerators() == [f"{kind}:0", f"{kind}:1"]
    free, every, held, name = (
        (7 << 30, 9 << 30, 2 << 30, "mps") if kind == "mps" else (3 << 30, 4 << 30, 1 << 30, "GPU 1")
    )
    assert devices.memory(f"{kind}:1") == (free, every)
    assert (devices.reserved_bytes(f"{kind}:1"), devices.name_of(f"{kind}:1")) == (held, name)


def test_cuda_build_without_gpus_reports_no_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in("cuda", 0, monkeypatch)
    assert devices.accelerators() == []


@pytest.mark.parametrize("name", ["xpu:0", "mps", "cuda:63", "gpu"])
def test_missing_device_raises_error_listing_available_devices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.is_present("cpu") == "cpu"
    stand_in("xpu", 2, monkeypatch)
    with pytest.raises(ConfigError, match=rf"--device {name}: torch .* has only cpu, xpu:0, xpu:1: use one of these"):
        devices.is_present(name)


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "gloo"), ("cuda:1", "cpu:gloo,cuda:nccl"), ("xpu:1", "cpu:gloo,xpu:xccl")]
)
def test_communication_backend_depends_on_the_device_kind(
    device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in("cuda", 2, monkeypatch)
    begun: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        group.dist, "init_process_group", lambda backend, **about: begun.append((backend, about["device_id"]))
    )
    group.Group(0, 2, "/nowhere/met", device, 1.0)
    assert begun == [(backend, None if device == "cpu" else torch.device(device))]


def test_device_without_communication_backend_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="--device mps:0: torch has no communication backend for ranks"):
        group.Group(0, 2, "/nowhere/met", "mps:0", 1.0)


def test_described_device_that_fails_has_no_memory_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in("cuda", 2, monkeypatch)

    def memory(name: str) -> tuple[int, int]:
        if name == "cuda:0":
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nFor debugging, see")
        return 3 << 30, 4 << 30

    monkeypatch.setattr(torch, "empty", lambda *shape, device: None)
    monkeypatch.setattr(devices, "memory", memory)
    assert devices.describe_devices() == {
        "gpus": [
            {"name": "cuda:0", "memory": 0, "free": 0, "kind": "cuda"},
            {
                "name": "GPU 1",
                "memory": 4 << 30,
                "free": 3 << 30,
                "kind": "cuda",
                "compute_capability": "7.5",
                "is_integrated": False,
            },
        ],
        "problem": "cuda:0: CUDA error: all CUDA-capable devices are busy or unavailable",
    }


def test_build_for_gpus_without_one_gives_the_reason_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in("cuda", 0, monkeypatch)
    described = devices.describe_devices()
    assert described["gpus"] == []
    assert described["problem"].startswith("cuda: Torch not compiled with CUDA enabled")
    stand_in("", 0, monkeypatch)
    assert devices.describe_devices() == {"problem": "it is built without support for GPUs"}


def test_integrated_gpu_has_the_available_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver counts the page cache as used."""
    integrated = SimpleNamespace(
        mem_get_info=lambda name: (1, 1 << 60),
        get_device_properties=lambda name: SimpleNamespace(is_integrated=1),
        get_device_name=lambda name: "NVIDIA GB10",
    )
    stand_in("cuda", 1, monkeypatch)
    monkeypatch.setattr(torch, "get_device_module", lambda device: integrated)
    monkeypatch.setattr(torch, "empty", lambda *shape, device: None)
    monkeypatch.setattr(devices, "available_memory", lambda: 7 << 30)  # as limited by a control group
    assert devices.memory("cuda:0") == (7 << 30, 1 << 60)
    (gpu,) = devices.describe_devices()["gpus"]
    assert (gpu["free"], gpu["is_integrated"]) == (7 << 30, True)
    assert Accelerator("cuda:0").uses_host_memory


def test_only_nvidia_gpus_are_described_with_a_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda *shape, device: None)
    for kind, hip, capability in (("cuda", None, "7.5"), ("cuda", "6.4", ""), ("xpu", None, ""), ("mps", None, "")):
        stand_in(kind, 1, monkeypatch)
        monkeypatch.setattr(torch.version, "hip", hip)
        (gpu,) = devices.describe_devices()["gpus"]
        assert gpu["compute_capability"] == capability


@pytest.fixture
def selected(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """The thread and name of each device that becomes the current one."""
    calls: list[tuple[int, str]] = []
    stand_in("cuda", 2, monkeypatch)
    monkeypatch.setattr(MODULES["cuda"], "set_device", lambda device: calls.append((get_ident(), str(device))))
    return calls


def test_set_current_selects_a_numbered_accelerator_only(selected: list[tuple[int, str]]) -> None:
    for name in ("cpu", "cuda", "mps:0", "cuda:1"):
        devices.set_current(name)
    assert selected == [(get_ident(), "cuda:1")]


def test_worker_of_one_rank_selects_its_device_before_it_loads(
    selected: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each thread that asks for the device, as those of transfer pairs do."""
    monkeypatch.setattr(devices, "is_present", lambda name: name)
    monkeypatch.setattr(devices, "check", bool)
    compute = ComputeOptions(device="cuda:1", threads=torch.get_num_threads())
    load: Any = SimpleNamespace(compute=compute, ranks=1, rank=0)
    assert _device(load, with_torch=False) == "cuda:1" and not selected
    assert _device(load, with_torch=True) == "cuda:1"
    compute_device("cuda:1").select()
    compute_device("cpu").select()
    assert selected == 2 * [(get_ident(), "cuda:1")]


def test_undivided_pipeline_selects_the_device_in_the_thread_of_its_call(selected: list[tuple[int, str]]) -> None:
    """The pipeline cannot be copied here, where no GPU is: the call ends before it computes."""

    class Pipeline:
        components: dict[str, Any] = {}

        def __call__(self) -> None: ...

        def __deepcopy__(self, memo: object) -> Any:
            raise LookupError(str(get_ident()))

    stage = UndividedStage(Pipeline(), {}, torch.device("cuda:1"), draws_there=False)
    running: Any = SimpleNamespace(params={"seed": 1})
    with pytest.raises(LookupError) as caught:
        PausedCall(lambda pause: stage._call({}, running, pause)).advance()
    assert selected == [(int(str(caught.value)), "cuda:1")]
    assert selected[0][0] != get_ident()


def test_transfer_pairs_select_the_device_in_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ends over gloo: its device is the CPU, and each call of a pair selects it.

    Threads are compared, and not their numbers, which the system gives out again.
    """
    calls: list[tuple[Thread, str]] = []
    selected_there = "unfuse.parallel.pairs.set_current"
    monkeypatch.setattr(selected_there, lambda device: calls.append((current_thread(), str(device))))
    ends = [TorchPairs(np.full(8, number, np.uint8), "cuda:1") for number in range(2)]
    port = ends[0].offer("a", "gloo", "127.0.0.1", 60.0)
    ends[1].join("a", "gloo", "127.0.0.1", 60.0, ("127.0.0.1", port))
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(ends[0].move, "a", 0, 8)
        ends[1].move("a", 0, 8)
        sending.result()
    assert ends[1]._memory.tolist() == [0] * 8
    assert {name for _, name in calls} == {"cpu"}
    assert [thread for thread, _ in calls].count(current_thread()) == 2  # joined and moved here
    assert len({thread for thread, _ in calls}) == 3  # and connected and moved in two others


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
    """Make products fail by an error on an NVIDIA GPU of compute capability 7.0."""

    def install(error: Exception) -> None:
        def fail(*_: Any, **__: Any) -> torch.Tensor:
            raise error

        stand_in("cuda", 2, monkeypatch)
        monkeypatch.setattr(torch, "full", fail)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda name: (7, 0))
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])

    return install


def test_device_that_computes_passes_its_check() -> None:
    devices.check("cpu")


def test_gpu_without_kernels_in_this_build_is_named_with_the_build(broken: Callable[[Exception], None]) -> None:
    broken(RuntimeError("CUDA error: no kernel image is available for execution on the device\nCompile with …"))
    message = (
        r"the device cuda:1 \(GPU 1, GPU-0000-1\) failed its check: torch \S+ has no kernels for compute capability 7.0"
        r", only for sm_80 sm_90: install a build of torch for this GPU, or use another device \(CUDA error: no kernel "
        r"image is available for execution on the device\)"
    )
    with pytest.raises(DeviceUnusable, match=message):
        devices.check("cuda:1")


def test_device_that_fails_its_check_is_named_with_the_error(broken: Callable[[Exception], None]) -> None:
    broken(RuntimeError("CUDA error: uncorrectable ECC error encountered"))
    with pytest.raises(DeviceUnusable, match="cuda:0 .* failed its check: CUDA error: uncorrectable ECC .*: restart"):
        devices.check("cuda:0")
    broken(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(DeviceUnusable, match="CUDA out of memory: stop other processes on this device"):
        devices.check("cuda:0")


@pytest.mark.parametrize("enter", [partial(_device, with_torch=True), _join_group], ids=["one rank", "several ranks"])
def test_no_memory_for_the_device_context_is_no_fault_of_the_device(
    enter: Callable[[Any], object], broken: Callable[[Exception], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"))
    monkeypatch.setattr(devices, "is_present", lambda name: name)
    compute = ComputeOptions(device="cuda:1", threads=torch.get_num_threads())
    load: Any = SimpleNamespace(compute=compute, ranks=2, rank=1, rendezvous="")
    with pytest.raises(ConfigError) as raised:
        enter(load)
    assert not isinstance(raised.value, DeviceUnusable)
    sentence = "out of memory while loading the device context: 3.5 GiB of cuda:1 are free; stop other programs on it"
    assert str(raised.value).startswith(sentence)


def test_device_with_a_wrong_product_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda size, fill_value, device: full(size, fill_value + 1.0))
    devices.check.cache_clear()
    with pytest.raises(DeviceUnusable, match="the device cpu failed its check: it computed a wrong product"):
        devices.check("cpu")


def test_bfloat16_is_refused_on_gpus_that_only_emulate_it(broken: Callable[[Exception], None]) -> None:
    broken(RuntimeError("not computed"))
    devices.require_dtypes("cuda:1", {"float16", "float32"})
    devices.require_dtypes("cpu", {"bfloat16"})
    message = (
        r"the device cuda:1 \(GPU 1, .*\) does not compute in bfloat16, .* is 7.0: start the server with --dtype fl"
    )
    with pytest.raises(ConfigError, match=message):
        devices.require_dtypes("cuda:1", {"bfloat16"})


def test_identity_of_a_device_is_its_index_and_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in("cuda", 2, monkeypatch)
    assert devices.identity("cpu") == DeviceId("cpu")
    assert devices.identity("cuda:1") == DeviceId("cuda:1", "GPU-0000-1")
    assert devices.identity("cuda") == DeviceId("cuda:0", "GPU-0000-0")
