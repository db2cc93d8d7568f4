"""What a worker says of itself with each heartbeat."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from unfuse.core.messages import Beat, Moved
from unfuse.core.task import Claim
from unfuse.worker.executor import Executor
from unfuse.worker.objects import Objects
from unfuse.worker.sets import Swapping


def heartbeat(
    held: Sequence[Claim], objects: Objects, moved: dict[str, Moved], wait: float, by: Executor | None,
    swapping: Swapping, arriving: int,
) -> Beat:  # fmt: skip
    """The next heartbeat of a worker. What compute has retracted is counted anew from it on."""
    usage, holding = objects.usage(), tuple(objects.holding())
    beat = Beat(tuple(held), holding, usage.used, wait, usage.high_water, usage.fragmentation, moved)
    if by is None:
        return beat
    texts = by.texts and msgspec.structs.replace(by.texts, arriving=arriving)
    about = {"unwritten": by.unwritten, "shares": by.shares, "ranks": by.ranks, "texts": texts}
    retracted, by.retracted = by.retracted, 0
    return msgspec.structs.replace(
        beat, **about, retracted=retracted, busy=by.busy.share, memory=by.memory,
        holds=swapping.holds, load_s=swapping.load_s, going=swapping.going,
    )  # fmt: skip
