"""One request through all stages of a model, on a device: its bytes, and where the host waited for the device."""

from __future__ import annotations

import gc
import io
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image

from tests.pretend.gpus import PretendedGpus
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import Params, StageSpec
from unfuse.models import base, find
from unfuse.models.base import RuntimeOptions
from unfuse.stages.base import Stage, StageInput, next_states

GPU = "cuda:1"  # not the first: what forgets its device would be right on that one by chance


class LoadedModel(NamedTuple):
    """A model and its stages in order, ready to run."""

    spec: ModelSpec
    stages: list[tuple[StageSpec, Stage]]


@dataclass
class Run:
    """What a request made."""

    #: The bytes of every output, by stage and name.
    outputs: dict[str, bytes] = field(default_factory=dict)

    #: Where the host waited, by stage and phase: "denoise start", "denoise step" (the step of most waits) and so on.
    waits: dict[str, Counter[str]] = field(default_factory=dict)


def picture(seed: int, mode: str = "RGB") -> bytes:
    """A PNG of noise."""
    file, size = io.BytesIO(), (80, 96, len(mode))
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, size, dtype=np.uint8), mode).save(file, "PNG")
    return file.getvalue()


UPLOADS = {"image": picture(1), "image_2": picture(2), "last_frame": picture(3), "mask": picture(4, "RGBA")}


def copied(model: Any, device: torch.device) -> Any:
    """A model with weights in memory of their own: where weights lie in a file can change the last bits on a CPU."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


@contextmanager
def reference_weights() -> Iterator[None]:
    """Models that are loaded on the CPU have copies of their weights, as those on a GPU do."""
    with patch.object(base, "move_to", copied):
        yield


def load(folder: Path, device: str = "cpu", dtype: str = "float32", loras: str = "", **options: Any) -> LoadedModel:
    """Load all stages of a model. On the CPU, it is the reference for pretended GPUs."""
    family = find(folder)
    spec = family.model_spec("model", folder, dtype)
    runtime = RuntimeOptions(
        device, spec.dtypes, ComputeOptions(device=device, dtype=dtype, **options), loras, kv=1 << 24, shared_objects={}
    )
    if device != "cpu":
        return LoadedModel(spec, [(stage, family.load(stage, folder, runtime)) for stage in spec.pipeline.stages])
    with reference_weights():
        return LoadedModel(spec, [(stage, family.load(stage, folder, runtime)) for stage in spec.pipeline.stages])


def on_host(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Copies of tensors on the host, as they are between two workers."""
    return {name: None if tensor is None else tensor.cpu().clone() for name, tensor in tensors.items()}


def bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


class Phases:
    """Counts the waits of each phase of a request; without GPUs, none."""

    def __init__(self, gpus: PretendedGpus | None, run: Run) -> None:
        self._gpus, self._run = gpus, run

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._gpus is None:
            yield
            return
        self._gpus.records.clear()
        yield
        waits = Counter({" ".join(wait): count for wait, count in self._gpus.records.waits.items()})
        most = self._run.waits.setdefault(name, waits)
        if waits.total() > most.total():
            self._run.waits[name] = waits


def run_request(model: LoadedModel, params: Params, gpus: PretendedGpus | None = None, lora_id: str = "") -> Run:
    """Run a request by itself, and hand its tensors on as workers do: by the host."""
    run, tensors = Run(), dict[str, Any]()
    for spec, stage, task in tasks_of(model, params, tensors, lora_id):
        tensors |= _run_stage(spec.name, stage, task, run, Phases(gpus, run))
    return run


def tasks_of(
    model: LoadedModel, params: Params, tensors: Mapping[str, Any], lora_id: str = ""
) -> Iterator[tuple[StageSpec, Stage, StageInput]]:
    """The stages of a request and their tasks, in order. `tensors` has by then what stages before have made."""
    params = {"prompt": "a red circle", "seed": 1, "output_format": "png", **model.spec.defaults, **params}
    for spec, stage in model.stages:
        if spec.only_with and not params.get(spec.only_with):
            continue
        derived = DerivedFacts(image_hashes={name: "hash" for name in UPLOADS if params.get(name)}, lora_id=lora_id)
        uploads = {name: UPLOADS[name] for name in stage.uploads_of(derived)}
        inputs = {name: tensors[name] for name in spec.inputs if name in tensors}
        yield spec, stage, StageInput(params, inputs, uploads, derived=derived)


def _run_stage(name: str, stage: Stage, task: StageInput, run: Run, phases: Phases) -> Mapping[str, Any]:
    """Run a task to its end. Returns its tensors, on the host."""
    stage.verify(task)
    with phases.phase(f"{name} start"):
        state = stage.start(task)
    while len({*stage.progress(state)}) > 1:
        with phases.phase(f"{name} step"):
            (stepped,) = next_states(stage, [state])
        if isinstance(stepped, Exception):
            raise stepped
        state = stepped
        stage.new_chunks(state)
        if task.params.get("preview_every"):
            with phases.phase(f"{name} preview"):
                preview = stage.preview(state)
            run.outputs[f"{name} preview {stage.progress(state)[0]}"] = preview.data if preview else b""
    with phases.phase(f"{name} finish"):
        output = stage.finish(state)
    stage.release(state)
    made = on_host(output.tensors)
    run.outputs |= {f"{name} {key}": bytes_of(tensor) for key, tensor in made.items() if tensor is not None}
    run.outputs |= {f"{name} {number}": media.data for number, media in enumerate(output.media)}
    return made


def differing(expected: Run, found: Run) -> list[str]:
    """The outputs that are not equal."""
    names = {**expected.outputs, **found.outputs}
    return [name for name in names if expected.outputs.get(name) != found.outputs.get(name)]


def held_by(gpus: PretendedGpus) -> dict[str, int]:
    """The bytes of tensors that are reachable, by device."""
    gc.collect()
    return gpus.memory.held()
