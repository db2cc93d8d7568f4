"""A scheduler as a process of its own, to be killed or stopped: welcomes whoever comes, and has no work."""

from __future__ import annotations

import asyncio
import sys

from unfuse.core.clock import SystemClock
from unfuse.core.messages import StorageLocations
from unfuse.queues.memory import MemoryQueue
from unfuse.scheduler.dispatcher import Dispatcher
from unfuse.scheduler.scheduler import Scheduler
from unfuse.wire.router import Router


async def main() -> None:
    scheduler = Scheduler(MemoryQueue(SystemClock()))
    dispatcher = Dispatcher(scheduler, [("none", "none", "auto")], StorageLocations(""))
    router = Router(sys.argv[1], dispatcher.answer, dispatcher.handle_undelivered)
    await scheduler.start()
    sys.stdout.write(router.address + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


asyncio.run(main())
