"""Inputs longer than the receive buffer: received piece by piece, through a part of the arena, into compute processes.

This is the receiving end of a tensor that streams between workers. The sending end is `stores.unsealed.Unsealed`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

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
UNWANTED, ENDED = "it is not wanted any more", "the compute process ended"

Input = tuple[Claim, str]  # of a task, by the id of its object


@dataclass
class _Answers:
    """The answers of processes to a piece: `left` are missing, and it is `over` with the last, or where none comes."""

    left: int
    over: asyncio.Future[None]
    error: str = ""


class Passing:
    """Passes inputs on piece by piece, each when all processes have taken the one before. For one event loop.

    `send` gives each of so many `processes` a piece, and the first one a Cancel; it returns whether they run.
    """

    def __init__(self, tokens: int, send: Callable[[Arrived | Cancel], Awaitable[bool]], processes: int = 1) -> None:
        self._tokens, self._send, self._processes = tokens, send, processes
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Input, _Answers] = {}
        self._has_all: dict[Claim, bool] = {}
        """Of tasks of which pieces were passed on: whether the processes still have all of them."""
        self._windows: dict[Extent, asyncio.Task[None]] = {}
        """The windows that exist now, each with the task that frees it."""
        self._drains = ThreadPoolExecutor(MOST, "input-window")

    @property
    def extents(self) -> list[Extent]:
        """The windows that exist now."""
        return [*self._windows]

    def window(self, task: Task, ref: ObjectRef) -> int:
        """Bytes of the window for an input of a task; 0 where it comes whole: its prompt is not longer than the buffer.

        Each input has its share of the buffer, but at least a chunk, since only chunks can be verified.
        """
        tokens = task.derived.prompt_tokens
        if not 0 < self._tokens < tokens:
            return 0
        return max(ref.nbytes * self._tokens // tokens, min(chunk_bytes(ref.nbytes), ref.nbytes))

    async def through(
        self, lease: Lease, ref: ObjectRef, store: TensorStore, transfers: Transfers, wait: float
    ) -> None:
        """Fetch an object, and have the processes take it as it comes. Raises what the transfer fails with.

        Raises ArenaFull if there is no room for the window within `wait` seconds, and TransientError if a process
        cannot take it, or ends.
        """
        arena = store.arena
        assert arena
        extent = await self._room(store, self.window(lease.task, ref), lease.task.request, wait)
        window = Window(arena.writable(extent), ref)
        session = transfers.fetch(ref, window)
        draining = self._loop.run_in_executor(self._drains, self._drain, lease, ref, extent, window, session)
        freeing = self._loop.create_task(self._free_window(arena, extent, draining, session))
        self._windows[extent] = freeing
        try:
            await asyncio.shield(draining)
        except BaseException:
            session.cancel()
            self._end((lease.claim, ref.id), UNWANTED)
            raise
        finally:
            await asyncio.shield(freeing)  # it goes on where this task is cancelled once more

    async def drop(self, claim: Claim) -> None:
        """A task will not run, and nothing passes for it: what the processes have taken is of no use. Idempotent."""
        self.begins(claim)
        await self._send(Cancel(claim))

    def begins(self, claim: Claim) -> bool:
        """Nothing more passes for a task. Returns whether the processes have all that has passed."""
        return self._has_all.pop(claim, True)

    def heard(self, taken: Taken) -> None:
        """A process has answered. Also after an error the place of a piece is not free before all have."""
        key = taken.claim, taken.object
        if answers := self._waiting.get(key):
            answers.left -= 1
            answers.error = answers.error or taken.error
            if not answers.left:
                self._end(key, answers.error)

    def lost(self) -> None:
        """A process is gone, and the others with it, and all that they had taken: the next ones have no part of it."""
        self._has_all = dict.fromkeys(self._has_all, False)
        for key in list(self._waiting):
            self._end(key, ENDED)

    def close(self) -> None:
        """Pass nothing more."""
        self.lost()
        self._drains.shutdown(wait=False)

    def _end(self, key: Input, error: str) -> None:
        """Wait for no more answers to a piece of this input, if any are awaited."""
        answers = self._waiting.pop(key, None)
        if answers and not answers.over.done():
            if error:
                answers.over.set_exception(TransientError(error))
            else:
                answers.over.set_result(None)

    async def _free_window(
        self, arena: Arena, extent: Extent, draining: asyncio.Future[None], session: Session
    ) -> None:
        """Free a window when nothing reads or writes there any more."""
        await asyncio.wait({draining})
        await asyncio.to_thread(session.wait)
        arena.abort(extent.id)
        del self._windows[extent]

    async def _room(self, store: TensorStore, nbytes: int, request: str, wait: float) -> Extent:
        until = self._loop.time() + wait
        while True:
            try:
                return store.reserve(nbytes, request)
            except ArenaFull as full:
                if nbytes > full.capacity or self._loop.time() >= until:
                    raise
            await asyncio.sleep(LOOK_AGAIN_S)

    def _drain(self, lease: Lease, ref: ObjectRef, extent: Extent, window: Window, session: Session) -> None:
        """In a thread: pass on what the window gives until all is taken."""
        start = 0
        for piece in window:
            at = extent.offset + start % extent.nbytes
            arrived = Arrived(lease, ref, at, start, start + piece.nbytes)
            asyncio.run_coroutine_threadsafe(self._pass(arrived, session), self._loop).result()
            start += piece.nbytes

    async def _pass(self, arrived: Arrived, session: Session) -> None:
        key = arrived.lease.claim, arrived.ref.id
        if session.cancelled:
            raise TransientError(UNWANTED)
        if not self._has_all.setdefault(arrived.lease.claim, True):
            raise TransientError(ENDED)
        answers = self._waiting[key] = _Answers(self._processes, self._loop.create_future())
        if not await self._send(arrived):
            self._end(key, "no compute process runs")
        await answers.over
