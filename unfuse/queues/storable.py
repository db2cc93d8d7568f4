"""What every queue can store."""

from __future__ import annotations

from operator import attrgetter

import msgspec

from unfuse.core.codec import encode
from unfuse.core.errors import ProtocolError
from unfuse.core.event import Event
from unfuse.core.request import RequestContext
from unfuse.core.task import Task

EXACT = 2**53  # every backend stores integers up to this one exactly

_NUMBERS = {
    kind: attrgetter(*(one.name for one in msgspec.structs.fields(kind) if one.type in (int, float, float | None)))
    for kind in (RequestContext, Task, Event)
}


def check_storable(*parts: RequestContext | Task | Event) -> None:
    """Raise ProtocolError for what no backend can store, before any of it is stored.

    That is text that is not Unicode, more bytes than a message may have, NaN, or a number beyond EXACT.
    """
    encode(parts)
    check_numbers(*parts)


def check_numbers(*parts: RequestContext | Task | Event) -> None:
    """Raise ProtocolError for NaN, or a number beyond EXACT: what encoding does not refuse."""
    for part in parts:
        planned = (part.planned.room, *part.planned.needs.values()) if isinstance(part, Task) else ()
        for number in (*_NUMBERS[type(part)](part), *planned):
            if not -EXACT <= (number or 0) <= EXACT:
                raise ProtocolError(f"{type(part).__name__} with a number of {number}: up to {EXACT} are stored")
