"""Noise schedulers of diffusers, taken apart between two steps and put together again from bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from hypothesis import given, settings, strategies as st
from torch import Tensor

from tests.examples import examples
from unfuse.core.codec import decode, encode
from unfuse.core.errors import PermanentError
from unfuse.stages.noise_scheduler_state import restore_scheduler, scheduler_state

FLOW = {"prediction_type": "flow_prediction", "flow_shift": 3.0}
MAKERS: dict[str, Any] = {
    "euler": lambda: FlowMatchEulerDiscreteScheduler(shift=3.0),
    "unipc": lambda: UniPCMultistepScheduler(use_flow_sigmas=True, **FLOW),
    "unipc of third order": lambda: UniPCMultistepScheduler(use_flow_sigmas=True, **FLOW, solver_order=3),
    "dpm": lambda: DPMSolverMultistepScheduler(use_flow_sigmas=True, **FLOW, solver_order=2),
}


def fresh(kind: str, steps: int) -> Any:
    scheduler = MAKERS[kind]()
    scheduler.set_timesteps(steps)
    scheduler.set_begin_index(0)
    return scheduler


def walk(scheduler: Any, latents: Tensor, first: int, last: int) -> Tensor:
    """Steps along predictions that depend on the latents, so that an error would grow."""
    for timestep in scheduler.timesteps[first:last]:
        latents = scheduler.step(torch.tanh(latents) * 0.9, timestep, latents, return_dict=False)[0]
    return latents


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")
@settings(max_examples=examples(15), deadline=None)
@given(kind=st.sampled_from(sorted(MAKERS)), steps=st.integers(2, 12), data=st.data())
def test_restored_noise_scheduler_produces_identical_latents(kind: str, steps: int, data: Any) -> None:
    """Given one that made some of its steps, when what it remembers travels as tensors and bytes into a fresh one,
    then the rest of the steps give the same bits."""
    made = data.draw(st.integers(0, steps))
    noise = torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(steps))
    scheduler = fresh(kind, steps)
    latents = walk(scheduler, noise, 0, made)

    tensors, values = scheduler_state(scheduler, fresh(kind, steps))
    sent = {name: tensor.clone() for name, tensor in tensors.items()}
    kept, expected = latents.clone(), walk(scheduler, latents, made, steps)
    other = fresh(kind, steps)
    restore_scheduler(other, sent, decode(encode(values), dict[str, Any]), torch.device("cpu"))

    assert torch.equal(walk(other, kept, made, steps), expected)


def test_state_saved_on_a_cpu_is_restored_on_another_device() -> None:
    """The meta device stands for a GPU. Only single numbers may stay on the host."""
    scheduler = fresh("unipc", 6)
    walk(scheduler, torch.ones(1, 2), 0, 3)
    restored = fresh("unipc", 6)
    restore_scheduler(restored, *scheduler_state(scheduler, fresh("unipc", 6)), torch.device("meta"))
    tensors = [restored.last_sample, *restored.model_outputs]
    assert [tensor.device.type for tensor in tensors] == ["meta"] * 3
    assert {step.device.type for step in restored.timestep_list} == {"cpu"}


def test_first_order_noise_scheduler_state_is_only_its_step_index() -> None:
    scheduler = fresh("euler", 8)
    walk(scheduler, torch.ones(1, 2), 0, 3)
    tensors, values = scheduler_state(scheduler, fresh("euler", 8))
    assert (tensors, values) == ({}, {"_step_index": 3})


def test_saved_noise_scheduler_state_is_a_copy() -> None:
    scheduler = fresh("unipc", 6)
    latents = walk(scheduler, torch.ones(1, 2), 0, 3)
    tensors, _ = scheduler_state(scheduler, fresh("unipc", 6))
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    walk(scheduler, latents, 3, 6)
    assert before
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())


def test_noise_scheduler_with_unknown_object_cannot_be_saved() -> None:
    scheduler = fresh("euler", 4)
    scheduler.secret = object()
    with pytest.raises(PermanentError, match="object in scheduler.secret cannot be saved"):
        scheduler_state(scheduler, fresh("euler", 4))
