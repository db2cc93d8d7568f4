"""The undivided pipeline as one stage, from the prompt to the file.

For models that no model family of unfuse divides into stages. All steps happen inside one call of the pipeline, which
reports each step through a callback. The call runs in a thread of its own, which pauses at every step until the step
loop requests the next one. Its progress is therefore reported, and it can be cancelled and preempted, as in any other
stage. Only one thread computes at a time.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image, Resampling
from typing_extensions import override

from unfuse.core.compute_options import ComputeOptions
from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.errors import PermanentError, UnfuseError, UnsupportedRequest
from unfuse.core.modalities import IMAGE_UPLOADS, UPLOAD, UPLOADS
from unfuse.core.plan import Params
from unfuse.core.request import FLAGGED_TYPE
from unfuse.core.retries import is_out_of_memory
from unfuse.parallel.devices import set_current
from unfuse.stages.base import EncodedMedia, StageInput, StageOutput, SteppedStage, need
from unfuse.stages.image_encode import read_image
from unfuse.stages.media import encode, need_format, remedy, to_bytes
from unfuse.stages.vae_memory import Size, VaeModes
from unfuse.weights.adapters import LoadedAdapters

#: Fields of pipeline outputs that mark the pictures which the safety checker replaced by black ones.
FLAGS = ("nsfw_content_detected", "nsfw_detected", "watermark_detected")

#: The placeholder file for a flagged picture.
FLAGGED = b'{"title": "the safety checker of the model flagged this picture", "type": "about:blank"}'

#: The exceptions that pipelines raise for parameters that they do not accept.
REFUSALS = ValueError, TypeError, NotImplementedError, AssertionError


class CallAbandoned(UnfuseError):
    """Raised in the thread of a paused call to stop it."""


class Pause(Protocol):
    """Pauses a call, from its own thread."""

    def __call__(self, error: Exception | None = None) -> None:
        """Wait until the call is continued. Raises CallAbandoned if it is stopped."""


class PausedCall:
    """A call in its own thread, which runs from one pause to the next.

    `make`: the function to call. Its argument is a function that pauses the call; an error that it gets is raised by
    `advance`, and the call continues after the next `advance`.
    The step loop calls `advance` and `stop`, from one thread.
    """

    def __init__(self, make: Callable[[Pause], Any]) -> None:
        #: What the call returned; None before its end.
        self.result: Any = None
        #: Whether the call has ended, also by an error.
        self.is_over = False
        self._make = make
        self._go_on_or_stop: SimpleQueue[bool] = SimpleQueue()
        self._paused_or_ended: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def advance(self) -> None:
        """Start or continue the call until its next pause or its end.

        Raises what the call raised.
        """
        if self._thread is None:
            # A daemon, so that a call that hangs does not keep the process from exiting.
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        else:
            self._go_on_or_stop.put(True)
        if error := self._paused_or_ended.get():
            raise error

    def stop(self) -> None:
        """Stop the call if it has not ended. Returns when it has ended."""
        if self._thread is None or self.is_over:
            return
        self._go_on_or_stop.put(False)
        self._paused_or_ended.get()

    def _pause(self, error: Exception | None = None) -> None:
        """Pause the call, from its own thread. Raises CallAbandoned if it is stopped."""
        self._paused_or_ended.put(error)
        if not self._go_on_or_stop.get():
            raise CallAbandoned

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self.result = self._make(self._pause)
        except BaseException as raised:  # `advance` raises it again, in the thread of the step loop
            error = raised
        self.is_over = True
        self._paused_or_ended.put(error)


class RandomState:
    """torch's global random state of one pipeline call, seeded with the request's seed.

    Pipelines use the global state for random numbers without a generator: the noise of some noise schedulers, or a
    sample of a VAE's latent distribution. Several calls alternate between their steps, so each has a state of its own.
    The numbers are those of a script that calls `torch.manual_seed(seed)` before the pipeline.
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
        for device, state in zip(self._cuda, states[1:], strict=True):
            torch.cuda.set_rng_state(state, device)


