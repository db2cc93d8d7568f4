"""What an owner and a reader say to each other, over whatever brings it, and the owner's answers."""

from __future__ import annotations

import msgspec

from unfuse.arena.arena import Arena
from unfuse.arena.objects import Extent
from unfuse.core.errors import ArenaFull, ObjectLost
from unfuse.core.object_ref import chunk_bytes

MAX_MESSAGE = 16 * 1024
"""Bytes of a message, beyond which its sender is not one of ours."""


class Shown(msgspec.Struct, frozen=True):
    """What must be shown of an object's ref."""

    id: str
    key: bytes
    generation: int
    nbytes: int


class Pull(Shown, frozen=True, tag=True):
    """Send these bytes, or keep them where they lie; either until the next message."""

    start: int
    stop: int


class Watch(Shown, frozen=True, tag=True):
    """Say how far an announced object is written, waiting a little for more than is known."""

    known: int
    wait: float


class Got(msgspec.Struct, frozen=True, tag=True):
    """What was pulled is here. Not answered."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answered by Pong."""


class Coming(msgspec.Struct, frozen=True, tag=True):
    """The bytes follow; they lie at this offset of the arena."""

    offset: int


class Written(msgspec.Struct, frozen=True, tag=True):
    """What ObjectTable.written says of an object."""

    checksums: tuple[int, ...]
    whole: bool


class Lost(msgspec.Struct, frozen=True, tag=True):
    """This object may not be read (any more), and why."""

    message: str


class Full(msgspec.Struct, frozen=True, tag=True):
    """There is no room now to take this object back from where it was moved; bytes."""

    needed: int
    free: int
    capacity: int


class Pong(msgspec.Struct, frozen=True, tag=True):
    """Here."""


ToOwner = Pull | Watch | Got | Ping
FromOwner = Coming | Written | Lost | Full | Pong


def refusal(error: ObjectLost | ArenaFull) -> Lost | Full:
    """How an owner says it."""
    return Full(error.needed, error.free, error.capacity) if isinstance(error, ArenaFull) else Lost(str(error))


def check_refusal(reply: FromOwner, id: str) -> None:
    """Raises the ObjectLost or ArenaFull that an owner answered about object `id`."""
    match reply:
        case Lost(message):
            raise ObjectLost(message, id)
        case Full(needed, free, capacity):
            raise ArenaFull(needed, free, capacity, "the owner's arena has no contiguous room")


def place(arena: Arena, pull: Pull) -> Extent:
    """Hold the object of a Pull. Raises ObjectLost for bytes that it has not, or not yet, and ArenaFull."""
    extent = arena.hold(pull.id, pull.key, pull.generation, pull.nbytes, announced=True)
    try:
        chunks, whole = arena.written(pull.id)
        end = pull.nbytes if whole else len(chunks) * chunk_bytes(pull.nbytes)
        if not 0 <= pull.start <= pull.stop <= end:
            raise ObjectLost(f"bytes {pull.start} to {pull.stop} of object {pull.id} are not there to be read", pull.id)
    except BaseException:
        arena.unhold(pull.id)
        raise
    return extent


def watch(arena: Arena, asked: Watch, longest: float) -> Written:
    """The answer to a Watch. Raises ObjectLost, ArenaFull."""
    arena.hold(asked.id, asked.key, asked.generation, asked.nbytes, announced=True)
    try:
        return Written(*arena.written(asked.id, asked.known, max(0.0, min(asked.wait, longest))))
    finally:
        arena.unhold(asked.id)
