"""Inputs from other workers: waits until they are written, and fetches those of other nodes."""

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

#: Most inputs that are streamed at one time.
MAX_STREAMS = 64

#: Why a stream failed: its task was cancelled, or a process that received it ended.
UNWANTED, ENDED = "the input is no longer needed", "the compute process ended"

#: An input of a task, by the id of its object.
Input = tuple[Claim, str]

#: Seconds between two checks for room, or of the objects of one owner.
RECHECK_S = 0.01

#: Number of objects that are checked in that time. More take longer, so that waiting for many costs no more.
MAX_CHECKED = 8

#: Most owners that are tested at one time for whether their memory can be mapped.
MAX_CHECKED_AT_ONCE = 64

#: RETAIN_S: seconds for which copies stay for the next attempt of a task whose compute process died or whose input was
#: lost, and for which a partial copy stays for the next attempt at the object. NEXT_S: seconds for which copies stay
#: for the request's next stage.
RETAIN_S, NEXT_S = 30.0, 2.0


@dataclass
class _Answers:
    """The answers of the processes to a chunk."""

    #: Number of missing answers.
    left: int

    #: Done with the last answer, or when no more will come.
    over: asyncio.Future[None]

    #: The first error. Empty if there was none.
    error: str = ""


class InputStreams:
    """Streams inputs into the compute processes chunk by chunk, through windows in the arena.

    A chunk is sent once all processes have received the one before (back-pressure). It belongs to one event loop.

    - `tokens`: inputs of prompts with more tokens are streamed; 0 streams none.
    - `send`: sends an InputArrived to all processes, or a CancelTask to the first. Returns whether they run.
    - `processes`: the number of compute processes.
    """

    def __init__(
        self, tokens: int, send: Callable[[InputArrived | CancelTask], Awaitable[bool]], processes: int = 1
    ) -> None:
        self._tokens, self._processes = tokens, processes
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Input, _Answers] = {}
        self._has_all: dict[Claim, bool] = {}  # streamed inputs: whether the processes still have all of them
        self._windows: dict[Extent, asyncio.Task[None]] = {}  # each with the asyncio task that frees it
        self._drains = ThreadPoolExecutor(MAX_STREAMS, "input-window")

    @property
    def extents(self) -> list[Extent]:
        """The arena extents of the present windows."""
        return [*self._windows]

    def window(self, task: Task, ref: ObjectRef) -> int:
        """Return the bytes of an input's window; 0 if the input is not streamed.

        Each input has its share of the buffer, but at least one chunk, since only whole chunks can be verified.
        """
        tokens = task.derived.prompt_tokens
        if not 0 < self._tokens < tokens:
            return 0
        return max(ref.nbytes * self._tokens // tokens, min(chunk_bytes(ref.nbytes), ref.nbytes))

    async def ranks(self, lease: Lease, ref: ObjectRef, store: TensorStore, transfers: Transfers, wait: float) -> None:
        """Fetch an object and stream it into the processes as it arrives.

        Raises the transfer's error, ArenaFull if there is no room for the window within `wait` seconds, and
        TransientError if a process cannot receive the object, or ends.
        """
        arena = store.arena
        assert arena

        extent = await self._reserve(store, self.window(lease.task, ref), lease.task.request, wait)
        window = RingBuffer(arena.writable(extent), ref)
        session = transfers.fetch(ref, window)
        drain = self._loop.run_in_executor(self._drains, self._send_chunks, lease, ref, extent, window, session)
        freed = self._loop.create_task(self._free_window(arena, extent, drain, session))
        self._windows[extent] = freed
        try:
            await asyncio.shield(drain)
        except BaseException:
            session.cancel()
            self._end((lease.claim, ref.id), UNWANTED)
            raise
        finally:
            await asyncio.shield(freed)  # it continues if this task is cancelled once more

    async def drop(self, claim: Claim) -> None:
        """Make the processes drop the received inputs of a task that will not run. Idempotent.

        Call this when no input of the task is streamed any more.
        """
        self.is_received(claim)
        await self._send(CancelTask(claim))

    def is_received(self, claim: Claim) -> bool:
        """Return whether the processes still have all streamed inputs of a task, and forget it."""
        return self._has_all.pop(claim, True)

    def record_answer(self, answer: InputTaken) -> None:
        """Record the answer of one process.

        A chunk's place is free once all processes have answered, also after an error.
        """
        key = answer.claim, answer.object
        if answers := self._waiting.get(key):
            answers.left -= 1
            answers.error = answers.error or answer.error
            if not answers.left:
                self._end(key, answers.error)

    def fail_all(self) -> None:
        """Fail all streams: the processes are gone, and with them all received chunks."""
        self._has_all = dict.fromkeys(self._has_all, False)
        for key in list(self._waiting):
            self._end(key, ENDED)

    def close(self) -> None:
        """Stop all streams."""
        self.fail_all()
        self._drains.shutdown(wait=False)

    def _end(self, key: Input, error: str) -> None:
        """End the wait for answers to a chunk of this input."""
        answers = self._waiting.pop(key, None)
        if answers and not answers.over.done():
            if error:
                answers.over.set_exception(TransientError(error))
            else:
                answers.over.set_result(None)

    async def _free_window(
        self, arena: Arena, extent: Extent, drain: asyncio.Future[None], session: TransferSession
    ) -> None:
        """Free a window once neither the transfer nor a process uses it."""
        await asyncio.wait({drain})
        await asyncio.to_thread(session.wait)
        arena.abort(extent.id)
        del self._windows[extent]

    async def _reserve(self, store: TensorStore, nbytes: int, request: str, wait: float) -> Extent:
        """Return an extent of this size; waits up to `wait` seconds for room. Raises ArenaFull."""
        deadline = self._loop.time() + wait
        while True:
            try:
                return store.reserve(nbytes, request)
            except ArenaFull as full:
                if nbytes > full.capacity or self._loop.time() >= deadline:
                    raise
            await asyncio.sleep(RECHECK_S)

    def _send_chunks(
        self, lease: Lease, ref: ObjectRef, extent: Extent, window: RingBuffer, session: TransferSession
    ) -> None:
        """Send the window's chunks to the processes until the object is complete.

        Runs in a thread.
        """
        start = 0
        for chunk in window:
            offset = extent.offset + start % extent.nbytes
            arrived = InputArrived(lease, ref, offset, start, start + chunk.nbytes)
            asyncio.run_coroutine_threadsafe(self._pass(arrived, session), self._loop).result()
            start += chunk.nbytes

    async def _pass(self, arrived: InputArrived, session: TransferSession) -> None:
        """Send a chunk and wait until all processes have received it. Raises TransientError."""
        key = arrived.lease.claim, arrived.ref.id
        if session.cancelled:
            raise TransientError(UNWANTED)
        if not self._has_all.setdefault(arrived.lease.claim, True):
            raise TransientError(ENDED)
        answers = self._waiting[key] = _Answers(self._processes, self._loop.create_future())
        if not await self._send(arrived):
            self._end(key, "no compute process is running")
        await answers.over


class PendingInputs:
    """Waits for objects that are still being written, by polling their owners.

    It belongs to one event loop. Each owner is polled in a thread of `threads`, since a stopped owner blocks the
    thread.
    """

    def __init__(self, store: TensorStore, threads: ThreadPoolExecutor) -> None:
        self._store, self._threads = store, threads
        self._waiting: dict[str, dict[asyncio.Future[None], ObjectRef]] = {}  # by owner
        self._polls: set[asyncio.Task[None]] = set()

    async def wait_until_written(self, ref: ObjectRef) -> None:
        """Wait until an object is completely written or lost. Reading it then shows which."""
        if ref.is_whole:
            return
        if ref.owner not in self._waiting:
            self._waiting[ref.owner] = {}
            poll = asyncio.create_task(self._poll(ref.owner))
            self._polls.add(poll)
            poll.add_done_callback(self._polls.discard)
        over = asyncio.get_running_loop().create_future()
        self._waiting[ref.owner][over] = ref
        await over

    async def _poll(self, owner: str) -> None:
        """Poll an owner until no caller waits for its objects."""
        waiting, loop = self._waiting[owner], asyncio.get_running_loop()
        try:
            while waiting:
                finished = await loop.run_in_executor(self._threads, self._finished, [*waiting.values()])
                for over in [over for over, ref in waiting.items() if over.done() or ref.id in finished]:
                    del waiting[over]
                    if not over.done():
                        over.set_result(None)
                if waiting:
                    await asyncio.sleep(RECHECK_S * max(1.0, len(waiting) / MAX_CHECKED))
        finally:
            del self._waiting[owner]

    def _finished(self, refs: Sequence[ObjectRef]) -> set[str]:
        """Return the ids of the objects that are whole or lost."""
        finished = set[str]()
        for ref in refs:
            try:
                is_over = self._store.is_whole(ref)
            except ObjectLost:
                is_over = True
            finished |= {ref.id} if is_over else set()
        return finished


@dataclass(eq=False)
class _Copy:
    """An object of another node that is being fetched, or is here."""

    #: The original object.
    ref: ObjectRef

    #: The transfer of the object.
    session: TransferSession

    #: The copy's place in the arena.
    sink: ArenaSink

    #: Done when the transfer has ended.
    over: asyncio.Future[None]

    #: The tasks that read the copy.
    users: set[Claim] = field(default_factory=set)


class RemoteInputs:
    """Fetches objects of other nodes into the arena of `store`, on one event loop.

    - `engines`: the transfer engines by name. They also serve that arena to other nodes.
    - `streams`: streams inputs that are longer than the receive buffer, if given.

    If the store has no arena, nothing is fetched, because every node can read the store itself.
    """

    def __init__(
        self,
        store: TensorStore,
        engines: Mapping[str, TransferEngine],
        options: TransferOptions,
        streams: InputStreams | None = None,
    ) -> None:
        self._store, self._owner = store, store.owner
        self._options = options
        self._arena = store.arena
        self._streams = streams
        self._engines = engines if self._arena else {}

        #: The addresses at which other nodes pull from this arena, by engine.
        self.served_at = {name: engine.serve(self._arena) for name, engine in self._engines.items() if self._arena}

        self._addresses: dict[str, Mapping[str, str]] = {}  # addresses of each owner, by engine
        self._copies: dict[tuple[str, str], _Copy] = {}  # by (request, object id)
        self._partial_copies: dict[tuple[str, str], _Copy] = {}  # partial copies, by (request, stage)
        self._fetched = set[_Copy]()  # all copies that use the arena, or will
        self._retained = Counter[Claim]()  # ended tasks whose copies stay for a while
        self._fetching: dict[Claim, asyncio.Task[list[ObjectRef | None]]] = {}
        self._reach_tests: dict[str, asyncio.Future[bool]] = {}  # running tests of owners
        self._threads = ThreadPoolExecutor(MAX_CHECKED_AT_ONCE, "owner-look")
        self._unwritten = PendingInputs(store, self._threads)

    @property
    def counters(self) -> TransferCounters:
        """The statistics of each engine's transfers."""
        return self._transfers.counters if "_transfers" in self.__dict__ else TransferCounters()

    async def fetch(self, lease: Lease, granted: LeasesGranted) -> Lease | None:
        """Fetch the inputs that cannot be mapped. Returns the lease with copies in their place.

        Waits for inputs that are still being written, and fetches their chunks meanwhile. Inputs that are longer than
        the receive buffer are streamed into the compute process, and are left out of the returned lease. Whether an
        owner's memory can be mapped is tested, since node names prove nothing. An input that cannot be fetched stays in
        the lease, because there may be a durable copy.

        Returns None if the task was cancelled. Raises ArenaFull if there is no room, and the errors of streamed
        transfers.
        """
        self._addresses.update(granted.engines)
        self._store.register_owners(granted.peers)
        claim, task = lease.claim, lease.task
        readable = [
            ref for ref in lease.input_objects if ref.owner in granted.peers or (claim.request, ref.id) in self._copies
        ]
        pending = [ref for ref in readable if ref.owner != self._owner]
        pending += [ref for ref in lease.input_objects if ref.owner == self._owner and not ref.is_whole]
        if not pending or not self._arena:
            return lease

        fetching = self._fetching[claim] = asyncio.create_task(self._fetch_all(lease, pending))
        try:
            await asyncio.wait({fetching})
            if fetching.cancelled():
                return None
            local_refs = dict(zip((ref.id for ref in pending), fetching.result(), strict=True))
        finally:
            del self._fetching[claim]

        inputs = tuple(local for ref in task.inputs if (local := local_refs.get(ref.id, ref)))
        prefix = tuple(local for ref in lease.prefix if (local := local_refs.get(ref.id, ref)))
        task = msgspec.structs.replace(task, inputs=inputs)
        checkpoint = lease.checkpoint and local_refs.get(lease.checkpoint.id, lease.checkpoint)
        return msgspec.structs.replace(lease, task=task, checkpoint=checkpoint, prefix=prefix)

    def cancel(self, claim: Claim) -> bool:
        """Stop waiting for a task's inputs. Returns whether it was waiting for some."""
        return claim in self._fetching and self._fetching[claim].cancel()

    def original(self, id: str) -> str:
        """Return the id of a copy's original object; any other id unchanged."""
        copies = (copy for copy in self._copies.values() if copy.sink.extent and copy.sink.extent.id == id)
        return next((copy.ref.id for copy in copies), id)

    def retain(self, claim: Claim, again: bool = True) -> None:
        """Retain an ended task's complete copies for a while, and drop the unfinished ones.

        They stay RETAIN_S seconds if the task may run here `again`, else NEXT_S seconds for its request's next stage.
        """
        self.drop_unused(claim, but_whole=True)
        self._retained[claim] += 1
        asyncio.get_running_loop().call_later(RETAIN_S if again else NEXT_S, self._end_retention, claim)

    def drop_unused(self, claim: Claim, but_whole: bool = False) -> None:
        """Drop an ended task's copies that no other task uses; with `but_whole`, only unfinished ones."""
        for key, copy in list(self._copies.items()):
            if but_whole and copy.session.is_complete:
                continue
            copy.users.discard(claim)
            if not copy.users:
                del self._copies[key]
                copy.session.cancel()

                # If the object is never completed, the next attempt at it has the same first chunks.
                if copy.sink.stays and copy.session.good and not copy.session.is_complete:
                    self._keep_partial_copy((key[0], copy.ref.stage), copy)
                else:
                    copy.over.add_done_callback(partial(self._drop, copy))

    @property
    def extents(self) -> list[Extent]:
        """The arena extents of all copies and of the windows of streamed inputs."""
        copies = [extent for copy in self._fetched if (extent := copy.sink.extent)]
        return copies + (self._streams.extents if self._streams else [])

    def unused(self) -> dict[str, _Copy]:
        """Return the copies that no task reads or may read again, by a descriptive name.

        Call this only while no task runs.
        """
        return {
            f"a copy of object {copy.ref.id} for {request}": copy
            for (request, _), copy in self._copies.items()
            if copy.sink.extent and not copy.users & self._retained.keys()
        }

    def free(self, name: str) -> bool:
        """Free an unused copy. Returns whether there is one of that name."""
        copy = self.unused().get(name)
        for claim in [*copy.users] if copy else ():
            self.drop_unused(claim)
        return copy is not None

    def forget(self, request: str) -> None:
        """Drop the partial copies of a request that is over."""
        for key in [key for key in self._partial_copies if key[0] == request]:
            self._drop_partial_copy(key, self._partial_copies[key])

    def close(self) -> None:
        """End all transfers and close the engines."""
        if "_transfers" in self.__dict__:
            self._transfers.close()
        self._threads.shutdown(wait=False)
        for engine in self._engines.values():
            engine.close()

    @cached_property
    def _transfers(self) -> Transfers:
        """The transfers of this arena.

        Made with the first fetch, so that they cost nothing without one.
        """
        assert self._arena
        for engine in self._engines.values():
            engine.register(self._arena.memory)
        return Transfers(self._engines, lambda owner: self._addresses.get(owner, {}), self._options)

    async def _fetch_all(self, lease: Lease, refs: Iterable[ObjectRef]) -> list[ObjectRef | None]:
        """Fetch these objects concurrently.

        If one fails, the others are cancelled before its error is raised.
        """
        fetches = [asyncio.create_task(self._fetch_input(lease, ref)) for ref in refs]
        try:
            return await asyncio.gather(*fetches)
        finally:
            for fetch in fetches:
                fetch.cancel()
            await asyncio.gather(*fetches, return_exceptions=True)

    async def _reaches(self, owner: str) -> bool:
        """Whether an owner's memory can be mapped.

        One thread tests each owner: a stopped owner blocks it.
        """
        if owner not in self._reach_tests:
            test = asyncio.get_running_loop().run_in_executor(self._threads, self._store.reaches, owner)
            self._reach_tests[owner] = test
            test.add_done_callback(lambda _: self._reach_tests.pop(owner))
        return await asyncio.shield(self._reach_tests[owner])

    async def _fetch_input(self, lease: Lease, ref: ObjectRef) -> ObjectRef | None:
        """Return the object to read in place of this one; None if it was streamed."""
        claim = lease.claim
        if ref.owner == self._owner or await self._reaches(ref.owner):
            await self._unwritten.wait_until_written(ref)
            return ref
        if self._streams and ref in lease.task.inputs and self._streams.window(lease.task, ref):
            await self._streams.ranks(lease, ref, self._store, self._transfers, self._options.bootstrap_s)
            return None
        key = claim.request, ref.id
        if key not in self._copies and (partial_copy := self._partial_copies.get((claim.request, ref.stage))):
            await asyncio.wait({partial_copy.over})  # until then, its transfer may still write to it
        copy = self._copies.get(key) or self._start_fetch(key, ref)
        copy.users.add(claim)
        try:
            await asyncio.shield(copy.over)  # other tasks may wait for the same copy
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

    def _start_fetch(self, key: tuple[str, str], ref: ObjectRef) -> _Copy:
        """Start to fetch an object; reuses verified chunks of a partial copy.

        The copy belongs to the task's request, whichever request made the original.
        """
        assert self._arena
        sink = ArenaSink(self._arena, msgspec.structs.replace(ref, request=key[0]), self._store.reserve)
        sink.stays, verified = not ref.is_whole, tuple[int, ...]()

        partial_copy = self._partial_copies.get((key[0], ref.stage))
        if (
            partial_copy
            and partial_copy.over.done()
            and partial_copy.over.exception()
            and partial_copy.ref.tensors == ref.tensors
        ):
            del self._partial_copies[key[0], ref.stage]
            self._fetched.discard(partial_copy)
            sink.extent, verified = partial_copy.sink.extent, partial_copy.session.verified
        session = self._transfers.fetch(ref, sink, sink_checksums=verified)
        over = asyncio.wrap_future(session.over)
        over.add_done_callback(_read_exception)
        copy = self._copies[key] = _Copy(ref, session, sink, over)
        self._fetched.add(copy)
        return copy

    def _end_retention(self, claim: Claim) -> None:
        self._retained -= Counter([claim])
        self.drop_unused(claim)

    def _keep_partial_copy(self, key: tuple[str, str], copy: _Copy) -> None:
        """Keep the partial copy of an object that will be made again."""
        if previous := self._partial_copies.get(key):
            self._drop_partial_copy(key, previous)
        self._partial_copies[key] = copy
        asyncio.get_running_loop().call_later(RETAIN_S, self._drop_partial_copy, key, copy)

    def _drop_partial_copy(self, key: tuple[str, str], copy: _Copy) -> None:
        if self._partial_copies.get(key) is copy:
            del self._partial_copies[key]
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
    """Read the exception, so that asyncio does not warn about it."""
    if not over.cancelled():
        over.exception()
