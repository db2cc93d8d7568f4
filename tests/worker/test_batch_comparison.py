"""Batches of a stage are compared with its requests alone, step by step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from unfuse.stages.base import StageInput, StageOutput, SteppedStage
from unfuse.worker.batch_comparison import ComparedBatch, ComparedStage

TASKS = [StageInput({"seed": seed}, {}) for seed in range(4)]


class Counts(SteppedStage[tuple[Tensor, int]]):
    """Two steps, of which the second differs in batches of four, and fails in batches of three."""

    kind = "counts"
    exact_key: int | None = 0

    @override
    def verify(self, task: StageInput) -> None: ...

    @override
    def exact_batch_key(self, state: tuple[Tensor, int]) -> int | None:
        return self.exact_key

    @override
    def start(self, task: StageInput) -> tuple[Tensor, int]:
        return torch.full((2,), float(task.params["seed"] or 0)), 0

    @override
    def step(self, batch: Sequence[tuple[Tensor, int]]) -> list[Tensor | Exception]:
        rows = torch.stack([value for value, _ in batch])
        if len(batch) == 3:
            raise torch.OutOfMemoryError
        if len(batch) == 4 and batch[0][1] == 1:
            rows = torch.sin(rows)
        return [*torch.add(rows, 1)]

    @override
    def advance(self, state: tuple[Tensor, int], result: Tensor) -> tuple[Tensor, int]:
        return result, state[1] + 1

    @override
    def progress(self, state: tuple[Tensor, int]) -> tuple[int, int]:
        return state[1], 2

    @override
    def finish(self, state: tuple[Tensor, int]) -> StageOutput:
        return StageOutput({"value": state[0]})


def test_each_batch_size_is_compared_at_every_step() -> None:
    results, outputs = ComparedStage("counts", Counts(), (2, 3, 4)).run(TASKS)
    assert results == [
        ComparedBatch("counts", 2, True),
        ComparedBatch("counts", 3, False, "out of memory"),
        ComparedBatch("counts", 4, False, "torch.add"),
    ]
    assert [float(tensors["value"][0]) for tensors in outputs] == [2.0, 3.0, 4.0, 5.0]  # type: ignore[index]


def test_batch_of_one_is_compared_where_it_is_computed_otherwise_than_alone() -> None:
    stage = Counts()
    stage.differs_alone = True
    assert [result.size for result in ComparedStage("counts", stage, (2,)).run(TASKS)[0]] == [1, 2]


def test_stage_whose_requests_never_share_a_forward_is_not_compared() -> None:
    stage = Counts()
    stage.exact_key = None
    assert ComparedStage("counts", stage, (2,)).run(TASKS)[0] == [ComparedBatch("counts", 0, True)]
