"""What a stage makes, read while it grows."""

from __future__ import annotations

from collections.abc import AsyncIterator

from unfuse.core.event import Event
from unfuse.core.growth import PIECES_AT_ONCE
from unfuse.queues.base import TaskQueue


async def pieces(queue: TaskQueue, request: str, stage: str, after: int = 0) -> AsyncIterator[bytes]:
    """The recorded pieces of a stage from number `after` on, as they come, until the request is over.

    Whoever counts what came may go on from there with another call. For a slow reader nothing is kept but one answer of
    the queue. Raises NotFound for an unknown request, and TransientError while the queue cannot be read.
    """
    events, ended = queue.watch(request), False
    while True:
        more = True
        while more:
            some = await queue.appended(request, stage, after)
            for piece in some:
                yield piece
            after += len(some)
            more = len(some) == PIECES_AT_ONCE
        if ended:
            return
        ended = not await _grew(events, stage, after)


async def _grew(events: AsyncIterator[Event], stage: str, after: int) -> bool:
    """Wait until a stage has a piece of number `after`; False at the end of the request."""
    async for event in events:
        if (event.type, event.stage) == ("appended", stage) and event.step > after:
            return True
    return False
