"""Messages between a worker's parent and its compute processes, over a socket pair.

They are encoded by msgspec; nothing is pickled.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import traceback
from typing import Any, Literal

import msgspec

from unfuse.core.codec import HEADER_BYTES, MAX_BYTES, decode, encode, frame, read_length, read_message
from unfuse.core.compute_options import ComputeOptions
from unfuse.core.errors import NotFound, ObjectLost, OutOfMemory, PermanentError, UnfuseError
from unfuse.core.messages import (
    CLIENT_ERROR,
    OUT_OF_MEMORY,
    CachePrefix,
    CheckpointSaved,
    Memory,
    OutputAnnounced,
    StepProgress,
    StorageLocations,
    TaskCompleted,
    TaskFailed,
    TaskStopped,
)
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import StageSelector
from unfuse.core.request import Timings
from unfuse.core.retries import MEMORY, REQUEST, UNKNOWN, is_out_of_host_memory, rule_of, type_name
from unfuse.core.task import MAX_DELTAS_PER_MESSAGE, Claim, Lease, OutputDeltas
from unfuse.core.text import TextStats
from unfuse.core.worker_status import BatchInvarianceStats, DeviceId, MemoryRetry, RankTimes

BatchMode = Literal["together", "alone", "compared", "batched"]
"""How a batch is computed: in one forward, each task alone, or both ways to compare the results.

