"""The stage port. A stage is loaded once per compute process and fed tasks; it never sees queues, refs or addresses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec

from unfuse.core.derived import Derived
from unfuse.core.errors import PermanentError
from unfuse.core.media import PIXELS
from unfuse.core.plan import Params
from unfuse.core.text import TextLoad

if TYPE_CHECKING:
    from torch import Tensor

Tensors = Mapping[str, "Tensor | None"]
Outline = Sequence[tuple[str, str, tuple[int, ...]]]


class StageInput(msgspec.Struct, frozen=True):
    """One task as a stage sees it.

    Its parameters, the tensors of its inputs by name (read-only: never written), the uploads it reads by name, and the
    pieces that are recorded of what it makes: see `SteppedStage.grown`. A task of a higher `priority` goes first.
    `prefix` is what others have made of the same beginning: see `SteppedStage.kept`; it is gone once the task began. An
    input that the stage has `received` in pieces is not among the tensors. Whether the task `extends` the portions of
    another stage: see `StageSpec.extends`. `derived` is what the server found out about the request.
    """

    params: Params
    tensors: Tensors
    uploads: Mapping[str, bytes] = {}
    recorded: tuple[bytes, ...] = ()
    priority: int = 0
    prefix: tuple[Tensors, ...] = ()
    received: Any = None
    extends: bool = False
    derived: Derived = Derived()


class Media(msgspec.Struct, frozen=True):
    """An encoded picture or video, ready for the result store."""

    content_type: str
    data: bytes


class StageOutput(msgspec.Struct, frozen=True):
    """What a stage made: tensors for later stages, or media for the client (a final stage).

    Tensors share no memory with the task's inputs, which may be gone when they are read.
    """

    tensors: Tensors = {}
    media: tuple[Media, ...] = ()


class OpenOutput(Protocol):
    """Where an output is written that is read meanwhile, from the front of its first tensor to the end of its last."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The tensors by name, to be written."""

    def due(self, name: str, elements: int) -> bool:
        """Whether others can read more once so many elements of a tensor, and all tensors before it, are written."""

    def written(self, name: str, elements: int) -> None:
        """These are written, and do not change any more. Never fails."""


class Receiving(Protocol):
    """Takes an input that comes in pieces, for a task that will begin, or be dropped."""

    def take(self, piece: Any) -> None:
        """Take the next bytes of the object, a tensor of uint8 that changes afterwards."""

    def drop(self) -> None:
        """The task will not begin."""


class Checkpoint(msgspec.Struct, frozen=True):
    """The state of a stepped stage between two steps, without what the task has: tensors, and plain values."""

    tensors: Tensors
    values: dict[str, Any] = {}


class HasTexts(Protocol):
    """What keeps texts: says how many, and how often one of them gave up its keys and values for others, so far."""

    retracted: int

    def load(self) -> TextLoad:
        """The present numbers."""

    def leftovers(self) -> Mapping[str, int]:
        """Bytes of memory that is taken now, by a name of what takes it: none while no state of a task exists."""

    def end_all(self) -> None:
        """Free the memory of everything that was begun here, while no state of a task exists."""


class Stage(ABC):
    """One stage kind of one model, with its weights in memory.

    `verify` raises PermanentError when inputs are missing or of the wrong shape; it must not touch their values.
    Tasks with equal `batch_key` may share a call of `run`. A task that is run alone gets what the undivided pipeline
    makes of it, bit for bit; mates change it by no more than rounding. `uploads` names the attachments a task brings.
    No entry keeps a gradient: a stage computes as under `torch.no_grad()`, whatever the caller's grad mode.
    """

    kind: str
    uploads: tuple[str, ...] = ()
    texts: HasTexts | None = None
    """What keeps the texts that this stage works on, if any; stages may share it."""
    resources: Mapping[str, int] = {}
    """Amounts that the process has of what tasks of this stage need (`StageSpec.needs`), as far as it `brings` them."""
    exact = False
    """Whether a task should get the same bytes whatever its mates, as far as this stage can see to that."""

    @abstractmethod
    def verify(self, task: StageInput) -> None:
        """Check the names, shapes and dtypes of a task's inputs. Raises PermanentError."""

    def uploads_of(self, derived: Derived) -> Sequence[str]:
        """The attachments that a task of such a request brings. Raises PermanentError."""
        return self.uploads

    def likeness(self, task: StageInput) -> Hashable | None:
        """What tasks must have in common, beside the batch key, to get the same bytes together as alone.

        It covers whatever in their inputs decides how a batch is computed, such as the length of a text behind which
        all is padding. None: that cannot be said, and in an exact pool each task is run by itself.
        """
        return None

    def batch_key(self, task: StageInput) -> Hashable:
        """Tasks of equal key may run in one batch."""
        return tuple(task.params.get(name) for name in PIXELS)

    def outline_of(self, task: StageInput) -> Outline:
        """As `SteppedStage.outline`, of a task."""
        return ()

    @abstractmethod
    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        """Run tasks to their end, in order."""


