"""The transfer port: whoever needs an object pulls its bytes from the owner's arena into memory of its own.

Whoever writes an engine runs `unfuse.testing.check_transfer` on it: the suite is the contract in executable form.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from msgspec import Meta

from unfuse.core.errors import ConfigError, TransientError
from unfuse.core.object_ref import ObjectRef

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from unfuse.arena.arena import Arena  # with numpy, which settings need not


class LinkBroken(TransientError):
    """Bytes did not come, or not whole. Another try, or another engine, may bring the rest."""


class TransferSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is set of how engines move tensors, and when they give up."""

    trusted_network: Annotated[
        bool,
        Meta(
            description="Allow engines (mooncake, nixl) that let whoever reaches a worker read and overwrite its "
            "tensors."
        ),
    ] = False
    threads: Annotated[
        int, Meta(description="Threads of a worker that move tensors here from one owner, at most.", ge=1, le=256)
    ] = 4
    queues: Annotated[int, Meta(description="Connections to each other worker.", ge=1, le=256)] = 4
    bootstrap_s: Annotated[
        float, Meta(description="Seconds to reach an owner, or find room, before a transfer fails.", gt=0)
    ] = 30.0
    heartbeat_s: Annotated[float, Meta(description="Seconds between two pings of another worker.", gt=0)] = 5.0
    max_missed: Annotated[
        int, Meta(description="Pings without an answer, or a byte, after which a worker is given up.", ge=1)
    ] = 2


class TransferOptions(TransferSettings, frozen=True):
    """How the engines of one worker listen, beside what is set.

    `host` is the address other nodes reach this process by; `secret` is what all peers share (workers' secret CURVE
    key). Without one engines serve and ask nobody, unless they are `insecure` at both ends: whoever reaches them may
    pull then who shows an object's key. A session has `attempts` tries in a row that bring nothing.
    """

    host: str = "127.0.0.1"
    secret: str = ""
    insecure: bool = False
    attempts: int = 6

    @property
    def authentic(self) -> bool:
        """Whether peers prove who they are, or need not."""
        return bool(self.secret) or self.insecure

    @property
    def silence_s(self) -> float:
        """Seconds after which a silent peer is gone."""
        return self.heartbeat_s * self.max_missed


class Link(ABC):
    """The way to one owner's objects. Nothing is connected before it is needed, nor connected again by the caller.

    Thread-safe. Every method raises LinkBroken when the owner cannot be reached, is silent for `silence_s`, or says
    what it must not; the next call tries anew, until `close`.
    """

    @abstractmethod
    def pull(self, ref: ObjectRef, start: int, stop: int, into: NDArray[np.uint8]) -> Generator[int, None, None]:
        """Fill `into` with bytes `start` to `stop` of an object, and nothing beyond it; yields how many are there.

        The numbers rise, to `stop − start` at the end; whatever is raised, the bytes of the last number came. They are
        not verified: an engine may bring wrong bytes. Giving the iterator up ends the pull.
        Raises ObjectLost when the owner says that no such object may be read, ArenaFull while it has no room for it.
        """

    @abstractmethod
    def written(self, ref: ObjectRef, known: int, wait: float) -> tuple[tuple[int, ...], bool]:
        """What ObjectTable.written says, for a `ref` whose checksums are not all known. Raises ObjectLost."""

    @abstractmethod
    def ping(self) -> None:
        """Return when the owner has answered, or bytes of it are coming."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect; what is being pulled breaks."""


class TransferEngine(ABC):
    """One way for bytes to move. Synchronous and thread-safe; made with TransferOptions.

    `enforces_refs`: an object's bytes go only to who shows its ref's key, and only while it exists; an engine
    that does not opens only in a trusted network. Raises ConfigError for options it cannot work with, among them those
    by which anybody could ask.
    """

    name: ClassVar[str]
    enforces_refs: ClassVar[bool] = True

    def __init__(self, options: TransferOptions) -> None:
        if not options.authentic:
            raise ConfigError(
                f"without keys any process that reaches this one could pull tensors by {self.name}: make some by "
                "`unfuse keys new DIR` and give all workers the same --keys"
            )
        self.options = options

    @abstractmethod
    def serve(self, arena: Arena) -> str:
        """Let peers pull from `arena` until `close`; returns the address they `connect` to."""

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Say once, before the first pull, in which memory pulls will end; some hardware needs to know."""
        del memory

    @abstractmethod
    def connect(self, address: str) -> Link:
        """The way to the owner that serves at `address`."""

    @abstractmethod
    def close(self) -> None:
        """Stop serving. Links are closed by who has them."""