batched: in one forward, and the stage does not aim at batch invariance any more.
"""

#: The file in the data folder with the batch invariance results.
EXACTNESS = "exactness.json"

#: The file in the data folder with the measured batch sizes.
BATCH_SIZES = "batch-sizes.json"

#: The folder in the data folder with the LoRA adapters fetched from the scheduler.
ADAPTER_FOLDER = "loras"

#: Most characters of a traceback in a failure report; the last ones are sent.
EVIDENCE_CHARS = 4000

#: The advice at the end of the message when the device has too little memory for a request.
ROOMIER = "use quantized weights, a larger device or, on a GPU, --offload"

#: The same for host memory, where offload saves nothing.
ROOMIER_HOST = "stop other programs, start fewer workers, or serve on a machine with more memory"


class LoadModels(msgspec.Struct, frozen=True, tag=True):
    """Load the chosen stages of these models. The answer is ModelsLoaded or LoadFailed."""

    #: The models as (name, source, dtype).
    models: tuple[tuple[str, str, str], ...]

    #: Selects the stages by role and component.
    choice: StageSelector

    #: How to compute: the device of this rank, threads, batching, the parallel plan, and more.
    compute: ComputeOptions

    #: Id of the worker, as owner of its objects.
    owner: str

    #: Name of the worker's machine.
    node: str

    #: Address of the worker's arena.
    arena: str

    #: Proves the right to write to the arena.
    write_token: bytes

    #: Addresses of the stores.
    storage: StorageLocations

    #: Folder with the sockets of the other arenas of this machine.
    run_dir: str = ""

    #: Folder for data that outlives the process. Empty if none does.
    data_dir: str = ""

    #: Number of this rank.
    rank: int = 0

    #: Number of ranks of the worker.
    ranks: int = 1

    #: The file by which the ranks meet. Its name is new at each start, so that no rank meets one of an earlier start.
    rendezvous: str = ""

    #: Bytes of the KV cache. 0 means what the device has room for.
    kv: int = 0

    #: Name of the set of weights to load. Empty without sets.
    loaded_model: str = ""

    #: Declared pools of that set; only these are loaded. Empty means all.
    pools: frozenset[str] = frozenset()

    #: Declared pools that the worker has served since it started. Other pools are not loaded: the files of their models
    #: have changed since then. Empty means any pool.
    registered: frozenset[str] = frozenset()


class RunTask(msgspec.Struct, frozen=True, tag=True):
    """Run a leased task."""

    #: The lease. Inputs of other nodes are replaced by their local copies, and streamed inputs are left out.
    lease: Lease

    #: (node, arena address) of the owners of its inputs, by worker id.
    peers: dict[str, tuple[str, str]]

    #: The pieces of its output that earlier attempts recorded. They may exceed one message: the channel sends them
    #: ahead in messages of their own and joins them again.
    recorded: tuple[bytes, ...] = ()


class InputArrived(msgspec.Struct, frozen=True, tag=True):
    """The next chunk of an input of a future task is in the arena.

    Every rank gets the message and answers with InputTaken. RunTask follows the last chunk, without that input.
    """

    #: The lease of the task that reads the input.
    lease: Lease

    #: The whole input, of another node.
    ref: ObjectRef

    #: Offset of the chunk in the arena, in bytes.
    offset: int

    #: The first byte of the chunk, in the object.
    start: int

    #: The byte after the last one of the chunk, in the object.
    stop: int


class CancelTask(msgspec.Struct, frozen=True, tag=True):
    """Drop a task at its next step. TaskStopped answers, unless the task has ended."""

    #: The claim of the task to drop.
    claim: Claim

    #: Whether to save a checkpoint first; CheckpointSaved is sent for it.
    save: bool = False

    #: Drop the task only if its state can be saved, so that no step is lost. Otherwise it continues, without an answer.
    if_saved: bool = False


class StepPlan(msgspec.Struct, frozen=True, tag=True):
    """One round of the step loop, as plain data.

    The first rank decides it, and every compute process carries it out in the same way. The order is: `receive`,
    `admit`, `drop`, `retry`, `save`, `step`.
    """

    #: Tasks to drop.
    drop: tuple[CancelTask, ...] = ()

    #: Tasks to start.
    admit: tuple[Claim, ...] = ()

    #: Tasks that waited for the result store and are tried again.
    retry: tuple[Claim, ...] = ()

    #: Tasks whose state is saved.
    save: tuple[Claim, ...] = ()

    #: The batch that makes a step.
    step: tuple[Claim, ...] = ()

    #: How the batch is computed. With "compared", tasks continue with the results that they had alone.
    batch_mode: BatchMode = "together"

    #: Inputs whose next chunk is received, as (task, object id). All ranks receive a chunk in the same round, because
    #: the number of free KV blocks must be equal on all ranks.
    receive: tuple[tuple[Claim, str], ...] = ()

    @property
    def changes(self) -> bool:
        """Whether the plan does more than receive inputs and make a step."""
        return bool(self.drop or self.admit or self.retry or self.save)


class PairCall(msgspec.Struct, frozen=True, tag=True):
    """Call a method of `transfer.base.ProcessPairs` for a pair. PairDone answers all methods but `part`."""

    #: Name of the method.
    method: Literal["offer", "join", "move", "part"]

    #: Name of the pair, the method's first argument.
    pair: str

    #: The method's other arguments, in order.
    arguments: tuple[Any, ...] = ()


class PairDone(msgspec.Struct, frozen=True, tag=True):
    """The answer to a PairCall: the method has ended, or the pair has failed."""

    #: Name of the pair.
    pair: str

    #: The port of an offered pair, else 0.
    port: int = 0

    #: Why the pair cannot be used any more. Empty if it can.
    error: str = ""


class InputTaken(msgspec.Struct, frozen=True, tag=True):
    """This rank no longer reads a chunk of an input.

    The chunk's place is free once all ranks have answered.
    """

    #: The claim of the task that reads the input.
    claim: Claim

    #: Id of the input's object.
    object: str

    #: Why the rank cannot receive the input. Then the task is dropped. Empty if the rank has received the chunk.
    error: str = ""


class LoadingStage(msgspec.Struct, frozen=True, tag=True):
    """A stage is loaded next."""

    #: Name of the stage's model.
    model: str

    #: Name of the stage.
    stage: str

    #: Bytes of all stages' files that are loaded so far.
    done: int

    #: Bytes of all stages' files.
    total: int


class ComponentLoaded(msgspec.Struct, frozen=True, tag=True):
    """A component is loaded."""

    #: Name of the component, such as `text_encoder`.
    component: str

    #: Seconds that loading took.
    seconds: float

    #: Bytes of memory that it uses.
    bytes: int

    #: Bytes of all stages' files that are loaded so far.
    done: int

    #: Bytes of all stages' files.
    total: int


class ModelsLoaded(msgspec.Struct, frozen=True, tag=True):
    """Everything is loaded."""

    #: "cpu", or the name of the GPU.
    device: str

    #: The numerics: all that the bytes of results depend on, except weights, dtypes and parameters.
    numerics: dict[str, str] = {}

    #: Amounts of the resources that the process provides to all its tasks together, such as KV blocks.
    resources: dict[str, int] = {}

    #: Registered pools that were not loaded, because the model's files have changed.
    changed_pools: frozenset[str] = frozenset()

    #: Index and UUID of the process's device.
    device_id: DeviceId = DeviceId("cpu")


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """Loading failed, and the process ends."""

    #: Why loading failed.
    message: str

    #: Whether the device is the cause: it failed its check, or while models were loaded.
    by_device: bool = False


class DeviceFailed(msgspec.Struct, frozen=True, tag=True):
    """A device error has made the device context unusable, and the process ends.

    Any rank may send it.
    """

    #: Rank of the failed device.
    rank: int

    #: The error, in one sentence.
    message: str

    #: The traceback.
    evidence: str = ""


class MemoryShortage(msgspec.Struct, frozen=True, tag=True):
    """A device had too little memory for a step.

    The first rank sends it at once, for all ranks.
    """

    #: Rank of the device.
    rank: int

    #: What follows. Empty if the task fails.
    retry: MemoryRetry | Literal[""] = ""


class RankStatus(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The times and the memory of one compute process. Sent when they have changed."""

    #: Seconds that the process has computed steps, and has waited for other ranks. Zeros if there is one rank.
    time: RankTimes = RankTimes()

    #: Bytes that the process has reserved on its GPU. 0 on a CPU.
    device_memory: int = 0

    #: KV blocks and prompts of the language stages. None without such stages, and from all ranks but the first.
    texts: TextStats | None = None

    #: Number of texts whose KV blocks were freed for other texts since the process started (retraction).
    retracted: int = 0

    #: By pool, how requests of an exact pool share forwards. Only the first rank reports it.
    batch_invariance: dict[str, BatchInvarianceStats] = {}


