"""Messages between a worker's parent and its compute processes, over a socket pair. Nothing is pickled."""

from __future__ import annotations

import asyncio
import socket
import threading
import traceback
from typing import Any, Literal

import msgspec

from unfuse.core.codec import HEADER_BYTES, MAX_BYTES, decode, encode, frame, length_of, read_message
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.errors import ObjectLost, UnfuseError
from unfuse.core.messages import (
    REFUSED,
    CachePrefix,
    CheckpointSaved,
    ExactBatchStats,
    Memory,
    OutputAnnounced,
    RankTimes,
    StepProgress,
    StorageLocations,
    TaskCompleted,
    TaskFailed,
    TaskStopped,
)
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import StageSelector
from unfuse.core.request import Timings
from unfuse.core.retries import MEMORY, REQUEST, UNKNOWN, rule_of, type_name
from unfuse.core.task import PIECES_AT_ONCE, Claim, Lease, OutputDeltas
from unfuse.core.text import TextStats

How = Literal["together", "alone", "compared"]
EXACTNESS = "exactness.json"  # the file, in the data folder, with what batches were found exact
KEPT_LORAS = "loras"  # the folder, in the data folder, with adapters that came from another machine

EVIDENCE_CHARS = 4000

ROOMIER = "serve with --vae tiled, --offload, or on a larger device"


class LoadModels(msgspec.Struct, frozen=True, tag=True):
    """Load the chosen stages of these (name, source, dtype) models, then answer Ready or LoadFailed.

    `owner`, `node`, `arena` and `write_token` open the worker's own arena. `places` has the addresses of the stores;
    the sockets of other arenas of this machine are in `run_dir`. What outlives it is in `data_dir` ("": nothing
    does). It is number `rank` of so many `ranks`, which meet in the file `rendezvous`. `kv` is the bytes for keys and
    values of tokens (0: as there is room). Of the set that it `holds`
    these declared `pools` alone are loaded (none: all). If `registered` is not empty, other pools are not loaded:
    the model's files have changed since the worker registered.
    """

    models: tuple[tuple[str, str, str], ...]
    choice: StageSelector
    compute: ComputeOptions
    owner: str
    node: str
    arena: str
    write_token: bytes
    places: StorageLocations
    run_dir: str = ""
    data_dir: str = ""
    rank: int = 0
    ranks: int = 1
    rendezvous: str = ""
    kv: int = 0
    holds: str = ""
    pools: frozenset[str] = frozenset()
    registered: frozenset[str] = frozenset()


class RunTask(msgspec.Struct, frozen=True, tag=True):
    """Run a leased task. `peers` gives (node, arena address) of the owners of its inputs.

    `recorded` are the pieces of its output that are recorded already. They may be more than a message takes, so that
    they go before it in messages of their own, and the channel puts them together again.
    """

    lease: Lease
    peers: dict[str, tuple[str, str]]
    recorded: tuple[bytes, ...] = ()


class InputArrived(msgspec.Struct, frozen=True, tag=True):
    """The next bytes, `start` to `stop`, of an input of a task that is to run here lie at this offset of the arena.

    Sent to every rank, and answered by each with Taken. The Run follows the last of them, without that input.
    """

    lease: Lease
    ref: ObjectRef
    offset: int
    start: int
    stop: int


class CancelTask(msgspec.Struct, frozen=True, tag=True):
    """Drop a task at its next step, with `save` after Saved. The answer is Stopped, unless it has ended.

    With `if_saved`, a task goes on, unanswered, where dropping it would lose steps, since its state cannot be saved.
    """

    claim: Claim
    save: bool = False
    if_saved: bool = False


class StepPlan(msgspec.Struct, frozen=True, tag=True):
    """One round of the loop, as plain data: it is decided once, and carried out the same in every compute process.

    It names tasks to drop, to admit, to try `again` (they wait for the result store) and to save, and the batch that
    makes a step `how`: together, each alone, or both ways, to compare them; what each has alone then counts. First, it
    takes what has come of inputs (`receive`: task and object), since that takes room which all ranks share alike.
    """

    drop: tuple[CancelTask, ...] = ()
    admit: tuple[Claim, ...] = ()
    again: tuple[Claim, ...] = ()
    save: tuple[Claim, ...] = ()
    step: tuple[Claim, ...] = ()
    how: How = "together"
    receive: tuple[tuple[Claim, str], ...] = ()

    @property
    def changes(self) -> bool:
        """Whether it does anything to tasks beside a step."""
        return bool(self.drop or self.admit or self.again or self.save)


class PairCall(msgspec.Struct, frozen=True, tag=True):
    """Call a method of `transfer.base.Pairs` for a pair. `part` is not answered, the others by PairDone."""

    method: Literal["offer", "join", "move", "part"]
    pair: str
    arguments: tuple[Any, ...] = ()


class PairDone(msgspec.Struct, frozen=True, tag=True):
    """A pair is offered at a port, is made, or has moved; or it is of no use any more, for the reason in `error`."""

    pair: str
    port: int = 0
    error: str = ""


class InputTaken(msgspec.Struct, frozen=True, tag=True):
    """This rank has taken what has arrived of a task's input, that object: its place is free again. Or it cannot
    (`error`): then the task is dropped.
    """

    claim: Claim
    object: str
    error: str = ""


class LoadingStage(msgspec.Struct, frozen=True, tag=True):
    """A stage will be loaded next; `done` of the `total` bytes of all stages' files are loaded."""

    model: str
    stage: str
    done: int
    total: int


class ComponentLoaded(msgspec.Struct, frozen=True, tag=True):
    """A component is loaded and takes `bytes` of memory; `done` of the `total` bytes of files are loaded now."""

    component: str
    seconds: float
    bytes: int
    done: int
    total: int


