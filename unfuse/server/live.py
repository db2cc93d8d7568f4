"""Videos as streams of fragmented MP4, which are read while they are made and, in the same bytes, afterwards.

What the decoder has made so far it left as parts beside the request's results, before it told of its progress. They go
with the request's end, and the rest is read from the finished file. Whatever comes next, of another attempt or from
that file, has to begin with what was sent: otherwise the stream is broken off, and the file is right.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

from anyio import to_thread

from unfuse.core.errors import NotFound, ResultsUnavailable, UnfuseError
from unfuse.core.event import Event
from unfuse.core.request import RequestContext
from unfuse.edge.refusal import BrokenOff
from unfuse.server.gateway import Gateway
from unfuse.stages.fragments import streamed
from unfuse.stores.results import part_name

CHUNK_BYTES = 256 * 1024  # about so many bytes of a finished file are read at a time


class Live:
    """One client's stream of one video. It keeps no bytes for a slow client, only how many it has, and their hash."""

    def __init__(self, gateway: Gateway, context: RequestContext) -> None:
        self._gateway, self._request, self._fps = gateway, context.id, float(context.request.params["fps"] or 0)
        (self._stage,) = (stage.name for stage in context.plan.stages if stage.final)
        self._attempt = self._parts = self._bytes = 0
        self._sent = hashlib.sha256()

    async def content(self) -> AsyncIterator[bytes]:
        """The bytes, as they come to be. Raises BrokenOff when the client cannot have all of them."""
        try:
            async for event in self._gateway.queue.watch(self._request):
                while data := await self._next_part(event):
                    yield data
            record = await self._gateway.queue.load(self._request)
            if record.context.status != "completed":
                raise BrokenOff(f"the request is {record.status}")
            rest = self._beyond(await to_thread.run_sync(self._gateway.results.path, self._request, 0))
            while data := await to_thread.run_sync(_chunk, rest):
                yield data
        except (UnfuseError, OSError) as error:
            raise BrokenOff(str(error)) from error

    async def _next_part(self, event: Event) -> bytes:
        """The next part of those that this event tells of; b"" if there is none.

        One that cannot be read is tried again at the next event; if it is gone for good, the finished file has it.
        """
        if event.type != "progress" or event.stage != self._stage:
            return b""
        with suppress(NotFound, ResultsUnavailable):
            if event.attempt > self._attempt and event.step >= self._parts:
                await self._go_on_with(event.attempt)
            if event.attempt == self._attempt and event.step > self._parts:
                data = await self._read(event.attempt, self._parts + 1)
                self._parts, self._bytes = self._parts + 1, self._bytes + len(data)
                self._sent.update(data)
                return data
        return b""

    async def _go_on_with(self, attempt: int) -> None:
        """Have a later attempt's parts follow what was sent. Raises BrokenOff if they do not begin with that."""
        same = hashlib.sha256()
        for step in range(1, self._parts + 1):
            same.update(await self._read(attempt, step))
        self._require(same.digest())
        self._attempt = attempt

    async def _read(self, attempt: int, step: int) -> bytes:
        return await to_thread.run_sync(self._gateway.results.attached, self._request, part_name(attempt, step))

    def _beyond(self, path: Path) -> Iterator[bytes]:
        """The finished file's stream behind what was sent. Raises BrokenOff if it does not begin with that."""
        same, left = hashlib.sha256(), self._bytes
        for data in streamed(path, self._fps):
            known, new = data[:left], data[left:]
            same.update(known)
            left -= len(known)
            if known and not left:
                self._require(same.digest())
            if new:
                yield new
        if left:
            self._require(same.digest())

    def _require(self, digest: bytes) -> None:
        if digest != self._sent.digest():
            raise BrokenOff("what was made again differs from what was sent")


def _chunk(rest: Iterator[bytes]) -> bytes:
    data = bytearray()
    for piece in rest:
        data += piece
        if len(data) >= CHUNK_BYTES:
            break
    return bytes(data)
