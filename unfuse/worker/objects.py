"""The objects that one worker holds: its stages' outputs, and copies of inputs; and those that nobody owns."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress

import msgspec
import structlog

from unfuse.arena.extents import MemoryUsage
from unfuse.arena.objects import Extent
from unfuse.core.errors import ObjectLost, TransientError
from unfuse.core.messages import Memory, StorageLocations, TaskCompleted, TaskFailed, TaskStopped
from unfuse.core.object_ref import ObjectRef
from unfuse.core.task import CACHED, Lease, cached_as
from unfuse.stores.results import copies_here
from unfuse.stores.tensor_store import TensorStore
from unfuse.transfer.base import TransferEngine, TransferOptions
from unfuse.worker.compute_messages import Leak
from unfuse.worker.remote_inputs import InputStreams, RemoteInputs

log = structlog.get_logger(__name__)

MOST_COPIED = 256 << 20  # bytes of an object that a worker copies when it stops

MOST_LINES = 32  # leaks that are logged by name at a time


class WorkerObjects:
    """A worker's tensor store, with the transfers to and from it. For one event loop; slow calls run in threads.

    `engines` serve the arena to other nodes, and fetch inputs from there; they are not used if the store is one that
    every node can read itself. Inputs that are longer than the receive buffer pass through `passing`. Raises
    ConfigError if an engine cannot be opened.

    If `places` name a store for them, some outputs and all checkpoints get durable copies as they are made, and a
    worker that stops can copy what it has. It remembers the copies that it wrote, so that none is written twice.
    """

    def __init__(
        self,
        store: TensorStore,
        places: StorageLocations,
        engines: Mapping[str, TransferEngine],
        options: TransferOptions,
        passing: InputStreams | None = None,
    ) -> None:
        self.store, self._arena = store, store.arena
        self._copies_as_made = frozenset(places.saved) if places.durable != "none" else None
        """The stage kinds whose outputs are copied as they are made. None if not even checkpoints are."""
        self._can_copy = copies_here(places) != "none"
        self._writing: set[asyncio.Task[bool]] = set()
        self._written: set[tuple[str, str]] = set()
        self._elsewhere: set[str] = set()
        self._made: dict[str, dict[str, ObjectRef]] = {}
        """What was made here and may be read: by request, and by id."""
        self.copies = RemoteInputs(store, engines, options, passing)

    @property
    def capacity(self) -> int:
        """Bytes of the arena."""
        return self._arena.capacity if self._arena else 0

    def usage(self) -> MemoryUsage:
        """How full the arena is."""
        return self._arena.usage() if self._arena else MemoryUsage(0, 0, 0, 0, 0, 0)

    @property
    def free(self) -> int | None:
        """Bytes that outputs may take; None for a store without a fixed size."""
        return self._arena.usage().free if self._arena and self.store.bounded else None

    def holding(self) -> frozenset[str]:
        """The ids of the requests that objects are held for."""
        return (self._arena.requests() if self._arena else frozenset()) | self._elsewhere

    def needed(self) -> frozenset[str]:
        """The ids of requests, not known to be over, whose objects are here and nowhere else."""
        held = self._arena.requests() if self._arena and self.store.bounded else frozenset()
        return frozenset(name for name in held if not name.startswith(CACHED)) - self._elsewhere

    def end_task(
        self, lease: Lease, message: TaskStopped | TaskCompleted | TaskFailed, read_here: bool
    ) -> TaskStopped | TaskCompleted | TaskFailed:
        """A task has ended: drop copies of its inputs and keep its output. Returns the report to send.

        Copies stay for a while if its compute process died, or an input came to nothing, since it may come here again;
        and if its output is `read_here`, by a stage that may read the same inputs. If the report names a lost copy, it
        gets the id of the original, which is the one that the scheduler knows.
        """
        if isinstance(message, TaskFailed) and message.object_id:
            message = msgspec.structs.replace(message, object_id=self.copies.original(message.object_id))
        elif isinstance(message, TaskCompleted):
            self.made(message, lease.task.planned.kind)
        crashed = isinstance(message, TaskFailed) and (message.kind == "crash" or message.reason == "compute")
        withdrawn = isinstance(message, TaskStopped) and not all(ref.whole for ref in lease.task.inputs)
        if crashed or withdrawn or (isinstance(message, TaskFailed) and message.kind == "object_lost"):
            self.copies.keep(message.claim)
        elif isinstance(message, TaskCompleted) and read_here:
            self.copies.keep(message.claim, again=False)
        else:
            self.copies.let_go(message.claim)
        return message

    def made(self, done: TaskCompleted, kind: str) -> None:
        """A stage of this kind has stored its output: begin to write a durable copy, if it is to have one."""
        if done.output is None:
            return
        self._remember(done.output)
        is_copied = self._copies_as_made is not None and kind in self._copies_as_made
        if is_copied:
            writing = asyncio.create_task(self._copy(done.output))
            self._writing.add(writing)
            writing.add_done_callback(self._writing.discard)
        if is_copied or not self.store.bounded:
            self._elsewhere.add(done.output.request)

    def share(self, key: str, output: ObjectRef | None) -> None:
        """Others are told of an output by that key: hold it for them, if there is any."""
        if key and output and self._arena:
            with suppress(ObjectLost):
                self._arena.share(output.id, cached_as(key, output.id))

    @property
    def outlasts(self) -> bool:
        """Whether what is here can be read when this worker has ended: it is copied, or lies in no arena."""
        return self._arena is None or self._can_copy

    async def save_copy(self, ref: ObjectRef, *, now: bool = False) -> bool:
        """Write a durable copy of a checkpoint, if all are copied, or this one is to be copied `now`.

        Returns False if a copy should be there and is not.
        """
        self._remember(ref)
        if self._copies_as_made is not None:
            self._elsewhere.add(ref.request)
        elif not (now and self._arena and self._can_copy):
            return True
        return await self._copy(ref)

    async def _copy(self, ref: ObjectRef, reader: str = "") -> bool:
        """Copy an object, for the request `reader` if another one made it. Returns whether there is a copy.

        An error is only logged: without a copy, the stage runs again if the worker dies.
        """
        key = reader or ref.request, ref.id
        if key in self._written:
            return True
        try:
            await asyncio.to_thread(self.store.save, ref, reader)
        except (ObjectLost, TransientError) as error:
            log.warning("no durable copy", request=key[0], stage=ref.stage, reason=str(error))
            return False
        self._written.add(key)
        return True

    async def wait_until_copied(self) -> None:
        """Wait until every copy that was begun is written."""
        while self._writing:
            await asyncio.wait(self._writing)

    def has_copy(self, ref: ObjectRef) -> bool:
        """Whether an object can be read when this worker has ended. Of another owner's nothing else is known."""
        return self._arena is None or ref.owner != self.store.owner or (ref.request, ref.id) in self._written

    async def copy_all(self, inputs: Iterable[tuple[str, ObjectRef]]) -> None:
        """Copy what was made here for requests that are not over, the smallest first, so that it outlasts this worker.

        Of `inputs` that another request has made, each is copied for the request that reads it. Objects of more than
        MOST_COPIED bytes are left out: long texts' keys and values are sooner computed again.
        """
        if not (self._arena and self._can_copy):
            return
        for reader, ref in sorted(inputs, key=lambda one: one[1].nbytes):
            if ref.request != reader:
                await self._copy(ref, reader)
        made = {request: list(refs.values()) for request, refs in self._made.items()}
        for request, refs in sorted(made.items(), key=lambda one: sum(ref.nbytes for ref in one[1])):
            small = [ref for ref in refs if ref.nbytes <= MOST_COPIED]
            copied = [await self._copy(ref) for ref in small if request in self._made]
            if all(copied) and len(small) == len(refs):
                self._elsewhere.add(request)

    def _remember(self, ref: ObjectRef) -> None:
        self._made.setdefault(ref.request, {})[ref.id] = ref

    async def delete(self, ref: ObjectRef) -> None:
        """Delete an object that nobody needs any more, and its durable copy."""
        if refs := self._made.get(ref.request):
            refs.pop(ref.id, None)
        is_copied = self._copies_as_made is not None or self.has_copy(ref)
        try:
            await asyncio.to_thread(self.store.discard if is_copied else self.store.delete, ref)
        except TransientError as error:
            log.warning("an object was not fully deleted", object=ref.id, reason=str(error))

    def unowned(self) -> dict[str, int]:
        """Bytes in the arena that have no owner, by a name, of a worker that runs no task and reports none."""
        if not self._arena:
            return {}
        found = {_unfinished(extent): extent.nbytes for extent in self._arena.unfinished()}
        for extent in self.copies.extents:
            found.pop(_unfinished(extent), None)
        found |= {name: copy.ref.nbytes for name, copy in self.copies.unused().items()}
        return found | ({f"{nbytes} bytes of no object": nbytes} if (nbytes := self._arena.unaccounted()) else {})

    def drop(self, ids: Iterable[str]) -> bool:
        """Free those of these objects that are in the arena: nobody reads them any more. Returns whether any was."""
        before, gone = self.usage().used, {*ids}
        for refs in self._made.values():
            for id in gone & refs.keys():
                del refs[id]
        for id in gone:
            if self._arena:
                self._arena.delete(id)
        return self.usage().used < before

    async def release(self, requests: Iterable[str]) -> None:
        """Free everything that is held for these requests, and the durable copies that workers write as they go.

        Copies that an earlier worker wrote when it stopped are deleted by `serve`.
        """
        release = self.store.abandon if self._copies_as_made is None else self.store.release
        for request in requests:
            self._elsewhere.discard(request)
            self._made.pop(request, None)
            self.copies.forget(request)
            self._written = {key for key in self._written if key[0] != request}
            try:
                await asyncio.to_thread(release, request)
            except TransientError as error:
                log.warning("a request's objects were not fully deleted", request=request, reason=str(error))

    async def abandon(self) -> None:
        """Free everything that is held here: objects, copies of other workers' objects, and what was spilled.

        Durable copies, and objects in a store that others can read, stay: their request may go on elsewhere.
        """
        for request in self._arena.requests() if self._arena else ():
            try:
                await asyncio.to_thread(self.store.abandon, request)
            except TransientError as error:
                log.warning("a request's objects were not fully deleted", request=request, reason=str(error))
        self._elsewhere.clear()
        self._made.clear()

    async def close(self) -> None:
        """End all transfers and close the store."""
        await asyncio.to_thread(self.copies.close)
        await asyncio.to_thread(self.store.close)


