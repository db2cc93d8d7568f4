"""A model's stages in this process, without server, scheduler or arena: what they compute, and nothing else."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from unfuse.core.compute_options import ComputeOptions
from unfuse.core.plan import Params, StageSpec
from unfuse.models import find
from unfuse.models.base import Report, RuntimeOptions
from unfuse.parallel.kernel_flags import set_kernel_flags
from unfuse.stages.base import Stage, StageInput, StageOutput, next_states
from unfuse.stages.denoise import Denoise, DenoiseState

Halves = Literal["apart", "fused"]
Made = dict[str, Tensor | None]
PROMPTS = ("a red circle on white", "a blue star on black", "a green ring on gray", "an orange cross on white")


class Model:
    """The stages of a model's folder by name that every request has, and requests for them."""

    def __init__(
        self,
        folder: Path,
        options: ComputeOptions | None = None,
        device: str = "cpu",
        report: Report | None = None,
        loras: str = "",
    ) -> None:
        options, family = options or ComputeOptions(), find(folder)
        set_kernel_flags(device, options.fp32_precision)
        self.card = family.model_spec("bench", folder, options.dtype)
        self.runtime = RuntimeOptions(device, self.card.dtypes, options, loras)
        self.specs = {spec.name: spec for spec in self.card.pipeline.stages if not spec.only_with}
        self.stages: dict[str, Stage] = {
            name: family.load(spec, folder, self.runtime, report) for name, spec in self.specs.items()
        }

    def denoise(self, halves: Halves) -> Denoise:
        """The denoise stage with its halves of guidance apart or fused, on the same weights."""
        (stage,) = (stage for stage in self.stages.values() if isinstance(stage, Denoise))
        return with_halves(Denoise(stage._denoiser, self.runtime.options), halves)

    def params(self, seed: int, **given: Any) -> Params:
        """A request's parameters, the model's defaults where nothing is given."""
        standard = {"prompt": PROMPTS[seed % len(PROMPTS)], "seed": seed, "output_format": "png"}
        return {**self.card.defaults, **standard, **given}

    def task(self, kind: str, params: Params, made: Made) -> tuple[StageSpec, StageInput]:
        """That stage's part of a request, of the tensors that the stages before it made."""
        spec = self.specs[kind]
        return spec, StageInput(params, {name: made[name] for name in spec.inputs if name in made})

    def run(self, kind: str, params: Params, made: Made) -> StageOutput:
        """One stage of a request; what it makes is added to `made`, in host memory, where workers exchange it."""
        spec, task = self.task(kind, params, made)
        (output,) = self.stages[spec.name].run([task])
        made.update({name: None if tensor is None else tensor.cpu() for name, tensor in output.tensors.items()})
        return output

    def encode(self, params: Params) -> Made:
        """What the stages before the denoiser make of a request."""
        made: Made = {}
        for name, spec in self.specs.items():
            if spec.kind.startswith("text_encode"):
                self.run(name, params, made)
        return made

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.runtime.device != "cpu":
            torch.cuda.synchronize(self.runtime.device)


def with_halves(stage: Denoise, halves: Halves) -> Denoise:
    """The stage with its halves of guidance always apart, or always in one forward, whatever its options are."""
    stage._fused = halves == "fused"
    stage.differs_alone = False
    return stage


@dataclass(frozen=True)
class Case:
    """Requests of one size (width, height, frames) and number of steps, by seed, with their prompts' embeddings."""

    model: Model
    made: list[Made]
    size: tuple[int, int, int]
    steps: int

    def params(self, seed: int) -> Params:
        width, height, frames = self.size
        sizes = {"width": width, "height": height, "num_frames": frames, "num_inference_steps": self.steps}
        return self.model.params(seed, **sizes)

    def start(self, stage: Denoise, seeds: list[int]) -> list[DenoiseState]:
        """These requests before their first step."""
        made = [self.made[seed % len(self.made)] for seed in seeds]
        return [
            stage.start(self.model.task("denoise", self.params(seed), tensors)[1])
            for seed, tensors in zip(seeds, made, strict=True)
        ]

    def step_seconds(self, halves: Halves, batch: int, steps: int) -> float:
        """Median seconds of a step of that many requests, after one that is not counted."""
        stage = self.model.denoise(halves)
        states, taken = self.start(stage, [*range(batch)]), []
        for _ in range(steps + 1):
            self.model.synchronize()
            began = time.perf_counter()
            states = advance(stage, states)
            self.model.synchronize()
            taken.append(time.perf_counter() - began)
        return median(taken[1:])

    def denoised(self, halves: Halves, seeds: list[int]) -> list[Tensor]:
        """The latents of these requests, stepped together from start to end."""
        stage = self.model.denoise(halves)
        states = self.start(stage, seeds)
        for _ in range(self.steps):
            states = advance(stage, states)
        return [state.latents.cpu() for state in states]


def advance(stage: Denoise, states: list[DenoiseState]) -> list[DenoiseState]:
    """One step of all of them."""
    stepped = []
    for state in next_states(stage, states):
        if isinstance(state, Exception):
            raise state
        stepped.append(state)
    return stepped
