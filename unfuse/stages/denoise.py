"""Denoising: noise drawn from the request's seed becomes latents, step by step.

Implements classifier-free guidance (also CFG parallel), LoRA adapters, the feature cache and checkpoints.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from unfuse.core.compute_options import ComputeOptions
from unfuse.core.errors import PermanentError
from unfuse.core.plan import Params
from unfuse.parallel.group import Mesh
from unfuse.stages.base import (
    CONDITIONAL,
    NEGATIVE,
    UNCONDITIONAL,
    Checkpoint,
    EncodedMedia,
    StageInput,
    StageOutput,
    SteppedStage,
    applies,
    need,
    need_tensor,
)
from unfuse.stages.batch_invariant_ops import one_by_one
from unfuse.stages.device_copies import HostCopy, to_device
from unfuse.stages.feature_cache import SIMILAR, FeatureCache, Memory
from unfuse.stages.image_encode import MOMENTS, DenoiseStart, KeptLatents, Redraw, layout, scaled
from unfuse.stages.media import remedy
from unfuse.stages.noise_scheduler_state import restore_scheduler, scheduler_state
from unfuse.stages.vae_decode import PreviewDecoder
from unfuse.weights.adapters import LoadedAdapters

#: Inputs of the transformer by name, each (1 or rows, …).
Inputs = Mapping[str, Tensor]


class NoiseScheduler(Protocol):
    """The methods of a diffusers scheduler that denoising uses.

    Each request has its own, because it has state.
    """

    #: The timestep of each step, (steps,).
    timesteps: Tensor
    #: The noise level before each step and after the last, (steps + 1,).
    sigmas: Tensor

    def scale_model_input(self, sample: Tensor, timestep: Tensor) -> Tensor:
        """Return the sample as the transformer expects it, of the same shape.

        Optional: without this method the transformer gets the sample itself.
        """

    def step(self, model_output: Tensor, timestep: Tensor, sample: Tensor, *, return_dict: bool) -> tuple[Tensor, ...]:
        """Return the sample after one step, (rows, …), first in a tuple.

        `return_dict` must be false.
        """


@dataclass(frozen=True)
class RowFacts:
    """The facts about one row of a forward that are in host memory.

    The forward therefore reads nothing back from the device.
    """

    #: The key of its timestep, by `Denoiser.phases`.
    phase: Hashable = ()
    #: The number of tokens that each mask leaves, in the order of `Denoiser.masks`.
    tokens: tuple[int, ...] = ()


class Denoiser(Protocol):
    """What a model family provides for denoising: its transformers and its noise scheduler's configuration."""

    #: The device of the transformers.
    device: torch.device
    #: The modules that predict; most families have one.
    transformers: tuple[torch.nn.Module, ...]
    #: The dtype of the transformers. Floating-point inputs are converted to it.
    dtype: torch.dtype
    #: Shapes of the inputs from the prompt, and under guidance from its negative. None is any length.
    embeds: Mapping[str, tuple[int | None, ...]]
    #: Shapes of further inputs of this kind, of integers. They keep their dtype.
    masks: Mapping[str, tuple[int | None, ...]]
    #: Shapes of further inputs, which both halves of guidance share. They keep their dtype.
    conditions: Mapping[str, tuple[int | None, ...]]
    #: CONDITIONAL or UNCONDITIONAL: which half of guidance comes first if an undivided pipeline computes both in one
    #: forward. "": the pipeline computes each half in its own forward.
    first: str

    def verify(self, params: Params) -> None:
        """Raise PermanentError unless the parameters have what the other methods read."""

    def guidance(self, params: Params) -> float:
        """Return the request's guidance scale."""

    def sample_noise(self, params: Params, generator: torch.Generator) -> Tensor:
        """Return noise as the request's first latents, (1, …), on the generator's device."""

    def constants(self, params: Params, inputs: Inputs) -> Inputs:
        """Return further inputs that `predict` needs of a request, each (1, …).

        Called once for each half of guidance.

        `inputs`: the inputs from the task, on the device. Constants replace those of equal names.
        """

    def noise_scheduler(self, params: Params, latents: Tensor) -> NoiseScheduler:
        """Return a new noise scheduler for a request with these latents, (1, …)."""

    def predict(
        self, latents: Tensor, timestep: Tensor, inputs: Inputs, params: Params, facts: Sequence[RowFacts]
    ) -> Tensor:
        """Return the transformer's output for these latents, (rows, …).

        `latents`: (rows, …). `timestep`: (rows,). `inputs`: each (rows, …). `params`: those of any row, because sizes
        are equal. `facts`: those of each row.
        """

    def combine(self, towards: Tensor, away: Tensor, scale: float, phase: Hashable, params: Params) -> Tensor:
        """Return one request's guided prediction, (1, …).

        `towards`, `away`: (1, …), the predictions for the prompt and for its negative. `scale`: the guidance scale,
        above 1. `phase`: the key of the timestep.
        """

    def phases(self, timesteps: Tensor) -> Sequence[Hashable]:
        """Return a key for each timestep.

        Rows must have equal keys to share a forward in an exact pool.

        Called once for each request, because reading timesteps waits for the device.
        """

    def rows_per_latent(self, latents: Tensor) -> int:
        """Return how many rows some modules of the transformer make of one row of latents."""

    def finish_latents(self, latents: Tensor, inputs: Inputs) -> Tensor:
        """Return one request's latents after its last step as the stage's output, (1, …)."""


