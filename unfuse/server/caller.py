"""Answers calls whose clients wait, and cancels the requests of clients that disconnect before that."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response

from unfuse.core.request import Delivery, Record, RequestContext
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
    if accepted := await respond_async(call, record):
        return accepted
    caller = WaitingClient(call.gateway, call.request, record)
    if delivery.stream:
        return stream(caller.told(events(record)))
    try:
        context = await call.gateway.completed(record.context.id)
        return Response(await to_thread.run_sync(reply, context, delivery), media_type="application/json")
    finally:
        caller.is_answered = True


class WaitingClient:
    """A client that waits for its request. If it disconnects before the answer, its request is cancelled.

    The request is not cancelled if the server closes the connection, because it shuts down or failed.
    """

    def __init__(self, gateway: Gateway, request: Request, record: Record) -> None:
        self._gateway, self._request, self._id = gateway, request, record.context.id
        self.is_answered = False  # whether the answer is there, whatever it is
        if record.context.caller.cancel_on_disconnect and not record.context.over:
            gateway.background.once("waiting for a client to disconnect", self._await_disconnect)

    async def told(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The events, which are the answer once the last was told."""
        with self._gateway.awaiting(self._id):
            async for event in events:
                yield event
        self.is_answered = True

    async def _await_disconnect(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        if not self.is_answered and not self._gateway.scheduler.draining:
            await self._gateway.scheduler.client_disconnected(self._id)
