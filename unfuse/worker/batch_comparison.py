"""Compares batches with requests alone, in a process of its own: `python -m unfuse.worker.batch_comparison`.

The process reads one line of JSON, a BatchComparison. It loads the stages of a model as a worker of an exact pool does,
and computes each step of each stage for every batch size both ways. It writes one line, a list of ComparedBatch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from unfuse.core.compute_options import ComputeOptions
from unfuse.core.plan import Params
from unfuse.core.retries import MEMORY, rule_of
from unfuse.models import find, read_model_spec
from unfuse.models.base import RuntimeOptions
from unfuse.stages.base import Stage, StageInput, Tensors
from unfuse.stages.bitwise import first_difference
from unfuse.worker.records import mute_libraries


class BatchComparison(msgspec.Struct, frozen=True):
    """The line that the process reads: which model to load, and which requests to compute."""

    #: The path of the model's folder.
    folder: str
    #: The dtype of its components, as in `--dtype`.
    dtype: str
    #: How the stages compute.
    compute: ComputeOptions
    #: The device of all stages.
    device: str
    #: The sizes of the batches.
    sizes: tuple[int, ...]
    #: The parameters of the requests, which have different seeds.
    params: Params
    #: The path of the start image of all requests, for models with image input; "" for none.
    image: str = ""


class ComparedBatch(msgspec.Struct, frozen=True):
    """What the comparison of a batch size of a stage showed."""

    #: Name of the stage.
    stage: str
    #: The batch size; 0 for a stage whose requests never share a forward in an exact pool.
    size: int
    #: Whether each request has the bytes that it has alone.
    equal: bool
    #: The first function whose result differs, or why the batch was not computed. "" for equal results.
    because_of: str = ""


class ComparedStage:
    """Computes a stage for several requests, and compares each step in batches."""

    def __init__(self, name: str, stage: Stage, sizes: Sequence[int]) -> None:
        self._name, self._stage = name, stage
        all_sizes = (1, *sizes) if stage.differs_alone else sizes
        self._results = {size: ComparedBatch(name, size, True) for size in all_sizes}

    def run(self, tasks: Sequence[StageInput]) -> tuple[list[ComparedBatch], list[Tensors]]:
        """Return what was compared, and the tensors of each task."""
        states = [self._stage.start(task) for task in tasks]
        if self._stage.exact_batch_key(states[0]) is None:
            return [ComparedBatch(self._name, 0, True)], [self._stage.run([task])[0].tensors for task in tasks]
        while len({*self._stage.progress(states[0])}) > 1:
            states = self._step(states)
        return [*self._results.values()], [self._stage.finish(state).tensors for state in states]

    def _step(self, states: Sequence[Any]) -> list[Any]:
        """Compute a step in every way, and return the next states."""
        alone = [self._stage.step_alone(state) for state in states]
        if error := next((result for result in alone if isinstance(result, Exception)), None):
            raise error
        for size, result in self._results.items():
            if result.equal:
                self._results[size] = replace(result, **self._difference(states[:size], alone[:size]))
        return [self._stage.advance(state, result) for state, result in zip(states, alone, strict=True)]

    def _difference(self, states: Sequence[Any], alone: Sequence[Any]) -> dict[str, Any]:
        """Return the fields of a ComparedBatch that the comparison of a step changes."""
        from unfuse.stages.variant_functions import variant_function

        try:
            row = first_difference(alone, self._stage.step(states))
            return {} if row is None else {"equal": False, "because_of": variant_function(self._stage, states, row)}
        except Exception as error:
            reason = "out of memory" if rule_of(error) is MEMORY else f"{type(error).__name__}: {error}"
            return {"equal": False, "because_of": reason}


def compare(comparison: BatchComparison) -> Iterator[ComparedBatch]:
    """Yield the result of every stage and batch size."""
    import torch

    from unfuse.parallel.kernel_flags import set_kernel_flags

    torch.set_num_threads(comparison.compute.threads)
    set_kernel_flags(comparison.device, comparison.compute.fp32_precision)
    folder = Path(comparison.folder)
    family, spec = find(folder), read_model_spec("compared", folder, comparison.dtype)
    runtime = RuntimeOptions(comparison.device, spec.dtypes, comparison.compute)
    uploads = {"image": Path(comparison.image).read_bytes()} if comparison.image else {}

    requests = [{**comparison.params, "seed": seed} for seed in range(max(comparison.sizes))]
    tensors: list[Tensors] = [{} for _ in requests]
    for stage_spec in (stage_spec for stage_spec in spec.pipeline.stages if not stage_spec.only_with):
        stage = family.load(stage_spec, folder, runtime)
        tasks = [
            StageInput(params, {name: earlier[name] for name in stage_spec.inputs if name in earlier}, uploads)
            for params, earlier in zip(requests, tensors, strict=True)
        ]
        for task in tasks:
            stage.verify(task)
        results, outputs = ComparedStage(stage_spec.name, stage, comparison.sizes).run(tasks)
        yield from results
        tensors = [{**earlier, **output} for earlier, output in zip(tensors, outputs, strict=True)]


if __name__ == "__main__":
    mute_libraries()
    answer = [*compare(msgspec.json.decode(sys.stdin.readline(), type=BatchComparison))]
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
