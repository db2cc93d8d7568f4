"""A pipeline as it is: one stage from the prompt to the file, for models that nobody has taken apart.

Its steps happen inside one call, which tells of each. The call has a thread of its own, that rests at every step until
the step loop wants the next one: so it is told of, cancelled and overtaken as any other stage is. One thread computes
at a time.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image, Resampling
from typing_extensions import override

from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.errors import PermanentError, UnfuseError, Unsuitable
from unfuse.core.modalities import REFERENCES, UPLOAD, UPLOADS
from unfuse.core.plan import Params
from unfuse.core.request import FLAGGED_TYPE
from unfuse.stages.base import EncodedMedia, StageInput, StageOutput, SteppedStage, need
from unfuse.stages.image_encode import read_picture
from unfuse.stages.media import encode, need_format, remedy, to_bytes
from unfuse.weights.adapters import LoadedAdapters

FLAGS = ("nsfw_content_detected", "nsfw_detected", "watermark_detected")
"""Fields of pipeline outputs with the pictures that the safety checker replaced by black ones."""

FLAGGED = b'{"title": "the safety checker of the model flagged this picture", "type": "about:blank"}'
"""The placeholder file for a flagged picture."""

REFUSALS = ValueError, TypeError, NotImplementedError, AssertionError
"""What a pipeline raises for parameters that it does not take."""


class CallAbandoned(UnfuseError):
    """Raised inside a call that is given up, at its step."""


class PausedCall:
    """A call that rests where it says so. `make` gets the function by which it does; what it returns is the `result`.

    Of `go_on` and `stop`, each is called from one thread, that of the step loop.
    """

    def __init__(self, make: Callable[[Callable[[], None]], Any]) -> None:
        self._make, self.result = make, None
        self._told: SimpleQueue[bool] = SimpleQueue()
        self._heard: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.is_over = False

    def go_on(self) -> None:
        """Begin, or go on, to the next rest or the end. Raises what the call raised."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        else:
            self._told.put(True)
        if error := self._heard.get():
            raise error

    def stop(self) -> None:
        """Give the call up, if it is not over. It has ended when this returns."""
        if self._thread is None or self.is_over:
            return
        self._told.put(False)
        self._heard.get()

    def _rest(self) -> None:
        self._heard.put(None)
        if not self._told.get():
            raise CallAbandoned

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self.result = self._make(self._rest)
        except BaseException as raised:  # it is raised again where somebody waits for the call
            error = raised
        self.is_over = True
        self._heard.put(error)


