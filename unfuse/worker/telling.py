"""Tells the scheduler of steps, those of tasks that stepped together in one message, and of what outputs grow by."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import structlog

from unfuse.core.growth import PIECES_AT_ONCE, Grown
from unfuse.core.messages import Append, Progress, Pulse, Recall, Recorded, Refused, Steps
from unfuse.core.task import Claim, Lease
from unfuse.supervision.supervisor import Supervisor
from unfuse.worker.link import Link

GATHER_S = 0.01  # seconds that a step waits for those of other tasks, which compute tells of one after the other


class Telling:
    """What is still to be told. `ended` is called with a claim whose lease is lost."""

    def __init__(self, link: Link, background: Supervisor, ended: Callable[[Claim], Awaitable[None]]) -> None:
        self._link, self._background, self._ended = link, background, ended
        self._steps: list[Progress] = []

    def stepped(self, message: Progress) -> None:
        """Tell of this soon."""
        self._steps.append(message)
        if len(self._steps) == 1:
            self._background.once("reporting steps", self._soon)

    def flush(self) -> None:
        """Tell now of all that waits, before whatever is said next."""
        steps, self._steps = self._steps, []
        if steps:
            self._background.once("reporting steps", partial(self._tell, Steps(tuple(steps))))

    async def _soon(self) -> None:
        await asyncio.sleep(GATHER_S)
        self.flush()

    async def _tell(self, message: Steps) -> None:
        answer = await self._link.call(message)
        for claim in answer.ended if isinstance(answer, Pulse) else ():
            await self._ended(claim)


APPEND_S = 0.05  # seconds between two messages about what has grown; a task that ends does not wait for them
PAUSE_S = 1.0  # seconds until a message is repeated that the scheduler could not record

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class _Growth:
    """The pieces of a task that are not known to be recorded, from number `offset` on. `settled`: there are none."""

    offset: int
    pieces: list[bytes] = field(default_factory=list)
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class Growing:
    """What is still to be recorded, of all tasks, in one message after the other: so pieces stay in order.

    `ended` is called with a claim for which nothing is recorded any more.
    """

    def __init__(self, link: Link, background: Supervisor, ended: Callable[[Claim], Awaitable[None]]) -> None:
        self._link, self._background, self._ended = link, background, ended
        self._unsaid: dict[Claim, _Growth] = {}
        self._hurry = asyncio.Event()
        self._sending = False

    def grown(self, message: Grown) -> None:
        """Have these pieces recorded soon."""
        self._unsaid.setdefault(message.claim, _Growth(message.offset)).pieces += message.pieces
        if not self._sending:
            self._sending = True
            self._background.once("recording what has grown", self._send)

    async def settled(self, claim: Claim) -> None:
        """Wait until all pieces of a task are recorded, or its lease is known to be lost."""
        if growth := self._unsaid.get(claim):
            self._hurry.set()
            await growth.settled.wait()

    async def recorded(self, lease: Lease) -> tuple[bytes, ...] | None:
        """The pieces that earlier attempts have made; None if the lease is lost."""
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
            while self._unsaid:
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
        for claim, growth in self._unsaid.items():
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
            growth = self._unsaid.pop(one.claim)
            growth.offset += len(one.pieces)
            del growth.pieces[: len(one.pieces)]
            if growth.pieces and one.claim not in answer.ended:
                self._unsaid[one.claim] = growth
            else:
                growth.settled.set()
        for claim in answer.ended:
            await self._ended(claim)
        return True
