"""The objects of one worker: outputs of its stages, copies of inputs, and leaks."""

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
from unfuse.core.task import CACHED, Lease, cache_owner_name
from unfuse.stores.results import copies_here
from unfuse.stores.tensor_store import TensorStore
from unfuse.transfer.base import TransferEngine, TransferOptions
from unfuse.worker.compute_messages import Leak
from unfuse.worker.remote_inputs import InputStreams, RemoteInputs

log = structlog.get_logger(__name__)

#: Most bytes of an object that a stopping worker copies.
MAX_COPIED_BYTES = 256 << 20

#: Most leaks that are logged by name at a time.
MAX_LOGGED_LEAKS = 32


class WorkerObjects:
    """A worker's tensor store, with the transfers to and from it.

    It belongs to one event loop. Slow calls run in threads.

    - `locations`: where durable copies are stored. With a durable store, the outputs of some stage kinds and all
      checkpoints are copied as they are made. A worker that stops can copy all its objects. No copy is written twice.
    - `engines`: transfer engines by name. They serve the arena to other nodes and fetch inputs from them. They are
      not used if every node can read the store itself.
    - `streams`: streams inputs that are longer than the receive buffer, if given.

    Raises ConfigError if an engine cannot be opened.
    """

    def __init__(
        self,
        store: TensorStore,
        locations: StorageLocations,
        engines: Mapping[str, TransferEngine],
        options: TransferOptions,
        streams: InputStreams | None = None,
    ) -> None:
        self.store, self._arena = store, store.arena
        # The stage kinds whose outputs are copied as they are made. None if not even checkpoints are copied.
        self._copies_as_made = frozenset(locations.durable_kinds) if locations.durable != "none" else None

        self._can_copy = copies_here(locations) != "none"
        self._writing: set[asyncio.Task[bool]] = set()
        self._written: set[tuple[str, str]] = set()  # durable copies, by (request, object id)
        self._elsewhere: set[str] = set()  # requests whose objects are also outside the arena
        self._local_refs: dict[str, dict[str, ObjectRef]] = {}  # readable objects made here, by request and id

        #: Copies of other nodes' objects.
        self.copies = RemoteInputs(store, engines, options, streams)

    @property
    def capacity(self) -> int:
        """Bytes of the arena; 0 without one."""
        return self._arena.capacity if self._arena else 0

    def usage(self) -> MemoryUsage:
        """Return how full the arena is."""
        return self._arena.usage() if self._arena else MemoryUsage(0, 0, 0, 0, 0, 0)

    @property
    def free(self) -> int | None:
        """Bytes that outputs may use; None for a store without a fixed size."""
        return self._arena.usage().free if self._arena and self.store.bounded else None

    def stored_requests(self) -> frozenset[str]:
        """Return the ids of the requests with objects here or in durable copies."""
        return (self._arena.requests() if self._arena else frozenset()) | self._elsewhere

    def needed(self) -> frozenset[str]:
        """Return the ids of requests with objects that exist only here.

        Objects of ended requests were freed, so their requests are not among them. Cached objects do not count.
        """
        requests = self._arena.requests() if self._arena and self.store.bounded else frozenset()
        return frozenset(name for name in requests if not name.startswith(CACHED)) - self._elsewhere

    def end_task(
        self, lease: Lease, message: TaskStopped | TaskCompleted | TaskFailed, read_here: bool
    ) -> TaskStopped | TaskCompleted | TaskFailed:
        """Drop the input copies of an ended task and register its output.

        Returns the report to send. Copies stay for a while in two cases. The task may run here again, because the
        compute process died or an input was lost. Or its output is `read_here`, by a stage of this worker, which may
        read the same inputs. If the report names a lost copy, the returned one names the original, because the
        scheduler has only the original.
        """
        if isinstance(message, TaskFailed) and message.object_id:
            message = msgspec.structs.replace(message, object_id=self.copies.original(message.object_id))
        elif isinstance(message, TaskCompleted):
            self.add_output(message, lease.task.planned.kind)
        crashed = isinstance(message, TaskFailed) and (message.kind == "crash" or message.reason == "compute")
        withdrawn = isinstance(message, TaskStopped) and not all(ref.is_whole for ref in lease.task.inputs)
        if crashed or withdrawn or (isinstance(message, TaskFailed) and message.kind == "object_lost"):
            self.copies.retain(message.claim)
        elif isinstance(message, TaskCompleted) and read_here:
            self.copies.retain(message.claim, again=False)
        else:
            self.copies.drop_unused(message.claim)
        return message

    def add_output(self, done: TaskCompleted, kind: str) -> None:
        """Register a stage's stored output, and start its durable copy, if any."""
        if done.output is None:
            return
        self._remember(done.output)
        is_copied = self._copies_as_made is not None and kind in self._copies_as_made
        if is_copied:
            writing = asyncio.create_task(self._write_copy(done.output))
            self._writing.add(writing)
            writing.add_done_callback(self._writing.discard)
        if is_copied or not self.store.bounded:
            self._elsewhere.add(done.output.request)

    def retain(self, key: str, output: ObjectRef | None) -> None:
        """Retain an output in the arena for other tasks, under this cache key.

        Does nothing without a key, an output or an arena.
        """
        if key and output and self._arena:
            with suppress(ObjectLost):  # its request may have ended meanwhile
                self._arena.retain(output.id, cache_owner_name(key, output.id))

    @property
    def outlasts(self) -> bool:
        """Whether objects can be read after the worker has ended."""
        return self._arena is None or self._can_copy

    async def save_copy(self, ref: ObjectRef, *, now: bool = False) -> bool:
        """Write a durable copy of a checkpoint, if all get one or `now` is set.

        Returns False if the copy could not be written.
        """
        self._remember(ref)
        if self._copies_as_made is not None:
            self._elsewhere.add(ref.request)
        elif not (now and self._arena and self._can_copy):
            return True
        return await self._write_copy(ref)

    async def _write_copy(self, ref: ObjectRef, reader: str = "") -> bool:
        """Copy an object. Returns whether there is a copy.

        `reader` is the request that reads the object, if another request made it. An error is only logged, since
        without a copy the stage runs again.
        """
        key = reader or ref.request, ref.id
        if key in self._written:
            return True
        try:
            await asyncio.to_thread(self.store.save, ref, reader)
        except (ObjectLost, TransientError) as error:
            log.warning("durable copy not written", request=key[0], stage=ref.stage, reason=str(error))
            return False
        self._written.add(key)
        return True

    async def wait_until_copied(self) -> None:
        """Wait until every started copy is written."""
        while self._writing:
            await asyncio.wait(self._writing)

    def has_copy(self, ref: ObjectRef) -> bool:
        """Whether an object can be read after this worker has ended.

        Of other workers' objects this is assumed.
        """
        return self._arena is None or ref.owner != self.store.owner or (ref.request, ref.id) in self._written

    async def copy_all(self, inputs: Iterable[tuple[str, ObjectRef]]) -> None:
        """Copy the objects of unfinished requests, smallest first, so that they outlast this worker.

        `inputs` are (request, ref) of objects that requests read. An object that another request made is copied for its
        reader, because the copies of a request are deleted when it ends. Objects of more than MAX_COPIED_BYTES are left
        out: it is faster to compute the KV cache of a long text again.
        """
        if not (self._arena and self._can_copy):
            return
        for reader, ref in sorted(inputs, key=lambda item: item[1].nbytes):
            if ref.request != reader:
                await self._write_copy(ref, reader)

        # A copy of the dict, because requests may end while objects are copied.
        refs_by_request = {request: list(refs.values()) for request, refs in self._local_refs.items()}
        for request, refs in sorted(refs_by_request.items(), key=lambda item: sum(ref.nbytes for ref in item[1])):
            small = [ref for ref in refs if ref.nbytes <= MAX_COPIED_BYTES]
            copied = [await self._write_copy(ref) for ref in small if request in self._local_refs]
            if all(copied) and len(small) == len(refs):
                self._elsewhere.add(request)

    def _remember(self, ref: ObjectRef) -> None:
        """Record that an object was made here."""
        self._local_refs.setdefault(ref.request, {})[ref.id] = ref

    async def delete(self, ref: ObjectRef) -> None:
        """Delete an object that no task needs any more, and its durable copy."""
        if refs := self._local_refs.get(ref.request):
            refs.pop(ref.id, None)
        is_copied = self._copies_as_made is not None or self.has_copy(ref)
        try:
            await asyncio.to_thread(self.store.discard if is_copied else self.store.delete, ref)
        except TransientError as error:
            log.warning("an object was not fully deleted", object=ref.id, reason=str(error))

    def unowned(self) -> dict[str, int]:
        """Return the bytes in the arena that nothing owns, by a descriptive name.

        Call this only while the worker runs no task and has reported the end of all tasks.
        """
        if not self._arena:
            return {}
        leftovers = {_name_of_unfinished(extent): extent.nbytes for extent in self._arena.unfinished()}
        for extent in self.copies.extents:
            leftovers.pop(_name_of_unfinished(extent), None)
        leftovers |= {name: copy.ref.nbytes for name, copy in self.copies.unused().items()}
        return leftovers | (
            {f"{nbytes} bytes that belong to no object": nbytes} if (nbytes := self._arena.unaccounted()) else {}
        )

    def drop(self, ids: Iterable[str]) -> bool:
        """Free those of these objects that are in the arena. Returns whether memory was freed."""
        used_before = self.usage().used
        unique_ids = {*ids}
        for refs in self._local_refs.values():
            for id in unique_ids & refs.keys():
                del refs[id]
        for id in unique_ids:
            if self._arena:
                self._arena.delete(id)
        return self.usage().used < used_before

    async def release(self, requests: Iterable[str]) -> None:
        """Free all objects of ended requests, and durable copies made while they ran.

        Copies that an earlier worker wrote when it stopped are deleted by the server.
        """
        release = self.store.abandon if self._copies_as_made is None else self.store.release
        for request in requests:
            self._elsewhere.discard(request)
            self._local_refs.pop(request, None)
            self.copies.forget(request)
            self._written = {key for key in self._written if key[0] != request}
            try:
                await asyncio.to_thread(release, request)
            except TransientError as error:
                log.warning("a request's objects were not fully deleted", request=request, reason=str(error))

    async def abandon(self) -> None:
        """Free all objects in this worker's arena and spill folder.

        These include copies of other workers' objects. Durable copies, and objects in a store that others can read,
        stay: their requests may continue elsewhere.
        """
        for request in self._arena.requests() if self._arena else ():
            try:
                await asyncio.to_thread(self.store.abandon, request)
            except TransientError as error:
                log.warning("a request's objects were not fully deleted", request=request, reason=str(error))
        self._elsewhere.clear()
        self._local_refs.clear()

    async def close(self) -> None:
        """End all transfers and close the store."""
        await asyncio.to_thread(self.copies.close)
        await asyncio.to_thread(self.store.close)


