"""The messages between workers and schedulers: registration, leases, heartbeats, reports and their answers.

A worker sends one of `ToScheduler`, and the scheduler answers with one of `ToWorker`. Decoding a message with an
unknown tag raises ProtocolError.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from unfuse.core.compute_options import MAX_RANKS
from unfuse.core.model_spec import ModelSpec
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import ResultFile, Seconds, Timings
from unfuse.core.task import MAX_DELTAS_PER_MESSAGE, Claim, Lease, OutputDeltas
from unfuse.core.worker_status import ChangedFile, Count, DeviceErrors, DeviceId, Word, WorkerStatus

FailureKind = Literal["transient", "permanent", "crash", "device", "object_lost", "hand_back"]
CLIENT_ERROR = "refused"  # the reason of a permanent failure that is the client's mistake
OUT_OF_MEMORY = "out_of_memory"  # the reason of a failure for lack of memory

Memory = Literal["kv", "arena"]
"""The memory of a worker that tasks share: the paged KV cache, and the arena with the objects."""

Amounts = Annotated[dict[Annotated[str, Meta(max_length=64)], Count], Meta(max_length=16)]
"""Amounts of named resources, other than slots and bytes of the arena."""

Numerics = Annotated[dict[Word, Word], Meta(max_length=32)]
"""A worker's numerics: all that the bytes of its results depend on, except weights, dtypes and parameters."""

#: Most entries about device errors in a heartbeat: each rank has one for each kind and retry.
MAX_DEVICE_ERRORS = 8 * MAX_RANKS

DURABLE_SCHEMES = frozenset({"disk", "s3"})
"""Schemes of the URLs of result stores that outlive their process. A worker that drains saves checkpoints there."""


class StorageLocations(msgspec.Struct, frozen=True):
    """Where workers store outputs, results, durable copies and checkpoints."""

    #: URL of the result store.
    results: str
    #: URL of the tensor store.
    store: str = "shared_memory"
    #: Used share of the arena, from 0 to 1, above which a spilling store moves objects out of it.
    threshold: float = 0.8
    #: The most bytes that are spilled.
    spill_capacity: int = 16 << 30
    #: URL of the store of durable copies; "none": there is none.
    durable: str = "none"
    #: Stage kinds whose outputs get durable copies.
    durable_kinds: tuple[str, ...] = ("denoise",)
    #: By stage kind, how floats are narrowed to be stored: bf16, fp16 or int4.
    encodings: dict[str, str] = {}
    #: When checkpoints of running stages are saved.
    checkpoint: str = "auto"
    #: Folder of LoRA adapters; "": there is none.
    adapters: str = ""
    #: Content of the result folder's mark file. A machine that reads another mark does not share the folder with the
    #: scheduler. "": this is not checked.
    results_store_id: str = ""

    @property
    def durable_url(self) -> str:
        """The URL of the copies that outlive their worker.

        It is the durable store, else a lasting result store, else "none".
        """
        if self.durable != "none":
            return self.durable
        return self.results if self.results.partition(":")[0] in DURABLE_SCHEMES else "none"


class WorkerInfo(msgspec.Struct, frozen=True):
    """A worker's registration: its identity, pools and resources, and the status of its last heartbeat."""

    #: Unique among the workers of a queue.
    id: str

    #: Name of its machine.
    node: str

    #: Roles whose stages it runs, joined by "+".
    role: str

    #: Ids of the pools that it serves, with the hash of its numerics.
    pools: tuple[str, ...]

    #: Number of tasks that it accepts at a time.
    slots: Count

    #: Address of the socket by which readers map its arena.
    arena: str

    #: Bytes of the arena; 0: the arena does not exist yet.
    arena_bytes: Count

    #: Process id of the worker's parent process.
    pid: Count = 0

    #: BLAKE2 hash of its secret: another connection with this id must send the secret.
    secret_hash: bytes = b""

    #: Addresses at which other nodes pull its objects, by transfer engine.
    engines: dict[str, str] = {}

    #: "cpu", or the name of the GPU.
    device: str = ""

    #: The device of each rank, in the order of ranks.
    devices: Annotated[tuple[DeviceId, ...], Meta(max_length=MAX_RANKS)] = ()

    #: Amounts of further resources that its tasks share.
    resources: Amounts = {}

    #: Its numerics.
    numerics: Numerics = {}

    #: Model swapping: by model name, the pools whose weights it loads together, one model at a time. Empty if all
    #: weights are loaded at once.
    swappable_models: Annotated[dict[Word, tuple[str, ...]], Meta(max_length=64)] = {}

    #: Declared pools that it no longer serves, with the model file that has changed.
    changed: Annotated[dict[Word, ChangedFile], Meta(max_length=1024)] = {}

    #: What it runs and uses now.
    status: WorkerStatus = WorkerStatus()

    @property
    def available_pools(self) -> tuple[str, ...]:
        """The pools whose tasks it can start with the weights that are loaded now."""
        return self.swappable_models.get(self.status.loaded, ()) if self.swappable_models else self.pools


