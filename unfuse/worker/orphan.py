"""A worker that no scheduler speaks to any more gives up what it keeps for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from unfuse.worker.link import Link
from unfuse.worker.objects import Objects

TICK_S = 1.0

log = structlog.get_logger(__name__)


async def free_when_alone(
    link: Link,
    objects: Objects,
    busy: Callable[[], bool],
    orphan_s: float,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Have `objects` given up once no scheduler was heard for `orphan_s` seconds; what runs then is let finish first.

    Seconds are counted one by one while they are waited through: neither a clock that is set nor a process that was
    stopped for an hour, and could be reached all the time, makes an orphan.
    """
    tick, alone, heard = min(TICK_S, orphan_s / 4), 0.0, link.heard
    while True:
        await sleep(tick)
        alone = alone + tick if link.heard == heard else 0.0
        heard = link.heard
        if alone >= orphan_s and not busy() and (held := objects.holding()):
            log.warning("no scheduler is heard of, giving up what is kept for it", requests=len(held), seconds=alone)
            await objects.abandon()
