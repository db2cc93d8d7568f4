"""Denoising: noise drawn from the request's seed becomes latents, step by step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from unfuse.core.errors import PermanentError
from unfuse.core.plan import Params
from unfuse.stages.base import StageInput, StageOutput, SteppedStage, need, need_tensor
from unfuse.stages.guidance import NEGATIVE, guided


class NoiseScheduler(Protocol):
    """A diffusers scheduler, as far as it is used: it keeps state, so each request has its own."""

    timesteps: Tensor

    def set_timesteps(self, num_inference_steps: int, device: torch.device) -> None:
        """Prepare for that many steps."""
        ...

    def set_begin_index(self, begin_index: int) -> None:
        """Start there."""
        ...

    def step(self, model_output: Tensor, timestep: Tensor, sample: Tensor, *, return_dict: bool) -> tuple[Tensor, ...]:
        """The sample after one step, first in a tuple when `return_dict` is false."""
        ...


class Denoiser(Protocol):
    """What a family says about denoising: transformer and noise scheduler configuration in memory."""

    @property
    def device(self) -> torch.device:
        """Where the transformer is."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """What the transformer computes in; floating-point inputs are given in it."""
        ...

    @property
    def embeds(self) -> Mapping[str, tuple[int | None, ...]]:
        """Shapes of the embeddings `predict` needs, by name; None is any length."""
        ...

    def latent_shape(self, params: Params) -> tuple[int, ...]:
        """Shape of a request's latents, with a batch axis of 1. Raises PermanentError for missing sizes."""
        ...

    def noise_scheduler(self) -> NoiseScheduler:
        """A new one, for one request."""
        ...

    def predict(self, latents: Tensor, timestep: Tensor, embeds: Mapping[str, Tensor]) -> Tensor:
        """The transformer's output for latents at a timestep (a scalar tensor)."""
        ...


@dataclass(frozen=True)
class DenoiseState:
    """A request between two steps. `negative` is None without guidance; `scheduler` changes with every step."""

    latents: Tensor
    timesteps: Tensor
    scheduler: NoiseScheduler
    guidance: float
    embeds: Mapping[str, Tensor]
    negative: Mapping[str, Tensor] | None
    step: int = 0


class Denoise(SteppedStage[DenoiseState]):
    """Embeddings in, `latents` out. Exact: each request has forwards of its own, so its mates change no bit of it."""

    kind = "denoise"

    def __init__(self, denoiser: Denoiser) -> None:
        self._denoiser = denoiser

    def verify(self, task: StageInput) -> None:
        """Raise PermanentError unless seed, steps and sizes are there, and the embeddings that guidance asks for."""
        need(task.params, "seed", int)
        if need(task.params, "num_inference_steps", int) < 1:
            raise PermanentError("num_inference_steps must be at least 1")
        self._denoiser.latent_shape(task.params)
        prefixes = ("", NEGATIVE) if guided(task.params) else ("",)
        for name, shape in self._denoiser.embeds.items():
            for prefix in prefixes:
                need_tensor(task, prefix + name, shape)

    def batch_key(self, params: Params) -> Hashable:
        """Requests of one size, all with or all without guidance."""
        return super().batch_key(params), guided(params)

    @torch.no_grad()
    def start(self, task: StageInput) -> DenoiseState:
        """Draw the noise: on the CPU in float32 whatever the device, so that a seed means one picture everywhere."""
        params, denoiser = task.params, self._denoiser
        generator = torch.Generator("cpu").manual_seed(need(params, "seed", int))
        noise = torch.randn(denoiser.latent_shape(params), generator=generator, dtype=torch.float32)
        scheduler = denoiser.noise_scheduler()
        scheduler.set_timesteps(need(params, "num_inference_steps", int), device=denoiser.device)
        scheduler.set_begin_index(0)
        return DenoiseState(
            noise.to(denoiser.device),
            scheduler.timesteps,
            scheduler,
            need(params, "guidance_scale", float),
            self._embeds(task, ""),
            self._embeds(task, NEGATIVE) if guided(params) else None,
        )

    @torch.no_grad()
    def step(self, batch: Sequence[DenoiseState]) -> list[DenoiseState]:
        """One step each. Raises PermanentError, before any scheduler moved, when a prediction is not finite."""
        predictions = [self._predict(state) for state in batch]
        return [self._advance(state, noise) for state, noise in zip(batch, predictions, strict=True)]

    def progress(self, state: DenoiseState) -> tuple[int, int]:
        """(steps done, steps in all); some noise schedulers take more than they were asked for."""
        return state.step, len(state.timesteps)

    def finish(self, state: DenoiseState) -> StageOutput:
        """The latents. Raises PermanentError when they are not finite."""
        _need_finite(state.latents, state)
        return StageOutput({"latents": state.latents})

    def _embeds(self, task: StageInput, prefix: str) -> Mapping[str, Tensor]:
        found = {name: task.tensors[prefix + name] for name in self._denoiser.embeds}
        return {name: t.to(self._denoiser.device, self._denoiser.dtype) for name, t in found.items() if t is not None}

    def _predict(self, state: DenoiseState) -> Tensor:
        """The operations of an undivided pipeline in its order: another order rounds differently."""
        timestep = state.timesteps[state.step]
        latents = state.latents.to(self._denoiser.dtype)
        prediction = self._denoiser.predict(latents, timestep, state.embeds)
        if state.negative is not None:
            without = self._denoiser.predict(latents, timestep, state.negative)
            prediction = without + state.guidance * (prediction - without)
        _need_finite(prediction, state)
        return prediction

    def _advance(self, state: DenoiseState, prediction: Tensor) -> DenoiseState:
        timestep = state.timesteps[state.step]
        latents = state.scheduler.step(prediction, timestep, state.latents, return_dict=False)[0]
        return replace(state, latents=latents, step=state.step + 1)


def _need_finite(tensor: Tensor, state: DenoiseState) -> None:
    if not bool(torch.isfinite(tensor).all()):
        steps = len(state.timesteps)
        raise PermanentError(
            f"denoising made values that are not finite at step {min(state.step + 1, steps)} of {steps}: "
            "try a smaller guidance_scale, or serve the model in float32"
        )