class Register(msgspec.Struct, frozen=True, tag=True):
    """A worker registers. The answer is Registered.

    Without pools, and without `changed` pools, the worker is not registered: the answer only has the models to serve.
    """

    #: Identity, pools, resources and status of the worker.
    worker: WorkerInfo
    #: Model specs of the models that it serves.
    model_specs: tuple[ModelSpec, ...] = ()
    #: Proves that a connection belongs to the worker that registered this id first: see `WorkerInfo.secret_hash`.
    secret: bytes = b""


class RequestTasks(msgspec.Struct, frozen=True, tag=True):
    """A worker's request for leases, answered by LeasesGranted."""

    #: The most tasks.
    slots: int
    #: Bytes of the arena into which their outputs must fit; None: any number.
    free_arena_bytes: int | None
    #: Seconds to wait for a task.
    wait: float
    #: Only tasks of a higher priority than this are leased, since a running task is paused for them; None: any task.
    min_priority: int | None = None
    #: Affinity of the running tasks, or of the last task with a LoRA adapter, which is still loaded.
    affinity: str = ""
    #: Free amounts of further resources.
    amounts: Amounts = {}
    #: With model swapping, the loaded model: only tasks of its pools are leased.
    loaded_model: str = ""
    #: The pool of a task that has just ended. Because a model swap is due, only tasks of later stages are leased.
    after_pool: str = ""


class TransferStats(msgspec.Struct, frozen=True):
    """Bytes that one transfer engine read from other workers, and its failures."""

    #: Verified bytes.
    bytes: Count = 0
    #: Seconds of the transfers.
    seconds: Seconds = 0.0
    #: Number of failed transfers.
    failures: Count = 0

    def __add__(self, other: TransferStats) -> TransferStats:
        return TransferStats(self.bytes + other.bytes, self.seconds + other.seconds, self.failures + other.failures)


