"""Inputs that other workers make: waits until they are written, and fetches those of other nodes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial

import msgspec
import structlog

from unfuse.arena.arena import Arena
from unfuse.arena.objects import Extent
from unfuse.core.errors import ArenaFull, ObjectLost, TransientError
from unfuse.core.messages import LeasesGranted
from unfuse.core.object_ref import ObjectRef, chunk_bytes
from unfuse.core.task import Claim, Lease, Task
from unfuse.stores.tensor_store import TensorStore
from unfuse.transfer.base import TransferEngine, TransferOptions
from unfuse.transfer.session import ArenaSink, RingBuffer, TransferCounters, Transfers, TransferSession
from unfuse.worker.compute_messages import CancelTask, InputArrived, InputTaken

log = structlog.get_logger(__name__)

MOST = 64  # inputs that pass at one time
UNWANTED, ENDED = "it is not wanted any more", "the compute process ended"

Input = tuple[Claim, str]  # of a task, by the id of its object


@dataclass
class _Answers:
    """The answers of processes to a piece: `left` are missing, and it is `over` with the last, or where none comes."""

    left: int
    over: asyncio.Future[None]
    error: str = ""


class InputStreams:
    """Passes inputs on piece by piece, each when all processes have taken the one before. For one event loop.

    `send` gives each of so many `processes` a piece, and the first one a Cancel; it returns whether they run.
    """

    def __init__(
        self, tokens: int, send: Callable[[InputArrived | CancelTask], Awaitable[bool]], processes: int = 1
    ) -> None:
        self._tokens, self._send, self._processes = tokens, send, processes
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Input, _Answers] = {}
        self._has_all: dict[Claim, bool] = {}
        """For tasks whose input was passed on in pieces: whether the processes still have all of it."""
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
        window = RingBuffer(arena.writable(extent), ref)
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
        await self._send(CancelTask(claim))

    def begins(self, claim: Claim) -> bool:
        """Nothing more passes for a task. Returns whether the processes have all that has passed."""
        return self._has_all.pop(claim, True)

    def heard(self, taken: InputTaken) -> None:
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
        self, arena: Arena, extent: Extent, draining: asyncio.Future[None], session: TransferSession
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

    def _drain(
        self, lease: Lease, ref: ObjectRef, extent: Extent, window: RingBuffer, session: TransferSession
    ) -> None:
        """In a thread: pass on what the window gives until all is taken."""
        start = 0
        for piece in window:
            at = extent.offset + start % extent.nbytes
            arrived = InputArrived(lease, ref, at, start, start + piece.nbytes)
            asyncio.run_coroutine_threadsafe(self._pass(arrived, session), self._loop).result()
            start += piece.nbytes

    async def _pass(self, arrived: InputArrived, session: TransferSession) -> None:
        key = arrived.lease.claim, arrived.ref.id
        if session.cancelled:
            raise TransientError(UNWANTED)
        if not self._has_all.setdefault(arrived.lease.claim, True):
            raise TransientError(ENDED)
        answers = self._waiting[key] = _Answers(self._processes, self._loop.create_future())
        if not await self._send(arrived):
            self._end(key, "no compute process runs")
        await answers.over


LOOK_AGAIN_S = 0.01  # seconds between two looks for room, or at the objects of one owner

LOOKS = 8  # objects that are looked at in that time; more take longer, so that waiting for many costs no more

MOST_LOOKED_AT = 64  # how many owners at a time are tested for whether their memory can be mapped

KEPT_S, NEXT_S = 30.0, 2.0
"""Seconds for which a copy is kept for the next attempt of a task that ended with its compute process, or whose inputs
came to nothing, and what there is of one for the next attempt at the object; and for the next stage of a request.
"""


class PendingInputs:
    """Asks the owners, each in a thread of `lookers`, since a stopped one blocks it. For one event loop."""

    def __init__(self, store: TensorStore, lookers: ThreadPoolExecutor) -> None:
        self._store, self._lookers = store, lookers
        self._waiting: dict[str, dict[asyncio.Future[None], ObjectRef]] = {}
        self._looking: set[asyncio.Task[None]] = set()

    async def until_whole(self, ref: ObjectRef) -> None:
        """Wait until an object is written to its end, or lost, as whoever reads it finds out."""
        if ref.whole:
            return
        if ref.owner not in self._waiting:
            self._waiting[ref.owner] = {}
            looking = asyncio.create_task(self._look(ref.owner))
            self._looking.add(looking)
            looking.add_done_callback(self._looking.discard)
        over = asyncio.get_running_loop().create_future()
        self._waiting[ref.owner][over] = ref
        await over

    async def _look(self, owner: str) -> None:
        waiting, loop = self._waiting[owner], asyncio.get_running_loop()
        try:
            while waiting:
                found = await loop.run_in_executor(self._lookers, self._over, [*waiting.values()])
                for over in [over for over, ref in waiting.items() if over.done() or ref.id in found]:
                    del waiting[over]
                    if not over.done():
                        over.set_result(None)
                if waiting:
                    await asyncio.sleep(LOOK_AGAIN_S * max(1.0, len(waiting) / LOOKS))
        finally:
            del self._waiting[owner]

    def _over(self, refs: Sequence[ObjectRef]) -> set[str]:
        """The ids of those that are whole or lost."""
        found = set[str]()
        for ref in refs:
            try:
                is_over = self._store.is_whole(ref)
            except ObjectLost:
                is_over = True
            found |= {ref.id} if is_over else set()
        return found


@dataclass(eq=False)
class _Copy:
    """An object of another node that is being fetched, or is here. `over` is done when the transfer has ended."""

    ref: ObjectRef
    session: TransferSession
    sink: ArenaSink
    over: asyncio.Future[None]
    users: set[Claim] = field(default_factory=set)


class RemoteInputs:
    """Fetches objects of other nodes into the arena of `store`; its `engines` also serve that arena to other nodes.

    For one event loop. Inputs that are longer than the receive buffer go through `passing`, if there is one. If the
    store has no arena, nothing is fetched, because every node can read the store itself.
    """

    def __init__(
        self,
        store: TensorStore,
        engines: Mapping[str, TransferEngine],
        options: TransferOptions,
        passing: InputStreams | None = None,
    ) -> None:
        self._store, self._owner, self._options, self._arena = store, store.owner, options, store.arena
        self._passing = passing
        self._engines = engines if self._arena else {}
        self.served_at = {name: engine.serve(self._arena) for name, engine in self._engines.items() if self._arena}
        """The addresses at which other nodes pull from this arena, by engine."""
        self._ways: dict[str, Mapping[str, str]] = {}
        self._copies: dict[tuple[str, str], _Copy] = {}
        self._parts: dict[tuple[str, str], _Copy] = {}
        self._fetched = set[_Copy]()  # all whose room is taken, or will be
        self._keeping = Counter[Claim]()  # tasks that have ended, and whose copies are kept for a while
        self._bringing: dict[Claim, asyncio.Task[list[ObjectRef | None]]] = {}
        self._reaching: dict[str, asyncio.Future[bool]] = {}
        self._lookers = ThreadPoolExecutor(MOST_LOOKED_AT, "owner-look")
        self._unwritten = PendingInputs(store, self._lookers)

    @property
    def counters(self) -> TransferCounters:
        """How much each engine has brought."""
        return self._transfers.counters if "_transfers" in self.__dict__ else TransferCounters()

    async def bring(self, lease: Lease, granted: LeasesGranted) -> Lease | None:
        """Fetch the task's inputs that cannot be mapped. Returns the lease with the copies in their place.

        Waits for inputs that are still written, and meanwhile fetches what there is of them. An input that is longer
        than the receive buffer passes into the compute process as it comes, and is no input any more.
        Whether an owner's memory can be mapped is tested, since node names prove nothing. An input that cannot be
        fetched stays as it is, because there may be a durable copy. Returns None if the task was cancelled. Raises
        ArenaFull if there is no room, and what a transfer through the buffer failed with.
        """
        self._ways.update(granted.engines)
        self._store.learn(granted.peers)
        claim, task = lease.claim, lease.task
        there = [ref for ref in lease.reads if ref.owner in granted.peers or (claim.request, ref.id) in self._copies]
        others = [ref for ref in there if ref.owner != self._owner]
        others += [ref for ref in lease.reads if ref.owner == self._owner and not ref.whole]
        if not others or not self._arena:
            return lease
        bringing = self._bringing[claim] = asyncio.create_task(self._bring_all(lease, others))
        try:
            await asyncio.wait({bringing})
            if bringing.cancelled():
                return None
            here = dict(zip((ref.id for ref in others), bringing.result(), strict=True))
        finally:
            del self._bringing[claim]
        inputs = tuple(found for ref in task.inputs if (found := here.get(ref.id, ref)))
        prefix = tuple(found for ref in lease.prefix if (found := here.get(ref.id, ref)))
        task = msgspec.structs.replace(task, inputs=inputs)
        checkpoint = lease.checkpoint and here.get(lease.checkpoint.id, lease.checkpoint)
        return msgspec.structs.replace(lease, task=task, checkpoint=checkpoint, prefix=prefix)

    def cancel(self, claim: Claim) -> bool:
        """Stop waiting for a task's inputs. Returns whether it was waiting for some."""
        return claim in self._bringing and self._bringing[claim].cancel()

    def original(self, id: str) -> str:
        """The id of the object that this one is a copy of; its own id if it is no copy."""
        copies = (copy for copy in self._copies.values() if copy.sink.extent and copy.sink.extent.id == id)
        return next((copy.ref.id for copy in copies), id)

    def keep(self, claim: Claim, again: bool = True) -> None:
        """A task has ended, and may begin here `again`, or another one of its request may: drop later what it has read,
        and now what has not come yet.
        """
        self.let_go(claim, but_whole=True)
        self._keeping[claim] += 1
        asyncio.get_running_loop().call_later(KEPT_S if again else NEXT_S, self._end_keeping, claim)

    def let_go(self, claim: Claim, but_whole: bool = False) -> None:
        """A task has ended: drop the copies that no other task uses."""
        for key, copy in list(self._copies.items()):
            if but_whole and copy.session.whole:
                continue
            copy.users.discard(claim)
            if not copy.users:
                del self._copies[key]
                copy.session.cancel()
                if copy.sink.stays and copy.session.good and not copy.session.whole:
                    self._keep_part((key[0], copy.ref.stage), copy)
                else:
                    copy.over.add_done_callback(partial(self._drop, copy))

    @property
    def extents(self) -> list[Extent]:
        """The room of all copies, and of all windows that inputs pass through."""
        copies = [extent for copy in self._fetched if (extent := copy.sink.extent)]
        return copies + (self._passing.extents if self._passing else [])

    def unused(self) -> dict[str, _Copy]:
        """The copies, by a name, that are here for tasks which have ended, and are kept for none, when no task runs."""
        return {
            f"a copy of object {copy.ref.id} for {request}": copy
            for (request, _), copy in self._copies.items()
            if copy.sink.extent and not copy.users & self._keeping.keys()
        }

    def free(self, name: str) -> bool:
        """Free an unused copy. Returns whether there is one of that name."""
        copy = self.unused().get(name)
        for claim in [*copy.users] if copy else ():
            self.let_go(claim)
        return copy is not None

    def forget(self, request: str) -> None:
        """A request is over: nothing of what it read is needed."""
        for key in [key for key in self._parts if key[0] == request]:
            self._drop_part(key, self._parts[key])

    def close(self) -> None:
        """End all transfers, and close the engines."""
        if "_transfers" in self.__dict__:
            self._transfers.close()
        self._lookers.shutdown(wait=False)
        for engine in self._engines.values():
            engine.close()

    @cached_property
    def _transfers(self) -> Transfers:
        """Made for the first object to fetch, so that it costs nothing where no object ever is."""
        assert self._arena
        for engine in self._engines.values():
            engine.register(self._arena.memory)
        return Transfers(self._engines, lambda owner: self._ways.get(owner, {}), self._options)

    async def _bring_all(self, lease: Lease, refs: Iterable[ObjectRef]) -> list[ObjectRef | None]:
        """All at one time; with one that fails the others end, before that is told."""
        bringing = [asyncio.create_task(self._bring(lease, ref)) for ref in refs]
        try:
            return await asyncio.gather(*bringing)
        finally:
            for one in bringing:
                one.cancel()
            await asyncio.gather(*bringing, return_exceptions=True)

    async def _reaches(self, owner: str) -> bool:
        """Whether an owner's memory can be mapped. One thread for each owner finds out: a stopped owner blocks it."""
        if owner not in self._reaching:
            looking = asyncio.get_running_loop().run_in_executor(self._lookers, self._store.reaches, owner)
            self._reaching[owner] = looking
            looking.add_done_callback(lambda _: self._reaching.pop(owner))
        return await asyncio.shield(self._reaching[owner])

    async def _bring(self, lease: Lease, ref: ObjectRef) -> ObjectRef | None:
        """What to read in place of an object; None if the compute process has taken it."""
        claim = lease.claim
        if ref.owner == self._owner or await self._reaches(ref.owner):
            await self._unwritten.until_whole(ref)
            return ref
        if self._passing and ref in lease.task.inputs and self._passing.window(lease.task, ref):
            await self._passing.through(lease, ref, self._store, self._transfers, self._options.bootstrap_s)
            return None
        key = claim.request, ref.id
        if key not in self._copies and (part := self._parts.get((claim.request, ref.stage))):
            await asyncio.wait({part.over})  # until then it is written
        copy = self._copies.get(key) or self._fetch(key, ref)
        copy.users.add(claim)
        try:
            await asyncio.shield(copy.over)
        except ObjectLost as error:
            log.warning("an input cannot be fetched", object=ref.id, owner=ref.owner, reason=str(error))
            return ref
        assert (extent := copy.sink.extent)
        return msgspec.structs.replace(
            ref,
            id=extent.id,
            owner=self._owner,
            node=self._store.node,
            request=claim.request,
            key=extent.key,
            generation=extent.generation,
        )

    def _fetch(self, key: tuple[str, str], ref: ObjectRef) -> _Copy:
        """Begin to fetch an object. The copy belongs to the task's request, whichever made the original."""
        assert self._arena
        sink = ArenaSink(self._arena, msgspec.structs.replace(ref, request=key[0]), self._store.reserve)
        sink.stays, kept = not ref.whole, tuple[int, ...]()
        part = self._parts.get((key[0], ref.stage))
        if part and part.over.done() and part.over.exception() and part.ref.tensors == ref.tensors:
            del self._parts[key[0], ref.stage]
            self._fetched.discard(part)
            sink.extent, kept = part.sink.extent, part.session.verified
        session = self._transfers.fetch(ref, sink, kept=kept)
        over = asyncio.wrap_future(session.over)
        over.add_done_callback(_read_exception)
        copy = self._copies[key] = _Copy(ref, session, sink, over)
        self._fetched.add(copy)
        return copy

    def _end_keeping(self, claim: Claim) -> None:
        self._keeping -= Counter([claim])
        self.let_go(claim)

    def _keep_part(self, key: tuple[str, str], copy: _Copy) -> None:
        """Keep what there is of an object that came while it was written, and is to be made again."""
        if before := self._parts.get(key):
            self._drop_part(key, before)
        self._parts[key] = copy
        asyncio.get_running_loop().call_later(KEPT_S, self._drop_part, key, copy)

    def _drop_part(self, key: tuple[str, str], copy: _Copy) -> None:
        if self._parts.get(key) is copy:
            del self._parts[key]
            copy.over.add_done_callback(partial(self._drop, copy))

    def _drop(self, copy: _Copy, over: asyncio.Future[None]) -> None:
        self._fetched.discard(copy)
        if not (copy.sink.extent and self._arena):
            return
        if over.cancelled() or over.exception():
            self._arena.abort(copy.sink.extent.id)
        else:
            self._arena.delete(copy.sink.extent.id)


def _read_exception(over: asyncio.Future[None]) -> None:
    """Read the exception, so that asyncio does not warn about a failure that nobody waits for."""
    if not over.cancelled():
        over.exception()
