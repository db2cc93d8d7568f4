"""The messages between workers and schedulers. Decoding one with an unknown tag raises ProtocolError."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from unfuse.core.compute_options import MOST
from unfuse.core.model_spec import ModelSpec
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import ResultFile, Seconds, Timings
from unfuse.core.task import PIECES_AT_ONCE, Claim, Lease, OutputDeltas
from unfuse.core.text import TextStats

FailureKind = Literal["transient", "permanent", "crash", "object_lost", "hand_back"]
REFUSED = "refused"

Memory = Literal["kv", "arena"]
"""The memory of a worker that tasks share: blocks of keys and values, and its arena with the objects."""

Count = Annotated[int, Meta(ge=0, le=1 << 60)]
Share = Annotated[float, Meta(ge=0, le=1)]
"""Numbers that workers report are added up in metrics, so NaN, infinity and negative numbers are refused."""

Amounts = Annotated[dict[Annotated[str, Meta(max_length=64)], Count], Meta(max_length=16)]
"""Amounts of named resources, other than slots and bytes of the arena."""

_Word = Annotated[str, Meta(max_length=128)]
Outcome = Annotated[dict[_Word, _Word], Meta(max_length=32)]


LASTING = frozenset({"disk", "s3"})
"""Result stores, by the scheme of their URL, where a worker that stops also saves what it runs."""


class StorageLocations(msgspec.Struct, frozen=True):
    """Where workers keep things: URLs of the result store, the tensor store and the store of durable copies.

    Outputs of the stage kinds in `saved` get durable copies. A store that spills begins when the share `threshold` of
    the arena is used, and spills at most `spill_capacity` bytes. `encodings` maps a stage kind to how its floats are
    narrowed: bf16, fp16 or int4. `checkpoint` says when running stages are saved. `loras` is the folder of adapters
    ("": none). By `mark` a machine sees whether the result store is the one of the scheduler's ("": it may be).
    """

    results: str
    store: str = "shared_memory"
    threshold: float = 0.8
    spill_capacity: int = 16 << 30
    durable: str = "none"
    saved: tuple[str, ...] = ("denoise",)
    encodings: dict[str, str] = {}
    checkpoint: str = "auto"
    loras: str = ""
    mark: str = ""

    @property
    def copies(self) -> str:
        """The URL where copies of objects outlive their worker: that of durable copies, else of lasting results."""
        if self.durable != "none":
            return self.durable
        return self.results if self.results.partition(":")[0] in LASTING else "none"


class ExactBatchStats(msgspec.Struct, frozen=True):
    """How requests of an exact pool share forwards.

    `largest` is the size of the largest batch that gave each the bytes it has alone; `blame` has the function because
    of which a size did not.
    """

    largest: Count = 1
    blame: Annotated[dict[int, str], Meta(max_length=256)] = {}

    def __or__(self, other: ExactBatchStats) -> ExactBatchStats:
        return ExactBatchStats(max(self.largest, other.largest), self.blame | other.blame)


class RankTimes(msgspec.Struct, frozen=True):
    """Seconds that a rank has computed steps since it started, and has waited for other ranks and their numbers.

    The rank that is slow is the one that computes longest: the others wait for it.
    """

    compute_s: Seconds = 0.0
    exchange_s: Seconds = 0.0


class ChangedFile(msgspec.Struct, frozen=True):
    """A model file that was changed after a worker loaded it; `name` is relative to the model's folder.

    Until it is `compared`, its bytes may still be the same.
    """

    name: str
    compared: bool

    def __str__(self) -> str:
        if self.compared:
            return f"{self.name} has changed since it was loaded: restart the server to load the new file"
        return f"{self.name} was modified since it was loaded: wait until its bytes are compared"


class WorkerStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker is doing and what it uses. Its registration and every heartbeat carry one."""

    #: Bytes of the arena in use.
    arena_used: Count = 0

    #: The most bytes of the arena that were ever in use.
    arena_high_water: Count = 0

    #: Share of the arena's free bytes that one object cannot use, from 0 to 1.
    arena_fragmentation: Share = 0.0

    #: Bytes that the compute processes hold: of GPU memory as the first one reports it, else of host memory.
    memory: Count = 0

    #: Share of the last seconds in which there were tasks to compute, from 0 to 1.
    utilization: Share = 0.0

    #: Number of tasks that wait because the result store is full or cannot be reached.
    waiting_for_results: Count = 0

    #: Number of tasks whose inputs are still being written or transferred.
    waiting_for_inputs: Count = 0

    #: Seconds of each rank, in the order of ranks. Empty if there is one rank.
    ranks: Annotated[tuple[RankTimes, ...], Meta(max_length=MOST)] = ()

    #: KV blocks and prompts of the language stages. None without such stages.
    texts: TextStats | None = None

    #: By pool, how requests of an exact pool share forwards, as far as that was compared.
    batch_invariance: dict[str, ExactBatchStats] = {}

    #: Which of its `sets` of pools has its weights loaded. Empty while another one loads, and without sets.
    loaded: str = ""

    #: Seconds that loading took.
    load_s: Seconds = 0.0

    #: The set that is loaded next, in place of `loaded`. Empty if none is.
    target: str = ""


