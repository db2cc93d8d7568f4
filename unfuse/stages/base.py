"""The stage port: a stage computes tasks in batches.

It is loaded once per compute process, and never sees queues, refs or addresses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

import msgspec

from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.errors import PermanentError
from unfuse.core.modalities import PIXELS
from unfuse.core.plan import Params
from unfuse.core.text import TextStats

if TYPE_CHECKING:
    from torch import Tensor


#: Tensors by name. None is a value that the stage did not compute, such as a negative embedding without guidance.
Tensors = Mapping[str, "Tensor | None"]

#: (name, dtype, shape) of each tensor of an output, in the order in which they are written.
Outline = Sequence[tuple[str, str, tuple[int, ...]]]


class StageInput(msgspec.Struct, frozen=True):
    """One task as a stage sees it: parameters, input tensors and uploads."""

    #: The parameters of the request.
    params: Params
    #: The input tensors by name, without the input in `received`. Read-only: a stage never writes to them.
    tensors: Tensors
    #: The uploaded files that the stage reads, by name.
    uploads: Mapping[str, bytes] = {}
    #: The chunks recorded from earlier attempts at this task, in order: see `Stage.new_chunks`.
    recorded: tuple[bytes, ...] = ()
    #: Tasks of a higher priority go first.
    priority: int = 0
    #: The first prefix blocks, computed by other tasks: see `Stage.prefix_blocks`. Dropped once the task has started.
    prefix: tuple[Tensors, ...] = ()
    #: The input that the stage received in chunks (`Stage.receive`), or None.
    received: Any = None
    #: Whether the task extends the prefix blocks of another stage: see `StageSpec.extends_prefix_of`.
    extends: bool = False
    #: What the server derived from the request.
    derived: DerivedFacts = DerivedFacts()


class EncodedMedia(msgspec.Struct, frozen=True):
    """One encoded file for the result store: a picture, a video or a text."""

    #: The MIME type of the file.
    content_type: str
    #: The contents of the file.
    data: bytes


class StageOutput(msgspec.Struct, frozen=True):
    """The output of one task: tensors for later stages, or media of a final stage.

    Tensors share no memory with the task's inputs, which may be freed before the output is read.
    """

    #: Tensors by name, for later stages.
    tensors: Tensors = {}
    #: Files for the client, from a final stage.
    media: tuple[EncodedMedia, ...] = ()
    #: "tiled": the VAE encoded or decoded in tiles, because memory was too small.
    vae: Literal["", "tiled"] = ""


class OpenOutput(Protocol):
    """An output that other processes read while it is written.

    It is written in order, from the start of its first tensor to the end of its last.
    """

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The tensors to write into, by name."""

    def completes_chunk(self, name: str, elements: int) -> bool:
        """Return whether writing up to here completes a transfer chunk, which readers can then read.

        `elements`: how many elements of tensor `name` would be written, besides all tensors before it.
        """

    def written(self, name: str, elements: int) -> None:
        """Announce that the first `elements` elements of a tensor are written and final. Never fails."""


class StreamedInput(Protocol):
    """Receives an input in chunks, before its task starts or is dropped."""

    def write(self, piece: Any) -> None:
        """Consume the next bytes of the object, a uint8 tensor (bytes,).

        The caller reuses the tensor's memory afterwards.
        """

    def drop(self) -> None:
        """Free the received data: the task will not start."""


@dataclass(frozen=True)
class PrefixBlock:
    """A block for prefix caching: equal for all tasks with the same prefix."""

    #: Its index among the blocks of the task, from 0.
    number: int

    #: Returns a copy of the block's tensors, which later steps do not change. Call it before the next step.
    copy: Callable[[], Tensors]

    #: Identifies this block and all before it. Set only if the stage's spec `extends` the blocks of another stage.
    digest: str = ""


class Checkpoint(msgspec.Struct, frozen=True):
    """The state of a stepped stage between two steps, without the task's inputs."""

    #: Tensors by name.
    tensors: Tensors
    #: Plain values by name.
    values: dict[str, Any] = {}


