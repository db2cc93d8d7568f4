"""Denoising, whatever the transformer: noise, guidance, steps, and values that are no numbers."""

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from unfuse.core.errors import PermanentError
from unfuse.core.plan import Params
from unfuse.stages.base import StageInput
from unfuse.stages.denoise import Denoise

PARAMS: Params = {
    "seed": 3, "num_inference_steps": 4, "guidance_scale": 3.0, "width": 16, "height": 8, "num_frames": 1,
}  # fmt: skip


class Subtract:
    """A noise scheduler that takes away a tenth of each prediction, and counts."""

    timesteps = torch.tensor([])
    steps = 0

    def set_timesteps(self, num_inference_steps: int, device: torch.device) -> None:
        self.timesteps = torch.arange(num_inference_steps, 0, -1, device=device)

    def set_begin_index(self, begin_index: int) -> None:
        self.steps = begin_index

    def step(self, model_output: Tensor, timestep: Tensor, sample: Tensor, *, return_dict: bool) -> tuple[Tensor, ...]:
        assert int(timestep) == len(self.timesteps) - self.steps
        self.steps += 1
        return (sample - 0.1 * model_output,)


class Constant:
    """A denoiser that predicts its embedding's value everywhere, from timestep `bad` on NaN."""

    device = torch.device("cpu")
    dtype = torch.float32
    embeds = {"embeds": (1, None)}

    def __init__(self, bad: int = 0) -> None:
        self.bad = bad
        self.weight = torch.ones(1, requires_grad=True)

    def latent_shape(self, params: Params) -> tuple[int, ...]:
        return (1, 2, int(params["height"] or 0), int(params["width"] or 0))

    def noise_scheduler(self) -> Subtract:
        return Subtract()

    def predict(self, latents: Tensor, timestep: Tensor, embeds: Mapping[str, Tensor]) -> Tensor:
        value = math.nan if int(timestep) <= self.bad else float(embeds["embeds"].mean())
        return self.weight * torch.full_like(latents, value)


def task(**changes: float | None) -> StageInput:
    tensors = {"embeds": torch.full((1, 5), 2.0), "negative_embeds": torch.full((1, 5), 1.0)}
    return StageInput({**PARAMS, **changes}, tensors)


def noise(seed: int) -> Tensor:
    return torch.randn((1, 2, 8, 16), generator=torch.Generator("cpu").manual_seed(seed))


def latents(found: object) -> Tensor:
    assert isinstance(found, Tensor)
    return found


def test_noise_comes_from_the_seed_and_each_step_moves_it() -> None:
    (output,) = Denoise(Constant()).run([task(guidance_scale=1.0)])

    made = latents(output.tensors["latents"])
    assert torch.allclose(made, noise(3) - 4 * 0.1 * 2.0)
    assert not made.requires_grad


def test_guidance_goes_from_the_negative_beyond_the_prompt() -> None:
    (output,) = Denoise(Constant()).run([task(guidance_scale=3.0)])

    assert torch.allclose(latents(output.tensors["latents"]), noise(3) - 4 * 0.1 * (1.0 + 3.0 * (2.0 - 1.0)))


def test_the_global_generator_is_neither_used_nor_moved() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()

    first, again = Denoise(Constant()).run([task(), task()])

    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(latents(first.tensors["latents"]), latents(again.tensors["latents"]))


def test_progress_counts_steps() -> None:
    stage = Denoise(Constant())
    state = stage.start(task())
    seen = [stage.progress(state)]
    for _ in range(4):
        (state,) = stage.step([state])
        seen.append(stage.progress(state))

    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]


def test_states_step_together_from_different_places() -> None:
    stage = Denoise(Constant())
    early, late = stage.start(task(seed=1)), stage.start(task(seed=2, num_inference_steps=2, guidance_scale=1))
    (early,) = stage.step([early])
    early, late = stage.step([early, late])

    assert (stage.progress(early), stage.progress(late)) == ((2, 4), (1, 2))
    assert torch.allclose(early.latents, noise(1) - 2 * 0.1 * 4.0)
    assert torch.allclose(late.latents, noise(2) - 0.1 * 2.0)


def test_values_that_are_not_finite_name_the_step() -> None:
    stage = Denoise(Constant(bad=2))
    state = stage.start(task())
    (state,) = stage.step([state])
    (state,) = stage.step([state])

    with pytest.raises(PermanentError, match="not finite at step 3 of 4: try a smaller guidance_scale"):
        stage.step([state])


def test_a_bad_mate_leaves_a_request_as_it_was() -> None:
    stage = Denoise(Constant())
    good, bad = stage.start(task(seed=1)), stage.start(task(seed=2, guidance_scale=math.inf))

    with pytest.raises(PermanentError):
        stage.step([good, bad])
    (good,) = stage.step([good])

    assert torch.allclose(good.latents, noise(1) - 0.1 * 4.0)


def test_latents_that_overflowed_in_the_last_step_are_not_handed_on() -> None:
    stage = Denoise(Constant())
    state = stage.start(task(num_inference_steps=1))
    (state,) = stage.step([state])
    state.latents[0, 0, 0, 0] = math.inf

    with pytest.raises(PermanentError, match="step 1 of 1"):
        stage.finish(state)


@pytest.mark.parametrize("change", [
    {"seed": None}, {"seed": 0.5}, {"num_inference_steps": 0}, {"num_inference_steps": None}, {"guidance_scale": None},
])  # fmt: skip
def test_a_task_that_lacks_something_is_refused(change: dict[str, float | None]) -> None:
    with pytest.raises(PermanentError, match=next(iter(change))):
        Denoise(Constant()).verify(task(**change))


def test_negative_embeddings_are_needed_only_under_guidance() -> None:
    stage = Denoise(Constant())
    tensors = {"embeds": torch.zeros(1, 5), "negative_embeds": None}

    stage.verify(StageInput({**PARAMS, "guidance_scale": 1.0}, tensors))
    with pytest.raises(PermanentError, match="input negative_embeds is missing"):
        stage.verify(StageInput(PARAMS, tensors))


def test_guided_and_unguided_requests_share_no_batch() -> None:
    stage = Denoise(Constant())

    assert stage.batch_key(PARAMS) == stage.batch_key({**PARAMS, "seed": 9, "guidance_scale": 7.5})
    assert stage.batch_key(PARAMS) != stage.batch_key({**PARAMS, "guidance_scale": 1.0})
    assert stage.batch_key(PARAMS) != stage.batch_key({**PARAMS, "width": 32})
