"""Messages between an arena's owner and its readers and writers, over a unix socket."""

from __future__ import annotations

from typing import Annotated

import msgspec

from unfuse.arena.buddy import Usage
from unfuse.arena.objects import Extent
from unfuse.core import framing
from unfuse.core.codec import encode

MAX_MESSAGE = 128 * 1024  # the most bytes of a message


class ShownRef(msgspec.Struct, frozen=True):
    """The fields of an object's ref that a reader must show."""

    id: str
    key: bytes
    generation: int
    nbytes: int


class HoldObject(ShownRef, frozen=True, tag=True):
    """Hold a sealed object until Unhold or the end of this connection. Answered by ObjectPlace, or Lost."""


class GetWritten(ShownRef, frozen=True, tag=True):
    """Ask how much of an object, whose writer may be at it, can be read. Answered at once, by Written, or Lost."""


class Unhold(msgspec.Struct, frozen=True, tag=True):
    """End one hold. Not answered."""

    id: str


class GetOwner(msgspec.Struct, frozen=True, tag=True):
    """Ask who owns the arena. Answered by OwnerReply."""


class Write(msgspec.Struct, frozen=True, tag=True):
    """Prove the right to write, which the messages below need. Answered by Acknowledged with a writable descriptor."""

    token: bytes


class Create(msgspec.Struct, frozen=True, tag=True):
    """Allocate an object; it is aborted if this connection ends before Seal. Answered by ObjectPlace, or NoRoom."""

    nbytes: Annotated[int, msgspec.Meta(ge=0)]
    request: str


class Announce(msgspec.Struct, frozen=True, tag=True):
    """Let an object be read while it is written. `written`: checksums of whole chunks. Answered by Acknowledged,
    or Lost.
    """

    id: str
    written: tuple[int, ...]


class Seal(msgspec.Struct, frozen=True, tag=True):
    """The object of this connection is written. Answered by Acknowledged, or Lost."""

    id: str


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Drop an object that this connection is writing. Answered by Acknowledged."""

    id: str


class Delete(msgspec.Struct, frozen=True, tag=True):
    """Delete an object. Answered by Acknowledged."""

    id: str


class Release(msgspec.Struct, frozen=True, tag=True):
    """Delete every object of a request. Answered by Acknowledged."""

    request: str


class SpillObject(msgspec.Struct, frozen=True, tag=True):
    """Free the room of an object that was copied elsewhere. Answered by Acknowledged, or Lost."""

    id: str


class GetState(msgspec.Struct, frozen=True, tag=True):
    """Ask for the state of the arena. Answered by ArenaState."""


class ObjectPlace(msgspec.Struct, frozen=True, tag=True):
    """The place of the object. The answer to a connection's first HoldObject carries the read-only descriptor.

    `given_back` is how often the arena has given memory back: a map of that is empty again.
    """

    extent: Extent
    given_back: int = 0


class Written(msgspec.Struct, frozen=True, tag=True):
    """The checksums of an announced object's complete chunks, and whether it is whole; of others () and True."""

    checksums: tuple[int, ...]
    whole: bool


class OwnerReply(msgspec.Struct, frozen=True, tag=True):
    """The owner of the arena, by the name that refs have."""

    id: str


class Acknowledged(msgspec.Struct, frozen=True, tag=True):
    """The request was carried out."""


class Lost(msgspec.Struct, frozen=True, tag=True):
    """The object cannot be held, read, sealed or spilled, for the reason in `message`."""

    message: str


class NoRoom(msgspec.Struct, frozen=True, tag=True):
    """There is no room: `needed`, `free` and `capacity` are bytes; the rest says of what, and what helps."""

    needed: int
    free: int
    capacity: int
    full: str
    remedy: str


class ArenaState(msgspec.Struct, frozen=True, tag=True):
    """How full the arena is, the requests that it holds objects for, and idle objects, which could be spilled."""

    usage: Usage
    requests: frozenset[str]
    idle: list[Extent]


ToOwner = (
    GetOwner
    | HoldObject
    | GetWritten
    | Unhold
    | Write
    | Create
    | Announce
    | Seal
    | Abort
    | Delete
    | Release
    | SpillObject
    | GetState
)
FromOwner = OwnerReply | ObjectPlace | Written | Acknowledged | Lost | NoRoom | ArenaState


def frame(message: ToOwner | FromOwner) -> bytes:
    """The message with its header."""
    return framing.frame(encode(message))