class ModelsLoaded(msgspec.Struct, frozen=True, tag=True):
    """Everything is loaded. `device` is cpu or the name of the GPU.

    `outcome` is what the bytes of results depend on beside weights, dtypes and parameters. `resources` are amounts that
    the process has found room for, for all tasks together. `left_out` are the registered pools that were not loaded,
    because the model's files have changed.
    """

    device: str
    outcome: dict[str, str] = {}
    resources: dict[str, int] = {}
    left_out: frozenset[str] = frozenset()


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """Loading failed, for the reason in `message`. The process ends."""

    message: str


class RankStatus(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """What one compute process does and uses. Sent when it has changed."""

    #: Seconds that it has computed steps and waited for other ranks. Zeros if there is one rank.
    time: RankTimes = RankTimes()

    #: Bytes that it holds on its GPU. 0 on a CPU.
    device_memory: int = 0

    #: KV blocks and prompts of its language stages. None without such stages, and of all ranks but the first.
    texts: TextStats | None = None

    #: Number of texts whose KV was given up for others since the process started.
    retracted: int = 0

    #: By pool, how requests of an exact pool share forwards. Known to the first rank.
    batch_invariance: dict[str, ExactBatchStats] = {}


class Leak(msgspec.Struct, frozen=True):
    """Memory that a worker without a task holds for nobody: what it is, its bytes, and whether it is free again."""

    memory: Memory
    name: str
    bytes: int
    freed: bool = False


class LeaksFound(msgspec.Struct, frozen=True, tag=True):
    """This process has no task and holds this memory. Each leak is reported once, by the rank that has it."""

    leaks: tuple[Leak, ...]


class TaskWaits(msgspec.Struct, frozen=True, tag=True):
    """A task waits because the result store does not take its results, or give its upload. Sent at each try."""

    claim: Claim


ForLoop = RunTask | InputArrived | CancelTask | StepPlan  # what the step loop is sent
ToCompute = LoadModels | ForLoop | PairCall

FromCompute = (
    LoadingStage
    | ComponentLoaded
    | ModelsLoaded
    | LoadFailed
    | StepPlan
    | RankStatus
    | PairDone
    | InputTaken
    | StepProgress
    | CheckpointSaved
    | OutputAnnounced
    | OutputDeltas
    | CachePrefix
    | LeaksFound
    | TaskWaits
    | TaskStopped
    | TaskCompleted
    | TaskFailed
)


class ComputeChannel:
    """The compute process's end of the socket pair. `receive` blocks; any thread may call `send`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._recorded: dict[Claim, list[bytes]] = {}

    def send(self, message: FromCompute) -> None:
        """Send to the parent. Raises BrokenPipeError if it is gone."""
        data = frame(encode(message))
        with self._lock:
            self._connection.sendall(data)

    def receive(self) -> ToCompute:
        """The next message. Raises EOFError if the parent is gone."""
        while isinstance(message := self._next(), OutputDeltas):
            self._recorded.setdefault(message.claim, []).extend(message.pieces)
        if isinstance(message, RunTask):
            return msgspec.structs.replace(message, recorded=tuple(self._recorded.pop(message.lease.claim, ())))
        return message

    def _next(self) -> ToCompute | OutputDeltas:
        message: ToCompute | OutputDeltas = decode(read_message(self._read, MAX_BYTES), ToCompute | OutputDeltas)
        return message

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._connection.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]
        return bytes(data)


class ParentChannel:
    """The parent's end of the socket pair, for one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, connection: socket.socket) -> ParentChannel:
        """A channel over one end of a socket pair, which it closes."""
        return cls(*await asyncio.open_unix_connection(sock=connection))

    async def send(self, message: ToCompute) -> None:
        """Send to the compute process. Raises nothing if that is gone: `receive` notices it."""
        if isinstance(message, RunTask):
            for at in range(0, len(message.recorded), PIECES_AT_ONCE):
                some = message.recorded[at : at + PIECES_AT_ONCE]
                self._writer.write(frame(encode(OutputDeltas(message.lease.claim, at, some))))
            message = msgspec.structs.replace(message, recorded=())
        self._writer.write(frame(encode(message)))

    async def receive(self) -> FromCompute:
        """The next message. Raises EOFError if the compute process is gone."""
        try:
            header = await self._reader.readexactly(HEADER_BYTES)
            return decode(await self._reader.readexactly(length_of(header, MAX_BYTES)), FromCompute)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError from error

    def close(self) -> None:
        """Close the socket: the compute process ends."""
        self._writer.close()


def failure(claim: Claim, error: Exception, timings: Timings | None = None) -> TaskFailed:
    """The report for a task that ended with this error; `timings` say what it has used."""
    rule = rule_of(error)
    message = str(error) if isinstance(error, UnfuseError) else f"{type(error).__name__}: {error}"
    if rule is MEMORY:
        message = f"the device has not enough memory for this request: {message}; ask for less, or {ROOMIER}"
    evidence = "".join(traceback.format_exception(error))[-EVIDENCE_CHARS:]
    return TaskFailed(
        claim, rule.kind, sendable(message), sendable(evidence),
        object_id=error.object_id if isinstance(error, ObjectLost) else "",
        reason=REFUSED if rule is REQUEST else "",
        error=sendable(type_name(error)) if rule is UNKNOWN else "",
        timings=timings or Timings(),
    )  # fmt: skip


def sendable(text: str) -> str:
    """Return a text in which characters that UTF-8 cannot encode are replaced, as in odd file names."""
    return text.encode(errors="replace").decode()


def about(claim: Claim) -> dict[str, object]:
    """The fields of every log line about a task."""
    return {"request": claim.request, "stage": claim.stage, "attempt": claim.attempt}
