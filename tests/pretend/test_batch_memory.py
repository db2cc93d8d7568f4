"""On a pretended GPU of little memory, a denoiser's batches grow as far as they fit, and none runs out of memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pretend.gpus import PretendedGpus
from tests.pretend.running import GPU, LoadedModel, load, on_host, tasks_of
from tests.worker.test_step_loop import Bench, Large
from tools import tiny
from unfuse.core.messages import TaskCompleted
from unfuse.core.request import new_request_id
from unfuse.parallel.accelerator import Accelerator
from unfuse.worker.step_loop import StepLoop

pytestmark = pytest.mark.slow

SIZE = {"height": 64, "width": 64, "num_inference_steps": 8}


class Denoise:
    """A loop of a model's denoise stage, and how many shared each forward, and which ran out of memory."""

    def __init__(self, folder: Path, model: LoadedModel) -> None:
        tensors: dict[str, Any] = {}
        for spec, stage, task in tasks_of(model, SIZE, tensors):
            if spec.kind == "denoise":
                self.stage, self.task = stage, task
                break
            (output,) = stage.run([task])
            tensors |= on_host(output.tensors)
        self.sizes, self.failures = list[int](), 0
        step = self.stage.step  # type: ignore[attr-defined]

        def recorded(batch: Sequence[Any]) -> Any:
            self.sizes.append(len(batch))
            try:
                return step(batch)
            except torch.OutOfMemoryError:
                self.failures += 1
                raise

        self.stage.step = recorded  # type: ignore[attr-defined]
        self.bench = Bench(folder, {"count": self.stage}, 8)
        own = self.bench.store, self.bench.results, self.bench.inbox, self.bench.sent.append
        self.bench.loop = StepLoop({"count": self.stage}, *own, 8, device=Accelerator(GPU))
        self.bench.loop._batches.sizes = Large(8)
        request = new_request_id()
        self.input = self.bench.store.put(dict(self.task.tensors), request=request, stage="before", attempt=1)

    def run(self, count: int) -> int:
        """Run so many requests at once. Returns how many shared the largest forward."""
        del self.sizes[:]
        params = {**self.task.params}
        leases = [self.bench.run("count", self.input, **{**params, "seed": seed}) for seed in range(count)]
        assert all(isinstance(self.bench.outcome(lease), TaskCompleted) for lease in leases)
        return max(self.sizes)


def test_batches_of_a_denoiser_grow_as_far_as_they_fit(tmp_path: Path) -> None:
    with PretendedGpus() as gpus:
        denoise = Denoise(tmp_path / "bench", load(tiny.build("flux", tmp_path / "flux"), GPU, batching="batched"))
        weights = gpus.memory.held()[GPU]
        gpus.memory.reset_peak()
        assert denoise.run(1) == 1
        row = gpus.memory.peak[GPU] - weights

    with PretendedGpus() as gpus:
        denoise = Denoise(tmp_path / "other", load(tiny.build("flux", tmp_path / "flux2"), GPU, batching="batched"))
        gpus.memory.empty_cache()
        gpus.memory.capacity = gpus.memory.held()[GPU] + 3 * row
        assert denoise.run(8) == 2
        assert denoise.failures == 0

        gpus.memory.capacity += 20 * row
        assert denoise.run(8) == 8
        assert denoise.failures == 0
