"""On a pretended GPU of little memory, a decode is tiled at the allocation that does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.test_decode_memory import KINDS, Decode
from tests.pretend.gpus import PretendedGpus
from tools.tiny import build
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.messages import TaskCompleted
from unfuse.models import find
from unfuse.models.base import RuntimeOptions
from unfuse.parallel.accelerator import Accelerator
from unfuse.worker.step_loop import StepLoop

pytestmark = pytest.mark.slow

GPU = "cuda:1"


@pytest.mark.parametrize("kind", ["flux", "wan"])
def test_decode_that_does_not_fit_is_tiled_and_whole_once_memory_is_free_again(kind: str, tmp_path: Path) -> None:
    folder = build(kind, tmp_path / kind)
    model, (shape, frames) = find(folder).model_spec("m", folder), KINDS[kind]
    with PretendedGpus() as gpus:
        (spec,) = (spec for spec in model.pipeline.stages if spec.name == "vae_decode")
        stage: Any = find(folder).load(spec, folder, RuntimeOptions(GPU, model.dtypes, ComputeOptions(device=GPU)))
        decode = Decode(tmp_path / "bench", stage, shape, num_frames=frames)
        bench, device = decode.bench, Accelerator(GPU)
        own = bench.store, bench.results, bench.inbox, bench.sent.append
        bench.loop = StepLoop({"print": stage}, *own, 1, device=device)

        weights = gpus.memory.held()[GPU]
        done, whole = decode.run()
        assert isinstance(done, TaskCompleted) and done.vae == ""
        peak = gpus.memory.peak[GPU]

        gpus.memory.capacity = weights + (peak - weights) // 2
        torch.cuda.empty_cache()
        done, tiled = decode.run()
        assert isinstance(done, TaskCompleted) and done.vae == "tiled"
        assert tiled.shape == whole.shape and not np.array_equal(tiled, whole)

        gpus.memory.capacity = 4 * peak
        done, again = decode.run()
        assert isinstance(done, TaskCompleted) and done.vae == ""
        assert np.array_equal(again, whole)
