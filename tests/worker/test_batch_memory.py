"""No batch is tried that does not fit: its peak is predicted from those of smaller batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.test_step_loop import Bench, Count, Large, Shared, Tagged, found
from unfuse.core.compute_device import ComputeDevice
from unfuse.core.messages import TaskCompleted
from unfuse.stages.base import StageInput
from unfuse.worker.batch_invariance import InvarianceResults
from unfuse.worker.batch_memory import MAX_KEYS, BatchMemory
from unfuse.worker.step_loop import StepLoop


class Gpu(ComputeDevice):
    """The memory of a pretended GPU, of which `allocated` bytes are in use."""

    measures_peaks = True

    def __init__(self, capacity: int, allocated: int = 0) -> None:
        self.capacity, self.allocated, self.peak = capacity, allocated, 0
        self.failures, self.resets = 0, 0

    def free_bytes(self) -> int:
        return self.capacity - self.allocated

    def allocated_bytes(self) -> int:
        return self.allocated

    def peak_bytes(self) -> int:
        return self.peak

    def reset_peak(self) -> None:
        self.peak, self.resets = self.allocated, self.resets + 1

    def forward(self, activations: int, retained: int = 0) -> None:
        """Use memory as a forward does."""
        self.allocated += retained
        if self.allocated + activations > self.capacity:
            self.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.peak = max(self.peak, self.allocated + activations)


class Activating(Count):
    """A stage whose forward needs memory: a constant part, and one for each row."""

    def __init__(self, gpu: Gpu, constant: int, row: int) -> None:
        super().__init__()
        self.gpu, self.constant, self.row = gpu, constant, row

    def step(self, batch: Sequence[tuple[StageInput, int]]) -> list[Any]:
        self.gpu.forward(self.constant + self.row * len(batch))
        return super().step(batch)

    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.batches]


class SharedActivating(Shared):
    """The same for a stage of an exact pool."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu

    def step(self, batch: Sequence[Tagged]) -> list[float | Exception]:
        self.gpu.forward(10 * len(batch))
        return super().step(batch)


def with_memory(folder: Path, stage: Any, gpu: ComputeDevice, batch: int = 8, **options: Any) -> Bench:
    """A loop on a device with this memory, for which a larger batch always pays off."""
    loop = Bench(folder, {"count": stage}, batch)
    own = loop.store, loop.results, loop.inbox, loop.sent.append
    loop.loop = StepLoop({"count": stage}, *own, batch, device=gpu, **options)
    loop.loop._batches.sizes = Large(batch)
    return loop


def run(loop: Bench, count: int = 8, steps: int = 6) -> None:
    for lease in [loop.run(tag=tag, steps=steps) for tag in range(count)]:
        assert isinstance(loop.outcome(lease), TaskCompleted)


@pytest.mark.parametrize(("capacity", "largest"), [(15, 1), (25, 2), (45, 4), (79, 7), (80, 8)])
@pytest.mark.parametrize("all_together", [False, True])
def test_no_forward_runs_out_of_memory_and_the_largest_batch_that_fits_is_used(
    tmp_path: Path, capacity: int, largest: int, all_together: bool
) -> None:
    gpu = Gpu(1000 + capacity, allocated=1000)
    stage = Activating(gpu, 0, 10)
    stage.all_together = all_together
    run(with_memory(tmp_path, stage, gpu))

    assert gpu.failures == 0
    assert max(stage.sizes()) == largest
    assert stage.sizes()[0] == 1, "nothing is known before"


def test_size_that_did_not_fit_is_tried_once_memory_is_free(tmp_path: Path) -> None:
    gpu = Gpu(25)
    stage = Activating(gpu, 0, 10)
    loop = with_memory(tmp_path, stage, gpu)
    run(loop)
    assert max(stage.sizes()) == 2
    gpu.capacity = 85
    run(loop)
    assert (gpu.failures, max(stage.sizes())) == (0, 8)


def test_constant_part_is_known_from_two_sizes(tmp_path: Path) -> None:
    """8 tasks need 140 bytes; from the size 1 alone, 480 would be predicted, and 4 need 100."""
    gpu = Gpu(150)
    stage = Activating(gpu, 50, 10)
    run(with_memory(tmp_path, stage, gpu))
    assert (gpu.failures, max(stage.sizes())) == (0, 8)


def test_measured_peak_corrects_the_prediction_and_is_read_twice_for_a_size() -> None:
    gpu = Gpu(1000)
    memory = BatchMemory(gpu)
    for activations, fitting in ((600, 1), (200, 4), (900, 4)):
        with memory.measure("key", 1):
            gpu.forward(activations)
        assert memory.largest("key", 8) == fitting
    assert gpu.resets == 2, "as the third forward of the size is not measured"


def test_memory_that_stays_allocated_does_not_grow_with_the_batch() -> None:
    """An offloaded component arrives in the forward."""
    gpu = Gpu(1000)
    memory = BatchMemory(gpu)
    with memory.measure("key", 1):
        gpu.forward(40, retained=400)
    gpu.allocated = 0  # another component has replaced it
    assert memory.largest("key", 8) == 8
    gpu.allocated = 300
    assert memory.largest("key", 8) == 4


def test_failed_forward_and_forgotten_or_oldest_keys_are_unknown() -> None:
    gpu = Gpu(1000)
    memory = BatchMemory(gpu)
    with pytest.raises(torch.OutOfMemoryError), memory.measure(("pool", 1), 1):
        gpu.forward(2000)
    assert memory.largest(("pool", 1), 8) == 1

    for number in range(MAX_KEYS + 1):
        with memory.measure(("pool", number), 1):
            gpu.forward(1)
    assert (memory.largest(("pool", 0), 8), memory.largest(("pool", 1), 8)) == (1, 8)
    memory.forget("pool")
    assert memory.largest(("pool", 1), 8) == 1


def test_device_that_does_not_answer_does_not_end_the_loop() -> None:
    class Lost(Gpu):
        def free_bytes(self) -> int:
            raise RuntimeError("CUDA error: device lost")

    gpu = Lost(100)
    memory = BatchMemory(gpu)
    for size in (1, 2):
        with memory.measure("key", size):
            gpu.forward(1)
    assert memory.largest("key", 8) == 2


def test_exact_pool_compares_only_batches_that_fit(tmp_path: Path) -> None:
    gpu = Gpu(45)
    stage = SharedActivating(gpu)
    sure = InvarianceResults(tmp_path / "exactness.json", chance=lambda: 1.0)
    loop = with_memory(tmp_path, stage, gpu, exactness=sure)
    leases = [loop.run(tag=tag, steps=8) for tag in range(8)]
    assert [found(loop, lease) for lease in leases] == [[float(t + s) for s in range(8)] for t in range(8)]
    assert gpu.failures == 0
    assert max(len(batch) for batch in stage.batches) == 4


def test_cpu_has_no_limit() -> None:
    memory = BatchMemory()
    with memory.measure("key", 1):
        pass
    assert memory.largest("key", 8) == 8
