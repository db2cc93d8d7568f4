"""What every queue stores: a request as a row, which numbers it may have, and how much is left of it."""

from __future__ import annotations

from collections import Counter
from operator import attrgetter

import msgspec

from unfuse.core.codec import encode
from unfuse.core.errors import ProtocolError
from unfuse.core.event import Event
from unfuse.core.request import RequestContext
from unfuse.core.task import Task


class StoredTask(msgspec.Struct, frozen=True, array_like=True):
    """A task that is queued, or leased if it has a token: then to `worker`, `since` that time.

    `returned` counts how often each worker has turned it down. `since` and `pushed` are Unix seconds.
    """

    arrival: int
    task: Task
    pushed: float
    returned: dict[str, int]
    worker: str = ""
    token: bytes = b""
    since: float = 0.0


class Pieces(msgspec.Struct, frozen=True):
    """Pieces of a stage of the request `id`, from number `first` on, as they were recorded at one time."""

    id: str
    stage: str
    first: int
    pieces: tuple[bytes, ...]


class Row(msgspec.Struct, frozen=True):
    """A whole stored request: any change replaces its row. `last` is the highest number of an event."""

    context: RequestContext
    stages: tuple[str, ...]
    tasks: tuple[StoredTask, ...]
    events: tuple[Event, ...]
    last: int


EXACT = 2**53  # every backend stores integers up to this one exactly

NUMBERS = (int, float, float | None)
_NUMBERS = {
    kind: attrgetter(*nested, *(one.name for one in msgspec.structs.fields(kind) if one.type in NUMBERS))
    for kind, nested in (
        (RequestContext, ("delivery.priority", "request.time_limit_s")),
        (Task, ("planned.room",)),
        (Event, ()),
    )
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
        needs = part.planned.needs.values() if isinstance(part, Task) else ()
        for number in (*_NUMBERS[type(part)](part), *needs):
            if not -EXACT <= (number or 0) <= EXACT:
                raise ProtocolError(f"{type(part).__name__} with a number of {number}: up to {EXACT} are stored")


NANOSECONDS = 10**9  # sums count whole nanoseconds: adding and subtracting the same number leaves exactly nothing
MOST_S = 10**5  # the longest prediction, in seconds, that counts; a longer one, or one of no number, counts as 0


def remaining_of(context: RequestContext) -> dict[str, int]:
    """Predicted nanoseconds of the stages that are not done, by pool; empty for a request that is over."""
    left = Counter[str]()
    for stage in () if context.over else context.plan.stages:
        state = context.stages.get(stage.name)
        if 0 < stage.cost <= MOST_S and (state is None or state.status != "done"):
            left[stage.pool] += round(stage.cost * NANOSECONDS)
    return {pool: nanoseconds for pool, nanoseconds in left.items() if nanoseconds}
