"""The transfer port: a reader pulls an object's bytes from its owner's arena.

The bytes go to the reader's own memory. To check a new engine, run `unfuse.testing.check_transfer` on it: the suite
is the contract in executable form.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Protocol

import msgspec
from msgspec import Meta

from unfuse.arena.objects import Extent
from unfuse.arena.protocol import ObjectUnavailable, ShownRef, Written
from unfuse.core.errors import ArenaFull, ConfigError, ObjectLost, TransientError
from unfuse.core.object_ref import ObjectRef, chunk_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from unfuse.arena.arena import Arena  # with numpy, which settings need not


def threads_for(cores: float) -> int:
    """Return the default number of threads for one owner on a machine with `cores`.

    More than twelve threads transfer no more bytes per second.
    """
    return min(max(4, int(0.75 * cores) // 8), 12)


class LinkBroken(TransientError):
    """The owner cannot be reached, or its bytes are incomplete or damaged.

    A retry, or another engine, may succeed.
    """


class TransferSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the transfer engines: security, threads, connections and timeouts."""

    trusted_network: Annotated[
        bool,
        Meta(
            description="Allow the engines gloo, mooncake, nccl and nixl, with which any machine that can connect to "
            "a worker can read and overwrite its tensors."
        ),
    ] = False
    threads: Annotated[
        int,
        Meta(
            description="Maximum threads that fetch tensors from one worker; 0: 4 to 12, by the number of cores.",
            ge=0,
            le=256,
            extra={"level": "expert"},
        ),
    ] = 0
    queues: Annotated[
        int, Meta(description="Number of connections to each other worker.", ge=1, le=256, extra={"level": "expert"})
    ] = 4
    bootstrap_s: Annotated[
        float,
        Meta(
            description="Seconds without progress after which a transfer fails, while the other worker cannot be "
            "reached or the arena is full.",
            gt=0,
            extra={"level": "expert"},
        ),
    ] = 30.0
    heartbeat_s: Annotated[
        float, Meta(description="Seconds between two pings of another worker.", gt=0, extra={"level": "expert"})
    ] = 5.0
    max_missed: Annotated[
        int,
        Meta(
            description="Pings without an answer after which the connections to a worker are closed. A connection is "
            "also closed after this many ping intervals without data.",
            ge=1,
            extra={"level": "expert"},
        ),
    ] = 2
    mooncake_protocol: Annotated[
        Literal["tcp", "rdma"],
        Meta(
            description="Protocol of Mooncake. rdma is untested on RDMA hardware. If rdma cannot start, tcp is used "
            "instead, and a warning is logged.",
            extra={"level": "expert"},
        ),
    ] = "tcp"
    mooncake_devices: Annotated[
        tuple[str, ...],
        Meta(
            description="RDMA devices that Mooncake uses, such as mlx5_0,mlx5_1; by default, all that it detects.",
            extra={"level": "expert"},
        ),
    ] = ()


class TransferOptions(TransferSettings, frozen=True):
    """The options of one worker's engines."""

    #: Most threads for one owner.
    threads: int = 4

    #: Address by which other nodes reach this process.
    host: str = "127.0.0.1"

    #: Shared by all peers: the workers' secret CURVE key. Without it, engines do not open unless `insecure`.
    secret: str = ""

    #: Whether to run without a secret, at both ends. Then any peer with an object's key can pull the object.
    insecure: bool = False

    #: A session fails after this number of tries in a row that bring nothing (retry policy).
    attempts: int = 6

    @property
    def authentic(self) -> bool:
        """Whether peers can prove their identity, or need not."""
        return bool(self.secret) or self.insecure

    @property
    def silence_s(self) -> float:
        """Seconds without a byte after which a peer counts as gone."""
        return self.heartbeat_s * self.max_missed


class PeerLink(ABC):
    """The link to one owner's objects. It connects on demand, and again after a failure.

    Thread-safe. Every method raises LinkBroken if the owner cannot be reached, is silent for `silence_s`, or breaks
    the protocol; the next call tries again, until `close`.
    """

    @abstractmethod
    def pull(self, ref: ObjectRef, start: int, stop: int, into: NDArray[np.uint8]) -> Generator[int, None, None]:
        """Fill `into` with bytes `start` to `stop` of an object, and yield the progress.

        Each yielded number is the number of bytes that are filled so far. These bytes stay valid if the pull fails
        later. They are not verified. Closing the iterator ends the pull. Raises ObjectLost if the owner replies that
        the object cannot be read, and ArenaFull while the object is spilled and the owner has no room to load it.
        """

    @abstractmethod
    def written(self, ref: ObjectRef, known: int, wait: float) -> tuple[tuple[int, ...], bool]:
        """Return the checksums of the chunks that are written, and whether the object is whole.

        It is `ObjectTable.written` of the owner, for a `ref` that lacks checksums. Waits up to `wait` seconds for more
        than `known` checksums. Raises ObjectLost.
        """

    @abstractmethod
    def ping(self) -> None:
        """Wait until the owner answers. Returns at once while the owner sends bytes."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect. Running pulls raise LinkBroken."""