class Heartbeat(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A heartbeat, which renews leases. The answer is HeartbeatReply.

    The answer is sent at once if it has content, such as a cancelled request, else within `wait` seconds.
    """

    #: Leases to renew.
    claims: tuple[Claim, ...] = ()

    #: Ids of the requests whose objects the worker stores.
    stored_requests: tuple[str, ...] = ()

    #: The most seconds until the answer.
    wait: Seconds = 0.0

    #: What the worker runs and uses now.
    status: WorkerStatus = WorkerStatus()

    #: By transfer engine, its transfers to this worker since the last heartbeat.
    transfers: Annotated[dict[str, TransferStats], Meta(max_length=16)] = {}

    #: Number of sequences that were retracted since the last heartbeat: their KV blocks were freed for others.
    retracted: Count = 0

    #: By memory, leaked bytes that were found since the last heartbeat, while the worker had no task.
    leaks: dict[Memory, Count] = {}

    #: Errors of the worker's devices since the last heartbeat.
    device_errors: Annotated[tuple[DeviceErrors, ...], Meta(max_length=MAX_DEVICE_ERRORS)] = ()


class StepProgress(msgspec.Struct, frozen=True, tag=True):
    """Steps `first` to `step` of a task are done.

    Within a worker, step 0 means that the task began.
    """

    #: Claim of the task.
    claim: Claim
    #: The last step that is done, counted from 1.
    step: int
    #: Number of steps of the stage.
    steps: int
    #: The first step that no earlier message reported.
    first: int
    #: Those of the steps that have a preview.
    previews: tuple[int, ...] = ()
    #: Device seconds of the attempt so far, as its share of its forwards.
    share_s: Seconds = 0.0


class ReportProgress(msgspec.Struct, frozen=True, tag=True):
    """Progress of several tasks. The answer, HeartbeatReply, names the claims whose lease is lost."""

    #: One entry for each task.
    progress: Annotated[tuple[StepProgress, ...], Meta(max_length=4096)]


class AppendOutput(msgspec.Struct, frozen=True, tag=True):
    """New output chunks of several tasks: at most MAX_DELTAS_PER_MESSAGE chunks in all.

    The answer, HeartbeatReply, names the claims whose chunks can no longer be recorded. All other chunks are recorded.
    """

    #: The new chunks of each task, one entry for a task.
    deltas: Annotated[tuple[OutputDeltas, ...], Meta(max_length=MAX_DELTAS_PER_MESSAGE)]


class ReadOutput(msgspec.Struct, frozen=True, tag=True):
    """A worker reads the recorded output chunks of a task. The answer is RecordedOutput."""

    #: Claim of the task.
    claim: Claim
    #: Number of the first chunk to read.
    after: Count = 0


class FetchAdapter(msgspec.Struct, frozen=True, tag=True):
    """A worker fetches bytes of a LoRA adapter. The answer is AdapterBytes."""

    #: Name of the adapter.
    name: str
    #: Hash of the adapter's content.
    id: str
    #: The first byte.
    offset: Count = 0


class TaskCompleted(msgspec.Struct, frozen=True, tag=True):
    """A report that a task is complete, answered by Accepted or LeasesGranted.

    The answer is LeasesGranted if the report has a `next_request`.
    """

    #: Claim of the completed task.
    claim: Claim
    #: The object that the stage made; None: it is a last stage.
    output: ObjectRef | None
    #: The results that a last stage wrote.
    results: tuple[ResultFile, ...]
    #: Usage of the attempt.
    timings: Timings
    #: The worker's next lease request. It is answered in the same transaction, without waiting for tasks.
    next_request: RequestTasks | None = None
    #: "tiled": the VAE encoded or decoded in tiles, because the memory of the device was too small.
    vae: Literal["", "tiled"] = ""


class CheckpointSaved(msgspec.Struct, frozen=True, tag=True):
    """A checkpoint of a task exists: a later attempt can resume from it."""

    #: Claim of the task.
    claim: Claim
    #: The saved state.
    checkpoint: ObjectRef
    #: Number of steps that it covers.
    step: int


class OutputAnnounced(msgspec.Struct, frozen=True, tag=True):
    """The output of a running task can be read while it is written.

    Its ref has no checksums yet, or few: readers get the others from the owner.
    """

    #: Claim of the task.
    claim: Claim
    #: The output, of which the first chunks may be written.
    output: ObjectRef


class CachePrefix(msgspec.Struct, frozen=True, tag=True):
    """Prefix caching: a running task has stored a prefix block that other tasks may reuse."""

    #: Claim of the task that computed the block.
    claim: Claim
    #: Key of the block: one of the stage's `prefixes`, or the key of `digest` in its `extends_prefix_of`.
    key: str
    #: The block.
    output: ObjectRef
    #: Digest of a block whose key is in `extends_prefix_of`; "": the key is one of the `prefixes`.
    digest: Word = ""


class TaskFailed(msgspec.Struct, frozen=True, tag=True):
    """A task ended without output. The retry policy decides what happens next."""

    #: Claim of the failed task.
    claim: Claim
    #: Kind of the failure. The retry policy depends on it.
    kind: FailureKind
    #: One sentence, for people.
    message: str
    #: Details for debugging, such as a traceback.
    evidence: str = ""
    #: Id of the lost input, for the kind object_lost.
    object_id: str = ""
    #: After a crash or a device error: whether other tasks had begun in the same compute process, any of which may be
    #: the cause.
    had_companions: bool = False
    #: After a device error: the device that failed.
    device: DeviceId | None = None
    #: After a device error: whether the device had completed a task of this pool since its last failure.
    had_worked: bool = False
    #: CLIENT_ERROR: a permanent failure is the client's mistake. OUT_OF_MEMORY: the device lacks memory, see `error`.
    #: Else why a task was handed back. drain, preempted, full (no room), producer (the stage of an input runs again)
    #: and compute (the process died for another reason) are not counted; after any other reason, a worker gets the
    #: same task only a few times.
    reason: str = ""
    #: Type of an exception after which the task is retried once. It is one that no rule in `core/retries.py` names, or
    #: that other processes on the device may have caused. "": another rule applies.
    error: str = ""
    #: Usage of the attempt, if the worker measured it.
    timings: Timings = Timings()


class TaskStopped(msgspec.Struct, frozen=True, tag=True):
    """A worker has dropped a task whose lease is lost.

    The request was cancelled, or the lease expired. The scheduler counts each attempt once, even if this message is
    repeated.
    """

    #: Claim of the dropped task.
    claim: Claim
    #: Usage of the attempt.
    timings: Timings = Timings()


class Unregister(msgspec.Struct, frozen=True, tag=True):
    """A worker ends. Its leases expire at once."""


class Registered(msgspec.Struct, frozen=True, tag=True):
    """The answer to Register: models, storage locations and intervals."""

    #: Models to serve, as (name, source, dtype).
    models: tuple[tuple[str, str, str], ...]
    #: Where the worker stores objects and results.
    storage: StorageLocations
    #: Seconds after which a lease expires, unless a heartbeat renews it.
    lease_ttl: float
    #: Seconds between heartbeats.
    heartbeat_s: float
    #: Settings that the worker's `ComputeOptions.numerics` must equal, by name. Empty: any settings are allowed.
    required_numerics: dict[str, str] = {}
    #: Whether the worker's `ComputeOptions.exact_only` must be set.
    exact_only: bool = False
    #: Version of the scheduler's package.
    version: str = ""
    #: The scheduler's clock, in Unix seconds.
    now: float = 0.0


class LeasesGranted(msgspec.Struct, frozen=True, tag=True):
    """The answer to RequestTasks, and to a TaskCompleted with a lease request.

    It also confirms that the TaskCompleted was recorded.
    """

    #: At most `RequestTasks.slots` leases. Empty: no task can be leased now.
    leases: tuple[Lease, ...]
    #: The owners of the tasks' inputs: worker id → (node, arena address).
    peers: dict[str, tuple[str, str]]
    #: Their addresses for other nodes: worker id → {transfer engine: address}.
    engines: dict[str, dict[str, str]] = {}


class HeartbeatReply(msgspec.Struct, frozen=True, tag=True):
    """The answer to Heartbeat, ReportProgress and AppendOutput.

    The answers to the latter two have `ended_claims` alone.
    """

    #: Claims that are no longer valid: their lease is lost, or their request was cancelled.
    ended_claims: tuple[Claim, ...]
    #: Ids of requests that are over: their objects may be freed.
    ended_requests: tuple[str, ...]
    #: Ids of single objects that may be freed.
    lost_objects: tuple[str, ...] = ()
    #: Name of the model to swap in now; "": none.
    swap_to: str = ""
    #: Name of the model that is likely to be swapped in next; "": none.
    swap_next: str = ""
    #: Whether the scheduler is stopping and leases no more tasks to any worker.
    is_stopping: bool = False


class RecordedOutput(msgspec.Struct, frozen=True, tag=True):
    """The answer to ReadOutput: output chunks in order. More chunks may follow."""

    #: Consecutive chunks, the first of which has the requested number.
    deltas: tuple[bytes, ...]


class AdapterBytes(msgspec.Struct, frozen=True, tag=True):
    """The answer to FetchAdapter: bytes of the adapter's file from the requested offset on."""

    #: Size of the whole file, in bytes.
    size: Count
    #: A part of the file; empty at the end of the file.
    data: bytes


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The message was recorded."""


class UnknownWorker(msgspec.Struct, frozen=True, tag=True):
    """The connection is not registered, perhaps after a restart of the scheduler: register, then resend."""


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """The message had no effect. With `lease_lost`, the worker drops the output of the attempt."""

    #: Why, in one sentence for people.
    message: str
    #: Whether the cause is that the task is no longer leased to the worker.
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
