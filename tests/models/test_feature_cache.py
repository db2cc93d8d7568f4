"""Skipping blocks: as diffusers does it, each request on its own, and never where results are to be exact."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np
import pytest
import torch

from tests.models import conftest as c
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.errors import PermanentError
from unfuse.stages.base import Stage, StageInput, next_states
from unfuse.stages.denoise import Denoise, DenoiseState

CACHED = {job.name: job for job in c.CACHED}
BATCHED = ComputeOptions(batching="batched")


def denoising(job: c.Job, undivided: c.Undivided, stages: c.Load, **changes: Any) -> tuple[Denoise, StageInput]:
    """The stage with a forward for each half of guidance: diffusers skips blocks of each by itself."""
    loaded: dict[str, Stage] = stages(undivided.folder(job.model), job.dtype, BATCHED)
    params = {**job.params, "output_format": "png", **changes}
    stage = copy(loaded["denoise"])
    assert isinstance(stage, Denoise)
    stage._fused = False
    return stage, StageInput(params, c.encode(loaded, params, undivided.uploads(params)))


def latents(stage: Denoise, task: StageInput) -> np.ndarray:
    stage.verify(task)
    (output,) = stage.run([task])
    made = output.tensors["latents"]
    assert made is not None
    return made.float().numpy()


def modules(stage: Denoise) -> list[Any]:
    return [module for transformer in stage._denoiser.transformers for module in transformer.modules()]


@contextmanager
def counted(stage: Denoise) -> Iterator[list[int]]:
    """How often each block of the transformer really attends."""
    counts: list[int] = []
    handles = []
    for transformer in stage._denoiser.transformers:
        attentions = [module for name, module in transformer.named_modules() if name.endswith(("attn1", "attn"))]
        for attention in attentions:
            counts.append(0)
            place = len(counts) - 1

            def count(*_: Any, place: int = place) -> None:
                counts[place] += 1

            handles.append(attention.register_forward_pre_hook(count))
    yield counts
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("name", CACHED)
def test_feature_cache_latents_equal_those_of_diffusers(name: str, undivided: c.Undivided, stages: c.Load) -> None:
    """Bit for bit; the blocks behind the first run less often than it; and something else comes out than without."""
    job = CACHED[name]
    stage, task = denoising(job, undivided, stages)
    with counted(stage) as counts:
        made = latents(stage, task)
    assert np.array_equal(made, undivided.result(name)["latents"])
    assert 0 < counts[-1] < counts[0]

    stage, plain = denoising(job, undivided, stages, feature_cache=0.0)
    whole = latents(stage, plain)
    assert not np.array_equal(whole, made)
    assert np.abs(whole - made).mean() < 0.3 * np.abs(whole).mean()


@pytest.mark.parametrize("name", CACHED)
def test_request_without_feature_cache_gets_exact_latents(name: str, undivided: c.Undivided, stages: c.Load) -> None:
    """Given hooks that another request had installed, then a request without them is what a pool without them makes."""
    job = CACHED[name]
    stage, task = denoising(job, undivided, stages)
    latents(stage, task)
    _, plain = denoising(job, undivided, stages, feature_cache=0.0)
    with counted(stage) as counts:
        made = latents(stage, plain)
    assert len(set(counts)) == 1

    exact = stages(undivided.folder(job.model), job.dtype)
    alone = {key: value for key, value in plain.params.items() if key != "feature_cache"}
    expected = c.run(exact["denoise"], alone, plain.tensors).tensors["latents"]
    assert np.array_equal(made, expected.float().numpy())


def test_feature_cache_state_is_separate_per_request_in_a_batch(undivided: c.Undivided, stages: c.Load) -> None:
    """Given three requests stepped together, of which one skips nothing, then each makes what it makes alone."""
    job = CACHED["cached-wan"]
    asked = [{"seed": 1}, {"seed": 2, "feature_cache": 0.6}, {"seed": 3, "feature_cache": 0.0}]
    tasks = [denoising(job, undivided, stages, **changes) for changes in asked]
    stage = tasks[0][0]
    alone = [latents(stage, task) for _, task in tasks]

    states: list[DenoiseState] = [stage.start(task) for _, task in tasks]
    for _ in range(12):
        stepped = next_states(stage, states)
        states = [state for state in stepped if isinstance(state, DenoiseState)]
    together = [state.latents.numpy() for state in states]

    for one, other in zip(alone, together, strict=True):
        assert np.array_equal(one, other)
    assert [bool(state.memory) for state in states] == [True, True, False]


@pytest.mark.parametrize("threshold", [0.3, 0.0])
def test_no_residuals_of_the_feature_cache_remain_after_a_request(
    threshold: float, undivided: c.Undivided, stages: c.Load
) -> None:
    """Whether the last request used the cache or not, after hooks were installed."""
    stage, task = denoising(CACHED["cached-wan"], undivided, stages)
    stage.verify(task)
    _, last = denoising(CACHED["cached-wan"], undivided, stages, feature_cache=threshold)
    latents(stage, last)
    registries = [module._diffusers_hook for module in modules(stage) if hasattr(module, "_diffusers_hook")]
    hooks = [hook for registry in registries for hook in registry.hooks.values()]
    managers = [hook.state_manager for hook in hooks if hasattr(hook, "state_manager")]
    assert managers
    assert not any(state for manager in managers for state in manager._state_cache.values())


def test_feature_cache_is_rejected_in_exact_pools(undivided: c.Undivided, stages: c.Load) -> None:
    job = CACHED["cached-wan"]
    stage, task = denoising(job, undivided, stages)
    exact = stages(undivided.folder(job.model), job.dtype)["denoise"]
    with pytest.raises(PermanentError, match="needs a pool with --batching batched"):
        exact.verify(task)
    stage.verify(task)


def test_feature_cache_on_unsupported_transformer_raises_error(undivided: c.Undivided, stages: c.Load) -> None:
    from unfuse.stages.feature_cache import FeatureCache

    with pytest.raises(PermanentError, match="feature_cache is not supported by Linear"):
        FeatureCache([torch.nn.Linear(2, 2)]).install()