class WorkerInfo(msgspec.Struct, frozen=True):
    """A worker's registration: what it is and serves, and its status at its last heartbeat."""

    #: Unique among the workers of a queue.
    id: str

    #: Name of its machine.
    node: str

    #: Roles whose stages it runs, joined by "+".
    role: str

    #: The pools that it registers, with the hash of `outcome`.
    pools: tuple[str, ...]

    #: Number of tasks that it has room for at a time.
    slots: Count

    #: Address of the socket by which readers map its arena.
    arena: str

    #: Bytes of the arena. 0 before there is one.
    room: Count

    #: Process id of the worker's parent process.
    pid: Count = 0

    #: BLAKE2 hash of its secret: another connection with this id must know the secret.
    proof: bytes = b""

    #: Addresses at which other nodes pull its objects, by transfer engine.
    engines: dict[str, str] = {}

    #: "cpu", or the name of the GPU.
    device: str = ""

    #: Amounts of further resources that its tasks share.
    resources: Amounts = {}

    #: What the bytes of its results depend on beside weights, dtypes and parameters.
    outcome: Outcome = {}

    #: Sets of pools whose weights it loads one at a time, by name. Empty if it has all at once.
    sets: Annotated[dict[_Word, tuple[str, ...]], Meta(max_length=64)] = {}

    #: Declared pools that it serves no longer, because that model file has changed.
    changed: Annotated[dict[_Word, ChangedFile], Meta(max_length=1024)] = {}

    #: What it does and uses now.
    status: WorkerStatus = WorkerStatus()

    @property
    def open(self) -> tuple[str, ...]:
        """The pools whose tasks it can begin as it is."""
        return self.sets.get(self.status.loaded, ()) if self.sets else self.pools


class Register(msgspec.Struct, frozen=True, tag=True):
    """A worker registers. Without pools, and without `changed` pools, it asks what it should serve.

    `secret` proves its identity.
    """

    worker: WorkerInfo
    cards: tuple[ModelSpec, ...] = ()
    secret: bytes = b""


class RequestTasks(msgspec.Struct, frozen=True, tag=True):
    """A worker asks for up to `slots` tasks whose outputs fit into `room` bytes (None: any), waiting `wait` seconds.

    With `above`, it asks only for tasks of a higher priority, for which a running task is paused. `affinity` is that of
    the tasks that run, or of the last one with an adapter, which is still loaded. `amounts` are the free amounts of
    further resources, by name. A worker with several sets of weights asks for tasks of the one that it `holds`; `after`
    a task of that pool, for such as follow on that pool alone, because another set is due.
    """

    slots: int
    room: int | None
    wait: float
    above: int | None = None
    affinity: str = ""
    amounts: Amounts = {}
    holds: str = ""
    after: str = ""