State = TypeVar("State")
Computed = TypeVar("Computed")


class SteppedStage(Stage, Generic[State]):
    """A stage that advances in steps. Its whole state is one value, so that it can pause, stop and move."""

    all_together = False
    """Whether all tasks that may share a forward do, as far as there is memory, without finding out if that pays."""

    goes_ahead = False
    """Whether a step may be computed while the one before is still told of, by `grown`, in another thread, where its
    portions are stored too. That touches nothing that steps need, and may find that the state is over: then the step
    was one too many.
    """

    def warm_up(self) -> None:
        """Compute something made up, so that no task pays for what is made at first use. Leaves nothing behind."""

    def receive(self, derived: Derived, priority: int, names: Collection[str]) -> Receiving | None:
        """Begin to take an input, which has tensors of these names, before its task begins; None: it is to be whole."""
        return None

    @abstractmethod
    def start(self, task: StageInput) -> State:
        """The state before the first step."""

    def save(self, state: State) -> Checkpoint | None:
        """What `resume` needs to continue exactly, in memory that steps do not change.

        None from a stage that starts from the beginning. Raises PermanentError for a state that cannot be saved.
        """
        return None

    def resume(self, task: StageInput, checkpoint: Checkpoint) -> State:
        """The saved state, also in another process. Raises PermanentError for a checkpoint of another task.

        Whoever goes on from it gets the bytes that go on from the original.
        """
        raise PermanentError(f"stage {self.kind} starts from the beginning")

    @abstractmethod
    def step(self, batch: Sequence[State]) -> list[State | Exception]:
        """Advance every state by one step; an error in its place if it cannot. The given states must not be used again.

        When it raises, out of memory perhaps, it has changed none of them: smaller batches of them may be tried.
        """

    def waits(self, state: State) -> bool:
        """Whether a step would not advance this state now, since it waits for something; others should go first."""
        return False

    differs_alone = False
    """Whether `compute` of a single state does otherwise than `alone`, so that these have to be compared, too."""

    def state_likeness(self, state: State) -> Hashable | None:
        """As `likeness`, of a state."""
        return None

    def compute(self, batch: Sequence[State]) -> list[Any]:
        """What a step makes of these states, for `advance`; an error in the place of one that cannot."""
        return self.step(batch)

    def alone(self, state: State) -> Any:
        """What `compute` should make of this state, bit for bit, whatever its mates."""
        return self.compute([state])[0]

    def advance(self, state: State, computed: Any) -> State:
        """The state after a step that computed this."""
        stepped: State = computed
        return stepped

    @abstractmethod
    def progress(self, state: State) -> tuple[int, int]:
        """(steps done, steps in all)."""

    def outline(self, state: State) -> Outline:
        """Names, dtypes and shapes of an output that can be read while it is written, when a state begins.

        None from a stage whose output is known only at its end.
        """
        return ()

    def write_to(self, state: State, output: OpenOutput) -> None:
        """Have the steps of a state that begins write its output there, each as much as it has; or `finish` has it all.

        What is written once stays, also where a step is made again.
        """

    @abstractmethod
    def finish(self, state: State) -> StageOutput:
        """The output of a state whose steps are all done."""

    def let_go(self, state: State) -> None:
        """The state is of no use any more: give back what it has of what tasks share. Called once, whatever happens."""

    def preview(self, state: State) -> Media | None:
        """A small picture of what the state is becoming; None from a stage without previews."""
        return None

    def part(self, state: State) -> bytes:
        """What a step added to a result that can be read while it grows; b"" from a stage without such.

        It is asked for after each step but the last one, after which the result is there.
        """
        return b""

    def grown(self, state: State) -> Sequence[bytes]:
        """The pieces that a step added to an output which is read while it grows; none from a stage without such.

        It is asked for once after each step, and `progress` counts behind it. Pieces are numbered as they come, behind
        those that are `recorded` of the task, and recorded before anybody sees them. So a state that starts, or
        resumes, goes on behind what is recorded.
        """
        return ()

    def kept(self, state: State) -> Sequence[int]:
        """The numbers of the portions that the last step completed; none from a stage without such.

        A stage whose spec `goes_on` makes what it makes in numbered portions, which are equal for all tasks of the same
        beginning. A task may be given the first of them as its `prefix`, in order; it takes what it can, and makes the
        others itself.
        """
        return ()

    def portion(self, state: State, number: int) -> Tensors:
        """A portion, for the tasks of others, in memory that steps do not change."""
        raise PermanentError(f"stage {self.kind} makes no portion {number}")

    def digest(self, state: State, number: int) -> str:
        """What a portion and all before it depend on, of a stage whose spec `extends` what another stage makes."""
        raise PermanentError(f"stage {self.kind} makes no portion {number}")

    def run(self, batch: Sequence[StageInput]) -> list[StageOutput]:
        """Run each task from start to finish, one after the other."""
        outputs = []
        for task in batch:
            state = self.start(task)
            while len({*self.progress(state)}) > 1:
                (stepped,) = self.step([state])
                if isinstance(stepped, Exception):
                    raise stepped
                state = stepped
                self.grown(state)
            outputs.append(self.finish(state))
            self.let_go(state)
        return outputs


