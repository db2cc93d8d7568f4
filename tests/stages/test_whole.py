"""A pipeline's call as a stage: told of, cancelled and overtaken at its steps; here a pipeline that only counts."""

from __future__ import annotations

import io
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from unfuse.core.errors import PermanentError
from unfuse.core.plan import Params
from unfuse.core.request import FLAGGED_TYPE
from unfuse.stages.base import StageInput
from unfuse.stages.undivided import RunningCall, UndividedStage

PARAMS: Params = {
    "prompt": "a",
    "seed": 1,
    "num_inference_steps": 3,
    "width": 4,
    "height": 2,
    "num_frames": 1,
    "output_format": "png",
}


class Counter:
    """A noise scheduler, as far as it has state."""

    def __init__(self) -> None:
        self.steps = 0

    def set_timesteps(self, count: int) -> None:
        self.steps = count


class Pipeline:
    """Makes a picture in as many steps as it is asked for, and `more` than that."""

    def __init__(self, more: int = 0) -> None:
        self.scheduler, self.weights, self.more = Counter(), object(), more
        self.num_timesteps: int | None = None
        self.steps: list[int] = []
        self.ended: list[str] = []

    @property
    def components(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "weights": self.weights, "ended": self.ended}

    def __call__(
        self,
        prompt: str,
        height: int,
        width: int,
        num_inference_steps: int,
        generator: torch.Generator,
        output_type: str,
        callback_on_step_end: Any,
    ) -> Any:
        if prompt == "no":
            raise ValueError("not\nthis")
        if prompt == "broken":
            raise RuntimeError(prompt)
        self.scheduler.set_timesteps(num_inference_steps + self.more)
        self.num_timesteps = self.scheduler.steps
        drawn = torch.rand(1, generator=generator).item()
        try:
            for step in range(self.scheduler.steps):
                self.steps.append(step)
                callback_on_step_end(self, step, 0, {})
        except BaseException as error:
            self.ended.append(f"{prompt}: {type(error).__name__}")
            raise
        assert self.scheduler.steps == num_inference_steps + self.more
        self.ended.append(prompt)
        return SimpleNamespace(images=np.full((1, height, width, 3), drawn if prompt != "nan" else np.nan))


class Silent(Pipeline):
    """Takes no callback, as HunyuanVideo 1.5 and LongCat-Image: it shows a progress bar, as all do."""

    progress_bar = DiffusionPipeline.progress_bar
    _progress_bar_config = {"disable": True}

    def __call__(  # type: ignore[override]
        self,
        prompt: str,
        height: int,
        width: int,
        num_inference_steps: int,
        generator: torch.Generator,
        output_type: str,
    ) -> Any:
        with self.progress_bar(total=num_inference_steps) as bar:
            return super().__call__(
                prompt, height, width, num_inference_steps, generator, output_type, lambda *_: bar.update()
            )


def stage_of(pipeline: Any) -> UndividedStage:
    takes = {name: name for name in ("prompt", "height", "width", "num_inference_steps")}
    return UndividedStage(pipeline, takes, torch.device("cpu"), draws_there=False)


def stepped(stage: UndividedStage, state: RunningCall) -> tuple[int, int]:
    (after,) = stage.step([state])
    assert after is state, after
    return stage.progress(state)


@pytest.mark.parametrize("more", [0, 2])
def test_undivided_pipeline_pauses_at_each_step(more: int) -> None:
    """Given a noise scheduler that may take more steps than were asked for."""
    pipeline, steps = Pipeline(more), 3 + more
    stage = stage_of(pipeline)
    state = stage.start(StageInput(PARAMS, {}))

    assert stage.progress(state) == (0, 3) and not pipeline.ended
    assert [stepped(stage, state) for _ in range(steps)] == [(done + 1, steps) for done in range(steps)]
    assert pipeline.ended == ["a"]
    (media,) = stage.finish(state).media
    assert media.content_type == "image/png"


@pytest.mark.parametrize("kind", [Pipeline, Silent])
def test_released_call_ends_at_its_step_and_leaves_no_thread(kind: type[Pipeline]) -> None:
    pipeline = kind()
    stage = stage_of(pipeline)
    state = stage.start(StageInput(PARAMS, {}))
    assert stepped(stage, state) == (1, 3)
    (running,) = [thread for thread in threading.enumerate() if thread.daemon and "_run" in thread.name]

    stage.release(state)
    running.join(10)
    assert pipeline.ended == ["a: CallAbandoned"] and not running.is_alive()
    stage.release(stage.start(StageInput(PARAMS, {})))


def test_concurrent_calls_share_no_pipeline_state() -> None:
    """Given two calls that are both under way, of other numbers of steps."""
    pipeline = Pipeline()
    stage = stage_of(pipeline)
    one, two = (
        stage.start(StageInput(PARAMS | {"prompt": name, "num_inference_steps": steps}, {}))
        for name, steps in (("a", 3), ("b", 5))
    )

    while stage.progress(two)[0] < 5:
        for state in (one, two):
            if not state.call.is_over:
                stepped(stage, state)
    assert pipeline.ended == ["a", "b"] and pipeline.scheduler.steps == 0 and pipeline.steps == []


def test_value_error_of_the_pipeline_becomes_permanent_error() -> None:
    stage = stage_of(Pipeline())
    (error,) = stage.step([stage.start(StageInput(PARAMS | {"prompt": "no"}, {}))])

    assert isinstance(error, PermanentError) and str(error) == "the pipeline does not accept this request: not this"


def test_other_pipeline_errors_are_returned_unchanged() -> None:
    """It may be the device that has too little memory."""
    stage = stage_of(Pipeline())
    (error,) = stage.step([stage.start(StageInput(PARAMS | {"prompt": "broken"}, {}))])

    assert isinstance(error, RuntimeError) and str(error) == "broken"


