"""Denoising, whatever the transformer: noise, guidance, steps, and values that are no numbers."""

import io
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from unfuse.core.compute_options import ComputeOptions
from unfuse.core.errors import PermanentError
from unfuse.core.plan import Params
from unfuse.stages import denoise as module
from unfuse.stages.base import Stage, StageInput, guidance_scale, need, next_states
from unfuse.stages.denoise import Denoise, DenoiseState, RowFacts
from unfuse.stages.vae_decode import PreviewDecoder

PARAMS: Params = {
    "seed": 3,
    "num_inference_steps": 4,
    "guidance_scale": 3.0,
    "width": 16,
    "height": 8,
    "num_frames": 1,
}


class Subtract:
    """A noise scheduler that takes away a tenth of each prediction, and counts."""

    def __init__(self, steps: int) -> None:
        self.timesteps = torch.arange(steps, 0, -1)
        self.sigmas = torch.linspace(0.1 * steps, 0, steps + 1)
        self.steps = 0

    def step(self, model_output: Tensor, timestep: Tensor, sample: Tensor, *, return_dict: bool) -> tuple[Tensor, ...]:
        assert int(timestep) == len(self.timesteps) - self.steps
        self.steps += 1
        return (sample - 0.1 * model_output,)


class Constant:
    """A denoiser that predicts its embedding's value everywhere plus its condition, from timestep `bad` on NaN."""

    device = torch.device("cpu")
    dtype = torch.float32
    embeds = {"embeds": (1, None)}
    masks: Mapping[str, tuple[int | None, ...]] = {}
    transformers = ()
    first = ""

    def __init__(self, bad: int = 0, conditions: Mapping[str, tuple[int | None, ...]] | None = None) -> None:
        self.bad = bad
        self.conditions = conditions or {}
        self.weight = torch.ones(1, requires_grad=True)
        self.rows: list[int] = []
        self.facts: list[Sequence[RowFacts]] = []
        self.reads = 0

    def verify(self, params: Params) -> None:
        need(params, "height", int)

    def guidance(self, params: Params) -> float:
        return guidance_scale(params)

    def sample_noise(self, params: Params, generator: torch.Generator) -> Tensor:
        return torch.randn((1, 2, int(params["height"] or 0), int(params["width"] or 0)), generator=generator)

    def constants(self, params: Params, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"offset": torch.tensor([[float(params.get("offset") or 0.0)]])}

    def noise_scheduler(self, params: Params, latents: Tensor) -> Subtract:
        return Subtract(int(params["num_inference_steps"] or 0))

    def predict(
        self,
        latents: Tensor,
        timestep: Tensor,
        inputs: Mapping[str, Tensor],
        params: Params,
        facts: Sequence[RowFacts],
    ) -> Tensor:
        self.facts.append(facts)
        self.rows.append(len(latents))
        value = inputs["embeds"].mean(1) + inputs["offset"].sum(1)
        value = sum((inputs[name].mean(1) for name in self.conditions), value)
        value = torch.where(timestep <= self.bad, math.nan, value)
        return self.weight * value.view(-1, 1, 1, 1).expand_as(latents)

    def combine(self, towards: Tensor, away: Tensor, scale: float, phase: Hashable, params: Params) -> Tensor:
        return away + scale * (towards - away)

    def phases(self, timesteps: Tensor) -> Sequence[bool]:
        self.reads += 1
        is_early: list[bool] = (timesteps > 1).tolist()
        return is_early

    def rows_per_latent(self, latents: Tensor) -> int:
        return 1

    def finish_latents(self, latents: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        return latents


class Particular(Constant):
    """It takes a mask, guides one way early and the other late, and puts a row of its condition into the outcome."""

    masks = {"mask": (1, None)}

    def predict(
        self,
        latents: Tensor,
        timestep: Tensor,
        inputs: Mapping[str, Tensor],
        params: Params,
        facts: Sequence[RowFacts],
    ) -> Tensor:
        assert inputs["mask"].dtype == torch.int64
        return super().predict(latents, timestep, inputs, params, facts) * inputs["mask"].sum(1).view(-1, 1, 1, 1)

    def combine(self, towards: Tensor, away: Tensor, scale: float, phase: Hashable, params: Params) -> Tensor:
        return towards if phase else away * float(params["seed"] or 0)

    def finish_latents(self, latents: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([latents[:, :1], torch.zeros_like(latents[:, 1:])], 1)


class Picture:
    """A decoder whose grid is the first three channels it can make of the latents."""

    vae = None
    latents = (1, 2, None, None)

    def unpack(self, latents: Tensor, params: Params) -> Tensor:
        return latents[:, [0, 0, 0]].unsqueeze(2)

    def decode(self, grid: Tensor) -> Tensor:
        return grid


EXACT = ComputeOptions()
FUSED = ComputeOptions(batching="batched")


def denoise(options: ComputeOptions = EXACT, **given: Any) -> Denoise:
    return Denoise(Constant(**given), options)


def advance(stage: Denoise, *states: DenoiseState) -> list[DenoiseState]:
    """One step that succeeds for all."""
    stepped = next_states(stage, states)
    assert not any(isinstance(state, Exception) for state in stepped)
    return [state for state in stepped if isinstance(state, DenoiseState)]


def task(**changes: float | None) -> StageInput:
    tensors = {"embeds": torch.full((1, 5), 2.0), "negative_embeds": torch.full((1, 5), 1.0)}
    return StageInput({**PARAMS, **changes}, tensors)


def noise(seed: int) -> Tensor:
    return torch.randn((1, 2, 8, 16), generator=torch.Generator("cpu").manual_seed(seed))


def latents(found: object) -> Tensor:
    assert isinstance(found, Tensor)
    return found


def test_latents_start_as_seeded_noise_and_change_with_each_step() -> None:
    (output,) = denoise().run([task(guidance_scale=1.0)])

    made = latents(output.tensors["latents"])
    assert torch.allclose(made, noise(3) - 4 * 0.1 * 2.0)
    assert not made.requires_grad


def test_guidance_extrapolates_from_negative_to_prompt_prediction() -> None:
    (output,) = denoise().run([task(guidance_scale=3.0)])

    assert torch.allclose(latents(output.tensors["latents"]), noise(3) - 4 * 0.1 * (1.0 + 3.0 * (2.0 - 1.0)))


def test_denoise_does_not_use_the_global_random_generator() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()

    first, again = denoise().run([task(), task()])

    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(latents(first.tensors["latents"]), latents(again.tensors["latents"]))


def test_progress_counts_steps() -> None:
    stage = denoise()
    state = stage.start(task())
    seen = [stage.progress(state)]
    for _ in range(4):
        (state,) = advance(stage, state)
        seen.append(stage.progress(state))

    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize("options", [EXACT, FUSED])
def test_requests_at_different_steps_are_batched_together(options: ComputeOptions) -> None:
    """Each with its own seed, scale, number of steps and offset; the halves of guidance in one forward."""
    denoiser = Constant()
    stage = Denoise(denoiser, options)
    early, late = (
        stage.start(task(seed=1)),
        stage.start(task(seed=2, num_inference_steps=2, guidance_scale=2, offset=5)),
    )
    (early,) = advance(stage, early)
    denoiser.rows.clear()
    early, late = advance(stage, early, late)

    assert denoiser.rows == [4]
    assert (stage.progress(early), stage.progress(late)) == ((2, 4), (1, 2))
    assert torch.allclose(early.latents, noise(1) - 2 * 0.1 * 4.0)
    assert torch.allclose(late.latents, noise(2) - 0.1 * 8.0)


def test_image_condition_is_shared_by_both_guidance_halves() -> None:
    stage = denoise(conditions={"image": (1, None)})
    given = task()
    bare, ready = given, StageInput(given.params, {**given.tensors, "image": torch.full((1, 3), 10.0)})

    with pytest.raises(PermanentError, match="input image is missing"):
        stage.verify(bare)
    stage.verify(ready)
    (state,) = advance(stage, stage.start(ready))
    assert torch.allclose(state.latents, noise(3) - 0.1 * 14.0)


def masked(**changes: float | None) -> StageInput:
    given = task(**changes)
    masks = {"mask": torch.ones(1, 2, dtype=torch.int64), "negative_mask": torch.ones(1, 3, dtype=torch.int64)}
    return StageInput(given.params, {**given.tensors, **masks})


def test_attention_masks_must_be_integer_tensors() -> None:
    stage, good = Denoise(Particular(), EXACT), masked()

    stage.verify(good)
    stage.start(good)
    with pytest.raises(PermanentError, match="input negative_mask is missing"):
        stage.verify(StageInput(PARAMS, {**good.tensors, "negative_mask": None}))
    with pytest.raises(PermanentError, match="input mask must be integer of 1×any, not torch.float32"):
        stage.verify(StageInput(PARAMS, {**good.tensors, "mask": torch.ones(1, 2)}))


def test_family_combines_guidance_per_request_in_a_batch() -> None:
    """By its own timestep and parameters, also beside another in one forward: 2 × 2 towards, 1 × 3 × seed away."""
    stage = Denoise(Particular(), EXACT)
    early, late = stage.start(masked(seed=1)), stage.start(masked(seed=2, num_inference_steps=1))

    early, late = advance(stage, early, late)

    assert torch.allclose(early.latents, noise(1) - 0.1 * 4.0)
    assert torch.allclose(late.latents, noise(2) - 0.1 * 6.0)


def test_forward_is_given_the_facts_of_each_row_and_timesteps_are_read_once() -> None:
    """The phase and the tokens of prompt and negative, each half in a forward of its own."""
    denoiser = Particular()
    stage = Denoise(denoiser, EXACT)
    state = stage.start(masked())
    for _ in range(4):
        (state,) = advance(stage, state)

    phases = [True, True, True, False]
    assert denoiser.facts == [[RowFacts(phase, (tokens,))] for phase in phases for tokens in (2, 3)]
    assert denoiser.reads == 1


def test_family_hook_transforms_final_latents_and_previews() -> None:
    stage = Denoise(Particular(), EXACT, PreviewDecoder(Picture))
    (state,) = advance(stage, stage.start(masked(num_inference_steps=1, preview_every=1)))

    made = latents(stage.finish(state).tensors["latents"])

    assert torch.equal(made[:, :1], state.latents[:, :1])
    assert not made[:, 1:].any()
    assert stage.preview(state) is not None


def test_non_finite_latents_fail_only_their_request_and_name_the_step() -> None:
    stage = denoise(bad=2)
    late, early = stage.start(task()), stage.start(task(seed=1, num_inference_steps=9))
    for _ in range(3):
        (late,) = advance(stage, late)
    with pytest.raises(PermanentError, match="not finite at step 3 of 4"):
        stage.save(late)

    failed, early = next_states(stage, [late, early])

    assert isinstance(failed, PermanentError)
    assert "not finite at step 3 of 4: try a smaller guidance_scale" in str(failed)
    assert isinstance(early, DenoiseState)
    assert torch.allclose(early.latents, noise(1) - 0.1 * 4.0)


class LateFlag:
    """A flag that may not be read before the next forward has begun."""

    def __init__(self, tensors: Sequence[Tensor], forwards: list[int]) -> None:
        self._tensors, self._forwards, self._made_at = [*tensors], forwards, len(forwards)

    def read(self) -> list[Tensor]:
        is_result = len(self._tensors) > 1  # which has to be awaited
        assert is_result or len(self._forwards) > self._made_at, "the host would wait for the device here"
        return self._tensors


def test_flag_of_a_step_is_read_after_the_next_forward_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    denoiser = Constant()
    monkeypatch.setattr(module, "HostCopy", lambda *tensors: LateFlag(tensors, denoiser.rows))
    stage = Denoise(denoiser, EXACT)
    state = stage.start(task())
    for _ in range(4):
        (state,) = advance(stage, state)
    assert stage.finish(state).tensors


@pytest.mark.parametrize("steps", [1, 3])
def test_non_finite_prediction_of_the_last_step_fails_the_result(steps: int) -> None:
    stage = denoise(bad=1)
    state = stage.start(task(num_inference_steps=steps))
    for _ in range(steps):
        (state,) = advance(stage, state)
    with pytest.raises(PermanentError, match=f"not finite at step {steps} of {steps}"):
        stage.finish(state)


def test_preview_shows_the_estimated_final_latents() -> None:
    stage = Denoise(Constant(), EXACT, PreviewDecoder(Picture))
    state = stage.start(task(preview_every=1, num_inference_steps=8, width=96, height=48))
    (state,) = advance(stage, state)
    assert state.estimate is not None
    end = state
    for _ in range(7):
        (end,) = advance(stage, end)
    assert torch.allclose(state.estimate, end.latents, atol=1e-5)

    media = stage.preview(state)

    assert media is not None
    assert Image.open(io.BytesIO(media.data)).size == (32, 16)
    assert media.content_type == "image/jpeg"


def test_no_preview_estimate_is_stored_without_preview_every() -> None:
    stage = Denoise(Constant(), EXACT, PreviewDecoder(Picture))
    (state,) = advance(stage, stage.start(task()))
    assert state.estimate is None
    assert stage.preview(state) is None


def test_non_finite_latents_after_the_last_step_raise_permanent_error() -> None:
    stage = denoise()
    state = stage.start(task(num_inference_steps=1))
    (state,) = advance(stage, state)
    state.latents[0, 0, 0, 0] = math.inf

    with pytest.raises(PermanentError, match="step 1 of 1"):
        stage.finish(state)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": None},
        {"seed": 0.5},
        {"num_inference_steps": 0},
        {"num_inference_steps": None},
        {"guidance_scale": None},
    ],
)
def test_verify_rejects_missing_or_invalid_parameters(change: dict[str, float | None]) -> None:
    with pytest.raises(PermanentError, match=next(iter(change))):
        denoise().verify(task(**change))


def test_negative_embeddings_are_required_only_with_guidance() -> None:
    stage = denoise()
    tensors = {"embeds": torch.zeros(1, 5), "negative_embeds": None}

    stage.verify(StageInput({**PARAMS, "guidance_scale": 1.0}, tensors))
    with pytest.raises(PermanentError, match="input negative_embeds is missing"):
        stage.verify(StageInput(PARAMS, tensors))


def key(stage: Stage, params: Params) -> Hashable:
    return stage.batch_key(StageInput(params, {}))


def test_batch_key_separates_guidance_size_and_sequence_length() -> None:
    stage = denoise()

    assert key(stage, PARAMS) == stage.batch_key(StageInput({**PARAMS, "seed": 9, "guidance_scale": 7.5}, {}))
    assert key(stage, PARAMS) != key(stage, {**PARAMS, "guidance_scale": 1.0})
    assert key(stage, PARAMS) != key(stage, {**PARAMS, "width": 32})
    assert key(stage, PARAMS) != stage.batch_key(StageInput({**PARAMS, "max_sequence_length": 32}, {}))
