"""Messages between an owner of objects and a reader, whatever carries them; and how the owner answers."""

from __future__ import annotations

import msgspec

from unfuse.arena.arena import Arena
from unfuse.arena.objects import Extent
from unfuse.arena.protocol import Lost, ShownRef, Written
from unfuse.core.errors import ArenaFull, ObjectLost
from unfuse.core.object_ref import chunk_bytes

MAX_MESSAGE = 16 * 1024  # the most bytes of a message


class Pull(ShownRef, frozen=True, tag=True):
    """Send these bytes; or hold them, for a reader that reads them itself, until its next message."""

    start: int
    stop: int


class Watch(ShownRef, frozen=True, tag=True):
    """Say how far an announced object is written; wait up to `wait` seconds for more than `known` chunks."""

    known: int
    wait: float


class Got(msgspec.Struct, frozen=True, tag=True):
    """The reader has the bytes that it pulled. Not answered."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Asks whether the owner is there. Answered by Pong."""


class Coming(msgspec.Struct, frozen=True, tag=True):
    """The bytes follow; in the arena they begin at `offset`, plus the start of the Pull."""

    offset: int


class Full(msgspec.Struct, frozen=True, tag=True):
    """The object is spilled, and there is no room to take it back now. All fields are bytes."""

    needed: int
    free: int
    capacity: int


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The owner is there."""


ToOwner = Pull | Watch | Got | Ping
FromOwner = Coming | Written | Lost | Full | Pong


def refusal(error: ObjectLost | ArenaFull) -> Lost | Full:
    """The message for an error of the owner."""
    return Full(error.needed, error.free, error.capacity) if isinstance(error, ArenaFull) else Lost(str(error))


def check_refusal(reply: FromOwner, id: str) -> None:
    """Raise ObjectLost or ArenaFull if that is the owner's reply about object `id`."""
    match reply:
        case Lost(message):
            raise ObjectLost(message, id)
        case Full(needed, free, capacity):
            raise ArenaFull(needed, free, capacity, "the owner's arena has no contiguous room")


def hold_for(arena: Arena, pull: Pull) -> Extent:
    """Hold the object of a Pull. Raises ObjectLost for bytes that it does not have (yet), and ArenaFull."""
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


def answer_watch(arena: Arena, asked: Watch, longest: float) -> Written:
    """The answer to a Watch. Raises ObjectLost, ArenaFull."""
    arena.hold(asked.id, asked.key, asked.generation, asked.nbytes, announced=True)
    try:
        return Written(*arena.written(asked.id, asked.known, max(0.0, min(asked.wait, longest))))
    finally:
        arena.unhold(asked.id)
