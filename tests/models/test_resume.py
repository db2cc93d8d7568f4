"""Every family's denoiser, interrupted after each of its steps and gone on with from a checkpoint."""

from __future__ import annotations

import numpy as np
import pytest

from tests.models import conftest as c
from unfuse.core.errors import PermanentError
from unfuse.stages.base import Checkpoint, StageInput, SteppedStage, next_states
from unfuse.stores.tensor_store import TensorStore
from unfuse.worker.checkpoints import pack, unpack


def test_resume_from_a_checkpoint_after_every_step_is_bit_exact(
    job: c.Job, undivided: c.Undivided, stages: c.Load
) -> None:
    """Given each state written into a store, when the next step starts from what is read there, then the latents are
    those of diffusers."""
    loaded = stages(undivided.folder(job.model), job.dtype)
    stage, params = loaded["denoise"], {**job.params, "output_format": "png"}
    if not isinstance(stage, SteppedStage):
        pytest.skip("a denoiser that runs as a whole has no state between steps")
    task = StageInput(params, c.encode(loaded, params, undivided.uploads(params)))
    state = stage.start(task)
    with TensorStore.create("memory") as store:
        done, steps = stage.progress(state)
        for _ in range(done, steps):
            (state,) = next_states(stage, [state])
            if stage.progress(state)[0] < steps:
                checkpoint = stage.save(state)
                assert checkpoint is not None
                ref = store.put(pack(checkpoint), request="req_0", stage="denoise", attempt=1)
                with store.get(ref, as_torch=True) as held:
                    state = stage.resume(task, unpack(held))
    latents = stage.finish(state).tensors["latents"]
    assert latents is not None
    assert np.array_equal(latents.float().numpy(), undivided.result(job.name)["latents"])


@pytest.mark.parametrize("broken", ["no latents", "another size", "beyond the end", "no step"])
def test_mismatched_checkpoint_is_rejected(broken: str, undivided: c.Undivided, stages: c.Load) -> None:
    job = next(job for job in c.JOBS if job.name == "unipc-image")
    loaded = stages(undivided.folder(job.model))
    stage, params = loaded["denoise"], {**job.params, "output_format": "png"}
    assert isinstance(stage, SteppedStage)
    task = StageInput(params, c.encode(loaded, params, {}))
    (state,) = next_states(stage, [stage.start(task)])
    checkpoint = stage.save(state)
    assert checkpoint is not None
    latents = checkpoint.tensors["latents"]
    assert latents is not None
    tensors = {"no latents": {}, "another size": {"latents": latents[..., :-1]}}.get(broken, {"latents": latents})
    step = {"beyond the end": 4, "no step": None}.get(broken, 1)

    with pytest.raises(PermanentError, match="does not match its task"):
        stage.resume(
            task, Checkpoint({**checkpoint.tensors, "latents": None} | tensors, {**checkpoint.values, "step": step})
        )
