"""The client that waits for the answer of a call: what is done when it is gone before that."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from starlette.requests import Request

from unfuse.core.request import Record
from unfuse.server.gateway import Gateway


class Caller:
    """Whoever waits for a request, which has a caller less if that is gone before it is answered.

    Whom the server leaves, because it ends or cannot go on, is not gone.
    """

    def __init__(self, gateway: Gateway, request: Request, record: Record) -> None:
        self._gateway, self._request, self._id = gateway, request, record.context.id
        self._is_answered = False
        if record.context.callers is not None and not record.context.over:
            gateway.background.once("noticing that a client is gone", self._notice)

    @contextmanager
    def answered(self) -> Iterator[None]:
        """The answer is there when this block ends, whatever it is."""
        try:
            yield
        finally:
            self._is_answered = True

    async def told(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The events, which are the answer once the last was told."""
        async for event in events:
            yield event
        self._is_answered = True

    async def _notice(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        if not self._is_answered and not self._gateway.scheduler.draining:
            await self._gateway.scheduler.left(self._id)