@pytest.mark.parametrize(
    ("params", "reason"),
    [({"prompt": "nan"}, "not finite"), ({"num_frames": 2}, ""), ({"seed": None}, "seed")],
)
def test_undeliverable_results_raise_permanent_error(params: Params, reason: str) -> None:
    stage, task = stage_of(Pipeline()), StageInput(PARAMS | params, {})
    if reason == "seed":
        with pytest.raises(PermanentError, match=reason):
            stage.verify(task)
        return
    state = stage.start(task)
    while stage.progress(state)[0] < 3:
        stepped(stage, state)
    if reason:
        with pytest.raises(PermanentError, match=reason):
            stage.finish(state)
    else:
        assert stage.finish(state).media


def test_result_of_another_size_raises_permanent_error() -> None:
    """Some pipelines round sides down without a word."""

    class Rounding(Pipeline):
        def __call__(self, **given: Any) -> Any:
            return super().__call__(**{**given, "width": 2})

    pipeline = Rounding()
    stage = stage_of(pipeline)
    stage._call_parameters = frozenset({"callback_on_step_end"})
    state = stage.start(StageInput(PARAMS, {}))
    while stage.progress(state)[0] < 3:
        stepped(stage, state)
    with pytest.raises(PermanentError, match="returned width 2, not 4: request width 2"):
        stage.finish(state)


@pytest.mark.parametrize(
    ("scale", "given", "seen"),
    [
        (1, (16, 8), (16, 8)),
        (1, (40, 30), (16, 8)),
        (2, (40, 30), (8, 4)),
        (0, (40, 30), (40, 30)),
    ],
)
def test_input_image_is_resized_if_the_call_has_no_size_parameters(
    scale: int, given: tuple[int, int], seen: tuple[int, int]
) -> None:
    file = io.BytesIO()
    Image.new("RGB", given).save(file, "PNG")
    stage = UndividedStage(Pipeline(), {"prompt": "prompt", "image": "image"}, torch.device("cpu"), False, None, scale)

    picture = stage._picture(file.getvalue(), PARAMS | {"width": 16, "height": 8})

    assert picture.size == seen


def test_verify_rejects_a_missing_input_image() -> None:
    stage = UndividedStage(Pipeline(), {"prompt": "prompt", "image": "image"}, torch.device("cpu"), False)
    stage.uploads = ("image",)
    with pytest.raises(PermanentError, match="upload image is missing"):
        stage.verify(StageInput(PARAMS, {}))


class Drawing(Pipeline):
    """Draws from torch's global random state at each step, and makes a picture of what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: dict[str, list[float]] = {}

    @property
    def components(self) -> dict[str, Any]:
        return super().components | {"drawn": self.drawn}

    def __call__(  # type: ignore[override]
        self,
        prompt: str,
        height: int,
        width: int,
        num_inference_steps: int,
        generator: torch.Generator,
        output_type: str,
        callback_on_step_end: Any,
    ) -> Any:
        drawn = self.drawn.setdefault(prompt, [])

        def step(*given: Any) -> None:
            drawn.append(torch.rand(1).item())
            callback_on_step_end(*given)

        return super().__call__(prompt, height, width, num_inference_steps, generator, output_type, step)


def test_global_random_draws_are_isolated_and_seeded_per_request() -> None:
    """Given calls that take turns, one of which is given up, and draws of the process itself."""
    pipeline = Drawing()
    stage = stage_of(pipeline)
    seeds = {"a": 7, "b": 8, "c": 7}
    states = {n: stage.start(StageInput(PARAMS | {"prompt": n, "seed": seed}, {})) for n, seed in seeds.items()}
    torch.manual_seed(1)
    outside, between = [torch.rand(1).item() for _ in range(7)], []

    torch.manual_seed(1)
    for name in ("a", "b", "a", "c", "b", "a", "c"):
        stepped(stage, states[name])
        between.append(torch.rand(1).item())
    stage.release(states["c"])
    torch.manual_seed(7)
    wanted = [torch.rand(1).item() for _ in range(3)]

    assert between == outside
    assert pipeline.drawn["a"] == wanted and pipeline.drawn["c"] == wanted[:2]
    assert pipeline.drawn["b"] != wanted[:2]


@pytest.mark.parametrize("name", ["nsfw_content_detected", "nsfw_detected", "watermark_detected"])
@pytest.mark.parametrize("flags", [[True], [False], None])
def test_flagged_image_has_the_flagged_content_type(name: str, flags: list[bool] | None) -> None:
    stage = stage_of(Pipeline())
    state = stage.start(StageInput(PARAMS, {}))
    while stage.progress(state)[0] < 3:
        stepped(stage, state)
    setattr(state.call.result, name, flags)

    (media,) = stage.finish(state).media
    assert media.content_type == (FLAGGED_TYPE if flags == [True] else "image/png")


def test_component_dtypes_are_restored_after_a_call() -> None:
    """Given a pipeline that leaves its VAE in float32, as those do that upcast it."""

    class Vae(torch.nn.Linear):
        @property
        def dtype(self) -> torch.dtype:
            return self.weight.dtype

    class Upcasting(Pipeline):
        vae = Vae(1, 1).half()

        @property
        def components(self) -> dict[str, Any]:
            return super().components | {"vae": self.vae}

    pipeline = Upcasting()
    stage = stage_of(pipeline)
    state = stage.start(StageInput(PARAMS, {}))
    stepped(stage, state)
    pipeline.vae.float()
    stepped(stage, state)
    stepped(stage, state)

    assert pipeline.vae.dtype == torch.float16
