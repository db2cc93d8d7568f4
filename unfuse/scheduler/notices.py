"""Webhooks that have not heard of the end of their request: who tells one next, and what came of it.

All of it is on the request's context. Who is about to tell a webhook takes the attempt first, so that no other
scheduler makes it too; one that dies while it tells is followed by another when its time is over.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgspec

from unfuse.core.errors import NotFound
from unfuse.core.request import Change, Record, RequestContext
from unfuse.queues.base import Filter
from unfuse.scheduler.transitions import Transitions

TAKEN_S = 20.0  # seconds that who takes an attempt has for it; then others may make the next one

PAUSES_S = (5.0, 30.0, 120.0, 600.0, 1800.0, 3600.0, 7200.0, 14400.0, 28800.0)
"""Seconds after each failed attempt before the next one. The one behind the last pause is the last."""


class Notices:
    """What the schedulers of one queue know of webhooks."""

    def __init__(self, transitions: Transitions) -> None:
        self._transitions = transitions

    async def unheard(self) -> AsyncIterator[RequestContext]:
        """The requests that are over and whose webhooks have not heard of it, oldest first."""
        with suppress(NotFound):  # what is behind one that is gone is found the next time
            async for page in self._transitions.pages(Filter(unheard=True)):
                for record in page:
                    yield record.context

    async def take(self, request: str) -> tuple[RequestContext, bool]:
        """The request, and whether its webhook is the caller's to tell for TAKEN_S from now. Raises NotFound."""
        return await self._changed(request, _taken)

    async def heard(self, request: str) -> RequestContext:
        """The webhook has heard. Raises NotFound."""
        return (await self._changed(request, lambda context, _: _with(context, state="heard", reason="")))[0]

    async def failed(self, request: str, reason: str, *, for_good: bool = False) -> RequestContext:
        """An attempt failed, and so would all others if it did `for_good`. Raises NotFound."""

        def fail(context: RequestContext, wall: float) -> Change | None:
            made = context.webhook.attempts
            if for_good or made > len(PAUSES_S):
                return _with(context, state="given_up", reason=reason)
            return _with(context, next_at=wall + PAUSES_S[made - 1], reason=reason)

        return (await self._changed(request, fail))[0]

    async def _changed(self, request: str, decide: Any) -> tuple[RequestContext, bool]:
        def of(record: Record, wall: float) -> Change | None:
            change: Change | None = decide(record.context, wall) if record.context.unheard else None
            return change

        record, ours = await self._transitions.apply(request, of)
        return record.context, ours


def _taken(context: RequestContext, wall: float) -> Change | None:
    if context.webhook.next_at > wall:
        return None
    return _with(context, attempts=context.webhook.attempts + 1, next_at=wall + TAKEN_S)


def _with(context: RequestContext, **fields: Any) -> Change:
    webhook = msgspec.structs.replace(context.webhook, **fields)
    return Change(msgspec.structs.replace(context, version=context.version + 1, webhook=webhook))
