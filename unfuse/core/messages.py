"""What workers and schedulers say to each other. Each union is decoded whole: an unknown tag is a ProtocolError."""

from __future__ import annotations

from typing import Literal

import msgspec

from unfuse.core.card import ModelCard
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import ResultFile, Timings
from unfuse.core.task import Claim, Lease

FailureKind = Literal["transient", "permanent", "crash", "object_lost", "hand_back"]


class WorkerInfo(msgspec.Struct, frozen=True):
    """A worker. `arena` is where readers of its objects connect to, `room` that arena's bytes, `used` those taken.

    `proof` is the BLAKE2 hash of its secret: another connection that claims its id must know that secret.
    """

    id: str
    node: str
    role: str
    pools: tuple[str, ...]
    slots: int
    arena: str
    room: int
    pid: int = 0
    used: int = 0
    proof: bytes = b""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A worker introduces itself; one without pools asks what it should serve. `secret` shows that it is itself."""

    worker: WorkerInfo
    cards: tuple[ModelCard, ...] = ()
    secret: bytes = b""


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Work for `slots` slots whose outputs fit `room` bytes (None: whatever it is), waiting up to `wait` seconds.

    With `above`, only work of a higher priority: what runs steps aside for it. `affinity` is that of what runs.
    """

    slots: int
    room: int | None
    wait: float
    above: int | None = None
    affinity: str = ""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A heartbeat: leases to renew, requests the worker holds objects for, and the bytes these take.

    The answer may wait up to `wait` seconds for a request to be interrupted: a cancellation is heard of at once.
    """

    claims: tuple[Claim, ...] = ()
    holding: tuple[str, ...] = ()
    used: int = 0
    wait: float = 0.0


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
    """A task's outcome: the object it made, or the results it wrote."""

    claim: Claim
    output: ObjectRef | None
    results: tuple[ResultFile, ...]
    timings: Timings


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A task ended without outcome. `object_id` names the input that was lost, `evidence` is for whoever debugs it.

    After a crash, `company` says that others had begun in the compute process that died: it may have been their doing.
    """

    claim: Claim
    kind: FailureKind
    message: str
    evidence: str = ""
    object_id: str = ""
    company: bool = False


class Bye(msgspec.Struct, frozen=True, tag=True):
    """A worker leaves for good."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The answer to Hello: models to serve as (name, source, dtype), where results go, how often to beat (seconds).

    `outcome` is what a worker's ComputeOptions must agree with, if it says anything.
    """

    models: tuple[tuple[str, str, str], ...]
    results: str
    lease_ttl: float
    beat: float
    outcome: dict[str, str] = {}


class Granted(msgspec.Struct, frozen=True, tag=True):
    """Leases, and the arena addresses of the workers that own their inputs as {worker id: (node, address)}."""

    leases: tuple[Lease, ...]
    peers: dict[str, tuple[str, str]]


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


ToScheduler = Hello | Ask | Beat | Progress | Done | Failed | Bye
ToWorker = Welcome | Granted | Pulse | Accepted | Stranger | Refused
