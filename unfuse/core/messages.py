"""What workers and schedulers say to each other. Each union is decoded whole: an unknown tag is a ProtocolError."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from unfuse.core.card import ModelCard
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import ResultFile, Timings
from unfuse.core.task import Claim, Lease

FailureKind = Literal["transient", "permanent", "crash", "object_lost", "hand_back"]

Count = Annotated[int, Meta(ge=0, le=1 << 60)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]
"""What a worker says of itself is drawn and added up: no NaN, no infinity, nothing below 0."""

Amounts = Annotated[dict[Annotated[str, Meta(max_length=64)], Count], Meta(max_length=16)]
"""So much of each named resource beside slots and bytes of an arena."""

_Word = Annotated[str, Meta(max_length=128)]
Outcome = Annotated[dict[_Word, _Word], Meta(max_length=32)]


class Places(msgspec.Struct, frozen=True):
    """Where workers keep things, as URLs: results, objects, and durable copies of what `saved` kinds of stages make.

    A store that spills does so above the share `threshold` of the arena, into `spill_capacity` bytes. `encodings` are
    those of stages' 32-bit floats by kind: bf16, fp16, or nothing. `checkpoint` says when running stages are saved.
    `loras` is the folder of adapters, if any.
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


class WorkerInfo(msgspec.Struct, frozen=True):
    """A worker. `arena` is where readers of its objects connect to, `room` that arena's bytes, `used` those taken.

    `high_water` is the most that ever were, `fragmentation` the share of the free ones that no one object can have.
    Other nodes pull its objects at the addresses of its transfer `engines`. `device` says what it computes on: cpu, or
    the name of the GPU.
    So many of its tasks are `unwritten`: they wait for the result store, which has no room or cannot be reached.
    `proof` is the BLAKE2 hash of its secret: another connection that claims its id must know that secret.
    `resources` are what it has for its tasks beside slots and an arena, by name; `outcome` is what the bytes of its
    results depend on beside weights, dtypes and parameters.
    """

    id: str
    node: str
    role: str
    pools: tuple[str, ...]
    slots: Count
    arena: str
    room: Count
    pid: Count = 0
    used: Count = 0
    proof: bytes = b""
    high_water: Count = 0
    fragmentation: Share = 0.0
    engines: dict[str, str] = {}
    device: str = ""
    unwritten: int = 0
    resources: Amounts = {}
    outcome: Outcome = {}


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A worker introduces itself; one without pools asks what it should serve. `secret` shows that it is itself."""

    worker: WorkerInfo
    cards: tuple[ModelCard, ...] = ()
    secret: bytes = b""


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Work for `slots` slots whose outputs fit `room` bytes (None: whatever it is), waiting up to `wait` seconds.

    With `above`, only work of a higher priority: what runs steps aside for it. `affinity` is that of what runs, or of
    what ran last with an adapter, which is loaded still. `amounts` are what is free of other resources, by name.
    """

    slots: int
    room: int | None
    wait: float
    above: int | None = None
    affinity: str = ""
    amounts: Amounts = {}


class Moved(msgspec.Struct, frozen=True):
    """What came here by a transfer engine: verified bytes, the seconds they took, and how often it failed."""

    bytes: Count = 0
    seconds: Seconds = 0.0
    failures: Count = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.bytes + other.bytes, self.seconds + other.seconds, self.failures + other.failures)


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A heartbeat: leases to renew, requests the worker holds objects for, and the bytes these take.

    `moved` is what came by which transfer engine since the last one; `unwritten` tasks wait for the result store.
    The answer may wait up to `wait` seconds for a request to be interrupted: a cancellation is heard of at once.
    """

    claims: tuple[Claim, ...] = ()
    holding: tuple[str, ...] = ()
    used: Count = 0
    wait: Seconds = 0.0
    high_water: Count = 0
    fragmentation: Share = 0.0
    moved: Annotated[dict[str, Moved], Meta(max_length=16)] = {}
    unwritten: Annotated[int, Meta(ge=0)] = 0


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Steps `first`…`step` of `steps` are done, and of these steps there are `previews`.

    The answer says whether to go on: a lost lease is a cancellation.
    """

    claim: Claim
    step: int
    steps: int
    first: int
    previews: tuple[int, ...] = ()


class Done(msgspec.Struct, frozen=True, tag=True):
    """A task's outcome: the object it made, or the results it wrote.

    With `ask`, which waits for nothing, what the worker would take next is given to it in the same transaction.
    """

    claim: Claim
    output: ObjectRef | None
    results: tuple[ResultFile, ...]
    timings: Timings
    ask: Ask | None = None


class Saved(msgspec.Struct, frozen=True, tag=True):
    """A task's state after so many steps is kept: a later attempt can go on from there."""

    claim: Claim
    checkpoint: ObjectRef
    step: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A task ended without outcome. `object_id` names the input that was lost, `evidence` is for whoever debugs it.

    After a crash, `company` says that others had begun in the compute process that died: it may have been their doing.
    `reason` says why a task is handed back: drain, preempted, full (no room for it), producer (an input's is gone) or
    compute (it died of something else) are nobody's fault; for anything else a worker gets a task but so often.
    """

    claim: Claim
    kind: FailureKind
    message: str
    evidence: str = ""
    object_id: str = ""
    company: bool = False
    reason: str = ""


class Bye(msgspec.Struct, frozen=True, tag=True):
    """A worker leaves for good."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The answer to Hello: models to serve as (name, source, dtype), where things are kept, seconds between heartbeats.

    `outcome` is what a worker's ComputeOptions must agree with, if it says anything. With `by_outcome`, workers are to
    have it in the names of their pools.
    """

    models: tuple[tuple[str, str, str], ...]
    places: Places
    lease_ttl: float
    beat: float
    outcome: dict[str, str] = {}
    by_outcome: bool = False


class Granted(msgspec.Struct, frozen=True, tag=True):
    """Leases, and where the workers are that own their inputs; to a Done that asked, also that its outcome is recorded.

    `peers` is {worker id: (node, arena address)}, `engines` {worker id: {transfer engine: address}}.
    """

    leases: tuple[Lease, ...]
    peers: dict[str, tuple[str, str]]
    engines: dict[str, dict[str, str]] = {}


class Pulse(msgspec.Struct, frozen=True, tag=True):
    """The answer to Beat: claims that ended (lost or cancelled), and requests whose objects may go."""

    ended: tuple[Claim, ...]
    over: tuple[str, ...]


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The outcome is recorded."""


class Stranger(msgspec.Struct, frozen=True, tag=True):
    """The scheduler does not know this connection (it was restarted, say): introduce yourself and ask again."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The message had no effect. `lease_lost`: drop what the attempt made."""

    message: str
    lease_lost: bool = False


ToScheduler = Hello | Ask | Beat | Progress | Saved | Done | Failed | Bye
ToWorker = Welcome | Granted | Pulse | Accepted | Stranger | Refused
