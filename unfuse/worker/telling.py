"""Tells the scheduler of steps: those of tasks that stepped together in one message."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from unfuse.core.messages import Progress, Pulse, Refused, Steps
from unfuse.core.task import Claim
from unfuse.supervision.supervisor import Supervisor
from unfuse.worker.compute_messages import Stepped
from unfuse.worker.link import Link

GATHER_S = 0.01
"""Seconds that a step waits for those of other tasks, which compute tells of one after the other."""


class Telling:
    """What is still to be told. `ended` is called with a claim whose lease is lost."""

    def __init__(self, link: Link, background: Supervisor, ended: Callable[[Claim], Awaitable[None]]) -> None:
        self._link, self._background, self._ended = link, background, ended
        self._steps: list[Progress] = []

    def stepped(self, message: Stepped) -> None:
        """Tell of this soon."""
        self._steps.append(Progress(message.claim, message.step, message.steps, message.first, message.previews))
        if len(self._steps) == 1:
            self._background.once("reporting steps", self._soon)

    def flush(self) -> None:
        """Tell now of all that waits, before whatever is said next."""
        steps, self._steps = self._steps, []
        together = [Steps(tuple(steps))] if self._link.gathers and len(steps) > 1 else steps
        for message in together:
            self._background.once("reporting steps", partial(self._tell, message))

    async def _soon(self) -> None:
        await asyncio.sleep(GATHER_S)
        self.flush()

    async def _tell(self, message: Progress | Steps) -> None:
        answer, ended = await self._link.call(message), tuple[Claim, ...]()
        if isinstance(answer, Pulse):
            ended = answer.ended
        elif isinstance(answer, Refused) and answer.lease_lost and isinstance(message, Progress):
            ended = (message.claim,)
        for claim in ended:
            await self._ended(claim)
