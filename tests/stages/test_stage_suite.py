"""The published suite for stages: real ones pass it, and it notices one broken promise at a time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import pytest
import torch

from unfuse.core.errors import PermanentError
from unfuse.stages.base import Checkpoint, EncodedMedia, Stage, StageInput, StageOutput, SteppedStage, need_tensor
from unfuse.testing import check_stage


class Grow(SteppedStage[tuple[torch.Tensor, int]]):
    """Doubles its input four times; `broken` names the promise that it breaks."""

    kind = "denoise"

    def __init__(self, broken: str = "") -> None:
        self.broken, self.calls = broken, 0

    def verify(self, task: StageInput) -> None:
        if self.broken != "accepts nothing as something":
            need_tensor(task, "x", (2,))

    def batch_key(self, task: StageInput) -> Hashable:
        self.calls += 1
        return self.calls if self.broken == "keys differ" else 0

    def start(self, task: StageInput) -> tuple[torch.Tensor, int]:
        x = task.tensors["x"]
        assert x is not None
        if self.broken == "writes its input":
            x += 1
        return x, int(self.broken == "starts late")

    def save(self, state: tuple[torch.Tensor, int]) -> Checkpoint:
        forgot = self.broken == "forgets where it was"
        return Checkpoint({"x": state[0]}, {"step": 1 if forgot else state[1]})

    def resume(self, task: StageInput, checkpoint: Checkpoint) -> tuple[torch.Tensor, int]:
        x = checkpoint.tensors["x"]
        assert x is not None
        return x.clone() + (self.broken == "resumes elsewhere"), checkpoint.values["step"]

    def step(self, batch: Sequence[tuple[torch.Tensor, int]]) -> list[tuple[torch.Tensor, int] | Exception]:
        if self.broken == "fails":
            return [PermanentError("no") for _ in batch]
        return [(2 * x, step + 1 + (self.broken == "jumps")) for x, step in batch]

    def progress(self, state: tuple[torch.Tensor, int]) -> tuple[int, int]:
        return state[1], 4

    def finish(self, state: tuple[torch.Tensor, int]) -> StageOutput:
        self.calls += 1
        x = state[0] + self.calls if self.broken == "differs each time" else state[0]
        return StageOutput({"x": x.requires_grad_(self.broken == "keeps a gradient")})


class Same(Stage):
    """Gives its input back."""

    kind = "vae_decode"

    def __init__(self, broken: str) -> None:
        self.broken = broken

    def verify(self, task: StageInput) -> None:
        need_tensor(task, "x", (2,))

    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        if self.broken == "makes nothing":
            return [StageOutput() for _ in batch]
        if self.broken == "makes one for all":
            return [StageOutput(media=(EncodedMedia("text/plain", b"x"),))][: len(batch)]
        return [StageOutput({"y": task.tensors["x"]}) for task in batch]


def tasks() -> list[StageInput]:
    return [StageInput({"width": 16}, {"x": torch.tensor([1.0, value])}) for value in (2.0, 3.0)]


def test_stage_suite_passes_a_conforming_stage() -> None:
    check_stage(Grow(), tasks())


BROKEN: list[tuple[Any, str, str]] = [
    (Grow, "accepts nothing as something", "without its inputs"),
    (Grow, "keys differ", "batch keys differ"),
    (Grow, "writes its input", "the stage changed an input"),
    (Grow, "starts late", "progress at the start"),
    (Grow, "forgets where it was", "where it was saved"),
    (Grow, "resumes elsewhere", "resumed task differs"),
    (Grow, "fails", "a step failed|no"),
    (Grow, "jumps", "by one"),
    (Grow, "differs each time", "another output"),
    (Grow, "keeps a gradient", "a gradient"),
    (Same, "shares memory", "shares memory"),
    (Same, "makes nothing", "tensors or media"),
    (Same, "makes one for all", "2 tasks gave 1 outputs"),
]


@pytest.mark.parametrize(("kind", "broken", "says"), BROKEN)
def test_stage_suite_detects_each_violation_of_the_stage_contract(kind: Any, broken: str, says: str) -> None:
    with pytest.raises((AssertionError, PermanentError), match=says):
        check_stage(kind(broken), tasks())
