"""The stage port. A stage is loaded once per compute process and fed tasks; it never sees queues, refs or addresses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec

from unfuse.core.derived_facts import DerivedFacts
from unfuse.core.errors import PermanentError
from unfuse.core.modalities import PIXELS
from unfuse.core.plan import Params
from unfuse.core.text import TextStats

if TYPE_CHECKING:
    from torch import Tensor


Tensors = Mapping[str, "Tensor | None"]
Outline = Sequence[tuple[str, str, tuple[int, ...]]]


class StageInput(msgspec.Struct, frozen=True):
    """One task as a stage sees it.

    Its parameters, the tensors of its inputs by name (read-only: never written), the uploads it reads by name, and the
    pieces that are recorded of what it makes: see `Stage.grown`. A task of a higher `priority` goes first.
    `prefix` has the first prefix blocks, which others have made: see `Stage.prefix_blocks`; it is gone once the task
    began. An input that the stage has `received` in pieces is not among the tensors. Whether the task `extends` the
    prefix blocks of another stage: see `StageSpec.extends`. `derived` is what the server found out about the request.
    """

    params: Params
    tensors: Tensors
    uploads: Mapping[str, bytes] = {}
    recorded: tuple[bytes, ...] = ()
    priority: int = 0
    prefix: tuple[Tensors, ...] = ()
    received: Any = None
    extends: bool = False
    derived: DerivedFacts = DerivedFacts()


class EncodedMedia(msgspec.Struct, frozen=True):
    """An encoded picture or video, ready for the result store."""

    content_type: str
    data: bytes


class StageOutput(msgspec.Struct, frozen=True):
    """What a stage made: tensors for later stages, or media for the client (a final stage).

    Tensors share no memory with the task's inputs, which may be gone when they are read.
    """

    tensors: Tensors = {}
    media: tuple[EncodedMedia, ...] = ()


class OpenOutput(Protocol):
    """Where an output is written that is read meanwhile, from the front of its first tensor to the end of its last."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The tensors by name, to be written."""

    def due(self, name: str, elements: int) -> bool:
        """Whether others can read more once so many elements of a tensor, and all tensors before it, are written."""

    def written(self, name: str, elements: int) -> None:
        """These are written, and do not change any more. Never fails."""


class StreamedInput(Protocol):
    """Takes an input that comes in pieces, for a task that will begin, or be dropped."""

    def take(self, piece: Any) -> None:
        """Take the next bytes of the object, a tensor of uint8 that changes afterwards."""

    def drop(self) -> None:
        """The task will not begin."""


@dataclass(frozen=True)
class PrefixBlock:
    """A part of an output that is equal for all tasks of the same beginning."""

    #: Its place among the blocks of the task, from 0 on.
    number: int

    #: Returns a copy of its tensors, which steps do not change. To be called before the next step.
    read: Callable[[], Tensors]

    #: Identifies this block and all before it, where the stage's spec `extends` the blocks of another stage.
    digest: str = ""


class Checkpoint(msgspec.Struct, frozen=True):
    """The state of a stepped stage between two steps, without what the task has: tensors, and plain values."""

    tensors: Tensors
    values: dict[str, Any] = {}


class ReportsTextStats(Protocol):
    """What keeps texts: says how many, and how often one of them gave up its keys and values for others, so far."""

    retracted: int

    def load(self) -> TextStats:
        """The present numbers."""

    def leftovers(self) -> Mapping[str, int]:
        """Bytes of memory that is taken now, by a name of what takes it: none while no state of a task exists."""

    def end_all(self) -> None:
        """Free the memory of everything that was begun here, while no state of a task exists."""


@dataclass(frozen=True)
class OneStepState:
    """A task of a stage of one step: `output` is None before the step."""

    task: StageInput
    output: StageOutput | None = None


