"""Inputs that are longer than the receive buffer: they pass through a part of the arena into the compute process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from unfuse.arena.arena import Arena
from unfuse.arena.objects import Extent
from unfuse.core.errors import ArenaFull, TransientError
from unfuse.core.object_ref import ObjectRef, chunk_bytes
from unfuse.core.task import Claim, Lease, Task
from unfuse.stores.tensor_store import TensorStore
from unfuse.transfer.session import Session, Transfers
from unfuse.transfer.sinks import Window
from unfuse.worker.compute_messages import Arrived, Cancel, Taken

MOST = 64  # inputs that pass at one time
LOOK_AGAIN_S = 0.01  # seconds between two looks for room
UNWANTED = "it is not wanted any more"


class Passing:
    """Passes inputs on piece by piece, each when the process has taken the one before. For one event loop.

    `send` gives the compute process a message, and returns whether there is one.
    """

    def __init__(self, tokens: int, send: Callable[[Arrived | Cancel], Awaitable[bool]]) -> None:
        self._tokens, self._send, self._loop = tokens, send, asyncio.get_running_loop()
        self._waiting: dict[tuple[Claim, str], asyncio.Future[None]] = {}
        self._unwanted = set[tuple[Claim, str]]()  # inputs of which no more is passed on
        self._windows: dict[str, Extent] = {}
        self._closing = set[asyncio.Task[None]]()
        self._drains = ThreadPoolExecutor(MOST, "input-window")

    @property
    def extents(self) -> list[Extent]:
        """The windows that exist now."""
        return [*self._windows.values()]

    def window(self, task: Task, ref: ObjectRef) -> int:
        """Bytes of the window for an input of a task; 0 where it comes whole: its prompt is not longer than the buffer.

        Each input has its share of the buffer, but at least a chunk, since only chunks can be verified.
        """
        tokens = task.params.get("prompt_tokens")
        if not isinstance(tokens, int) or not 0 < self._tokens < tokens:
            return 0
        return max(ref.nbytes * self._tokens // tokens, min(chunk_bytes(ref.nbytes), ref.nbytes))

    async def through(
        self, lease: Lease, ref: ObjectRef, store: TensorStore, transfers: Transfers, wait: float
    ) -> None:
        """Fetch an object, and have the process take it as it comes. Raises what the transfer fails with.

        Raises ArenaFull if there is no room for the window within `wait` seconds, and TransientError if the process
        ends.
        """
        arena = store.arena
        assert arena
        extent = await self._room(store, self.window(lease.task, ref), lease.task.request, wait)
        window = Window(arena.writable(extent), ref)
        session = transfers.fetch(ref, window)
        self._windows[extent.id] = extent
        draining = self._loop.run_in_executor(self._drains, self._drain, lease, ref, extent, window)
        try:
            await asyncio.shield(draining)
        except BaseException:
            session.cancel()
            self._unwanted.add((lease.claim, ref.id))
            self.heard(Taken(lease.claim, ref.id, UNWANTED))
            raise
        finally:
            ending = self._close_window((lease.claim, ref.id), arena, extent, draining, session)
            closing = self._loop.create_task(ending)
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            await asyncio.shield(closing)  # it goes on where this task is cancelled once more

    async def drop(self, claim: Claim) -> None:
        """A task will not run, and nothing passes for it: what the process has taken is of no use. Idempotent."""
        await self._send(Cancel(claim))

    def heard(self, taken: Taken) -> None:
        """The process has answered."""
        waiting = self._waiting.pop((taken.claim, taken.object), None)
        if waiting and not waiting.done():
            if taken.error:
                waiting.set_exception(TransientError(taken.error))
            else:
                waiting.set_result(None)

    def lost(self) -> None:
        """The process is gone, with all that it had taken."""
        for claim, id in list(self._waiting):
            self.heard(Taken(claim, id, "the compute process ended"))

    def close(self) -> None:
        """Pass nothing more."""
        self.lost()
        self._drains.shutdown(wait=False)

    async def _close_window(
        self, key: tuple[Claim, str], arena: Arena, extent: Extent, draining: asyncio.Future[None], session: Session
    ) -> None:
        """Free a window when nothing reads or writes there any more."""
        await asyncio.wait({draining})
        await asyncio.to_thread(session.wait)
        arena.abort(extent.id)
        del self._windows[extent.id]
        self._unwanted.discard(key)

    async def _room(self, store: TensorStore, nbytes: int, request: str, wait: float) -> Extent:
        until = self._loop.time() + wait
        while True:
            try:
                return store.reserve(nbytes, request)
            except ArenaFull as full:
                if nbytes > full.capacity or self._loop.time() >= until:
                    raise
            await asyncio.sleep(LOOK_AGAIN_S)

    def _drain(self, lease: Lease, ref: ObjectRef, extent: Extent, window: Window) -> None:
        """In a thread: pass on what the window gives until all is taken."""
        start = 0
        for piece in window:
            at = extent.offset + start % extent.nbytes
            arrived = Arrived(lease, ref, at, start, start + piece.nbytes)
            asyncio.run_coroutine_threadsafe(self._pass(arrived), self._loop).result()
            start += piece.nbytes

    async def _pass(self, arrived: Arrived) -> None:
        claim, id = arrived.lease.claim, arrived.ref.id
        if (claim, id) in self._unwanted:
            raise TransientError(UNWANTED)
        waiting = self._waiting[claim, id] = self._loop.create_future()
        if not await self._send(arrived):
            self.heard(Taken(claim, id, "no compute process runs"))
        await waiting
