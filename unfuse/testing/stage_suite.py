"""The conformance suite of stages: plain asserts on a loaded stage and its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from unfuse.core.errors import PermanentError
from unfuse.core.object_ref import layout_tensors
from unfuse.stages.base import Stage, StageInput, StageOutput, SteppedStage, next_states
from unfuse.stores.tensor_store import TensorStore
from unfuse.stores.tensors import describe
from unfuse.worker.checkpoints import pack, unpack

#: The dtype, shape and bytes of each tensor, by name.
Bits = dict[str, tuple[str, tuple[int, ...], bytes] | None]


def check_stage(stage: Stage, inputs: Sequence[StageInput]) -> None:
    """Check a stage on these tasks, each of which it must accept. Raises AssertionError.

    Each task is run alone, in a batch, and step by step. A stage with checkpoints is resumed after each of its steps.
    """
    assert inputs, "check_stage needs at least one task"
    for task in inputs:
        _accepts_what_fits(stage, task)
        expected = _runs_alone(stage, task)
        if isinstance(stage, SteppedStage):
            _steps(stage, task, expected)
    batched = _output_names(stage.run(inputs), len(inputs))
    alone = [_output_names(stage.run([task]), 1)[0] for task in inputs]
    assert batched == alone, "names or order of outputs differ in a batch"


def _accepts_what_fits(stage: Stage, task: StageInput) -> None:
    """Check `verify` and `batch_key`: a task without its inputs is refused."""
    stage.verify(task)
    hash(stage.batch_key(task))
    assert stage.batch_key(replace(task, params=dict(task.params))) == stage.batch_key(task), (
        "batch keys differ for equal parameters"
    )
    if task.tensors:
        try:
            stage.verify(replace(task, tensors={}))
        except PermanentError:
            return
        raise AssertionError("a task without its inputs was accepted")


def _runs_alone(stage: Stage, task: StageInput) -> Bits:
    """Return the output's bytes, after checking that running the task is pure.

    The output is the same each time, shares no memory with inputs and has no gradient. Inputs are not written.
    """
    before = _bits(task.tensors)
    (output,) = stage.run([task])
    first = _bits(output.tensors), [media.data for media in output.media]
    assert _bits(task.tensors) == before, "the stage changed an input"
    assert bool(output.tensors) != bool(output.media), "an output must have either tensors or media"
    layout_tensors((name, *describe(tensor)) for name, tensor in output.tensors.items())
    for name, tensor in output.tensors.items():
        assert not getattr(tensor, "requires_grad", False), f"output {name} requires a gradient"
        for input_name, input_tensor in task.tensors.items():
            assert not _overlap(tensor, input_tensor), f"output {name} shares memory with input {input_name}"
    (again,) = stage.run([task])
    assert (_bits(again.tensors), [media.data for media in again.media]) == first, (
        "a second run of the same task gave another output"
    )
    return first[0]


def _steps(stage: SteppedStage[Any], task: StageInput, expected: Bits) -> None:
    """Check that each step advances by one, and that resuming gives the same output."""
    state = stage.start(task)
    done, steps = stage.progress(state)
    assert done == 0 < steps, "progress at the start must be 0 of at least 1 step"
    with TensorStore.create("memory") as store:
        while done < steps:
            (state,) = next_states(stage, [state])
            assert not isinstance(state, Exception), f"a step failed: {state}"
            assert stage.progress(state) == (done + 1, steps), "a step did not advance progress by one"
            done += 1
            checkpoint = stage.save(state) if done < steps else None
            if checkpoint is not None:
                ref = store.put(pack(checkpoint), request="req_0", stage="checked", attempt=1)
                with store.get(ref, as_torch=_is_torch(task.tensors)) as tensors:
                    state = stage.resume(task, unpack(tensors))
                assert stage.progress(state) == (done, steps), "a resumed task is not at the step where it was saved"
    assert _bits(stage.finish(state).tensors) == expected, "the output of a stepped and resumed task differs"


def _output_names(outputs: Sequence[StageOutput], count: int) -> list[list[str]]:
    """Return the names of tensors and content types of media of each output."""
    assert len(outputs) == count, f"{count} tasks gave {len(outputs)} outputs"
    return [[*output.tensors, *(media.content_type for media in output.media)] for output in outputs]


def _bits(tensors: Mapping[str, Any]) -> Bits:
    bits: Bits = {}
    for name, tensor in tensors.items():
        bits[name] = None if tensor is None else (*describe(tensor), _array(tensor).tobytes())
    return bits


def _array(tensor: Any) -> Any:
    """Return a tensor as a numpy array, of bytes for a torch tensor."""
    if isinstance(tensor, np.ndarray):
        return tensor
    import torch

    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0)


def _overlap(left: Any, right: Any) -> bool:
    """Return whether two tensors share memory."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray) or left is None or right is None:
        return isinstance(left, np.ndarray) and isinstance(right, np.ndarray) and bool(np.shares_memory(left, right))
    return bool(left.numel()) and bool(left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr())


def _is_torch(tensors: Mapping[str, Any]) -> bool:
    return not any(isinstance(tensor, np.ndarray) for tensor in tensors.values())