class Stage(ABC):
    """One stage kind of one model, with its weights in memory.

    A stage of one step implements `verify` and `run`. A stage of several steps is a `SteppedStage`. The step loop runs
    both by the same methods; the state of a stage of one step is a `OneStepState`.

    `verify` raises PermanentError when inputs are missing or of the wrong shape; it must not touch their values.
    A task that is run alone gets what the undivided pipeline makes of it, bit for bit; mates change it by no more than
    rounding. `uploads` names the attachments a task brings.
    No entry keeps a gradient: a stage computes as under `torch.no_grad()`, whatever the caller's grad mode.
    """

    kind: str
    uploads: tuple[str, ...] = ()
    texts: ReportsTextStats | None = None
    """What keeps the texts that this stage works on, if any; stages may share it."""
    resources: Mapping[str, int] = {}
    """Amounts that the process has of what tasks of this stage need (`StageSpec.needs`), as far as it `brings` them."""
    exact = False
    """Whether a task should get the same bytes whatever its mates, as far as this stage can see to that."""
    differs_alone = False
    """Whether `step` of a single state computes it otherwise than `step_alone`, so that these are compared, too."""
    all_together = False
    """Whether all tasks that may share a forward do, as far as there is memory, without finding out if that pays."""
    can_overlap = False
    """Whether a step may be computed while the one before is still reported, by `grown`, in another thread, where its
    prefix blocks are stored too. That touches nothing that steps need, and may find that the state is over: then the
    step was one too many.
    """

    @abstractmethod
    def verify(self, task: StageInput) -> None:
        """Check the names, shapes and dtypes of a task's inputs. Raises PermanentError."""

    def uploads_of(self, derived: DerivedFacts) -> Sequence[str]:
        """The attachments that a task of such a request brings. Raises PermanentError."""
        return self.uploads

    def batch_key(self, task: StageInput) -> Hashable:
        """Tasks of equal key may run in one batch."""
        return tuple(task.params.get(name) for name in PIXELS)

    def exact_batch_key(self, state: Any) -> Hashable | None:
        """What states must have in common, beside the batch key, to get the same bytes together as alone.

        It covers whatever in their inputs decides how a batch is computed, such as the length of a text behind which
        all is padding. None: that cannot be said, and in an exact pool each task is run by itself.
        """
        return None

    @abstractmethod
    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        """Run tasks to their end, in order."""

    def warm_up(self) -> None:  # noqa: B027
        """Compute something made up, so that no task pays for what is made at first use. Leaves nothing behind."""

    def receive(self, derived: DerivedFacts, priority: int, names: Collection[str]) -> StreamedInput | None:
        """Begin to take an input, which has tensors of these names, before its task begins; None: it is to be whole."""
        return None

    def start(self, task: StageInput) -> Any:
        """The state before the first step."""
        return OneStepState(task)

    def save(self, state: Any) -> Checkpoint | None:
        """What `resume` needs to continue exactly, in memory that steps do not change.

        None from a stage that starts from the beginning. Raises PermanentError for a state that cannot be saved.
        """
        return None

    def resume(self, task: StageInput, checkpoint: Checkpoint) -> Any:
        """The saved state, also in another process. Raises PermanentError for a checkpoint of another task.

        Whoever goes on from it gets the bytes that go on from the original.
        """
        raise PermanentError(f"stage {self.kind} starts from the beginning")

    def waits(self, state: Any) -> bool:
        """Whether a step would not advance this state now, since it waits for something; others should go first."""
        return False

    def step(self, batch: Sequence[Any]) -> list[Any]:
        """Compute one step of these states: a result for `advance` of each, or the error of one that has none.

        A stage with an exact batch key changes no state here, so that a step can be computed again with other mates, to
        compare the results. When it raises, out of memory perhaps, it has changed none of them either: smaller batches
        of them may be tried.
        """
        return [*self.run([state.task for state in batch])]

    def step_alone(self, state: Any) -> Any:
        """The result that `step` should have for this state, bit for bit, whatever its mates."""
        return self.step([state])[0]

    def advance(self, state: Any, result: Any) -> Any:
        """The state after a step with this result. The given state must not be used again."""
        return OneStepState(state.task, result)

    def progress(self, state: Any) -> tuple[int, int]:
        """(steps done, steps in all)."""
        return int(state.output is not None), 1

    def outline(self, state: Any) -> Outline:
        """Names, dtypes and shapes of an output that can be read while it is written, when a state begins.

        None from a stage whose output is known only at its end.
        """
        return ()

    def write_to(self, state: Any, output: OpenOutput) -> None:  # noqa: B027
        """Have the steps of a state that begins write its output there, each as much as it has; or `finish` has it all.

        What is written once stays, also where a step is made again.
        """

    def finish(self, state: Any) -> StageOutput:
        """The output of a state whose steps are all done."""
        output: StageOutput = state.output
        return output

    def let_go(self, state: Any) -> None:  # noqa: B027
        """The state is of no use any more: give back what it has of what tasks share. Called once, whatever happens."""

    def preview(self, state: Any) -> EncodedMedia | None:
        """A small picture of what the state is becoming; None from a stage without previews."""
        return None

    def part(self, state: Any) -> bytes:
        """What a step added to a result that can be read while it grows; b"" from a stage without such.

        It is asked for after each step but the last one, after which the result is there.
        """
        return b""

    def grown(self, state: Any) -> Sequence[bytes]:
        """The pieces that a step added to an output which is read while it grows; none from a stage without such.

        It is asked for once after each step, and `progress` counts behind it. Pieces are numbered as they come, behind
        those that are `recorded` of the task, and recorded before anybody sees them. So a state that starts, or
        resumes, goes on behind what is recorded.
        """
        return ()

    def prefix_blocks(self, state: Any) -> Sequence[PrefixBlock]:
        """The prefix blocks that the last step completed, in order; none from a stage without such.

        A stage whose spec `goes_on` makes its output in such blocks. A task may be given the first of them as its
        `prefix`, in order; it takes what it can, and makes the others itself.
        """
        return ()