def _unfinished(extent: Extent) -> str:
    return f"an unfinished object {extent.id} of {extent.request}"


class WorkerLeakCheck:
    """Finds what lies in the arena of a worker without a task and has no owner; logs and counts all its leaks.

    What is found at two looks in a row is a leak. Copies of inputs are freed, since no task here can read them, and
    readers elsewhere hold what they read. Other objects stay, because whoever leaks them may still write there.
    """

    def __init__(self) -> None:
        self._suspects, self._reported = frozenset[str](), frozenset[str]()
        self._bytes = Counter[Memory]()

    def look(self, objects: WorkerObjects, *, idle: bool) -> None:
        """Look for leaks in the arena, if the worker is `idle`: it has no task, and none of which it still reports."""
        unowned = objects.unowned() if idle else {}
        confirmed = unowned.keys() & self._suspects - self._reported
        self.found(Leak("arena", name, unowned[name], objects.copies.free(name)) for name in sorted(confirmed))
        self._reported = (self._reported | confirmed) & unowned.keys() if idle else self._reported
        self._suspects = frozenset(unowned)

    def found(self, leaks: Iterable[Leak]) -> None:
        """Log leaks, and count their bytes. Of very many, the rest is one line."""
        found = [*leaks]
        for leak in found:
            self._bytes[leak.memory] += leak.bytes
        for leak in found[:MOST_LINES]:
            about = {"memory": leak.memory, "what": leak.name, "bytes": leak.bytes, "freed": leak.freed}
            log.warning("memory leak in a worker without tasks", **about)
        if rest := found[MOST_LINES:]:
            log.warning("more leaks in a worker without tasks", number=len(rest), bytes=sum(one.bytes for one in rest))

    def take(self) -> dict[Memory, int]:
        """Return the bytes that were found since the last call, for a heartbeat."""
        taken, self._bytes = dict(self._bytes), Counter[Memory]()
        return taken

    def put_back(self, taken: Mapping[Memory, int]) -> None:
        """Count again what could not be reported."""
        self._bytes.update(taken)
