"""How long a worker keeps objects for schedulers: until they are read, or as long as it hears from any."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from unfuse.worker.link import Link
from unfuse.worker.objects import Objects

TICK_S = 1.0

SILENT_BEATS = 3  # how many beats without an answer mean that no scheduler is there to wait for

log = structlog.get_logger(__name__)


async def free_when_orphaned(
    link: Link,
    objects: Objects,
    busy: Callable[[], bool],
    orphan_s: float,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Free `objects` when no scheduler has answered for `orphan_s` seconds and no task runs.

    Time is counted in ticks of sleep, so that neither a clock that jumps, nor a process that was stopped for an hour,
    makes an orphan.
    """
    tick, alone, heard = min(TICK_S, orphan_s / 4), 0.0, link.heard
    while True:
        await sleep(tick)
        alone = alone + tick if link.heard == heard else 0.0
        heard = link.heard
        if alone >= orphan_s and not busy() and (held := objects.holding()):
            log.warning("no scheduler answers, freeing what is held for it", requests=len(held), seconds=alone)
            await objects.abandon()


async def until_read(
    link: Link, objects: Objects, released: asyncio.Event, beat_s: float, stops: Callable[[], bool]
) -> None:
    """Wait until nobody needs what lies here alone, as long as there is a scheduler to say so by `released`.

    Where that scheduler `stops`, it gives nobody a task that would read it.
    """
    heard = -1
    while objects.needed() and heard != link.heard and not stops():
        heard = link.heard
        released.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(SILENT_BEATS * beat_s):
                await released.wait()
