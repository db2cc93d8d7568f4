"""A checkpoint from one kind of device is resumed on the other with equal bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.pretend.families import Family, cases
from tests.pretend.running import LoadedModel, bytes_of, on_host, run_request, tasks_of
from tools import tiny
from unfuse.stages.base import Checkpoint, Stage, StageInput, next_states

pytestmark = pytest.mark.nightly


def denoise_task(model: LoadedModel, params: dict[str, Any]) -> tuple[Stage, StageInput]:
    """The denoise stage of a model, and its task of a request."""
    tensors: dict[str, Any] = {}
    for spec, stage, task in tasks_of(model, params, tensors):
        if spec.kind == "denoise":
            return stage, task
        tensors |= on_host(stage.run([task])[0].tensors)
    raise AssertionError("no stage denoises")


def stopped(stage: Stage, task: StageInput) -> Checkpoint:
    """The checkpoint behind two steps, as it is stored: on the host."""
    state = stage.start(task)
    for _ in range(2):
        (state,) = next_states(stage, [state])
    checkpoint = stage.save(state)
    assert checkpoint is not None
    return msgspec.structs.replace(checkpoint, tensors=on_host(checkpoint.tensors))


def latents_from(stage: Stage, task: StageInput, checkpoint: Checkpoint) -> bytes:
    """The bytes of the latents that the remaining steps make."""
    state = stage.resume(task, checkpoint)
    while len({*stage.progress(state)}) > 1:
        (state,) = next_states(stage, [state])
    latents = stage.finish(state).tensors["latents"]
    assert latents is not None
    return bytes_of(latents)


@pytest.mark.parametrize("kind", [kind for kind in tiny.KINDS if not kind.startswith(("klein", "krea"))])
def test_checkpoint_of_one_device_is_resumed_on_the_other(kind: str, tmp_path: Path) -> None:
    """Those of klein and Krea are left out: their denoising is one step."""
    family, params = Family(kind, tmp_path), cases(kind)["plain"]
    expected = run_request(family.on_cpu, params).outputs["denoise latents"]
    on_cpu = denoise_task(family.on_cpu, params)
    from_cpu = stopped(*on_cpu)
    with family.gpus:
        on_gpu = denoise_task(family.on_gpu, params)
        from_gpu = stopped(*on_gpu)
        assert latents_from(*on_gpu, from_cpu) == expected
    assert latents_from(*on_cpu, from_gpu) == expected
