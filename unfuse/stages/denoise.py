"""Denoising: noise drawn from the request's seed becomes latents, step by step."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from unfuse.core.compute_options import ComputeOptions
from unfuse.core.errors import PermanentError
from unfuse.core.plan import Params
from unfuse.parallel.group import Mesh
from unfuse.stages.base import (
    AWAY,
    NEGATIVE,
    TOWARDS,
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
from unfuse.stages.image_encode import MOMENTS, DenoiseStart, KeptLatents, Redraw, layout, scaled
from unfuse.stages.media import remedy
from unfuse.stages.vae_decode import PreviewDecoder
from unfuse.weights.adapters import LoadedAdapters

Inputs = Mapping[str, Tensor]

PLAIN = (int, float, str, bool, type(None))  # types of what a noise scheduler remembers beside tensors and lists

LEADER = "fbc_leader_block_hook"  # the name of diffusers' hook on the first block
NEVER = -1.0  # a threshold below every difference: every block runs, and the result is exact
Memory = dict[int, dict[str, Any]]  # what each transformer remembered, by the names of its forwards
SIMILAR = "feature_cache"  # the parameter by which a request allows blocks to be skipped


class NoiseScheduler(Protocol):
    """What is used of a diffusers scheduler. It has state, so each request has its own."""

    timesteps: Tensor
    sigmas: Tensor

    def scale_model_input(self, sample: Tensor, timestep: Tensor) -> Tensor:
        """The sample as the transformer is to see it; where there is no such method, it sees it as it is."""

    def step(self, model_output: Tensor, timestep: Tensor, sample: Tensor, *, return_dict: bool) -> tuple[Tensor, ...]:
        """The sample after one step, first in a tuple when `return_dict` is false."""


class Denoiser(Protocol):
    """What a family provides for denoising: its transformer, and the noise scheduler's configuration."""

    device: torch.device
    """The device of the transformer."""
    transformers: tuple[torch.nn.Module, ...]
    """The modules that predict; most families have one."""
    dtype: torch.dtype
    """The dtype of the transformer; floating-point inputs are converted to it."""
    embeds: Mapping[str, tuple[int | None, ...]]
    """Shapes of the inputs made from the prompt, and under guidance from its negative too; None is any length."""
    masks: Mapping[str, tuple[int | None, ...]]
    """Shapes of further such inputs, of whole numbers: they keep their dtype."""
    conditions: Mapping[str, tuple[int | None, ...]]
    """Shapes of further inputs, which both halves of guidance share; they keep their dtype."""
    first: str
    """TOWARDS or AWAY: the half of guidance that comes first in the forward which both share in an undivided
    pipeline; "" where each has its own.
    """

    def verify(self, params: Params) -> None:
        """Raise PermanentError unless the parameters hold what the other methods read."""

    def guidance(self, params: Params) -> float:
        """The request's guidance scale."""

    def draw(self, params: Params, generator: torch.Generator) -> Tensor:
        """Noise as the request's first latents, with a batch axis of 1, on the generator's device."""

    def constants(self, params: Params) -> Inputs:
        """What `predict` needs of a request beside the inputs, with a batch axis of 1."""

    def noise_scheduler(self, params: Params, latents: Tensor) -> NoiseScheduler:
        """A new noise scheduler for one request, at its first step."""

    def predict(self, latents: Tensor, timestep: Tensor, inputs: Inputs, params: Params) -> Tensor:
        """The transformer's output for latents (rows, …) at timesteps (rows); `params` are any row's: sizes agree."""

    def combine(self, towards: Tensor, away: Tensor, scale: float, timestep: Tensor, params: Params) -> Tensor:
        """One request's prediction, of those for its prompt and its negative, at a guidance scale above 1."""

    def phase(self, timestep: Tensor) -> Hashable:
        """What timesteps must have in common, so that rows are computed in one forward."""

    def parts(self, latents: Tensor) -> int:
        """How many rows the transformer makes of one, somewhere inside."""

    def settle(self, latents: Tensor, inputs: Inputs) -> Tensor:
        """One request's latents after its last step, in the form that is handed on."""