class ReportsTextStats(Protocol):
    """The text sequences of a stage, which count KV cache blocks, prompts and retractions."""

    #: How often the KV of a sequence was freed for other sequences, so far.
    retracted: int

    def load(self) -> TextStats:
        """Return the current numbers."""

    def leftovers(self) -> Mapping[str, int]:
        """Return leaked memory in bytes by owner: empty if no memory is in use.

        Call it only while no task has a state.
        """

    def end_all(self) -> None:
        """Free the memory of all sequences. Call it only while no task has a state."""


@dataclass(frozen=True)
class OneStepState:
    """The state of a task in a stage with one step."""

    #: The inputs of the task.
    task: StageInput
    #: None before the step.
    output: StageOutput | None = None


class Stage(ABC):
    """One stage kind of one model, with its weights in memory.

    A stage of one step implements `verify` and `run`. A stage of several steps is a `SteppedStage`. The step loop calls
    the same methods of both; the state of a stage of one step is a `OneStepState`.

    - `verify` raises PermanentError if inputs are missing or of the wrong shape. It must not read their values.
    - A task that is run alone gets the result of the undivided pipeline, bit for bit. The rest of its batch changes the
      result by rounding only.
    - No method records gradients: a stage computes as under `torch.no_grad()`, whatever the caller's grad mode.
    """

    #: The stage kind, as in StageSpec.
    kind: str
    #: Names of the uploads that each task needs.
    uploads: tuple[str, ...] = ()
    #: The text sequences of the stage, or None. Several stages may share them.
    texts: ReportsTextStats | None = None
    #: Amounts by resource that this process provides, for resources that tasks need (`StageSpec.needs`, `provides`).
    resources: Mapping[str, int] = {}
    #: Whether the stage aims at batch invariance: equal bytes for a task whatever the rest of its batch.
    exact = False
    #: Whether `step` of a single state computes it otherwise than `step_alone`, so that these two are compared as well.
    differs_alone = False
    #: Whether all tasks that may share a forward always do, within memory, without measuring if batching is faster.
    all_together = False
    #: Whether a second thread may call `new_chunks` for a step, and store its prefix blocks, while the next step runs.
    #: The report of a step then uses no data that steps need. If it ends the task, the next step was computed in vain.
    can_overlap = False
    #: Whether the stage encodes files. The first rank then calls `video_fragment` and `finish` in a second thread, for
    #: one task at a time, in the order of its steps. The next steps of the task, and of others, are computed meanwhile.
    #: Such a stage has no `new_chunks` and no `prefix_blocks`.
    encodes = False

    @abstractmethod
    def verify(self, task: StageInput) -> None:
        """Check the names, shapes and dtypes of a task's inputs. Raises PermanentError."""

    def uploads_of(self, derived: DerivedFacts) -> Sequence[str]:
        """Return the names of the uploads that a task of this request reads. Raises PermanentError."""
        return self.uploads

    def batch_key(self, task: StageInput) -> Hashable:
        """Return a key: tasks with equal keys may run in one batch."""
        return tuple(task.params.get(name) for name in PIXELS)

    def exact_batch_key(self, state: Any) -> Hashable | None:
        """Return a key for batch invariance: states with equal keys may share a forward.

        States of equal batch key and equal exact batch key get the same bytes together as alone. The key covers all
        properties of the inputs that decide how a batch is computed, such as the length of a text before its padding.
        None: unknown, so an exact pool runs each task alone.
        """
        return None

    @abstractmethod
    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        """Run tasks to their end. Returns their outputs in the same order."""

    def warm_up(self) -> None:  # noqa: B027
        """Compute a made-up task, so that no real task pays for first-use initialization.

        Leaves no state behind.
        """

    def use_batched(self) -> None:
        """Compute as in a batched pool from the next step on, without batch invariance."""
        self.exact = self.differs_alone = False

    def receive(self, derived: DerivedFacts, priority: int, names: Collection[str]) -> StreamedInput | None:
        """Return a receiver for an input in chunks, before its task starts.

        `names`: the names of the input's tensors. None: the stage needs this input whole.
        """
        return None

    def start(self, task: StageInput) -> Any:
        """Return the state before the first step."""
        return OneStepState(task)

    def save(self, state: Any) -> Checkpoint | None:
        """Return a checkpoint from which `resume` continues exactly, in memory that steps do not change.

        None: tasks of this stage restart from the beginning. Raises PermanentError for a state that cannot be saved.
        """
        return None

    def resume(self, task: StageInput, checkpoint: Checkpoint) -> Any:
        """Return the saved state, also in another process.

        Steps from it make the same bytes as steps from the original. Raises PermanentError for a checkpoint of
        another task.
        """
        raise PermanentError(f"stage {self.kind} does not support checkpoints")

    def waits(self, state: Any) -> bool:
        """Return whether a step would not advance this state now. Other states should go first."""
        return False

    def step(self, batch: Sequence[Any]) -> list[Any]:
        """Compute one step, and return a result for `advance` or an error per state.

        A stage with an exact batch key changes no state here, so that the step can be repeated in another batch to
        compare the results. If this method raises, for example out of memory, no state has changed either: the caller
        may retry with smaller batches.
        """
        return [*self.run([state.task for state in batch])]

    def step_alone(self, state: Any) -> Any:
        """Return the reference result of a step.

        `step` should return the same bytes in every batch.
        """
        return self.step([state])[0]

    def reduce_memory(self, state: Any) -> Any | None:
        """Return the state with a next step that needs less memory, or None.

        Called after a step has run out of memory alone, twice. The given state must not be used again. Raises
        OutOfMemory if a smaller step would change the bytes of the result, and `--exact-only` refuses that.
        """
        return None

    def advance(self, state: Any, result: Any) -> Any:
        """Return the state after a step with this result.

        The given state must not be used again.
        """
        return OneStepState(state.task, result)

    def progress(self, state: Any) -> tuple[int, int]:
        """Return (steps done, total steps)."""
        return int(state.output is not None), 1

    def outline(self, state: Any) -> Outline:
        """Return names, dtypes and shapes of an output that others read while it is written.

        Called when a state starts. Empty: the output is known only at its end.
        """
        return ()

    def write_to(self, state: Any, output: OpenOutput) -> None:  # noqa: B027
        """Make a new state's steps write their output to `output` once it is computed.

        Data that was written stays unchanged, also when a step is repeated. A stage that does not write during steps
        returns all tensors from `finish`.
        """

    def finish(self, state: Any) -> StageOutput:
        """Return the output of a state whose steps are all done."""
        output: StageOutput = state.output
        return output

    def release(self, state: Any) -> None:  # noqa: B027
        """Release the shared resources of a state. Called exactly once per state, also after errors."""

    def preview(self, state: Any) -> EncodedMedia | None:
        """Return a small picture of the current result; None from a stage without previews."""
        return None

    def video_fragment(self, state: Any) -> bytes:
        """Return the video fragment that the last step added to the result's stream, or b"".

        Called after each step except the last, after which the result itself is stored.
        """
        return b""

    def discard_frames(self, state: Any) -> None:  # noqa: B027
        """Free the frames that the last step left to encode.

        Called on ranks that encode no files.
        """

    def new_chunks(self, state: Any) -> Sequence[bytes]:
        """Return the chunks, such as token deltas, that the last step added to the output.

        Called once after each step, before `progress` counts it. Chunks are numbered in order, after those in
        `StageInput.recorded`, and are recorded before any client reads them. A state that starts or resumes therefore
        continues after its recorded chunks.
        """
        return ()

    def prefix_blocks(self, state: Any) -> Sequence[PrefixBlock]:
        """Return the prefix blocks that the last step completed, in order.

        A stage whose spec `prefix_cached` computes its output in such blocks. A task may get the first of them as its
        `prefix`, in order; it uses those that it has room for and computes the others.
        """
        return ()