def _name_of_unfinished(extent: Extent) -> str:
    return f"an unfinished object {extent.id} of {extent.request}"


class WorkerLeakCheck:
    """Finds leaks in the arena of a worker without tasks; logs and counts all leaks.

    Memory that two checks in a row find is a leak: a cancelled transfer needs time to end. Copies of inputs are freed,
    since no task here can read them, and other workers retain the objects that they read. Other objects stay, because
    their writer may still write there.
    """

    def __init__(self) -> None:
        self._suspects, self._reported = frozenset[str](), frozenset[str]()
        self._bytes = Counter[Memory]()

    def check(self, objects: WorkerObjects, *, idle: bool) -> None:
        """Look for leaks in the arena if the worker is `idle`.

        It is idle if it has no task and has reported the end of all tasks.
        """
        unowned = objects.unowned() if idle else {}
        confirmed = unowned.keys() & self._suspects - self._reported
        self.record(Leak("arena", name, unowned[name], objects.copies.free(name)) for name in sorted(confirmed))
        self._reported = (self._reported | confirmed) & unowned.keys() if idle else self._reported
        self._suspects = frozenset(unowned)

    def record(self, leaks: Iterable[Leak]) -> None:
        """Log leaks and count their bytes. Leaks beyond MAX_LOGGED_LEAKS share one line."""
        new_leaks = [*leaks]
        for leak in new_leaks:
            self._bytes[leak.memory] += leak.bytes
        for leak in new_leaks[:MAX_LOGGED_LEAKS]:
            fields = {"memory": leak.memory, "what": leak.name, "bytes": leak.bytes, "freed": leak.freed}
            log.warning("memory leak in a worker without tasks", **fields)
        if unlogged := new_leaks[MAX_LOGGED_LEAKS:]:
            log.warning(
                "more leaks in a worker without tasks", number=len(unlogged), bytes=sum(leak.bytes for leak in unlogged)
            )

    def take_counts(self) -> dict[Memory, int]:
        """Return the bytes found since the last call, for a heartbeat."""
        leaked, self._bytes = dict(self._bytes), Counter[Memory]()
        return leaked

    def put_back(self, counts: Mapping[Memory, int]) -> None:
        """Count bytes again that could not be reported."""
        self._bytes.update(counts)