@dataclass(frozen=True)
class DenoiseState:
    """A request between two denoising steps."""

    #: The parameters of the request.
    params: Params
    #: The latents after the last step, (1, …).
    latents: Tensor
    #: The noise scheduler. It changes with every step.
    scheduler: NoiseScheduler
    #: The guidance scale of the request. Guidance applies above 1.
    guidance: float
    #: The transformer's inputs for the prompt, each (1, …).
    inputs: Inputs
    #: The transformer's inputs for the negative prompt; None without guidance.
    negative: Inputs | None
    #: Identifies the LoRA adapters of the request; "": none.
    lora_id: str = ""
    #: The number of tokens that each mask leaves of the prompt, and of its negative.
    tokens: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
    #: The key of each timestep, by `Denoiser.phases`.
    phases: Sequence[Hashable] = ()
    #: The noise level before each step and after the last. Set for requests with previews only.
    sigmas: Sequence[float] = ()
    #: The steps done, with those that were skipped at the start.
    step: int = 0
    #: The number of steps that were skipped at the start.
    skipped_steps: int = 0
    #: The latents of a picture that must stay where its mask is 0, or None.
    kept_latents: KeptLatents | None = None
    #: The predicted final latents at the last step, (1, …), for previews.
    estimate: Tensor | None = None
    #: Whether the last prediction is finite: a flag on its way to the host. None before the first step.
    is_finite: HostCopy | None = None
    #: The cached residuals of the last forwards, if the request uses the feature cache.
    memory: Memory = field(default_factory=dict)

    @property
    def threshold(self) -> float:
        """The threshold of the feature cache; 0: it is off."""
        return float(self.params.get(SIMILAR) or 0.0)

    def half(self, *, is_negative: bool) -> Inputs:
        """Return the transformer's inputs for the prompt, or for its negative."""
        inputs = self.negative if is_negative else self.inputs
        assert inputs is not None
        return inputs

    def facts(self, *, is_negative: bool) -> RowFacts:
        """Return the facts of the next step's row for the prompt, or for its negative."""
        return RowFacts(self.phases[self.step], self.tokens[is_negative])