class ProcessPairs(Protocol):
    """Pairs of processes that move bytes between the memory of two workers.

    Every method but `part` raises OSError if it fails. The pair cannot be used after an error. When a method returns,
    no memory of this process is read or written any more.
    """

    def offer(self, pair: str, backend: str, host: str, patience_s: float) -> int:
        """Create a pair as its sender.

        Returns the port of `host` at which the receiver can join.
        """
        ...

    def join(self, pair: str, backend: str, host: str, patience_s: float, at: tuple[str, int]) -> None:
        """Join a pair as its receiver.

        `at`: host and port at which the sender offers the pair.
        `host`: address of this process.
        """
        ...

    def move(self, pair: str, start: int, stop: int) -> None:
        """Send or receive bytes `start` to `stop` of this worker's memory."""
        ...

    def part(self, pair: str) -> None:
        """End a pair. Neither waits nor fails."""
        ...


class TransferEngine(ABC):
    """One way to move bytes. Synchronous and thread-safe; made with TransferOptions.

    An engine that `enforces_refs` gives an object's bytes only to peers that show its ref's key, and only while the
    object exists. Other engines open only in a trusted network. Raises ConfigError for options that the engine cannot
    use, or that would let any process pull.
    """

    #: The engine's name in `BACKENDS`.
    name: ClassVar[str]

    #: Whether an object's key is needed to read it.
    enforces_refs: ClassVar[bool] = True

    def __init__(self, options: TransferOptions) -> None:
        if not options.authentic:
            raise ConfigError(
                f"the transfer engine {self.name} requires keys: create them with `unfuse keys new DIR`, and start all "
                "workers with the same --keys"
            )
        self.options = options

    @abstractmethod
    def serve(self, arena: Arena) -> str:
        """Let peers pull from `arena` until `close`. Returns the address for `connect`."""

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Register the memory that pulls write to, once, before the first pull.

        Some hardware needs this.
        """
        del memory

    def use(self, pairs: ProcessPairs, device: str) -> None:
        """Use these `pairs` to move bytes, for a worker that computes on `device`.

        Call this once, before the first pull. Engines whose library needs no compute process ignore it. Raises
        ConfigError for a device that the engine cannot use.
        """
        del pairs, device

    @abstractmethod
    def connect(self, address: str) -> PeerLink:
        """Return a link to the owner that serves at `address`."""

    @abstractmethod
    def close(self) -> None:
        """Stop serving. Callers close their links themselves."""


#: Most bytes of a message.
MAX_MESSAGE = 16 * 1024


class Pull(ShownRef, frozen=True, tag=True):
    """Send these bytes.

    For an engine whose reader reads the memory itself, the owner retains the object until the reader's next message.
    """

    #: Offset of the first byte in the object.
    start: int

    #: Offset behind the last byte.
    stop: int


class Watch(ShownRef, frozen=True, tag=True):
    """Request the progress of writing an announced object. Answered by Written."""

    #: Number of chunks that the reader knows to be written.
    known: int

    #: Seconds to wait for more than these.
    wait: float


class Got(msgspec.Struct, frozen=True, tag=True):
    """The reader has the bytes that it pulled. Not answered."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Request a Pong, which shows that the owner is reachable."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The bytes follow."""

    #: Offset in the arena of the first byte, if the reader reads the memory itself.
    offset: int


class Full(msgspec.Struct, frozen=True, tag=True):
    """The object is spilled and the arena has no room for it."""

    #: Bytes that the object needs.
    needed: int

    #: Free bytes of the owner's arena, not necessarily contiguous.
    free: int

    #: Bytes of the owner's arena.
    capacity: int


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The owner is reachable."""


ToOwner = Pull | Watch | Got | Ping
FromOwner = Ready | Written | ObjectUnavailable | Full | Pong


def refusal(error: ObjectLost | ArenaFull) -> ObjectUnavailable | Full:
    """Return the reply that reports an owner's error to the reader."""
    return (
        Full(error.needed, error.free, error.capacity)
        if isinstance(error, ArenaFull)
        else ObjectUnavailable(str(error))
    )


def check_refusal(reply: FromOwner, id: str) -> None:
    """Raise ObjectLost or ArenaFull if the owner's reply refuses object `id`."""
    match reply:
        case ObjectUnavailable(message):
            raise ObjectLost(message, id)
        case Full(needed, free, capacity):
            raise ArenaFull(needed, free, capacity, "the owner's arena has no contiguous room")


def hold_object(arena: Arena, pull: Pull) -> Extent:
    """Retain the object of a Pull in the arena, and return its extent.

    Raises ObjectLost for bytes that the object does not have, or not yet, and ArenaFull.
    """
    extent = arena.hold(pull.id, pull.key, pull.generation, pull.nbytes, announced=True)
    try:
        checksums, is_whole = arena.written(pull.id)
        readable = pull.nbytes if is_whole else len(checksums) * chunk_bytes(pull.nbytes)
        if not 0 <= pull.start <= pull.stop <= readable:
            raise ObjectLost(
                f"bytes {pull.start} to {pull.stop} of object {pull.id} cannot be read yet, or do not exist", pull.id
            )
    except BaseException:
        arena.unhold(pull.id)
        raise
    return extent


def answer_watch(arena: Arena, watch: Watch, max_wait_s: float) -> Written:
    """Return the answer to a Watch; waits up to `max_wait_s`. Raises ObjectLost and ArenaFull."""
    arena.hold(watch.id, watch.key, watch.generation, watch.nbytes, announced=True)
    try:
        return Written(*arena.written(watch.id, watch.known, max(0.0, min(watch.wait, max_wait_s))))
    finally:
        arena.unhold(watch.id)