class JointStage(SteppedStage[State], Generic[State, Computed]):
    """A stepped stage whose steps have two halves: what a batch computes together, and how each state goes on with it.

    `compute` changes no state, so that it can be done again with other mates, to compare what they get.
    """

    @abstractmethod
    def compute(self, batch: Sequence[State]) -> list[Computed | Exception]:
        """What one step computes of these states; an error in the place of one that has none. May raise, too."""

    @abstractmethod
    def advance(self, state: State, computed: Computed) -> State:
        """The state after a step that computed this; the given state must not be used again."""

    def step(self, batch: Sequence[State]) -> list[State | Exception]:
        """Both halves of a step; of one state, what it makes alone."""
        computed = self.compute(batch) if len(batch) > 1 else [self.alone(state) for state in batch]
        together = zip(batch, computed, strict=True)
        return [made if isinstance(made, Exception) else self.advance(state, made) for state, made in together]


@dataclass(frozen=True)
class Once:
    """A task of a plain stage in the step loop: `output` counts when it is `done`."""

    task: StageInput
    output: StageOutput = StageOutput()
    done: bool = False


class OneStep(JointStage[Once, StageOutput]):
    """A plain stage seen as a stepped one: everything happens in its only step."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.kind, self.uploads = stage.kind, stage.uploads

    def verify(self, task: StageInput) -> None:
        """Check the inputs as the plain stage does."""
        self._stage.verify(task)

    def uploads_of(self, derived: Derived) -> Sequence[str]:
        """Those of the plain stage."""
        return self._stage.uploads_of(derived)

    def batch_key(self, task: StageInput) -> Hashable:
        """The batch key of the plain stage."""
        return self._stage.batch_key(task)

    def start(self, task: StageInput) -> Once:
        """The task, not yet run."""
        return Once(task)

    def state_likeness(self, state: Once) -> Hashable | None:
        """That of the task."""
        return self._stage.likeness(state.task)

    def compute(self, batch: Sequence[Once]) -> list[StageOutput | Exception]:
        """Run the plain stage on these tasks."""
        return [*self._stage.run([state.task for state in batch])]

    def advance(self, state: Once, computed: StageOutput) -> Once:
        """The task with its output."""
        return Once(state.task, computed, True)

    def progress(self, state: Once) -> tuple[int, int]:
        """(0, 1), then (1, 1)."""
        return int(state.done), 1

    def outline(self, state: Once) -> Outline:
        """That of the task."""
        return self._stage.outline_of(state.task)

    def finish(self, state: Once) -> StageOutput:
        """The output of the plain stage."""
        return state.output


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
