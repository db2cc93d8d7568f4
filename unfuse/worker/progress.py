"""Reports the progress of tasks to the scheduler, and has their growing outputs recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import structlog

from unfuse.core.growth import PIECES_AT_ONCE, Grown
from unfuse.core.messages import Append, Progress, Pulse, Recall, Recorded, Refused, Steps
from unfuse.core.supervisor import Supervisor
from unfuse.core.task import Claim, Lease
from unfuse.worker.link import Link

GATHER_S = 0.01  # seconds that a step waits for steps of other tasks, to be sent in the same message


class ProgressReporter:
    """Sends the steps of tasks, many in one message. `ended` is called with a claim whose lease is lost."""

    def __init__(self, link: Link, background: Supervisor, ended: Callable[[Claim], Awaitable[None]]) -> None:
        self._link, self._background, self._ended = link, background, ended
        self._steps: list[Progress] = []

    def add(self, progress: Progress) -> None:
        """Report this within GATHER_S."""
        self._steps.append(progress)
        if len(self._steps) == 1:
            self._background.once("reporting steps", self._soon)

    def flush(self) -> None:
        """Report now whatever waits, before the next message."""
        steps, self._steps = self._steps, []
        if steps:
            self._background.once("reporting steps", partial(self._send, Steps(tuple(steps))))

    async def _soon(self) -> None:
        await asyncio.sleep(GATHER_S)
        self.flush()

    async def _send(self, message: Steps) -> None:
        answer = await self._link.call(message)
        for claim in answer.ended if isinstance(answer, Pulse) else ():
            await self._ended(claim)


APPEND_S = 0.05  # seconds between two messages about what has grown; a task that ends does not wait for them
PAUSE_S = 1.0  # seconds until a message is repeated that the scheduler could not record

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class _Growth:
    """The pieces of a task that are not known to be recorded, from number `offset` on. `recorded`: there are none."""

    offset: int
    pieces: list[bytes] = field(default_factory=list)
    recorded: asyncio.Event = field(default_factory=asyncio.Event)


class OutputRecorder:
    """Has the new output of tasks recorded, in one message after the other, so that pieces stay in order.

    `ended` is called with a claim for which nothing is recorded any more.
    """

    def __init__(self, link: Link, background: Supervisor, ended: Callable[[Claim], Awaitable[None]]) -> None:
        self._link, self._background, self._ended = link, background, ended
        self._unrecorded: dict[Claim, _Growth] = {}
        self._hurry = asyncio.Event()
        self._sending = False

    def add(self, message: Grown) -> None:
        """Have these pieces recorded soon."""
        self._unrecorded.setdefault(message.claim, _Growth(message.offset)).pieces += message.pieces
        if not self._sending:
            self._sending = True
            self._background.once("recording what has grown", self._send)

    async def wait_until_recorded(self, claim: Claim) -> None:
        """Wait until all pieces of a task are recorded, or its lease is known to be lost."""
        if growth := self._unrecorded.get(claim):
            self._hurry.set()
            await growth.recorded.wait()

    async def read(self, lease: Lease) -> tuple[bytes, ...] | None:
        """Return the pieces that earlier attempts have made; None if the lease is lost."""
        found: list[bytes] = []
        while len(found) < lease.appended:
            match await self._link.call(Recall(lease.claim, len(found))):
                case Recorded(pieces) if pieces:
                    found += pieces
                case Refused(lease_lost=False):
                    await asyncio.sleep(PAUSE_S)
                case _:
                    return None
        return tuple(found)

    async def _send(self) -> None:
        """Send messages until nothing is left: the first when tasks that stepped together have told of it."""
        try:
            await asyncio.sleep(GATHER_S)
            while self._unrecorded:
                self._hurry.clear()
                pause = APPEND_S if await self._record(self._some()) else PAUSE_S
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._hurry.wait()
        finally:
            self._sending = False

    def _some(self) -> list[Grown]:
        """As much as one message takes, of those first that have waited longest."""
        found, room = list[Grown](), PIECES_AT_ONCE
        for claim, growth in self._unrecorded.items():
            found += [Grown(claim, growth.offset, tuple(growth.pieces[:room]))] if room else []
            room -= min(room, len(growth.pieces))
        return found

    async def _record(self, grown: list[Grown]) -> bool:
        """Have these recorded; False if that failed, and may be tried again."""
        answer = await self._link.call(Append(tuple(grown)))
        if not isinstance(answer, Pulse):
            log.warning("what has grown is not recorded yet", answer=str(answer))
            return False
        for one in grown:
            growth = self._unrecorded.pop(one.claim)
            growth.offset += len(one.pieces)
            del growth.pieces[: len(one.pieces)]
            if growth.pieces and one.claim not in answer.ended:
                self._unrecorded[one.claim] = growth
            else:
                growth.recorded.set()
        for claim in answer.ended:
            await self._ended(claim)
        return True
