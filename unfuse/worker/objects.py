"""The objects of one worker: those its stages made, kept for who reads them, and copies of inputs from other nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial

import msgspec
import structlog

from unfuse.arena.buddy import Usage
from unfuse.core.errors import ObjectLost, TransientError
from unfuse.core.messages import Done, Failed, Granted, Places
from unfuse.core.object_ref import ObjectRef
from unfuse.core.task import Claim, Lease, cached_as
from unfuse.stores.tensor_store import TensorStore
from unfuse.transfer.base import TransferEngine, TransferOptions
from unfuse.transfer.session import Session, Transfers
from unfuse.transfer.sinks import ArenaSink
from unfuse.transfer.tally import Tally
from unfuse.worker.channel import Stopped
from unfuse.worker.durable import DurableCopies

MOST_LOOKED_AT = 64
"""Owners of which it is tried at a time whether they are near."""

Outcome = Stopped | Done | Failed

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class _Copy:
    """An object of another node on its way here, or here, for as long as tasks use it."""

    ref: ObjectRef
    session: Session
    sink: ArenaSink
    over: asyncio.Future[None]
    users: set[Claim] = field(default_factory=set)


class Objects:
    """A worker's tensor store with what leads to it and from it. For one event loop; what may take long is in threads.

    Owners that are met in `run_dir` share their memory with this one. `engines` serve the arena to others, and bring
    from there what tasks read; none do where the store is a place that every node reaches by itself. Raises ConfigError
    when the store or an engine cannot be opened.
    """

    def __init__(
        self,
        owner: str,
        node: str,
        capacity: int,
        places: Places,
        engines: Mapping[str, TransferEngine],
        options: TransferOptions,
        run_dir: str = "",
    ) -> None:
        self._owner, self._node, self._options = owner, node, options
        self.store = TensorStore.create(
            places.store, owner=owner, node=node, capacity=capacity, threshold=places.threshold,
            spill_capacity=places.spill_capacity, durable=places.durable, run_dir=run_dir,
        )  # fmt: skip
        self.durable = DurableCopies(self.store, places)
        self._arena = self.store.arena
        self._engines = engines if self._arena else {}
        self.engines = {name: engine.serve(self._arena) for name, engine in self._engines.items() if self._arena}
        """Where other nodes pull from, by engine."""
        self._ways: dict[str, Mapping[str, str]] = {}
        self._copies: dict[tuple[str, str], _Copy] = {}
        self._bringing: dict[Claim, asyncio.Task[list[ObjectRef]]] = {}
        self._elsewhere: set[str] = set()
        self._reaching: dict[str, asyncio.Future[bool]] = {}
        self._lookers = ThreadPoolExecutor(MOST_LOOKED_AT, "owner-look")

    @property
    def capacity(self) -> int:
        """Bytes of the arena."""
        return self._arena.capacity if self._arena else 0

    def usage(self) -> Usage:
        """How full the arena is."""
        return self._arena.usage() if self._arena else Usage(0, 0, 0, 0, 0, 0)

    @property
    def free(self) -> int | None:
        """Bytes that outputs may take; None for a store that finds room by itself, or refuses."""
        return self._arena.usage().free if self._arena and self.store.bounded else None

    @property
    def tally(self) -> Tally:
        """What came here by which engine."""
        return self._transfers.tally if "_transfers" in self.__dict__ else Tally()

    def holding(self) -> frozenset[str]:
        """The requests that something is kept for."""
        return (self._arena.requests() if self._arena else frozenset()) | self._elsewhere

    async def bring(self, lease: Lease, granted: Granted) -> Lease | None:
        """The lease with copies that are here in place of inputs that cannot be mapped; None when it was cancelled.

        Whether they can is tried, whatever their nodes are called. What cannot be had stays as it is: there may be a
        durable copy. Raises ArenaFull when there is no room for it.
        """
        self._ways.update(granted.engines)
        self.store.learn(granted.peers)
        claim, task = lease.claim, lease.task
        others = [ref for ref in lease.reads if ref.owner != self._owner and ref.owner in granted.peers]
        if not others or not self._arena:
            return lease
        bringing = self._bringing[claim] = asyncio.create_task(self._bring_all(claim, others))
        try:
            await asyncio.wait({bringing})
            if bringing.cancelled():
                return None
            here = {ref.id: copy for ref, copy in zip(others, bringing.result(), strict=True)}
        finally:
            del self._bringing[claim]
        task = msgspec.structs.replace(task, inputs=tuple(here.get(ref.id, ref) for ref in task.inputs))
        checkpoint = lease.checkpoint and here.get(lease.checkpoint.id, lease.checkpoint)
        return msgspec.structs.replace(lease, task=task, checkpoint=checkpoint)

    def cancel(self, claim: Claim) -> bool:
        """Whether a task's inputs were on their way, and are not waited for any more."""
        return claim in self._bringing and self._bringing[claim].cancel()

    def original(self, id: str) -> str:
        """The object that one here is a copy of; itself if it is none."""
        copies = (copy for copy in self._copies.values() if copy.sink.extent and copy.sink.extent.id == id)
        return next((copy.ref.id for copy in copies), id)

    def let_go(self, claim: Claim) -> None:
        """A task needs its inputs no more."""
        for key, copy in list(self._copies.items()):
            copy.users.discard(claim)
            if not copy.users:
                del self._copies[key]
                copy.session.cancel()
                copy.over.add_done_callback(partial(self._drop, copy))

    def settle(self, lease: Lease, message: Outcome) -> Outcome:
        """A task is over here: let go of what it read, keep what it made, name what was lost as the scheduler does."""
        if isinstance(message, Failed) and message.object_id:
            message = msgspec.structs.replace(message, object_id=self.original(message.object_id))
        elif isinstance(message, Done):
            self.made(message, lease.task.kind)
        self.let_go(message.claim)
        return message

    def made(self, done: Done, kind: str) -> None:
        """A stage of that kind has put its output; a durable copy of it is written beside it, if it is to have one."""
        if done.output is None:
            return
        if self.durable.begin(done.output, kind) or not self.store.bounded:
            self._elsewhere.add(done.output.request)

    def share(self, lease: Lease, done: Done) -> None:
        """An outcome is recorded: from now on other requests may read the output, if it is for the encoder cache."""
        key, output = lease.task.cache, done.output
        if key and output and self._arena:
            with suppress(ObjectLost):
                self._arena.share(output.id, cached_as(key, output.id))

    async def keep(self, ref: ObjectRef) -> None:
        """Write a durable copy of a checkpoint, if there is a place for such."""
        if self.durable.wanted:
            self._elsewhere.add(ref.request)
            await self.durable.write(ref)

    async def delete(self, ref: ObjectRef) -> None:
        """Give up an object that nobody needs any more, and its durable copy."""
        try:
            await asyncio.to_thread(self.store.discard, ref)
        except TransientError as error:
            log.warning("something is left of an object", object=ref.id, reason=str(error))

    async def release(self, requests: Iterable[str]) -> None:
        """Give up all that is kept for these requests, copies included."""
        for request in requests:
            self._elsewhere.discard(request)
            try:
                await asyncio.to_thread(self.store.release, request)
            except TransientError as error:
                log.warning("something is left of a request", request=request, reason=str(error))

    async def abandon(self) -> None:
        """Give up all that is kept here, copies of others' objects included, and what was spilled from here.

        Durable copies, and what lies where others reach it, are left to whoever knows whether its request is over.
        """
        for request in self._arena.requests() if self._arena else ():
            try:
                await asyncio.to_thread(self.store.abandon, request)
            except TransientError as error:
                log.warning("something is left of a request", request=request, reason=str(error))
        self._elsewhere.clear()

    async def close(self) -> None:
        """Give everything up, and serve it no more."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        if "_transfers" in self.__dict__:
            self._transfers.close()
        self._lookers.shutdown(wait=False)
        for engine in self._engines.values():
            engine.close()
        self.store.close()

    @cached_property
    def _transfers(self) -> Transfers:
        """Made when the first object has to come from elsewhere: where nothing ever does, this costs nothing."""
        assert self._arena
        for engine in self._engines.values():
            engine.register(self._arena.memory)
        return Transfers(self._engines, lambda owner: self._ways.get(owner, {}), self._options)

    async def _bring_all(self, claim: Claim, refs: Iterable[ObjectRef]) -> list[ObjectRef]:
        return await asyncio.gather(*(self._bring(claim, ref) for ref in refs))

    async def _reaches(self, owner: str) -> bool:
        """Whether an owner's memory can be mapped. One that is stopped is waited for by one thread only."""
        if owner not in self._reaching:
            looking = asyncio.get_running_loop().run_in_executor(self._lookers, self.store.reaches, owner)
            self._reaching[owner] = looking
            looking.add_done_callback(lambda _: self._reaching.pop(owner))
        return await asyncio.shield(self._reaching[owner])

    async def _bring(self, claim: Claim, ref: ObjectRef) -> ObjectRef:
        if await self._reaches(ref.owner):
            return ref
        key = claim.request, ref.id
        copy = self._copies.get(key) or self._fetch(key, ref)
        copy.users.add(claim)
        try:
            await asyncio.shield(copy.over)
        except ObjectLost as error:
            log.warning("an input cannot be brought here", object=ref.id, owner=ref.owner, reason=str(error))
            return ref
        assert (extent := copy.sink.extent)
        return msgspec.structs.replace(
            ref, id=extent.id, owner=self._owner, node=self._node, request=claim.request, key=extent.key,
            generation=extent.generation,
        )  # fmt: skip

    def _fetch(self, key: tuple[str, str], ref: ObjectRef) -> _Copy:
        """Begin to bring an object here. It is the task's request that the copy is for, whoever made the original."""
        assert self._arena
        sink = ArenaSink(self._arena, msgspec.structs.replace(ref, request=key[0]), self.store.reserve)
        session = self._transfers.fetch(ref, sink)
        over = asyncio.wrap_future(session.over)
        over.add_done_callback(_looked_at)
        copy = self._copies[key] = _Copy(ref, session, sink, over)
        return copy

    def _drop(self, copy: _Copy, over: asyncio.Future[None]) -> None:
        if not over.cancelled() and not over.exception() and copy.sink.extent and self._arena:
            self._arena.delete(copy.sink.extent.id)


def _looked_at(over: asyncio.Future[None]) -> None:
    """Whether anybody still waits for it or not: its failure is no news."""
    if not over.cancelled():
        over.exception()