class Leak(msgspec.Struct, frozen=True):
    """Memory in use by a worker without tasks."""

    #: The kind of the memory: in the arena, or KV blocks.
    memory: Memory

    #: Describes the leaked object or sequence, for the log.
    name: str

    #: Size of the leaked memory.
    bytes: int

    #: Whether the memory was freed when it was found.
    freed: bool = False


class LeaksFound(msgspec.Struct, frozen=True, tag=True):
    """Leaks of a process without tasks. Each is reported once, by its rank."""

    #: The leaks that one check found.
    leaks: tuple[Leak, ...]


class TaskWaits(msgspec.Struct, frozen=True, tag=True):
    """A task waits for the result store, for its results or an upload.

    Sent at each try.
    """

    #: The claim of the task.
    claim: Claim


class StepEncoded(msgspec.Struct, frozen=True, tag=True):
    """Wakes the step loop, since the files of a step are encoded.

    No process sends it to another one.
    """


#: The messages for the step loop. A step plan comes from the first rank, by way of the parent.
ForLoop = RunTask | InputArrived | CancelTask | StepPlan | StepEncoded

#: The messages from the parent to a compute process.
ToCompute = LoadModels | ForLoop | PairCall

#: The messages from a compute process to the parent.
FromCompute = (
    LoadingStage
    | ComponentLoaded
    | ModelsLoaded
    | LoadFailed
    | DeviceFailed
    | StepPlan
    | MemoryShortage
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
        """Send a message to the parent. Raises BrokenPipeError if the parent is gone."""
        data = frame(encode(message))
        with self._lock:
            self._connection.sendall(data)

    def receive(self) -> ToCompute:
        """Return the next message. Raises EOFError if the parent is gone."""
        while isinstance(message := self._receive_one(), OutputDeltas):
            self._recorded.setdefault(message.claim, []).extend(message.deltas)
        if isinstance(message, RunTask):
            return msgspec.structs.replace(message, recorded=tuple(self._recorded.pop(message.lease.claim, ())))
        return message

    def _receive_one(self) -> ToCompute | OutputDeltas:
        message: ToCompute | OutputDeltas = decode(read_message(self._read, MAX_BYTES), ToCompute | OutputDeltas)
        return message

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        unfilled = memoryview(data)
        while unfilled:
            count = self._connection.recv_into(unfilled)
            if not count:
                raise EOFError
            unfilled = unfilled[count:]
        return bytes(data)


class ParentChannel:
    """The parent's end of the socket pair, for one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, connection: socket.socket) -> ParentChannel:
        """Return a channel over one end of a socket pair. The channel closes the socket."""
        return cls(*await asyncio.open_unix_connection(sock=connection))

    async def send(self, message: ToCompute) -> None:
        """Send a message to the compute process.

        Raises nothing if the process is gone: `receive` notices it.
        """
        # A long text has more recorded pieces than fit one message. The other end joins them again.
        if isinstance(message, RunTask):
            for offset in range(0, len(message.recorded), MAX_DELTAS_PER_MESSAGE):
                pieces = message.recorded[offset : offset + MAX_DELTAS_PER_MESSAGE]
                self._writer.write(frame(encode(OutputDeltas(message.lease.claim, offset, pieces))))
            message = msgspec.structs.replace(message, recorded=())
        self._writer.write(frame(encode(message)))

    async def receive(self) -> FromCompute:
        """Return the next message. Raises EOFError if the compute process is gone."""
        try:
            header = await self._reader.readexactly(HEADER_BYTES)
            return decode(await self._reader.readexactly(read_length(header, MAX_BYTES)), FromCompute)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError from error

    def close(self) -> None:
        """Close the socket, which ends the compute process."""
        self._writer.close()


#: By the cause of a retry rule, the reason that a failure by this rule reports.
REASONS = {REQUEST.cause: CLIENT_ERROR, MEMORY.cause: OUT_OF_MEMORY}


def failure(claim: Claim, error: Exception, timings: Timings | None = None) -> TaskFailed:
    """Return the report for a task that ended with this error.

    `timings`: what the task has used. The type of the error decides the kind of failure, and so the retry policy.
    """
    rule = rule_of(error)
    message = str(error) if isinstance(error, UnfuseError) else f"{type(error).__name__}: {error}"
    is_shared = isinstance(error, OutOfMemory) and error.shared
    if rule is MEMORY and not isinstance(error, OutOfMemory):
        place, advice = memory_advice(error)
        message = f"{place} does not have enough memory for this request: {message}; reduce the request, or {advice}"
    evidence = "".join(traceback.format_exception(error))[-EVIDENCE_CHARS:]
    return TaskFailed(
        claim,
        "transient" if is_shared else rule.kind,
        sendable(message),
        sendable(evidence),
        object_id=error.object_id if isinstance(error, ObjectLost) else "",
        reason=REASONS.get(rule.cause, ""),
        error=sendable(type_name(error)) if rule is UNKNOWN or is_shared else "",
        timings=timings or Timings(),
    )


def memory_advice(error: BaseException, *, uses_host_memory: bool = False) -> tuple[str, str]:
    """Return what lacks memory, by an out-of-memory error, and what the operator can do.

    `uses_host_memory`: whether the device has no memory of its own.
    """
    if uses_host_memory or is_out_of_host_memory(error):
        return "the host", ROOMIER_HOST
    return "the device", ROOMIER


def sendable(text: str) -> str:
    """Return the text with characters replaced that UTF-8 cannot encode, as in undecodable file names."""
    return text.encode(errors="replace").decode()


def about(claim: Claim) -> dict[str, object]:
    """Return the fields of every log line about a task."""
    return {"request": claim.request, "stage": claim.stage, "attempt": claim.attempt}


#: Why a task is handed back when compute is not ready.
CANNOT_RUN = "the worker cannot run the task now"


def unfetched(claim: Claim, error: Exception, ready: bool) -> TaskFailed:
    """Return the failure report of a task whose inputs could not be fetched.

    If compute is not `ready`, the task is handed back, since such a failure must not use up its retries.
    """
    if isinstance(error, ObjectLost | PermanentError | NotFound):
        return failure(claim, error)
    if not ready:
        return TaskFailed(claim, "hand_back", CANNOT_RUN, reason="compute")
    return TaskFailed(claim, "transient", sendable(f"an input cannot be fetched: {error}"))