State = TypeVar("State")


class SteppedStage(Stage, Generic[State]):
    """A stage that advances in steps.

    Its whole state is one value, so that a task can pause, stop and move to another process. It implements `verify`,
    `start`, `step`, `progress` and `finish`. A stage whose tasks may share forwards in an exact pool also implements
    `exact_batch_key` and `advance`, and its `step` changes no state.
    """

    @abstractmethod
    def start(self, task: StageInput) -> State:
        """Return the state before the first step."""

    @abstractmethod
    def step(self, batch: Sequence[State]) -> list[Any]:
        """Compute one step of these states, as `Stage.step` does.

        By default, results are the next states.
        """

    def advance(self, state: State, result: Any) -> State:
        """Return the state after a step with this result.

        The given state must not be used again.
        """
        next_state: State = result
        return next_state

    @abstractmethod
    def progress(self, state: State) -> tuple[int, int]:
        """Return (steps done, total steps)."""

    @abstractmethod
    def finish(self, state: State) -> StageOutput:
        """Return the output of a state whose steps are all done."""

    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        """Run each task from start to finish, one after the other."""
        outputs = []
        for task in batch:
            state = self.start(task)
            while len({*self.progress(state)}) > 1:
                (next_state,) = next_states(self, [state])
                if isinstance(next_state, Exception):
                    raise next_state
                state = next_state
                # Called for their effects: an answer adds the step's token to its text, a video its frames to the file.
                self.new_chunks(state)
                self.video_fragment(state)

            outputs.append(self.finish(state))
            self.release(state)
        return outputs