State = TypeVar("State")


class SteppedStage(Stage, Generic[State]):
    """A stage that advances in steps. Its whole state is one value, so that it can pause, stop and move.

    It implements `verify`, `start`, `step`, `progress` and `finish`. A stage of which an exact pool may share forwards
    implements `exact_batch_key` and `advance` too, and its `step` changes no state.
    """

    @abstractmethod
    def start(self, task: StageInput) -> State:
        """The state before the first step."""

    @abstractmethod
    def step(self, batch: Sequence[State]) -> list[Any]:
        """Compute one step of these states, as `Stage.step` does; by default, results are the next states."""

    def advance(self, state: State, result: Any) -> State:
        """The state after a step with this result. The given state must not be used again."""
        following: State = result
        return following

    @abstractmethod
    def progress(self, state: State) -> tuple[int, int]:
        """(steps done, steps in all)."""

    @abstractmethod
    def finish(self, state: State) -> StageOutput:
        """The output of a state whose steps are all done."""

    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        """Run each task from start to finish, one after the other."""
        outputs = []
        for task in batch:
            state = self.start(task)
            while len({*self.progress(state)}) > 1:
                (following,) = next_states(self, [state])
                if isinstance(following, Exception):
                    raise following
                state = following
                self.grown(state)
            outputs.append(self.finish(state))
            self.let_go(state)
        return outputs


def next_states(stage: Stage, states: Sequence[Any]) -> list[Any]:
    """Make one step of these states. Returns the next states, with an error in the place of one that failed.

    A single state is stepped as it is alone.
    """
    results = stage.step(states) if len(states) > 1 else [stage.step_alone(state) for state in states]
    pairs = zip(states, results, strict=True)
    return [result if isinstance(result, Exception) else stage.advance(state, result) for state, result in pairs]


T = TypeVar("T", str, int, float)


def need(params: Params, name: str, kind: type[T]) -> T:
    """The parameter of this name and type; an int is accepted for a float. Raises PermanentError if it is missing."""
    value = params.get(name)
    if kind is float and type(value) is int:
        return kind(value)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise PermanentError(f"parameter {name} must be of type {kind.__name__}, not {value!r}")
    return value


def need_tensor(task: StageInput, name: str, shape: Sequence[int | None], whole: bool = False) -> Tensor:
    """The task's tensor of this name. Raises PermanentError unless it is there, of that shape (None: any length).

    It must be floating point; where it is to be of `whole` numbers, it must not.
    """
    tensor = task.tensors.get(name)
    if tensor is None:
        raise PermanentError(f"input {name} is missing")
    wanted = [side if side is not None else got for side, got in zip(shape, tensor.shape, strict=False)]
    if list(tensor.shape) != wanted or len(shape) != tensor.ndim or tensor.is_floating_point() == whole:
        sides = "×".join("any" if side is None else str(side) for side in shape)
        found = f"{tensor.dtype} of {tuple(tensor.shape)}"
        raise PermanentError(f"input {name} must be {'integer' if whole else 'floating point'} of {sides}, not {found}")
    return tensor


NEGATIVE = "negative_"  # prefix of what was made from the negative prompt; the value is None without guidance
TOWARDS, AWAY = "towards", "away"  # the halves of guidance: what is predicted for the prompt, and for its negative


def guidance_scale(params: Params) -> float:
    """How much further than the negative prompt's a prediction goes. Raises PermanentError without a scale."""
    return need(params, "guidance_scale", float)


def applies(scale: float) -> bool:
    """Whether there is a second half at that scale: above 1, as diffusers has it."""
    return scale > 1.0