class Denoise(SteppedStage[DenoiseState]):
    """The denoising stage: embeddings in, `latents` out.

    Where the halves of guidance are computed:

    - Batched pool: both halves share a forward.
    - Exact pool: each half gets the bytes of a forward of its own. If the family sets `Denoiser.first`, both halves of
      a request share a forward, as in its undivided pipeline.
    - CFG parallel: each half has its own rank.

    A request that uses the feature cache (in a batched pool only) never shares a forward with others.

    `loras`: the adapters, or None if this worker serves none.
    `mesh`: the ranks over which the stage is spread, or None.
    `redraw`: how pictures are redrawn, or None if the family does not redraw.
    """

    kind = "denoise"

    def __init__(
        self,
        denoiser: Denoiser,
        options: ComputeOptions,
        preview: PreviewDecoder | None = None,
        loras: LoadedAdapters | None = None,
        mesh: Mesh | None = None,
        redraw: Redraw | None = None,
    ) -> None:
        self._denoiser = denoiser
        self._preview = preview
        self._adapters = loras
        self._is_spread = mesh is not None
        self._redraw = redraw
        self._feature_cache = FeatureCache(denoiser.transformers)

        self.exact = options.batching != "batched"
        self._cfg_axis = mesh.axis("cfg") if mesh is not None and "cfg" in mesh.degrees else None
        self._place_halves()
        self._noise_device = denoiser.device if options.noise_device != "cpu" else torch.device("cpu")

    def _place_halves(self) -> None:
        """Decide which halves of guidance share a forward."""
        self._paired = self.exact and bool(self._denoiser.first)
        self._fused = (self._paired or not self.exact) and self._cfg_axis is None
        self.differs_alone = self.exact and self._cfg_axis is None and not self._paired

    def use_batched(self) -> None:
        """Compute as in a batched pool, with both halves of guidance in one forward."""
        if self.exact:
            self.exact = False
            self._place_halves()

    def verify(self, task: StageInput) -> None:
        """Raise PermanentError unless the task has seed, steps, sizes and the tensors that guidance needs."""
        need(task.params, "seed", int)
        if need(task.params, "num_inference_steps", int) < 1:
            raise PermanentError("num_inference_steps must be at least 1")
        if task.derived.lora_id and self._adapters is None:
            raise PermanentError("LoRA adapters are disabled: start the server with --loras FOLDER")

        self._denoiser.verify(task.params)

        if task.params.get(SIMILAR):
            if self.exact:
                raise PermanentError(f"{SIMILAR} is not exact: it needs a pool with --batching batched")
            if self._is_spread:
                raise PermanentError(f"{SIMILAR} cannot be used if denoising is spread over ranks (--parallel)")
            self._feature_cache.install()

        prefixes = ("", NEGATIVE) if applies(self._denoiser.guidance(task.params)) else ("",)
        for prefix in prefixes:
            for name, shape in self._denoiser.embeds.items():
                need_tensor(task, prefix + name, shape)
            for name, shape in self._denoiser.masks.items():
                need_tensor(task, prefix + name, shape, integer=True)

        redraw_shapes = self._redraw.shapes(task) if self._redraw else {}
        for name, shape in {**self._denoiser.conditions, **redraw_shapes}.items():
            need_tensor(task, name, shape)

    def batch_key(self, task: StageInput) -> Hashable:
        """Return a key of sizes, text length, adapters, their scale, and whether guidance applies."""
        is_guided = applies(self._denoiser.guidance(task.params))
        shared_params = (task.params.get(name) for name in ("max_sequence_length", "lora", "lora_scale"))
        return super().batch_key(task), is_guided, task.derived.lora_id, *shared_params

    @torch.no_grad()
    def start(self, task: StageInput) -> DenoiseState:
        """Draw the noise and return the state before the first step.

        The noise is drawn on the CPU unless set otherwise, so that a seed gives the same picture on every device.
        """
        params, denoiser = task.params, self._denoiser
        generator = torch.Generator(self._noise_device).manual_seed(need(params, "seed", int))

        # The picture's sample comes before the noise: pipelines draw both from one generator, in this order.
        moments, grid = task.tensors.get(MOMENTS), None
        if self._redraw and moments is not None:
            grid = self._redraw.sample_latents(to_device(moments, denoiser.device), generator)
        noise = to_device(denoiser.sample_noise(params, generator), denoiser.device)
        scheduler, guidance = denoiser.noise_scheduler(params, noise), denoiser.guidance(params)

        denoise_start = DenoiseStart(scaled(scheduler, noise))
        if self._redraw and grid is not None:
            denoise_start = self._redraw.start(task, grid, noise, scheduler)

        inputs, negative = self._inputs(task, ""), self._inputs(task, NEGATIVE) if applies(guidance) else None
        tokens = self._tokens(task, ""), self._tokens(task, NEGATIVE) if applies(guidance) else ()
        return DenoiseState(
            params,
            denoise_start.latents,
            scheduler,
            guidance,
            inputs,
            negative,
            task.derived.lora_id,
            tokens,
            self._denoiser.phases(scheduler.timesteps),
            scheduler.sigmas.tolist() if params.get("preview_every") else (),
            denoise_start.step,
            denoise_start.step,
            denoise_start.kept_latents,
        )

    @torch.no_grad()
    def save(self, state: DenoiseState) -> Checkpoint:
        """Return a checkpoint: latents, the number of steps, and the changes of the noise scheduler.

        Raises PermanentError for latents that are not finite.
        """
        if not _is_finite(state):
            raise _not_finite(state, self._denoiser.dtype)
        fresh = self._denoiser.noise_scheduler(state.params, state.latents)
        tensors, values = scheduler_state(state.scheduler, fresh)
        return Checkpoint({"latents": state.latents.cpu(), **tensors}, {"step": state.step, "scheduler": values})

    @torch.no_grad()
    def resume(self, task: StageInput, checkpoint: Checkpoint) -> DenoiseState:
        """Return the state of a checkpoint.

        Raises PermanentError for a checkpoint with other shapes or steps than the task's.
        """
        initial = self.start(task)
        latents = checkpoint.tensors.get("latents")
        step = checkpoint.values.get("step")
        steps = range(len(initial.scheduler.timesteps))
        if latents is None or latents.shape != initial.latents.shape or not isinstance(step, int) or step not in steps:
            raise PermanentError(f"a checkpoint at step {step} does not match its task")

        restore_scheduler(initial.scheduler, checkpoint.tensors, checkpoint.values["scheduler"], initial.latents.device)

        # `empty_like` restores the memory layout, by which convolutions round: see `layout`.
        return replace(
            initial, latents=torch.empty_like(initial.latents, dtype=latents.dtype).copy_(latents), step=step
        )

    def exact_batch_key(self, state: DenoiseState) -> Hashable:
        """Return a key of mask lengths, shared shapes, the next step's phase and memory layout."""
        phase = state.phases[min(state.step, len(state.phases) - 1)]
        return state.tokens, self._sizes(state), phase, layout(state.latents)

    def step(self, batch: Sequence[DenoiseState]) -> list[Tensor | Exception]:
        """Return the predictions, each (1, …), or a PermanentError.

        The error says that the prediction of the step before is not finite.

        The host learns that one step late, when the device already computes the next one: it would wait otherwise.
        """
        positive, negative = batch[0].tokens
        return self._checked_predictions(batch, self._fused or (self.differs_alone and positive == negative))

    def step_alone(self, state: DenoiseState) -> Tensor | Exception:
        """Return the prediction, with both halves of guidance computed as in an undivided pipeline."""
        return self._checked_predictions([state], self._fused)[0]

    @torch.no_grad()
    def advance(self, state: DenoiseState, result: Tensor) -> DenoiseState:
        """Apply the noise scheduler to a prediction, (1, …). Returns the next state."""
        step, previous = state.step, state.latents
        latents = state.scheduler.step(result, state.scheduler.timesteps[step], previous, return_dict=False)[0]

        estimate = None
        if state.params.get("preview_every"):
            sigma, next_sigma = state.sigmas[step : step + 2]
            # The change of this step, continued to noise level 0.
            estimate = latents - next_sigma * (latents - previous) / (next_sigma - sigma)

        latents = state.kept_latents.apply_to(state.scheduler, latents, step + 1) if state.kept_latents else latents
        flag = HostCopy(torch.isfinite(result).all())
        return replace(state, latents=latents, step=step + 1, estimate=estimate, is_finite=flag)

    def progress(self, state: DenoiseState) -> tuple[int, int]:
        """Return (steps done, total steps), without the steps that were skipped at the start."""
        return state.step - state.skipped_steps, len(state.scheduler.timesteps) - state.skipped_steps

    @torch.no_grad()
    def preview(self, state: DenoiseState) -> EncodedMedia | None:
        """Return a small picture of the predicted final latents."""
        if self._preview is None or state.estimate is None:
            return None
        return self._preview.preview(self._denoiser.finish_latents(state.estimate, state.inputs), state.params)

    def finish(self, state: DenoiseState) -> StageOutput:
        """Return the latents, (1, …), in host memory. Raises PermanentError if not finite."""
        latents = self._denoiser.finish_latents(state.latents, state.inputs)
        host_latents, is_finite = HostCopy(latents, torch.isfinite(latents).all()).read()
        if not bool(is_finite):
            raise _not_finite(state, self._denoiser.dtype)
        return StageOutput({"latents": host_latents})

    def _inputs(self, task: StageInput, prefix: str) -> Inputs:
        """Return the transformer's inputs from a task's tensors, and the family's constants.

        `prefix`: "" or NEGATIVE, for the embeddings and masks.
        """
        device = self._denoiser.device
        dtype = self._denoiser.dtype
        embeds = self._denoiser.embeds
        names = {name: prefix + name for name in (*embeds, *self._denoiser.masks)}
        names |= {name: name for name in self._denoiser.conditions}
        tensors = {name: task.tensors[tensor_name] for name, tensor_name in names.items()}
        inputs = {
            name: to_device(tensor, device, dtype if name in embeds else tensor.dtype)
            for name, tensor in tensors.items()
            if tensor is not None
        }
        return {**inputs, **self._denoiser.constants(task.params, inputs)}

    def _tokens(self, task: StageInput, prefix: str) -> tuple[int, ...]:
        """Return how many tokens each mask of the task leaves. `prefix`: as in `_inputs`."""
        masks = (task.tensors[prefix + name] for name in self._denoiser.masks)
        return tuple(int(mask.sum()) for mask in masks if mask is not None)

    def _sizes(self, state: DenoiseState) -> tuple[torch.Size, ...]:
        """Return the shapes of the inputs that both halves of guidance share.

        Pictures may differ in shape at equal latents.
        """
        return tuple(state.inputs[name].shape for name in self._denoiser.conditions)

    @torch.no_grad()
    def _checked_predictions(self, batch: Sequence[DenoiseState], fused: bool) -> list[Tensor | Exception]:
        """Return the predictions of a batch, or an error.

        The error is for a state whose last prediction is not finite.

        `fused`: whether the halves of guidance share a forward.
        """
        if self._adapters is not None:
            self._adapters.use(batch[0].params, batch[0].lora_id)
        predictions = self._predict(batch, fused)
        dtype, rows = self._denoiser.dtype, enumerate(batch)
        return [predictions[row : row + 1] if _is_finite(state) else _not_finite(state, dtype) for row, state in rows]

    def _forward(
        self,
        latents: Tensor,
        timestep: Tensor,
        inputs: Inputs,
        params: Params,
        facts: Sequence[RowFacts],
        rows_per_request: int = 1,
    ) -> Tensor:
        """Return the prediction for rows, (rows, …), with batch invariance in exact pools.

        `rows_per_request`: how many adjacent rows belong to one request.
        """
        requests = len(latents) // rows_per_request if self.exact else 1
        with one_by_one(requests, rows_per_request * self._denoiser.rows_per_latent(latents)):
            return self._denoiser.predict(latents, timestep, inputs, params, facts)

    def _predict(self, batch: Sequence[DenoiseState], fused: bool) -> Tensor:
        """Return the predictions of a batch, (requests, …), guidance applied.

        Uses the operations of an undivided pipeline in its order, because another order rounds differently.
        """
        uses_feature_cache = any(state.threshold for state in batch)

        # Cached residuals belong to one request, and inputs of other shapes cannot be concatenated.
        if len(batch) > 1 and (uses_feature_cache or len({self._sizes(state) for state in batch}) > 1):
            return _concatenate([self._predict([state], fused) for state in batch])
        memory = batch[0].memory if uses_feature_cache else None
        use_memory = partial(self._feature_cache.use_memory, memory, batch[0].threshold)

        latents = _concatenate([_scaled_input(state) for state in batch]).to(self._denoiser.dtype)
        timestep = torch.stack([state.scheduler.timesteps[state.step] for state in batch])
        params, inputs = batch[0].params, _concatenate_inputs([state.inputs for state in batch])

        negatives = [state.negative for state in batch if state.negative is not None]

        if negatives and fused:
            with use_memory("both"):
                towards, away = self._predict_both_halves(batch, latents, timestep)
        else:

            def predict_half(name: str, half_inputs: Inputs) -> Tensor:
                facts = [state.facts(is_negative=name == UNCONDITIONAL) for state in batch]
                with use_memory(name):
                    return self._forward(latents, timestep, half_inputs, params, facts)

            if not negatives:
                return predict_half(CONDITIONAL, inputs)
            if self._cfg_axis is None:
                towards, away = (
                    predict_half(CONDITIONAL, inputs),
                    predict_half(UNCONDITIONAL, _concatenate_inputs(negatives)),
                )
            else:  # each half on a rank of its own, and both ranks get both
                is_away = self._cfg_axis.rank > 0
                own_half = (
                    predict_half(UNCONDITIONAL, _concatenate_inputs(negatives))
                    if is_away
                    else predict_half(CONDITIONAL, inputs)
                )
                towards, away = self._cfg_axis.gather(own_half).unbind(0)

        rows = [slice(row, row + 1) for row in range(len(batch))]
        combine = self._denoiser.combine
        return _concatenate(
            [
                combine(towards[row], away[row], state.guidance, state.phases[state.step], state.params)
                for row, state in zip(rows, batch, strict=True)
            ]
        )

    def _predict_both_halves(
        self, batch: Sequence[DenoiseState], latents: Tensor, timestep: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the predictions for the prompts and for their negatives, computed in one forward.

        `latents`: (requests, …). `timestep`: (requests,).
        """
        is_away_first = self._denoiser.first == UNCONDITIONAL
        order = (is_away_first, not is_away_first)
        inputs = _concatenate_inputs([state.half(is_negative=half) for state in batch for half in order])
        facts = [state.facts(is_negative=half) for state in batch for half in order]

        # `repeat_interleave` drops the memory layout.
        doubled_latents = latents.repeat_interleave(2, 0).contiguous(memory_format=layout(latents))
        doubled = doubled_latents, timestep.repeat_interleave(2, 0)
        halves = self._forward(*doubled, inputs, batch[0].params, facts, 2 if self._paired else 1)
        return halves[is_away_first::2], halves[not is_away_first :: 2]


def _scaled_input(state: DenoiseState) -> Tensor:
    """Return the latents, (1, …), as the transformer expects them."""
    if not hasattr(state.scheduler, "scale_model_input"):
        return state.latents
    return state.scheduler.scale_model_input(state.latents, state.scheduler.timesteps[state.step])


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate along the batch axis. A single tensor is returned itself, without a copy."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _concatenate_inputs(rows: Sequence[Inputs]) -> Inputs:
    """Concatenate the inputs of several requests, by name."""
    return {name: _concatenate([row[name] for row in rows]) for name in rows[0]}


def _is_finite(state: DenoiseState) -> bool:
    """Return whether the last prediction is finite, as far as there is one."""
    return state.is_finite is None or bool(state.is_finite.read()[0])


def _not_finite(state: DenoiseState, dtype: torch.dtype) -> PermanentError:
    """Return the error for values of the last step that are not finite."""
    return PermanentError(
        f"denoising produced values that are not finite at step {state.step} of {len(state.scheduler.timesteps)}: "
        f"{remedy('the model', dtype, state.params)}"
    )
