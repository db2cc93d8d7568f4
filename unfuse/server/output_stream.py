"""The output stream of a request: the recorded chunks of its final stages, read while they grow."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping

from unfuse.core.event import Event
from unfuse.core.growth import PIECES_AT_ONCE
from unfuse.queues.base import RequestStore


async def output_stream(
    queue: RequestStore, request: str, offsets: Mapping[str, int]
) -> AsyncIterator[tuple[str, bytes]]:
    """The chunks of these stages as (stage, chunk), each stage from its offset on, until the request is over.

    A reader that counts them may go on from there with another call. For a slow reader nothing is kept but one answer
    of the queue. Raises NotFound for an unknown request, and TransientError while the queue cannot be read.
    """
    counts = dict(offsets)
    async for stages in _stages_with_news(queue.watch(request), counts):
        for stage in stages:
            size = PIECES_AT_ONCE
            while size == PIECES_AT_ONCE:
                chunks = await queue.appended(request, stage, counts[stage])
                size = len(chunks)
                for chunk in chunks:
                    counts[stage] += 1
                    yield stage, chunk


async def _stages_with_news(events: AsyncIterator[Event], counts: Mapping[str, int]) -> AsyncIterator[Collection[str]]:
    """The stages that may have more chunks than `counts`: all at first and at the end, between them one at a time."""
    yield counts.keys()
    async for event in events:
        if event.type == "appended" and event.step > counts.get(event.stage, event.step):
            yield (event.stage,)
    yield counts.keys()
