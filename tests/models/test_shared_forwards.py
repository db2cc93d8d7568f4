"""In exact pools requests share forwards, and each gets the bytes that it has alone: every family, stage by stage."""

from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import Any

import pytest
import torch

from tests.models import conftest as c
from unfuse.core.compute_options import ComputeOptions
from unfuse.stages.base import Stage, StageInput
from unfuse.stages.bitwise import first_difference
from unfuse.stages.variant_functions import variant_function

KINDS = {job.model: job for job in reversed(c.JOBS)}
"""Of each tiny model one call that it can take."""
BY_DAY = {
    "float32": (c.SHAPES, "wan-2.2-5b-image", "flux", "qwen-image", "sdxl", "z-image"),
    "bfloat16": ("wan-2.2", "hunyuan-video", "sd3"),
}
"""Each trait once: a mask, a second transformer, a timestep a token, two text encoders, guidance by a number, halves of
guidance that share a forward, and of unequal length."""
PROMPTS = ("a red circle", "b", c.ODD, c.LONG, "a blue star on black")


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def mixed(kind: str, count: int) -> list[dict[str, Any]]:
    """Requests of one size, with seeds, prompts, scales, step counts and, where a model takes them, pictures mixed."""
    usual = KINDS[kind].params
    found = []
    for n in range(count):
        own = {**usual, "seed": n, "prompt": PROMPTS[n % len(PROMPTS)], "num_inference_steps": 2 + n % 3}
        own["guidance_scale"] = usual["guidance_scale"] and usual["guidance_scale"] + n % 2
        if n % 4 == 1:
            own |= {"negative_prompt": PROMPTS[(n + 1) % 3], "true_cfg_scale": 2.0 + n % 2}
        if "image" in own:
            own["image"] = ("sky.png", "wall.jpg", "glass.webp")[n % 3]
        found.append({**own, "output_format": "png"})
    return found


def compared(stage: Stage, tasks: list[StageInput]) -> tuple[list[Any], dict[tuple[Hashable, int], str]]:
    """What each task comes to alone, and of every size of batch that came about what is to blame for a difference.

    Tasks start three at a time, so that those of a batch are at different steps.
    """
    waiting, running, done = dict(enumerate(tasks)), dict[int, Any](), dict[int, Any]()
    blame: dict[tuple[Hashable, int], str] = {}
    while len(done) < len(tasks):
        for place in list(waiting)[:3]:
            running[place] = stage.start(waiting.pop(place))
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for place, state in running.items():
            groups[stage.batch_key(tasks[place]), stage.exact_batch_key(state)].append(place)
        for key, places in groups.items():
            alone = [stage.step_alone(running[place]) for place in places]
            for size in range(1 if stage.differs_alone else 2, len(places) + 1):
                states = [running[place] for place in places[-size:]]
                row = first_difference(alone[-size:], stage.step(states))
                blame[key, size] = blame.get((key, size), "") or (
                    "" if row is None else variant_function(stage, states, row)
                )
            for place, made in zip(places, alone, strict=True):
                running[place] = stage.advance(running[place], made)
                if len(set(stage.progress(running[place]))) == 1:
                    done[place] = stage.finish(running.pop(place))
    return [done[place] for place in range(len(tasks))], blame


def check(kind: str, dtype: str, count: int, undivided: c.Undivided, stages: c.Load) -> None:
    """Hold every stage that shares forwards to what it makes of each request alone."""
    params = mixed(kind, count)
    tensors: list[dict[str, Any]] = [{} for _ in params]
    sizes: dict[str, set[int]] = {}
    for name, stage in stages(undivided.folder(kind), dtype).items():
        if not {*stage.uploads} <= undivided.uploads(params[0]).keys():
            continue
        tasks = [c.task(*given, undivided.uploads(given[0])) for given in zip(params, tensors, strict=True)]
        if stage.exact_batch_key(stage.start(tasks[0])) is not None:
            outputs, blame = compared(stage, tasks)
            assert not any(blame.values()), (name, blame)
            sizes[name] = {size for _, size in blame}
        else:
            outputs = [stage.run([task])[0] for task in tasks]
        for found, output in zip(tensors, outputs, strict=True):
            found.update(output.tensors)
    assert {"text_encode", "denoise"} <= sizes.keys() and max(sizes["denoise"]) > 1


@pytest.mark.parametrize(("kind", "dtype"), [(kind, dtype) for dtype, kinds in BY_DAY.items() for kind in kinds])
def test_exact_batches_are_bitwise_equal_to_single_requests(
    kind: str, dtype: str, undivided: c.Undivided, stages: c.Load
) -> None:
    check(kind, dtype, 6, undivided, stages)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", sorted(kind for kind in KINDS if not kind.startswith(("klein", "krea"))))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_batches_are_bitwise_equal_for_every_family(
    kind: str, dtype: str, threads: int, undivided: c.Undivided, stages: c.Load
) -> None:
    """Those of the general family share nothing: their blocks take requests one by one."""
    check(kind, dtype, 16, undivided, stages)


def test_non_exact_batch_difference_is_attributed_to_a_torch_function(
    undivided: c.Undivided, stages: c.Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = stages(undivided.folder("flux"))
    params = mixed("flux", 3)
    tasks = [StageInput(given, c.encode(loaded, given, {})) for given in params]
    denoise = loaded["denoise"]
    monkeypatch.setattr(denoise, "exact", False)
    _, blame = compared(denoise, tasks)
    assert {found.rpartition(".")[2] for found in blame.values()} & {"silu", "gelu", "linear", "sin", "cos"}, blame


@pytest.mark.parametrize("kind", [c.SHAPES, "sdxl"])
def test_exact_denoise_stage_that_falls_back_computes_as_a_batched_one(
    kind: str, undivided: c.Undivided, stages: c.Load
) -> None:
    """Its halves of guidance share a forward then, as in a stage that was batched from the start."""
    folder, params = undivided.folder(kind), mixed(kind, 3)
    batched = stages(folder, "float32", ComputeOptions(batching="batched"))
    tasks = [StageInput(given, c.encode(batched, given, {})) for given in params]
    falling, reference = stages(folder, "float32")["denoise"], batched["denoise"]
    assert falling.exact and not reference.exact

    states = [falling.start(task) for task in tasks]
    falling.use_batched()
    assert not (falling.exact or falling.differs_alone)
    assert first_difference(falling.step(states), reference.step([reference.start(task) for task in tasks])) is None
    assert first_difference([falling.step_alone(states[0])], reference.step([reference.start(tasks[0])])) is None
