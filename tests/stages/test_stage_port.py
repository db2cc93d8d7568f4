"""The stage port: what every stage can rely on, whatever its kind."""

from collections.abc import Hashable, Sequence

import pytest
import torch

from unfuse.core.errors import PermanentError
from unfuse.core.plan import Params
from unfuse.stages.base import Stage, StageInput, StageOutput, SteppedStage, need, need_tensor, next_states


class Double(Stage):
    """A plain stage: twice its input."""

    kind = "double"

    def verify(self, task: StageInput) -> None:
        need_tensor(task, "x", (2,))

    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        return [StageOutput({"y": 2 * _tensor(task)}) for task in batch]


class Count(SteppedStage[tuple[int, int]]):
    """A stepped stage: counts to its parameter."""

    kind = "count"

    def verify(self, task: StageInput) -> None:
        need(task.params, "to", int)

    def start(self, task: StageInput) -> tuple[int, int]:
        return 0, need(task.params, "to", int)

    def step(self, batch: Sequence[tuple[int, int]]) -> list[tuple[int, int] | Exception]:
        return [(done + 1, to) if done + 1 != 13 else PermanentError("unlucky") for done, to in batch]

    def progress(self, state: tuple[int, int]) -> tuple[int, int]:
        return state

    def finish(self, state: tuple[int, int]) -> StageOutput:
        return StageOutput({"n": torch.tensor(state[0])})


def _tensor(task: StageInput) -> torch.Tensor:
    tensor = task.tensors["x"]
    assert tensor is not None
    return tensor


def _task(*values: float) -> StageInput:
    return StageInput({"width": 16, "height": 32}, {"x": torch.tensor(values, dtype=torch.float32)})


def test_plain_stage_completes_in_one_step() -> None:
    stage = Double()
    first, second = _task(1, 2), _task(3, 4)
    stage.verify(first)
    states = [stage.start(first), stage.start(second)]
    assert [stage.progress(state) for state in states] == [(0, 1), (0, 1)]

    states = next_states(stage, states)

    assert [stage.progress(state) for state in states] == [(1, 1), (1, 1)]
    made = [stage.finish(state).tensors["y"] for state in states]
    assert [tensor.tolist() for tensor in made if tensor is not None] == [[2, 4], [6, 8]]


def test_stepped_stage_runs_each_task_to_its_own_last_step() -> None:
    outputs = Count().run([StageInput({"to": to}, {}) for to in (3, 0, 7)])

    assert [int(output.tensors["n"]) for output in outputs if output.tensors["n"] is not None] == [3, 0, 7]


def test_failing_step_raises_the_error_of_its_task() -> None:
    with pytest.raises(PermanentError, match="unlucky"):
        Count().run([StageInput({"to": 14}, {})])


def test_stages_share_no_exact_batch_by_default() -> None:
    stage = Double()
    assert stage.exact_batch_key(stage.start(_task(1, 2))) is None


def test_stages_return_no_preview_by_default() -> None:
    assert Count().preview((1, 2)) is None


def key(stage: Stage, params: Params) -> Hashable:
    return stage.batch_key(StageInput(params, {}))


def test_batch_key_groups_tasks_of_equal_size() -> None:
    stage = Double()
    assert key(stage, {"width": 16, "height": 32, "seed": 1}) == stage.batch_key(
        StageInput({"height": 32, "width": 16}, {})
    )
    assert key(stage, {"width": 16, "height": 32}) != stage.batch_key(StageInput({"width": 32, "height": 16}, {}))
    assert key(stage, {"num_frames": 1}) != key(stage, {"num_frames": 5})


@pytest.mark.parametrize(
    ("value", "kind", "expected"), [(3, int, 3), (3, float, 3.0), (0.5, float, 0.5), ("", str, "")]
)
def test_need_returns_the_parameter_in_its_type(value: int | float | str, kind: type, expected: object) -> None:
    found = need({"p": value}, "p", kind)

    assert found == expected
    assert type(found) is kind


@pytest.mark.parametrize(("value", "kind"), [(None, int), (True, int), (True, float), ("3", int), (3.0, int), (3, str)])
def test_need_rejects_a_missing_or_mistyped_parameter(value: object, kind: type) -> None:
    params = {} if value is None else {"p": value}

    with pytest.raises(PermanentError, match=f"parameter p must be of type {kind.__name__}, not {value!r}"):
        need(params, "p", kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tensor",
    [
        None,
        torch.zeros(2),
        torch.zeros(1, 2, 3),
        torch.zeros(2, 5),
        torch.zeros(1, 2, dtype=torch.int64),
        torch.zeros(0),
    ],
)
def test_need_tensor_rejects_an_undeclared_shape_or_dtype(tensor: torch.Tensor | None) -> None:
    with pytest.raises(PermanentError, match="input x"):
        need_tensor(StageInput({}, {"x": tensor}), "x", (1, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_need_tensor_accepts_the_declared_shape(dtype: torch.dtype) -> None:
    need_tensor(StageInput({}, {"x": torch.zeros(1, 7, dtype=dtype)}), "x", (1, None))