class FeatureCache:
    """Skips most of a transformer while its first block says that little has changed since the step before.

    First-block caching, as diffusers has it (https://github.com/chengzeyi/ParaAttention, after TeaCache,
    arXiv:2411.19108): when what the first block adds differs from last time by less than a share, the other blocks are
    taken to add what they added last time. diffusers remembers that in its hooks; here each request has its own memory,
    which goes with its state. Hooks are installed when a request first asks for them.
    """

    def __init__(self, transformers: Sequence[Any]) -> None:
        self._transformers = transformers
        self._hooks: list[tuple[Any, Any]] = []

    def install(self) -> None:
        """Raise PermanentError for a transformer that cannot skip its blocks."""
        from diffusers import FirstBlockCacheConfig

        for transformer in self._transformers[len(self._hooks) :]:
            try:
                transformer.enable_cache(FirstBlockCacheConfig(threshold=NEVER))
            except (AttributeError, ValueError, IndexError) as error:
                name = type(transformer).__name__
                raise PermanentError(f"feature_cache: {name} cannot skip its blocks: leave it out") from error
            registries = (getattr(module, "_diffusers_hook", None) for module in transformer.modules())
            leader = next(hook for registry in registries if registry and (hook := registry.get_hook(LEADER)))
            self._hooks.append((transformer, leader))

    @contextmanager
    def remembering(self, memory: Memory | None, threshold: float, forward: str) -> Iterator[None]:
        """Run the forward of that name with what its request remembers; without `memory` none is used or left.

        A `threshold` is the share by which the first block's effect may differ for the others to be skipped.
        """
        with ExitStack() as contexts:
            for number, (transformer, hook) in enumerate(self._hooks):
                hook.threshold = NEVER if memory is None else threshold
                hook.state_manager._state_cache = {} if memory is None else memory.setdefault(number, {})
                contexts.enter_context(transformer.cache_context(forward))
            yield


@dataclass(frozen=True)
class DenoiseState:
    """A request between two steps. `negative` is None without guidance; `scheduler` changes with every step."""

    params: Params
    latents: Tensor
    scheduler: NoiseScheduler
    guidance: float
    inputs: Inputs
    negative: Inputs | None
    lora_id: str = ""
    tokens: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
    """How many tokens of the prompt, and of its negative, each mask leaves; in exact pools."""
    step: int = 0
    begin: int = 0
    """How many steps were not to be made."""
    kept: KeptLatents | None = None
    estimate: Tensor | None = None
    """The predicted final latents at the last step, for previews."""
    memory: Memory = field(default_factory=dict)
    """Results of the last forwards that may be used again, if the request allows that."""

    @property
    def threshold(self) -> float:
        """The largest change for which they are used again; 0: never."""
        return float(self.params.get(SIMILAR) or 0.0)


