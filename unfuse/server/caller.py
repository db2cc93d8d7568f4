"""Answers calls whose clients wait, and sees what is done when one is gone before that."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response

from unfuse.core.checking import Delivery
from unfuse.core.request import Record, RequestContext
from unfuse.server.accept import Call, respond_async
from unfuse.server.gateway import Gateway
from unfuse.server.sse import stream


async def answer_call(
    call: Call, events: Callable[[Record], AsyncIterator[bytes]], reply: Callable[[RequestContext, Delivery], bytes]
) -> Response:
    """Answer a call: by the request alone if its client prefers not to wait; by events of what is made, if it streams;
    else, once it is completed, by a `reply`, which is made in a thread.
    """
    record, delivery = await call.accept()
    if accepted := respond_async(call, record):
        return accepted
    caller = Caller(call.gateway, call.request, record)
    if delivery.stream:
        return stream(caller.told(events(record)))
    try:
        context = await call.gateway.completed(record.context.id)
        return Response(await to_thread.run_sync(reply, context, delivery), media_type="application/json")
    finally:
        caller.is_answered = True


class Caller:
    """Whoever waits for a request, which has a caller less if that is gone before it is answered.

    Whom the server leaves, because it ends or cannot go on, is not gone.
    """

    def __init__(self, gateway: Gateway, request: Request, record: Record) -> None:
        self._gateway, self._request, self._id = gateway, request, record.context.id
        self.is_answered = False  # whether the answer is there, whatever it is
        if record.context.callers is not None and not record.context.over:
            gateway.background.once("noticing that a client is gone", self._notice)

    async def told(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The events, which are the answer once the last was told."""
        async for event in events:
            yield event
        self.is_answered = True

    async def _notice(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        if not self.is_answered and not self._gateway.scheduler.draining:
            await self._gateway.scheduler.left(self._id)
