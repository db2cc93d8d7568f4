"""A pretended GPU behaves as one of CUDA's, as far as the project uses it."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.pretend.faults import STICKY, Fault
from tests.pretend.gpus import PretendedGpus
from tests.pretend.running import held_by

CPU_TENSOR = torch.arange(4.0)
ELSEWHERE = "Expected all tensors to be on the same device"


@pytest.fixture
def gpus() -> Iterator[PretendedGpus]:
    with PretendedGpus() as gpus:
        yield gpus


def waits(gpus: PretendedGpus) -> Counter[str]:
    """How often the host has waited since the last time, by kind."""
    found = Counter[str]()
    for wait, count in gpus.records.waits.items():
        found[wait.kind] += count
    gpus.records.clear()
    return found


def test_torch_is_itself_again_outside_of_the_context() -> None:
    before = torch.Generator, torch.cuda.is_available, torch.nn.Module.__call__, threading.Thread.run
    with PretendedGpus():
        assert torch.cuda.is_available()
    assert (torch.Generator, torch.cuda.is_available, torch.nn.Module.__call__, threading.Thread.run) == before
    assert not torch.cuda.is_available()


MADE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "factory": lambda gpu: torch.zeros(3, device="cuda:1"),
    "like": lambda gpu: torch.zeros_like(gpu),
    "new": lambda gpu: gpu.new_ones(2),
    "view": lambda gpu: gpu.view(2, 2)[1],
    "number": lambda gpu: gpu * torch.tensor(2.0),
    "CPU index": lambda gpu: gpu[torch.tensor([0, 2])],
    "Python function": lambda gpu: torch.nn.functional.pad(gpu, (1, 1)),
    "module": lambda gpu: torch.nn.Linear(4, 2).to("cuda:1")(gpu),
    "deep copy": lambda gpu: copy.deepcopy(torch.nn.Linear(4, 2).to(gpu.device)).weight,
    "parameter": lambda gpu: torch.nn.Parameter(gpu),
    "dtype": lambda gpu: gpu.half(),
    "other": lambda gpu: CPU_TENSOR.to(gpu),
    "noise": lambda gpu: torch.randn(2, generator=torch.Generator("cuda:1").manual_seed(1), device="cuda:1"),
}


@pytest.mark.parametrize("name", MADE)
def test_results_lie_on_the_device_of_their_inputs(name: str, gpus: PretendedGpus) -> None:
    made = MADE[name](torch.arange(4.0, device="cuda:1"))
    assert (made.device, made.is_cuda, made.get_device()) == (torch.device("cuda:1"), True, 1)


REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "CPU tensor": lambda gpu: gpu + CPU_TENSOR,
    "other GPU": lambda gpu: gpu + torch.zeros(4, device="cuda:0"),
    "list": lambda gpu: torch.cat([gpu, CPU_TENSOR]),
    "weights": lambda gpu: torch.nn.Linear(4, 2)(gpu),
    "number on the host, written": lambda gpu: torch.tensor(1.0).add_(gpu.sum()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tensors_of_several_devices_are_refused(name: str, gpus: PretendedGpus) -> None:
    with pytest.raises(RuntimeError, match=ELSEWHERE):
        REFUSED[name](torch.arange(4.0, device="cuda:1"))


def test_numpy_missing_devices_and_host_generators_are_refused(gpus: PretendedGpus) -> None:
    with pytest.raises(TypeError, match="Use Tensor.cpu"):
        torch.zeros(1, device="cuda").numpy()
    with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
        torch.zeros(1, device="cuda:2")
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch.randn(1, generator=torch.Generator(), device="cuda")


WAITS: dict[str, tuple[Callable[[torch.Tensor], object], dict[str, int]]] = {
    "computing": (lambda gpu: (gpu * 2 + 1).sum(), {}),
    "item": (lambda gpu: gpu.sum().item(), {"read": 1}),
    "tolist": (lambda gpu: gpu.isfinite().tolist(), {"read": 1}),
    "truth": (lambda gpu: bool((gpu >= 0).all()), {"read": 1}),
    "to the host": (lambda gpu: gpu.cpu(), {"read": 1}),
    "to the host, not blocking": (lambda gpu: gpu.to("cpu", non_blocking=True), {}),
    "from the host": (lambda gpu: CPU_TENSOR.to("cuda:1"), {"upload": 1}),
    "from the host, not blocking": (lambda gpu: CPU_TENSOR.pin_memory().to("cuda:1", non_blocking=True), {}),
    "data": (lambda gpu: torch.tensor([1, 2], device="cuda:1"), {"upload": 1}),
    "copy_": (lambda gpu: gpu.copy_(CPU_TENSOR), {"upload": 1}),
    "nonzero": (lambda gpu: gpu.nonzero(), {"size": 1}),
    "mask": (lambda gpu: gpu[gpu > 1], {"size": 1}),
    "CPU index": (lambda gpu: gpu[torch.tensor([1])], {"index": 1}),
    "synchronize": (lambda gpu: torch.cuda.synchronize(), {"synchronize": 1}),
}


@pytest.mark.parametrize("name", WAITS)
def test_waits_of_the_host_are_counted_by_kind(name: str, gpus: PretendedGpus) -> None:
    function, expected = WAITS[name]
    gpu = torch.arange(4.0, device="cuda:1")
    waits(gpus)
    function(gpu)
    assert waits(gpus) == expected


def test_bytes_are_counted_until_nothing_refers_to_them(gpus: PretendedGpus) -> None:
    tensor = torch.zeros(256, device="cuda:1")
    view, parameter = tensor[:1], torch.nn.Parameter(torch.zeros(1))
    parameter.data = tensor
    del tensor
    assert held_by(gpus) == {"cuda:1": 1024} and torch.cuda.memory_allocated(1) == 1024
    del view, parameter
    assert held_by(gpus) == {}
    assert (torch.cuda.memory_reserved("cuda:1"), torch.cuda.max_memory_allocated("cuda:1")) == (1024, 1024)
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info("cuda:1") == (80 << 30, 80 << 30)


def test_tensors_beyond_the_capacity_are_out_of_memory() -> None:
    with PretendedGpus(capacity=4096) as gpus:
        held = torch.zeros(1000, device="cuda:0")
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            torch.zeros_like(held)
        torch.zeros(1000, device="cuda:1")
        del held
        torch.zeros(1000, device="cuda:0")
        assert gpus.memory.peak == {"cuda:0": 4000, "cuda:1": 4000}


def test_current_device_and_streams_are_those_of_their_thread(gpus: PretendedGpus) -> None:
    found: list[torch.device] = []
    torch.cuda.set_device("cuda:1")
    torch.cuda.Stream()
    with torch.cuda.device(0):
        torch.cuda.Stream()
    thread = threading.Thread(target=lambda: found.append(torch.zeros(1, device="cuda").device))
    thread.start()
    thread.join()
    assert (torch.zeros(1, device="cuda").device.index, found) == (1, [torch.device("cuda:0")])
    assert gpus.records.streams == {"cuda:0": 1, "cuda:1": 1} and gpus.records.called("set_device(cuda:1)") == 1
    stream = torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream("cuda:1") is stream
    assert torch.cuda.current_stream() == torch.cuda.default_stream() != stream


def test_broken_device_raises_its_error_in_every_later_operation(gpus: PretendedGpus) -> None:
    gpu, layer = torch.zeros(4, device="cuda:1"), torch.nn.Linear(4, 4).to("cuda:1")
    gpus.faults.arm(Fault(STICKY, "Linear", first=2))
    layer(gpu)
    for operation in (lambda: layer(gpu), lambda: gpu + 1, lambda: gpu.cpu(), torch.cuda.synchronize):
        with pytest.raises(torch.AcceleratorError, match="CUDA error: an illegal memory access"):
            operation()
    assert (CPU_TENSOR + 1).sum() == 10
    gpus.faults.arm()
    layer(gpu)


def test_memory_errors_are_raised_in_the_forwards_that_are_named(gpus: PretendedGpus) -> None:
    layer = torch.nn.Linear(4, 4).to("cuda:1")
    one, two = torch.zeros(1, 4, device="cuda:1"), torch.zeros(2, 4, device="cuda:1")
    gpus.faults.arm(Fault("cublas", "Linear", first=2, last=2, rows=2))
    layer(two)
    layer(one)
    with pytest.raises(RuntimeError, match="CUBLAS_STATUS_ALLOC_FAILED"):
        layer(two)
    layer(two)
    gpus.faults.arm(Fault("out of memory", "Linear", rows=2))
    layer(one)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            layer(two)