class Denoise(SteppedStage[DenoiseState]):
    """Embeddings in, `latents` out. In an exact pool, what counts is what each half of guidance gives by itself.

    A request that allows blocks to be skipped, in a batched pool, has forwards of its own: what it skips is its affair.
    `redraw` says how pictures are redrawn, if the family does that.
    """

    kind = "denoise"

    def __init__(
        self, denoiser: Denoiser, options: ComputeOptions, preview: PreviewDecoder | None = None,
        loras: LoadedAdapters | None = None, mesh: Mesh | None = None, redraw: Redraw | None = None,
    ) -> None:  # fmt: skip
        self._denoiser, self._preview, self._adapters, self._is_spread = denoiser, preview, loras, mesh is not None
        self._features, self._redraw = FeatureCache(denoiser.transformers), redraw
        self.exact = options.batching != "batched"
        self._apart = mesh.axis("cfg") if mesh is not None and "cfg" in mesh.degrees else None
        self._paired = self.exact and bool(denoiser.first)
        self._fused = (self._paired or not self.exact) and self._apart is None
        self.differs_alone = self.exact and self._apart is None and not self._paired
        self._noise_device = denoiser.device if options.noise_device != "cpu" else torch.device("cpu")

    def verify(self, task: StageInput) -> None:
        """Raise PermanentError unless seed, steps and sizes are there, and the inputs that guidance asks for."""
        need(task.params, "seed", int)
        if need(task.params, "num_inference_steps", int) < 1:
            raise PermanentError("num_inference_steps must be at least 1")
        if task.derived.lora_id and self._adapters is None:
            raise PermanentError("this worker serves no loras: start its server with --loras FOLDER too")
        self._denoiser.verify(task.params)
        if task.params.get(SIMILAR):
            if self.exact:
                raise PermanentError(f"{SIMILAR} is not exact: it needs a pool with --batching batched")
            if self._is_spread:
                raise PermanentError(f"{SIMILAR} cannot be used where denoising is spread over ranks (--parallel)")
            self._features.install()
        prefixes = ("", NEGATIVE) if applies(self._denoiser.guidance(task.params)) else ("",)
        for prefix in prefixes:
            for name, shape in self._denoiser.embeds.items():
                need_tensor(task, prefix + name, shape)
            for name, shape in self._denoiser.masks.items():
                need_tensor(task, prefix + name, shape, whole=True)
        redraws = self._redraw.shapes(task) if self._redraw else {}
        for name, shape in {**self._denoiser.conditions, **redraws}.items():
            need_tensor(task, name, shape)

    def batch_key(self, task: StageInput) -> Hashable:
        """Requests of one size, text length and adapters at one scale, all with or all without guidance."""
        guided = applies(self._denoiser.guidance(task.params))
        shared = (task.params.get(name) for name in ("max_sequence_length", "lora", "lora_scale"))
        return super().batch_key(task), guided, task.derived.lora_id, *shared

    @torch.no_grad()
    def start(self, task: StageInput) -> DenoiseState:
        """Draw the noise, on the CPU whatever the device unless set otherwise: a seed means one picture everywhere."""
        params, denoiser = task.params, self._denoiser
        generator = torch.Generator(self._noise_device).manual_seed(need(params, "seed", int))
        moments, grid = task.tensors.get(MOMENTS), None
        if self._redraw and moments is not None:
            grid = self._redraw.draw(moments.to(denoiser.device), generator)
        noise = denoiser.draw(params, generator).to(denoiser.device)
        scheduler, scale = denoiser.noise_scheduler(params, noise), denoiser.guidance(params)
        made = DenoiseStart(scaled(scheduler, noise))
        if self._redraw and grid is not None:
            made = self._redraw.begin(task, grid, noise, scheduler)
        inputs, negative = self._inputs(task, ""), self._inputs(task, NEGATIVE) if applies(scale) else None
        tokens = self._tokens(inputs), self._tokens(negative)
        return DenoiseState(
            params,
            made.latents,
            scheduler,
            scale,
            inputs,
            negative,
            task.derived.lora_id,
            tokens,
            made.step,
            made.step,
            made.kept,
        )

    @torch.no_grad()
    def save(self, state: DenoiseState) -> Checkpoint:
        """Latents, the number of steps, and the state of the noise scheduler."""
        fresh = self._denoiser.noise_scheduler(state.params, state.latents)
        tensors, remembered = scheduler_state(state.scheduler, fresh)
        return Checkpoint({"latents": state.latents.cpu(), **tensors}, {"step": state.step, "scheduler": remembered})

    @torch.no_grad()
    def resume(self, task: StageInput, checkpoint: Checkpoint) -> DenoiseState:
        """A state as at the start, with what was saved."""
        begun, saved, step = self.start(task), checkpoint.tensors.get("latents"), checkpoint.values.get("step")
        steps = range(len(begun.scheduler.timesteps))
        if saved is None or saved.shape != begun.latents.shape or not isinstance(step, int) or step not in steps:
            raise PermanentError(f"a checkpoint at step {step} does not fit its task")
        restore_scheduler(begun.scheduler, checkpoint.tensors, checkpoint.values["scheduler"], begun.latents.device)
        return replace(begun, latents=torch.empty_like(begun.latents, dtype=saved.dtype).copy_(saved), step=step)

    def exact_batch_key(self, state: DenoiseState) -> Hashable:
        """How many tokens the masks leave of each text, sizes of what is given, what steps next, the layout."""
        timesteps = state.scheduler.timesteps
        phase = self._denoiser.phase(timesteps[min(state.step, len(timesteps) - 1)])
        return state.tokens, self._sizes(state), phase, layout(state.latents)

    def step(self, batch: Sequence[DenoiseState]) -> list[Tensor | Exception]:
        """Predictions; a request whose own is not finite gets a PermanentError, and its mates go on."""
        positive, negative = batch[0].tokens
        return self._predictions(batch, self._fused or (self.differs_alone and positive == negative))

    def step_alone(self, state: DenoiseState) -> Tensor | Exception:
        """The prediction, of both halves of guidance as an undivided pipeline computes them."""
        return self._predictions([state], self._fused)[0]

    @torch.no_grad()
    def advance(self, state: DenoiseState, result: Tensor) -> DenoiseState:
        """What the noise scheduler makes of a prediction."""
        step, before = state.step, state.latents
        latents = state.scheduler.step(result, state.scheduler.timesteps[step], before, return_dict=False)[0]
        estimate = None
        if state.params.get("preview_every"):
            sigma, next_sigma = state.scheduler.sigmas[step : step + 2].tolist()
            estimate = latents - next_sigma * (latents - before) / (next_sigma - sigma)
        latents = state.kept.over(state.scheduler, latents, step + 1) if state.kept else latents
        return replace(state, latents=latents, step=step + 1, estimate=estimate)

    def progress(self, state: DenoiseState) -> tuple[int, int]:
        """(steps done, steps in all); those that a picture spares do not count."""
        return state.step - state.begin, len(state.scheduler.timesteps) - state.begin

    @torch.no_grad()
    def preview(self, state: DenoiseState) -> EncodedMedia | None:
        """A small picture of the predicted final latents."""
        if self._preview is None or state.estimate is None:
            return None
        return self._preview.picture(self._denoiser.settle(state.estimate, state.inputs), state.params)

    def finish(self, state: DenoiseState) -> StageOutput:
        """The latents. Raises PermanentError when they are not finite."""
        latents = self._denoiser.settle(state.latents, state.inputs)
        if not bool(torch.isfinite(latents).all()):
            raise _not_finite(state, self._denoiser.dtype)
        return StageOutput({"latents": latents})

    def _inputs(self, task: StageInput, prefix: str) -> Inputs:
        device, dtype, embeds = self._denoiser.device, self._denoiser.dtype, self._denoiser.embeds
        names = {name: prefix + name for name in (*embeds, *self._denoiser.masks)}
        names |= {name: name for name in self._denoiser.conditions}
        found = {name: task.tensors[given] for name, given in names.items()}
        given = {n: t.to(device, dtype if n in embeds else t.dtype) for n, t in found.items() if t is not None}
        return {**given, **self._denoiser.constants(task.params)}

    def _tokens(self, inputs: Inputs | None) -> tuple[int, ...]:
        """How many tokens each mask leaves; in an exact pool that may decide how a batch is computed."""
        masks = [inputs[name] for name in self._denoiser.masks] if self.exact and inputs else []
        return tuple(int(mask.sum()) for mask in masks)

    def _sizes(self, state: DenoiseState) -> tuple[torch.Size, ...]:
        """The shapes of what both halves share: those of pictures may differ where the latents do not."""
        return tuple(state.inputs[name].shape for name in self._denoiser.conditions)

    @torch.no_grad()
    def _predictions(self, batch: Sequence[DenoiseState], fused: bool) -> list[Tensor | Exception]:
        if self._adapters is not None:
            self._adapters.use(batch[0].params, batch[0].lora_id)
        predictions = self._predict(batch, fused)
        finite = torch.isfinite(predictions).flatten(1).all(1).tolist()
        dtype, rows = self._denoiser.dtype, enumerate(batch)
        return [predictions[row : row + 1] if finite[row] else _not_finite(state, dtype) for row, state in rows]

    def _forward(self, latents: Tensor, timestep: Tensor, inputs: Inputs, params: Params, of: int = 1) -> Tensor:
        """What is predicted for rows of which `of` belong together, as in the forward that they have alone."""
        with one_by_one(len(latents) // of if self.exact else 1, of * self._denoiser.parts(latents)):
            return self._denoiser.predict(latents, timestep, inputs, params)

    def _predict(self, batch: Sequence[DenoiseState], fused: bool) -> Tensor:
        """The operations of an undivided pipeline, in its order, since another order rounds differently."""
        skipping = any(state.threshold for state in batch)
        if len(batch) > 1 and (skipping or len({self._sizes(state) for state in batch}) > 1):
            return _join([self._predict([state], fused) for state in batch])
        remembering = partial(self._features.remembering, batch[0].memory if skipping else None, batch[0].threshold)
        latents = _join([_seen(state) for state in batch]).to(self._denoiser.dtype)
        timestep = torch.stack([state.scheduler.timesteps[state.step] for state in batch])
        params, inputs = batch[0].params, _joined([state.inputs for state in batch])
        negatives = [state.negative for state in batch if state.negative is not None]
        if negatives and fused:
            turned = self._denoiser.first == AWAY
            pairs = zip(negatives, (state.inputs for state in batch), strict=True)
            both = _joined([half for pair in pairs for half in (pair if turned else reversed(pair))])
            doubled = latents.repeat_interleave(2, 0).contiguous(memory_format=layout(latents))
            twice = doubled, timestep.repeat_interleave(2, 0)
            with remembering("both"):
                halves = self._forward(*twice, both, params, 2 if self._paired else 1)
            towards, away = halves[turned::2], halves[not turned :: 2]
        else:

            def half(name: str, given: Inputs) -> Tensor:
                with remembering(name):
                    return self._forward(latents, timestep, given, params)

            if not negatives:
                return half(TOWARDS, inputs)
            if self._apart is None:
                towards, away = half(TOWARDS, inputs), half(AWAY, _joined(negatives))
            else:  # each half on a rank of its own, and both ranks get both
                own = half(AWAY, _joined(negatives)) if self._apart.rank else half(TOWARDS, inputs)
                towards, away = self._apart.gather(own).unbind(0)
        rows = [slice(row, row + 1) for row in range(len(batch))]
        combine = self._denoiser.combine
        return _join(
            [combine(towards[r], away[r], s.guidance, timestep[r], s.params) for r, s in zip(rows, batch, strict=True)]
        )


def _seen(state: DenoiseState) -> Tensor:
    """The latents as the transformer is to see them."""
    if not hasattr(state.scheduler, "scale_model_input"):
        return state.latents
    return state.scheduler.scale_model_input(state.latents, state.scheduler.timesteps[state.step])


def _join(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _joined(rows: Sequence[Inputs]) -> Inputs:
    return {name: _join([row[name] for row in rows]) for name in rows[0]}


def _not_finite(state: DenoiseState, dtype: torch.dtype) -> PermanentError:
    steps = len(state.scheduler.timesteps)
    return PermanentError(
        f"denoising produced values that are not finite at step {min(state.step + 1, steps)} of {steps}: "
        f"{remedy('the model', dtype, state.params)}"
    )


def scheduler_state(scheduler: object, fresh: object) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Copied tensors and plain values that tell a scheduler from a fresh one. Raises PermanentError for others.

    A scheduler made anew for the same request has all the rest, so only what has changed since is saved: of a
    first-order one the index of the step, of a multistep one its last predictions too.
    """
    tensors: dict[str, Tensor] = {}
    before = vars(fresh)
    changed = {n: value for n, value in vars(scheduler).items() if n not in before or not _equal(value, before[n])}
    return tensors, {name: _taken(f"scheduler.{name}", value, tensors) for name, value in changed.items()}


def restore_scheduler(
    scheduler: object, tensors: Mapping[str, Tensor | None], values: Mapping[str, Any], device: Any
) -> None:
    """Give a fresh scheduler what `scheduler_state` found; tensors that were not on the CPU go to the device."""
    for name, value in values.items():
        setattr(scheduler, name, _put_back(value, tensors, device))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and bool(one == other)


def _taken(name: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value in terms of plain ones; a tensor becomes [its name, whether it was on the CPU]."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach().to("cpu", copy=True)
        return {"tensor": name, "cpu": value.device.type == "cpu"}
    if isinstance(value, list):
        return [_taken(f"{name}.{index}", part, tensors) for index, part in enumerate(value)]
    if isinstance(value, PLAIN):
        return value
    raise PermanentError(f"a noise scheduler with a {type(value).__name__} in {name} cannot be saved between steps")


def _put_back(value: Any, tensors: Mapping[str, Tensor | None], device: Any) -> Any:
    if isinstance(value, dict):
        tensor = tensors[value["tensor"]]
        assert tensor is not None
        return tensor.clone() if value["cpu"] else tensor.to(device, copy=True)
    if isinstance(value, list):
        return [_put_back(part, tensors, device) for part in value]
    return value
