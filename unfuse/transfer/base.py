"""The transfer port: whoever needs an object pulls its bytes from the owner's arena into memory of its own.

Whoever writes an engine runs `unfuse.testing.check_transfer` on it: the suite is the contract in executable form.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import TYPE_CHECKING, ClassVar

import msgspec

from unfuse.arena.arena import Arena
from unfuse.core.errors import ConfigError, TransientError
from unfuse.core.object_ref import ObjectRef

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class LinkBroken(TransientError):
    """Bytes did not come, or not whole. Another try, or another engine, may bring the rest."""


class TransferOptions(msgspec.Struct, frozen=True):
    """How engines listen, and when they give up.

    `host` is the address other nodes reach this process by; `secret` is what all peers share (workers' secret CURVE
    key). Without one engines serve and ask nobody, unless they are `insecure` at both ends: whoever reaches them may
    pull then who shows an object's key. `queues` connections lead to each peer, `threads` threads move its sessions. A
    peer is pinged every `heartbeat_s` seconds and gone after `max_missed` of them without an answer or a byte. A
    session has `bootstrap_s` seconds to reach its owner or find room, and `attempts` tries in a row that bring nothing.
    """

    host: str = "127.0.0.1"
    secret: str = ""
    trusted_network: bool = False
    insecure: bool = False
    queues: int = 4
    threads: int = 4
    bootstrap_s: float = 30.0
    heartbeat_s: float = 5.0
    max_missed: int = 2
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
        """See ObjectTable, for a `ref` whose checksums are not all known. Raises ObjectLost when it was given up."""

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