class TransferStats(msgspec.Struct, frozen=True):
    """What a transfer engine brought to this worker: verified bytes, seconds that took, and failed transfers."""

    bytes: Count = 0
    seconds: Seconds = 0.0
    failures: Count = 0

    def __add__(self, other: TransferStats) -> TransferStats:
        return TransferStats(self.bytes + other.bytes, self.seconds + other.seconds, self.failures + other.failures)


class Heartbeat(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A heartbeat. The answer is a Pulse, at once when a request is cancelled, else within `wait` seconds."""

    #: Leases to renew.
    claims: tuple[Claim, ...] = ()

    #: Ids of the requests that the worker holds objects for.
    holding: tuple[str, ...] = ()

    #: Seconds for which the scheduler may hold its answer back.
    wait: Seconds = 0.0

    #: What the worker does and uses now.
    status: WorkerStatus = WorkerStatus()

    #: By transfer engine, what it brought to this worker since the last heartbeat.
    moved: Annotated[dict[str, TransferStats], Meta(max_length=16)] = {}

    #: Number of texts whose KV was given up for others since the last heartbeat.
    retracted: Count = 0

    #: Bytes of memory that nobody owned, as found since the last heartbeat while the worker had no task.
    leaked: dict[Memory, Count] = {}


class StepProgress(msgspec.Struct, frozen=True, tag=True):
    """Steps `first` to `step` of `steps` are done; `previews` lists those of them that have a preview.

    Within a worker, step 0 says that the task began.
    The attempt has used a device for `share_s` seconds so far, as its share of the forwards that it was in.
    """

    claim: Claim
    step: int
    steps: int
    first: int
    previews: tuple[int, ...] = ()
    share_s: Seconds = 0.0


class ReportProgress(msgspec.Struct, frozen=True, tag=True):
    """Progress of several tasks. The answer, a Pulse, says whose lease is lost."""

    progress: Annotated[tuple[StepProgress, ...], Meta(max_length=4096)]


class AppendOutput(msgspec.Struct, frozen=True, tag=True):
    """What the outputs of several tasks have grown by: at most PIECES_AT_ONCE pieces.

    The answer, a Pulse, names the claims for which nothing is recorded any more; all else is.
    """

    grown: Annotated[tuple[OutputDeltas, ...], Meta(max_length=PIECES_AT_ONCE)]


class ReadOutput(msgspec.Struct, frozen=True, tag=True):
    """A worker asks for the recorded pieces of a task from number `after` on. The answer, Recorded, has the first."""

    claim: Claim
    after: Count = 0


class FetchAdapter(msgspec.Struct, frozen=True, tag=True):
    """A worker asks for bytes of an adapter, from `offset` on; `id` is that of its content."""

    name: str
    id: str
    offset: Count = 0


class TaskCompleted(msgspec.Struct, frozen=True, tag=True):
    """A task is complete: the object that it made, or the results that it wrote.

    With `ask`, the scheduler leases the worker its next tasks in the same transaction; this never waits.
    """

    claim: Claim
    output: ObjectRef | None
    results: tuple[ResultFile, ...]
    timings: Timings
    ask: RequestTasks | None = None


class CheckpointSaved(msgspec.Struct, frozen=True, tag=True):
    """A checkpoint of a task after `step` steps exists: a later attempt can resume there."""

    claim: Claim
    checkpoint: ObjectRef
    step: int


class OutputAnnounced(msgspec.Struct, frozen=True, tag=True):
    """The output of a running task can be read while it is written.

    Its ref has no checksums yet, or few: readers ask the owner for them.
    """

    claim: Claim
    output: ObjectRef


class CachePrefix(msgspec.Struct, frozen=True, tag=True):
    """A running task has made what others may go on from: the output under that key, one of the task's `prefixes`.

    Or the key is that of a prefix block with this `digest`, in the space that the task `extends`.
    """

    claim: Claim
    key: str
    output: ObjectRef
    digest: _Word = ""


class TaskFailed(msgspec.Struct, frozen=True, tag=True):
    """A task ended without output. `object_id` names the lost input; `evidence` helps to debug the failure.

    `error` is the type of an exception that no rule in `core/retries.py` names ("" if a rule names it).

    After a crash, `company` says that other tasks had begun in the same compute process, so that one of them may be
    the cause. `reason` says that a permanent failure is the client's mistake (REFUSED), or why a task is handed back.
    The reasons drain, preempted, full (no room), producer (the stage of an input runs again) and compute (the process
    died of something else) are not counted; after any other reason a worker gets the same task only a few times.
    `timings` say what the attempt has used, as far as the worker knows.
    """

    claim: Claim
    kind: FailureKind
    message: str
    evidence: str = ""
    object_id: str = ""
    company: bool = False
    reason: str = ""
    error: str = ""
    timings: Timings = Timings()


class TaskStopped(msgspec.Struct, frozen=True, tag=True):
    """A worker has dropped a task whose lease it lost, because the request was cancelled or the lease ran out.

    `timings` say what the attempt has used. The scheduler counts each attempt once, however often it is told.
    """

    claim: Claim
    timings: Timings = Timings()


class Unregister(msgspec.Struct, frozen=True, tag=True):
    """A worker leaves for good."""


class Registered(msgspec.Struct, frozen=True, tag=True):
    """The answer to Hello: models to serve as (name, source, dtype), where to keep things, seconds between heartbeats.

    A worker's ComputeOptions must agree with `outcome`, unless that is empty. `version` is that of the scheduler's
    package, `now` its Unix time in seconds.
    """

    models: tuple[tuple[str, str, str], ...]
    places: StorageLocations
    lease_ttl: float
    beat: float
    outcome: dict[str, str] = {}
    version: str = ""
    now: float = 0.0


class LeasesGranted(msgspec.Struct, frozen=True, tag=True):
    """The answer to Ask, and to Done with an ask, whose result it confirms: leases, and the owners of their inputs.

    `peers` is {worker id: (node, arena address)}, `engines` is {worker id: {transfer engine: address}}.
    """

    leases: tuple[Lease, ...]
    peers: dict[str, tuple[str, str]]
    engines: dict[str, dict[str, str]] = {}


class HeartbeatReply(msgspec.Struct, frozen=True, tag=True):
    """The answer to Beat: claims that ended (lost or cancelled), and ids of requests whose objects may be freed.

    `lost` are ids of single objects that may be. `load` names the set of weights to load in the place of another one
    ("": none), `soon` one that is likely to be next. A scheduler that `stops` gives no more tasks to anyone. To Steps
    and Append it has the claims alone.
    """

    ended: tuple[Claim, ...]
    over: tuple[str, ...]
    lost: tuple[str, ...] = ()
    load: str = ""
    soon: str = ""
    stops: bool = False


class RecordedOutput(msgspec.Struct, frozen=True, tag=True):
    """The answer to Recall: pieces in their order. There may be more behind them."""

    pieces: tuple[bytes, ...]


class AdapterBytes(msgspec.Struct, frozen=True, tag=True):
    """The answer to Borrow: bytes of a file that has `size` of them."""

    size: Count
    data: bytes


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The message was recorded."""


class UnknownWorker(msgspec.Struct, frozen=True, tag=True):
    """The scheduler does not know this connection, perhaps because it was restarted: send Register, then ask again."""


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """The message had no effect. With `lease_lost`, the worker drops what the attempt made."""

    message: str
    lease_lost: bool = False


ToScheduler = (
    Register
    | RequestTasks
    | Heartbeat
    | ReportProgress
    | AppendOutput
    | ReadOutput
    | OutputAnnounced
    | CheckpointSaved
    | CachePrefix
    | FetchAdapter
    | TaskCompleted
    | TaskFailed
    | TaskStopped
    | Unregister
)
ToWorker = (
    Registered | LeasesGranted | HeartbeatReply | RecordedOutput | AdapterBytes | Accepted | UnknownWorker | Rejected
)