@dataclass
class RunningCall:
    """A request in its pipeline call."""

    #: The parameters of the request.
    params: Params
    #: Identifies the LoRA adapters of the request; "": none.
    lora_id: str
    #: The call, paused between two steps.
    call: PausedCall
    #: The number of steps.
    steps: int
    #: Returns the call once more, from its beginning.
    create_call: Callable[[], PausedCall]
    #: The steps done.
    done: int = 0
    #: The decode or encode that has run out of memory, while the call is paused in it: see `_within_memory`.
    short_of_memory: tuple[VaeModes, Size, int] | None = None
    #: "tiled": the VAE computed in tiles, because memory was too small.
    vae: Literal["", "tiled"] = ""


class UndividedStage(SteppedStage[RunningCall]):
    """The undivided pipeline as a stage: parameters and pictures in, media out.

    Each request has its own copy of the pipeline, which shares the weights: noise schedulers and calls have state. The
    state of a call cannot be saved between its steps.

    `takes`: the request parameter for each parameter of the call.
    `draws_there`: whether the generator is on the device; else it is on the CPU.
    `picture_scale`: the factor from the start picture's size to the result's size, for a call without size parameters;
    0: the call has sizes, or takes no picture.
    `uploads`: the uploads that the pipeline needs.
    """

    kind = "whole"
    encodes = True

    def __init__(
        self,
        pipeline: Any,
        takes: Mapping[str, str],
        device: torch.device,
        draws_there: bool,
        loras: LoadedAdapters | None = None,
        picture_scale: int = 0,
        uploads: tuple[str, ...] = (),
        options: ComputeOptions | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._takes = takes
        self._loras = loras
        self._picture_scale = picture_scale
        self._call_parameters = frozenset(inspect.signature(pipeline.__call__).parameters)
        self._device = device
        self.uploads = uploads

        # In the thread of a call: the call, and how it pauses.
        self._thread = threading.local()
        vae = getattr(pipeline, "vae", None)
        self._decode_modes, self._encode_modes = (VaeModes.create(vae, options, device) for _ in range(2))
        if vae is not None and hasattr(vae, "use_tiling"):
            vae.decode = self._within_memory(vae.decode, self._decode_modes)
            vae.encode = self._within_memory(vae.encode, self._encode_modes)

        # Some pipelines change the dtype of a component during a call: see `_restore_dtypes`.
        models: list[Any] = [
            component for component in pipeline.components.values() if isinstance(component, torch.nn.Module)
        ]
        self._dtypes = [(model, model.dtype) for model in models if hasattr(model, "dtype")]
        self._generator_device = device if draws_there else torch.device("cpu")

    @override
    def uploads_of(self, derived: DerivedFacts) -> Sequence[str]:
        return [name for name in UPLOADS if name in derived.image_hashes]

    @override
    def verify(self, task: StageInput) -> None:
        """Raise PermanentError without a seed, a known format, or the picture that the model needs."""
        need(task.params, "seed", int)
        need_format(need(task.params, "output_format", str))
        if task.derived.lora_id and self._loras is None:
            raise PermanentError("LoRA adapters are disabled: start the server with --loras FOLDER")
        if self.uploads and UPLOAD not in task.uploads:
            raise PermanentError(f"upload {UPLOAD} is missing")

    @override
    def batch_key(self, task: StageInput) -> Hashable:
        return task.params.get("seed"), *super().batch_key(task)  # type: ignore[misc]

    @override
    def start(self, task: StageInput) -> RunningCall:
        """Prepare the call. It starts with the first step."""
        params = task.params
        values = ((argument, params.get(name)) for argument, name in self._takes.items())
        arguments: dict[str, Any] = {argument: value for argument, value in values if value is not None}

        pictures = {name: self._picture(data, params) for name, data in task.uploads.items()}
        arguments |= {argument: pictures[name] for argument, name in self._takes.items() if name in pictures}
        if (references := [pictures[name] for name in IMAGE_UPLOADS if name in pictures])[1:]:
            arguments[UPLOAD] = references

        seed = need(params, "seed", int)

        def create_call() -> PausedCall:
            generator = torch.Generator(self._generator_device).manual_seed(seed)
            return PausedCall(lambda pause: self._call(arguments | {"generator": generator}, running, pause))

        # The call reports its steps to its `RunningCall`, which is therefore created first, with a placeholder.
        steps = max(1, _requested_steps(params))
        running = RunningCall(params, task.derived.lora_id, PausedCall(lambda pause: None), steps, create_call)
        running.call = create_call()
        return running

    @override
    def step(self, batch: Sequence[RunningCall]) -> list[RunningCall | Exception]:
        """Continue each call to its next step, the last one to its end.

        The pipeline reports nothing after its last step: the VAE decode, for example, belongs to that step.
        """
        return [self._continue_call(state) for state in batch]

    @override
    def reduce_memory(self, state: RunningCall) -> RunningCall | None:
        """Return the state if its decode or encode can need less memory."""
        if state.short_of_memory is None:
            return None
        modes, size, rows = state.short_of_memory
        return None if modes.reduce(size, modes.mode(size), rows) is None else state

    @override
    def progress(self, state: RunningCall) -> tuple[int, int]:
        """Return (steps done, total steps), as the pipeline counts them once it has started."""
        return (state.steps, state.steps) if state.call.is_over else (min(state.done, state.steps - 1), state.steps)

    @override
    def finish(self, state: RunningCall) -> StageOutput:
        """Return the encoded files, or a placeholder if the safety checker flagged the result.

        Raises PermanentError for values that are not finite, and for a result of another size than requested.
        """
        output = state.call.result
        if any(np.ravel(getattr(output, name, None) or ()).any() for name in FLAGS):
            return StageOutput(media=(EncodedMedia(FLAGGED_TYPE, FLAGGED),))

        result = next((getattr(output, name) for name in ("frames", "images", "image") if hasattr(output, name)), None)
        if result is None:
            raise PermanentError(f"the pipeline returned a {type(output).__name__}, which has no pictures and no video")
        return StageOutput(media=encode(self._pixels(result, state.params), state.params), vae=state.vae)

    @override
    def release(self, state: RunningCall) -> None:
        """Stop the call if it has not ended."""
        state.call.stop()

    def _continue_call(self, state: RunningCall) -> RunningCall | Exception:
        """Continue a call to its next step.

        Returns the state, or the error of the call.
        """
        try:
            if self._loras is not None:
                self._loras.use(state.params, state.lora_id)
            state.call.advance()
        except REFUSALS as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            return UnsupportedRequest(f"the pipeline does not accept this request: {reason}")
        except AttributeError as error:
            if not hasattr(error.obj, "set_timesteps"):
                return error
            return UnsupportedRequest(f"the pipeline does not work with the model's noise scheduler: {error}")
        except Exception as error:  # the rest of the batch continues
            if is_out_of_memory(error) and state.call.is_over:  # then only the whole call can be repeated
                state.call, state.done = state.create_call(), 0
            return error
        return state

    def _within_memory(self, compute: Callable[..., Any], modes: VaeModes) -> Callable[..., Any]:
        """Return a VAE's `decode` or `encode` that pauses its call when memory runs out.

        When the call continues, it is repeated, in the mode that its size needs by then. So the steps before it are not
        repeated.
        """

        def compute_within_memory(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            running: RunningCall | None = getattr(self._thread, "running", None)
            height, width = tensor.shape[-2:]
            latents = modes.latents(height, width) if modes is self._encode_modes else (height, width)
            size = *tensor.shape[1:-2], *latents
            while True:
                mode = modes.mode(size)
                try:
                    with modes.use(mode):
                        result = compute(tensor, *args, **kwargs)
                except Exception as error:
                    if running is None or not is_out_of_memory(error):
                        raise
                    failure = error
                else:
                    if running is not None:
                        running.short_of_memory, running.vae = None, running.vae or mode.vae
                    return result
                if running is not None:
                    running.short_of_memory = modes, size, len(tensor)
                self._thread.pause(failure)
                del failure

        return compute_within_memory

    def _call(self, arguments: dict[str, Any], running: RunningCall, pause_call: Pause) -> Any:
        """Call the pipeline, in a thread of its own, and return its output.

        `arguments`: those of the call. `pause_call`: pauses it, at each step except the last.
        """
        set_current(self._device)
        pipeline = self._copy_pipeline()
        random_state = RandomState(need(running.params, "seed", int), self._device)

        def pause(error: Exception | None = None) -> None:
            random_state.leave()
            pause_call(error)
            random_state.enter()

        self._thread.running, self._thread.pause = running, pause

        def on_step(pipeline: Any, *_: object) -> dict[str, Any]:
            running.done += 1
            # The first step replaces the requested total by the pipeline's. From then on the total only grows.
            known_steps = running.steps if running.done > 1 else 1
            running.steps = max(known_steps, _pipeline_steps(pipeline) or _requested_steps(running.params))
            if running.done < running.steps:
                pause()
            return {}

        if "callback_on_step_end" in self._call_parameters:
            arguments["callback_on_step_end"] = on_step
        elif "callback_steps" in self._call_parameters:
            arguments |= {"callback": lambda *_: on_step(pipeline) and None, "callback_steps": 1}
        else:
            pipeline.progress_bar = _reporting_bar(pipeline.progress_bar, lambda *_: on_step(pipeline))

        random_state.enter()
        try:
            return pipeline(**arguments, output_type="np")
        finally:
            random_state.leave()
            self._restore_dtypes()

    def _restore_dtypes(self) -> None:
        """Restore the dtypes of the pipeline's components.

        Some pipelines cast the VAE and do not cast it back.
        """
        for model, dtype in self._dtypes:
            if model.dtype != dtype:
                model.to(dtype)

    def _picture(self, upload: bytes, params: Params) -> Image:
        """Return an uploaded picture.

        It is resized if the call takes no size, because then the picture decides the result's size.
        """
        picture = read_image(upload)
        if not self._picture_scale:
            return picture
        width, height = (need(params, side, int) // self._picture_scale for side in ("width", "height"))
        return picture if picture.size == (width, height) else picture.resize((width, height), Resampling.LANCZOS)

    def _lowest_dtype(self) -> torch.dtype | None:
        """Return the floating-point dtype with the fewest bits among the pipeline's components.

        None if no component has floating-point weights.
        """
        dtypes = {getattr(component, "dtype", None) for component in self._pipeline.components.values()}
        floats = [dtype for dtype in dtypes if isinstance(dtype, torch.dtype) and dtype.is_floating_point]
        return min(floats, key=lambda dtype: torch.finfo(dtype).bits, default=None)

    def _copy_pipeline(self) -> Any:
        """Return a copy of the pipeline that shares all components except its noise scheduler."""
        shared = [
            component for component in self._pipeline.components.values() if not hasattr(component, "set_timesteps")
        ]
        return copy.deepcopy(self._pipeline, {id(component): component for component in shared})

    def _pixels(self, result: Any, params: Params) -> NDArray[np.uint8]:
        """Return the result of a call for one request as frames, (frames, height, width, 3).

        `result`: (frames, height, width, 3), with a batch axis of 1 before it for videos. Values are 0 to 1.
        Raises PermanentError for other shapes, for values that are not finite, and for a size that was not requested.
        """
        frames = np.asarray(result)
        frames = frames[0] if frames.ndim == 5 else frames
        if frames.ndim != 4 or frames.shape[-1] != 3:
            raise PermanentError(f"the pipeline returned an array of shape {frames.shape}, not RGB pictures")

        pixels = to_bytes(frames, "pipeline", remedy("the model", self._lowest_dtype(), params))
        for name, size in zip(("num_frames", "height", "width"), frames.shape[:3], strict=True):
            if name in self._takes and params[name] != size:
                mismatch = f"the pipeline returned {name} {size}, not {params[name]}"
                raise PermanentError(f"{mismatch}: request {name} {size}")
        return pixels


def _reporting_bar(create_original_bar: Callable[..., Any], on_update: Callable[..., object]) -> Callable[..., Any]:
    """Return a factory of progress bars that call `on_update` at each step.

    It wraps a pipeline's own factory, `create_original_bar`, and is for pipelines without a step callback.
    """

    def create_bar(*args: Any, **kwargs: Any) -> Any:
        progress_bar = create_original_bar(*args, **kwargs)
        progress_bar.update = on_update
        return progress_bar

    return create_bar


def _pipeline_steps(pipeline: Any) -> int:
    """Return the number of steps that the pipeline states; 0 if it states none."""
    with suppress(AttributeError, TypeError):
        return int(pipeline.num_timesteps)
    return 0


def _requested_steps(params: Params) -> int:
    """Return the number of steps of the request; 1 without that parameter."""
    steps = params.get("num_inference_steps")
    return steps if isinstance(steps, int) else 1
