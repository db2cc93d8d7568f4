"""What follows when tasks run out of memory, rung by rung, with stages that raise each spelling of it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.core.test_retries import OUT_OF_MEMORY
from tests.worker.test_step_loop import Bench, Count, grown
from unfuse.core.compute_device import ComputeDevice
from unfuse.core.errors import OutOfMemory
from unfuse.core.messages import TaskCompleted, TaskFailed
from unfuse.stages.base import StageInput
from unfuse.worker.compute_messages import MemoryShortage, failure
from unfuse.worker.memory_ladder import MemoryLadder, clear_frames, size_of
from unfuse.worker.step_loop import StepLoop

State = tuple[StageInput, int]

SPELLINGS: list[Exception] = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    MemoryError("no room"),
    torch.AcceleratorError("CUDA error: out of memory"),
    *map(RuntimeError, OUT_OF_MEMORY),
]


class Gpu(ComputeDevice):
    """The memory of a pretended GPU, which counts how often its cache was emptied."""

    uses_host_memory = False

    def __init__(self, others: int = 0, cached: int = 0) -> None:
        self.others, self.cache, self.emptied = others, cached, 0

    def empty_cache(self) -> None:
        self.emptied += 1
        self.cache = 0

    def cached_bytes(self) -> int:
        return self.cache

    def used_by_others(self) -> int:
        return self.others


class Smaller(Count):
    """A stage whose step fits once it was made smaller `rungs` times; `needs` of them are possible."""

    def __init__(self, rungs: int, needs: int, refuses: bool = False) -> None:
        super().__init__()
        self.rungs, self.needs, self.refuses = rungs, needs, refuses
        self.tried = list[int]()
        self.reduced = 0

    def step(self, batch: Sequence[State]) -> list[Any]:
        self.tried.append(self.reduced)
        if self.reduced < self.needs:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().step(batch)

    def reduce_memory(self, state: State) -> State | None:
        if self.refuses:
            raise OutOfMemory("tiles are refused")
        if self.reduced == self.rungs:
            return None
        self.reduced += 1
        return state


def retries(loop: Bench) -> list[str]:
    """What followed each error, as the loop reported it."""
    return [message.retry for message in loop.sent if isinstance(message, MemoryShortage)]


def with_memory(loop: Bench, gpu: ComputeDevice) -> Bench:
    """The same loop on a device with this memory."""
    stages = loop.loop._factory._stages
    own = loop.store, loop.results, loop.inbox, loop.sent.append
    sizes = loop.loop._batches.sizes
    loop.loop = StepLoop(stages, *own, 4, device=gpu)
    loop.loop._batches.sizes = sizes
    return loop


class Failing(Count):
    """A stage that raises the next of its errors at each step, and completes the step where that is None."""

    def __init__(self, *errors: Exception | None) -> None:
        super().__init__()
        self.errors = [*errors]

    def step(self, batch: Sequence[State]) -> list[Any]:
        if self.errors and (error := self.errors.pop(0)):
            raise error
        return super().step(batch)


@pytest.mark.parametrize("error", SPELLINGS, ids=str)
def test_batch_is_halved_and_cache_emptied_in_every_spelling(tmp_path: Path, error: Exception) -> None:
    loop, count = grown(tmp_path, raises=lambda size: error if size > 2 else None, fail_at=2)
    gpu = Gpu()
    with_memory(loop, gpu)
    leases = [loop.run(tag=tag) for tag in range(1, 5)]

    assert all(isinstance(loop.outcome(lease), TaskCompleted) for lease in leases)
    assert [len(batch) for batch in count.batches] == [4, 2, 2, 2, 2]
    assert gpu.emptied == 1
    assert retries(loop) == ["halved"]


@pytest.mark.parametrize("error", SPELLINGS, ids=str)
def test_task_that_runs_out_of_memory_alone_is_repeated_once(tmp_path: Path, error: Exception) -> None:
    count, gpu = Failing(None, error), Gpu()
    loop = with_memory(Bench(tmp_path, {"count": count}, 1), gpu)

    assert isinstance(loop.outcome(loop.run()), TaskCompleted)
    assert (len(count.batches), gpu.emptied) == (3, 1)


def test_each_step_may_be_repeated_once(tmp_path: Path) -> None:
    count = Failing(MemoryError(), None, MemoryError(), None)
    loop = Bench(tmp_path, {"count": count}, 1)

    assert isinstance(loop.outcome(loop.run()), TaskCompleted)
    assert len(count.batches) == 3


def test_step_is_made_smaller_until_it_fits(tmp_path: Path) -> None:
    stage = Smaller(rungs=3, needs=2)
    loop = Bench(tmp_path, {"count": stage}, 1)

    assert isinstance(loop.outcome(loop.run()), TaskCompleted)
    assert stage.tried == [0, 0, 1, 2, 2, 2]
    assert retries(loop) == ["repeated", "reduced", "reduced"]


def test_task_that_never_fits_fails_in_a_sentence_and_others_complete(tmp_path: Path) -> None:
    stage = Smaller(rungs=2, needs=9)
    loop = with_memory(Bench(tmp_path, {"count": stage, "print": Count()}, 1), Gpu())
    other = loop.run("print", steps=2)
    failed = loop.outcome(loop.run(width=1024, height=768))

    assert isinstance(failed, TaskFailed)
    assert (failed.kind, failed.reason, failed.error) == ("permanent", "out_of_memory", "")
    assert failed.message == (
        "the device does not have enough memory for 1024x768 in stage stage, even alone: CUDA out of memory; reduce "
        "the request (smaller size), or use quantized weights, a larger device or, on a GPU, --offload"
    )
    assert "Traceback" in failed.evidence
    assert stage.tried == [0, 0, 1, 2]
    assert isinstance(loop.outcome(other), TaskCompleted)


@pytest.mark.parametrize("device", [ComputeDevice(), Gpu()], ids=["CPU", "GPU"])
def test_lack_of_host_memory_is_not_answered_with_offload(tmp_path: Path, device: ComputeDevice) -> None:
    """A CPU's memory is the host's, and a GPU's worker may lack memory of the host, too."""
    errors = 2 * [MemoryError("Unable to allocate 3.00 GiB for an array")]
    loop = with_memory(Bench(tmp_path, {"count": Failing(*errors)}, 1), device)
    failed = loop.outcome(loop.run())
    assert isinstance(failed, TaskFailed)
    assert failed.message == (
        "the host does not have enough memory for this request in stage stage, even alone: Unable to allocate 3.00 GiB "
        "for an array; reduce the request (shorter text), or stop other programs, start fewer workers, or serve on a "
        "machine with more memory"
    )
    report = failure(failed.claim, RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert report.message.startswith("the host does not have enough memory for this request: ")
    assert "--offload" not in report.message
    report = failure(failed.claim, torch.OutOfMemoryError("CUDA out of memory"))
    assert report.message.endswith(
        "reduce the request, or use quantized weights, a larger device or, on a GPU, --offload"
    )


def test_refused_smaller_step_fails_with_the_reason(tmp_path: Path) -> None:
    loop = Bench(tmp_path, {"count": Smaller(rungs=2, needs=1, refuses=True)}, 1)
    failed = loop.outcome(loop.run())

    assert isinstance(failed, TaskFailed)
    assert failed.message.endswith("; tiles are refused")


def test_task_is_retried_elsewhere_if_other_processes_use_the_device(tmp_path: Path) -> None:
    loop = with_memory(Bench(tmp_path, {"count": Smaller(rungs=0, needs=1)}, 1), Gpu(others=5 << 30))
    failed = loop.outcome(loop.run())

    assert isinstance(failed, TaskFailed)
    assert (failed.kind, failed.reason, failed.error) == (
        "transient",
        "out_of_memory",
        "unfuse.core.errors.OutOfMemory",
    )
    assert failed.message.endswith("; other processes use 5.0 GiB of the device")


def test_returned_error_of_one_task_is_repeated_without_the_rest_of_its_batch(tmp_path: Path) -> None:
    loop, count = grown(tmp_path, fail_at=2)
    count.returns = torch.OutOfMemoryError("CUDA out of memory")
    bad, good = loop.run(tag=0), loop.run(tag=1)
    failed = loop.outcome(bad)

    assert isinstance(loop.outcome(good), TaskCompleted)
    assert isinstance(failed, TaskFailed)
    assert failed.reason == "out_of_memory"
    assert sum(batch.count(0) for batch in count.batches) == 3, "the failed step was repeated once"


def test_start_that_runs_out_of_memory_is_repeated_once(tmp_path: Path) -> None:
    loop, count = grown(tmp_path)
    starts, start, errors = [], count.start, [MemoryError(), None, MemoryError(), MemoryError()]

    def failing(task: StageInput) -> State:
        starts.append(task)
        if error := errors.pop(0):
            raise error
        return start(task)

    count.start = failing  # type: ignore[method-assign]
    first, second = loop.run(), loop.run()

    assert isinstance(loop.outcome(first), TaskCompleted)
    failed = loop.outcome(second)
    assert isinstance(failed, TaskFailed)
    assert (failed.reason, len(starts)) == ("out_of_memory", 4)


@pytest.mark.parametrize(
    ("others", "cached", "emptied"), [(2 << 30, 2 << 30, 1), (2 << 30, 1 << 20, 0), (0, 2 << 30, 0)]
)
def test_large_cache_is_returned_after_the_last_task_of_a_shared_device(
    tmp_path: Path, others: int, cached: int, emptied: int
) -> None:
    loop, _ = grown(tmp_path)
    gpu = Gpu(others, cached)
    with_memory(loop, gpu)
    first, second = loop.run(steps=1), loop.run(steps=3)
    loop.outcome(first)
    loop.turn()
    assert gpu.emptied == 0, "another task of the stage uses the cache"

    loop.outcome(second)
    loop.loop._give_back_cache()
    loop.loop._give_back_cache()
    assert gpu.emptied == emptied


def test_failed_forward_frees_its_tensors() -> None:
    freed = list[weakref.ref[torch.Tensor]]()

    def forward() -> None:
        tensor = torch.zeros(8)
        freed.append(weakref.ref(tensor))
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except torch.OutOfMemoryError as error:
            raise RuntimeError("the layer failed") from error

    try:
        forward()
    except RuntimeError as error:
        assert freed[0]() is not None
        clear_frames(error)
    assert freed[0]() is None


def test_device_that_does_not_answer_does_not_end_the_loop() -> None:
    class Lost(Gpu):
        def empty_cache(self) -> None:
            raise RuntimeError("CUDA error: device lost")

        used_by_others = empty_cache  # type: ignore[assignment]

    ladder = MemoryLadder(Lost())
    ladder.recover(MemoryError())
    ladder.give_back()
    assert MemoryLadder(Lost(cached=4 << 30)).give_back() is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"width": 832, "height": 480, "num_frames": 81}, "832x480 with 81 frames"),
        ({"width": 64, "height": 32, "num_frames": 1}, "64x32"),
        ({"max_tokens": 5}, ""),
    ],
)
def test_size_of_a_request_is_named(params: dict[str, Any], text: str) -> None:
    assert size_of(params) == text