class RandomState:
    """torch's global random state of one pipeline call, seeded with the request's seed.

    Pipelines use the global state for random numbers without a generator: the noise of some noise schedulers, or a
    sample of a VAE's latent distribution. Calls take turns between their steps, so each has a state of its own. The
    numbers are those of a script that calls `torch.manual_seed(seed)` before the pipeline.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._cuda = seed, [device] if device.type == "cuda" else []
        self._inside: list[torch.Tensor] = []
        self._outside: list[torch.Tensor] = []

    def enter(self) -> None:
        """Make this call's state the global one, and save the one before it."""
        self._outside = self._read()
        if self._inside:
            self._write(self._inside)
            return
        torch.default_generator.manual_seed(self._seed)
        for device in self._cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(self._seed)

    def leave(self) -> None:
        """Save this call's state, and restore the global one from before `enter`."""
        if self._outside:
            self._inside = self._read()
            self._write(self._outside)
            self._outside = []

    def _read(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._cuda)]

    def _write(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        for one, state in zip(self._cuda, states[1:], strict=True):
            torch.cuda.set_rng_state(state, one)


@dataclass
class RunningCall:
    """A request in its call, so many steps of which are done."""

    params: Params
    lora_id: str
    call: PausedCall
    steps: int
    done: int = 0


class UndividedStage(SteppedStage[RunningCall]):
    """Parameters, and pictures where the model takes them, in; media out.

    Each request has a `pipeline` of its own, which shares the weights: a noise scheduler has state, and so has a call.
    `takes` maps each parameter of the call to a parameter of requests. Results of a call without a size are
    `picture_scale` times as large as the start picture (0: the call takes a size, or no picture). The state of a call
    cannot be saved between its steps.
    """

    kind = "whole"

    def __init__(
        self, pipeline: Any, takes: Mapping[str, str], device: torch.device, draws_there: bool,
        loras: LoadedAdapters | None = None, picture_scale: int = 0, uploads: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self._pipeline, self._takes, self._loras, self._picture_scale = pipeline, takes, loras, picture_scale
        self._known = frozenset(inspect.signature(pipeline.__call__).parameters)
        self._device, self.uploads = device, uploads
        models: list[Any] = [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]
        self._dtypes = [(model, model.dtype) for model in models if hasattr(model, "dtype")]
        self._generator_device = device if draws_there else torch.device("cpu")

    @override
    def uploads_of(self, derived: DerivedFacts) -> Sequence[str]:
        return [name for name in UPLOADS if name in derived.pictures]

    @override
    def verify(self, task: StageInput) -> None:
        """Raise PermanentError unless seed and format are there, and the picture that the model starts from."""
        need(task.params, "seed", int)
        need_format(need(task.params, "output_format", str))
        if task.derived.lora_id and self._loras is None:
            raise PermanentError("this worker serves no loras: start its server with --loras FOLDER too")
        if self.uploads and UPLOAD not in task.uploads:
            raise PermanentError(f"upload {UPLOAD} is missing")

    @override
    def batch_key(self, task: StageInput) -> Hashable:
        return task.params.get("seed"), *super().batch_key(task)  # type: ignore[misc]

    @override
    def start(self, task: StageInput) -> RunningCall:
        """The call begins with its first step."""
        params = task.params
        said = ((own, params.get(name)) for own, name in self._takes.items())
        given: dict[str, Any] = {own: value for own, value in said if value is not None}
        pictures = {name: self._picture(data, params) for name, data in task.uploads.items()}
        given |= {own: pictures[name] for own, name in self._takes.items() if name in pictures}
        if (seen := [pictures[name] for name in REFERENCES if name in pictures])[1:]:
            given[UPLOAD] = seen
        generator = torch.Generator(self._generator_device).manual_seed(need(params, "seed", int))
        running = RunningCall(params, task.derived.lora_id, PausedCall(lambda rest: None), max(1, _count(params)))
        running.call = PausedCall(lambda rest: self._call(given | {"generator": generator}, running, rest))
        return running

    @override
    def step(self, batch: Sequence[RunningCall]) -> list[RunningCall | Exception]:
        """To the next step of each; the last one goes on to the end, as what comes behind it tells of nothing."""
        return [self._stepped(state) for state in batch]

    @override
    def progress(self, state: RunningCall) -> tuple[int, int]:
        """(steps done, steps in all), as the pipeline counts them once it has begun."""
        return (state.steps, state.steps) if state.call.is_over else (min(state.done, state.steps - 1), state.steps)

    @override
    def finish(self, state: RunningCall) -> StageOutput:
        """Return the encoded files, or a placeholder if the safety checker flagged the result.

        Raises PermanentError for values that are not finite, and for a result of another size than requested.
        """
        output = state.call.result
        if any(np.ravel(getattr(output, name, None) or ()).any() for name in FLAGS):
            return StageOutput(media=(EncodedMedia(FLAGGED_TYPE, FLAGGED),))
        made = next((getattr(output, name) for name in ("frames", "images", "image") if hasattr(output, name)), None)
        if made is None:
            raise PermanentError(f"the pipeline made a {type(output).__name__}, which has no pictures and no video")
        return StageOutput(media=encode(self._pixels(made, state.params), state.params))

    @override
    def let_go(self, state: RunningCall) -> None:
        """A call that is not over ends here."""
        state.call.stop()

    def _stepped(self, state: RunningCall) -> RunningCall | Exception:
        try:
            if self._loras is not None:
                self._loras.use(state.params, state.lora_id)
            state.call.go_on()
        except REFUSALS as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            return Unsuitable(f"the pipeline does not accept this request: {reason}")
        except AttributeError as error:
            if not hasattr(error.obj, "set_timesteps"):
                return error
            return Unsuitable(f"the pipeline does not work with the model's noise scheduler: {error}")
        except Exception as error:  # the others of the batch go on
            return error
        return state

    def _call(self, given: dict[str, Any], running: RunningCall, rest: Callable[[], None]) -> Any:
        """What the pipeline makes."""
        own, random = self._own(), RandomState(need(running.params, "seed", int), self._device)

        def wait() -> None:
            random.leave()
            rest()
            random.enter()

        def reached(pipeline: Any, *_: object) -> dict[str, Any]:
            running.done += 1
            running.steps = max(
                running.steps if running.done > 1 else 1, _timesteps(pipeline) or _count(running.params)
            )
            if running.done < running.steps:
                wait()
            return {}

        if "callback_on_step_end" in self._known:
            given["callback_on_step_end"] = reached
        elif "callback_steps" in self._known:
            given |= {"callback": lambda *_: reached(own) and None, "callback_steps": 1}
        else:
            own.progress_bar = _telling(own.progress_bar, lambda *_: reached(own))
        random.enter()
        try:
            return own(**given, output_type="np")
        finally:
            random.leave()
            self._restore_dtypes()

    def _restore_dtypes(self) -> None:
        """Restore the dtypes of components: some pipelines cast the VAE and do not cast it back."""
        for model, dtype in self._dtypes:
            if model.dtype != dtype:
                model.to(dtype)

    def _picture(self, upload: bytes, params: Params) -> Image:
        """Return an uploaded picture, resized if the call takes no size, because then it decides the result's size."""
        picture = read_picture(upload)
        if not self._picture_scale:
            return picture
        width, height = (need(params, side, int) // self._picture_scale for side in ("width", "height"))
        return picture if picture.size == (width, height) else picture.resize((width, height), Resampling.LANCZOS)

    def _lowest(self) -> torch.dtype | None:
        """The dtype with the fewest bits among the pipeline's components; None if it has no weights."""
        dtypes = {getattr(part, "dtype", None) for part in self._pipeline.components.values()}
        floats = [one for one in dtypes if isinstance(one, torch.dtype) and one.is_floating_point]
        return min(floats, key=lambda one: torch.finfo(one).bits, default=None)

    def _own(self) -> Any:
        """A pipeline like this one, of the same weights."""
        shared = [part for part in self._pipeline.components.values() if not hasattr(part, "set_timesteps")]
        return copy.deepcopy(self._pipeline, {id(part): part for part in shared})

    def _pixels(self, made: Any, params: Params) -> NDArray[np.uint8]:
        """Frames (frames, height, width, 3) of what a call made of one request: a batch of one."""
        frames = np.asarray(made)
        frames = frames[0] if frames.ndim == 5 else frames
        if frames.ndim != 4 or frames.shape[-1] != 3:
            raise PermanentError(f"the pipeline made an array of {frames.shape}, which are no pictures in RGB")
        pixels = to_bytes(frames, "pipeline", remedy("the model", self._lowest(), params))
        for name, size in zip(("num_frames", "height", "width"), frames.shape[:3], strict=True):
            if name in self._takes and params[name] != size:
                raise PermanentError(f"the pipeline made a {name} of {size}, not {params[name]}: ask for {name} {size}")
        return pixels


def _telling(bar: Callable[..., Any], reached: Callable[..., object]) -> Callable[..., Any]:
    """The progress bar of a pipeline whose call takes no callback: it tells of each step."""

    def made(*given: Any, **named: Any) -> Any:
        shown = bar(*given, **named)
        shown.update = reached
        return shown

    return made


def _timesteps(pipeline: Any) -> int:
    """How many steps the pipeline makes, if it says so."""
    with suppress(AttributeError, TypeError):
        return int(pipeline.num_timesteps)
    return 0


def _count(params: Params) -> int:
    steps = params.get("num_inference_steps")
    return steps if isinstance(steps, int) else 1
