"""What an arena and its readers and writers say to each other over a unix socket: a length, then one message."""

from __future__ import annotations

from typing import Annotated

import msgspec

from unfuse.arena.buddy import Usage
from unfuse.arena.objects import Extent
from unfuse.core import framing
from unfuse.core.codec import encode

MAX_MESSAGE = 128 * 1024
"""Bytes of a message, beyond which its sender is not one of ours."""


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Keep a sealed object until Unhold or the end of this connection. Answered by Placed, or Lost."""

    id: str
    key: bytes
    generation: int
    nbytes: int


class Unhold(msgspec.Struct, frozen=True, tag=True):
    """End one hold. Not answered."""

    id: str


class Who(msgspec.Struct, frozen=True, tag=True):
    """Whose arena is it? Answered by Owner."""


class Write(msgspec.Struct, frozen=True, tag=True):
    """Prove the right to write; every message below needs it. Answered by Done with a writable descriptor."""

    token: bytes


class Create(msgspec.Struct, frozen=True, tag=True):
    """Make room for an object; it is aborted if this connection ends before Seal. Answered by Placed, or Full."""

    nbytes: Annotated[int, msgspec.Meta(ge=0)]
    request: str


class Seal(msgspec.Struct, frozen=True, tag=True):
    """The object of this connection is written. Answered by Done, or Lost."""

    id: str


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Give up an object of this connection. Answered by Done."""

    id: str


class Delete(msgspec.Struct, frozen=True, tag=True):
    """Delete an object. Answered by Done."""

    id: str


class Release(msgspec.Struct, frozen=True, tag=True):
    """Delete every object of a request. Answered by Done."""

    request: str


class Spill(msgspec.Struct, frozen=True, tag=True):
    """An object is kept elsewhere now: free its room. Answered by Done, or Lost."""

    id: str


class Look(msgspec.Struct, frozen=True, tag=True):
    """Answered by Seen."""


class Placed(msgspec.Struct, frozen=True, tag=True):
    """Where the object is. The answer to a connection's first Hold brings the read-only descriptor."""

    extent: Extent


class Owner(msgspec.Struct, frozen=True, tag=True):
    """The owner that refs to its objects name."""

    id: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """It is so."""


class Lost(msgspec.Struct, frozen=True, tag=True):
    """The object cannot be held, sealed or spilled."""

    message: str


class Full(msgspec.Struct, frozen=True, tag=True):
    """There is no room; bytes."""

    needed: int
    free: int
    capacity: int


class Seen(msgspec.Struct, frozen=True, tag=True):
    """How full the arena is, the requests it holds objects for, and objects that could be moved elsewhere."""

    usage: Usage
    requests: frozenset[str]
    idle: list[Extent]


ToOwner = Who | Hold | Unhold | Write | Create | Seal | Abort | Delete | Release | Spill | Look
FromOwner = Owner | Placed | Done | Lost | Full | Seen


def frame(message: ToOwner | FromOwner) -> bytes:
    """The message as it travels."""
    return framing.frame(encode(message))