def next_states(stage: Stage, states: Sequence[Any]) -> list[Any]:
    """Return the states after one more step, or the error of a state that failed.

    A single state is stepped by `step_alone`.
    """
    results = stage.step(states) if len(states) > 1 else [stage.step_alone(state) for state in states]
    pairs = zip(states, results, strict=True)
    return [result if isinstance(result, Exception) else stage.advance(state, result) for state, result in pairs]


T = TypeVar("T", str, int, float)


def need(params: Params, name: str, kind: type[T]) -> T:
    """Return a required parameter of this type; an int is accepted for a float.

    Raises PermanentError if it is missing or of another type.
    """
    value = params.get(name)
    if kind is float and type(value) is int:
        return kind(value)

    # In Python a bool is an int.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise PermanentError(f"parameter {name} must be of type {kind.__name__}, not {value!r}")
    return value


def need_tensor(task: StageInput, name: str, shape: Sequence[int | None], integer: bool = False) -> Tensor:
    """Return a required input tensor of a task. Checks its shape and dtype.

    `shape`: the expected shape; None is any length.
    `integer`: whether the dtype must be an integer; else it must be floating point.
    Raises PermanentError if the tensor is missing or does not match.
    """
    tensor = task.tensors.get(name)
    if tensor is None:
        raise PermanentError(f"input {name} is missing")

    expected_shape = [side if side is not None else actual for side, actual in zip(shape, tensor.shape, strict=False)]
    has_shape = list(tensor.shape) == expected_shape and len(shape) == tensor.ndim
    if not has_shape or tensor.is_floating_point() == integer:
        sides = "×".join("any" if side is None else str(side) for side in shape)
        actual_type = f"{tensor.dtype} of {tuple(tensor.shape)}"
        expected_kind = "integer" if integer else "floating point"
        raise PermanentError(f"input {name} must be {expected_kind} of {sides}, not {actual_type}")
    return tensor


#: Prefix of the names of tensors for the negative prompt. Their value is None without guidance.
NEGATIVE = "negative_"

#: The halves of classifier-free guidance (CFG): the prediction for the prompt, and for the negative prompt.
CONDITIONAL, UNCONDITIONAL = "towards", "away"


def guidance_scale(params: Params) -> float:
    """Return the guidance scale of a request. Raises PermanentError without one."""
    return need(params, "guidance_scale", float)


def applies(scale: float) -> bool:
    """Return whether guidance is on at this scale: above 1, as in diffusers."""
    return scale > 1.0
