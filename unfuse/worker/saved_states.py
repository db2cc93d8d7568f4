"""The checkpoints of the tasks that a worker runs, the newest that the scheduler has recorded; and their portions."""

from __future__ import annotations

import asyncio

from unfuse.core.messages import Accepted, Keep, Saved
from unfuse.core.object_ref import ObjectRef
from unfuse.core.task import Claim, Lease
from unfuse.worker.link import Link
from unfuse.worker.objects import Objects


class SavedStates:
    """Makes checkpoints durable, has them recorded, and deletes the ones before. For one event loop."""

    def __init__(self, objects: Objects, link: Link) -> None:
        self._objects, self._link = objects, link
        self.stops = False  # whether the worker stops, so that checkpoints have to outlast it
        self._known: dict[Claim, ObjectRef | None] = {}
        self._portions: dict[Claim, set[asyncio.Future[None]]] = {}
        self._lock = asyncio.Lock()

    def begin(self, lease: Lease) -> None:
        """A task begins, perhaps from a checkpoint."""
        self._known[lease.claim] = lease.checkpoint

    async def record(self, saved: Saved | Keep) -> None:
        """Have a task's state recorded, or a portion, which others find from then on."""
        if isinstance(saved, Saved):
            await self._save(saved)
        else:
            await self._share(saved)

    async def _share(self, kept: Keep) -> None:
        """Have a portion recorded, and hold it for others."""
        recorded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        pending = self._portions.setdefault(kept.claim, set())
        pending.add(recorded)
        try:
            answer = await self._link.call(kept)
            if isinstance(answer, Accepted):
                self._objects.share(kept.key, kept.output)
        finally:
            recorded.set_result(None)
            pending.discard(recorded)
            if not pending:
                self._portions.pop(kept.claim, None)

    async def _save(self, saved: Saved) -> None:
        """Copy a checkpoint to any durable store, have it recorded, delete what it replaces; itself if not recorded.

        One that cannot be copied, as when the disk is full, replaces none that is.
        """
        async with self._lock:
            before = self._known.get(saved.claim)
            useless: ObjectRef | None = saved.checkpoint
            is_copied = await self._objects.save_copy(saved.checkpoint, now=self.stops)
            if is_copied or before is None or not self._objects.has_copy(before):
                answer = await self._link.call(saved)
                if isinstance(answer, Accepted):
                    useless = before
                    if saved.claim in self._known:
                        self._known[saved.claim] = saved.checkpoint
            if useless:
                await self._objects.delete(useless)

    async def wait_until_saved(self) -> None:
        """Wait until every checkpoint so far is recorded."""
        async with self._lock:
            return

    async def wait_until_shared(self, claim: Claim) -> None:
        """Wait until every portion of a task so far is recorded."""
        while pending := self._portions.get(claim):
            await asyncio.wait(pending)

    async def end(self, claim: Claim, done: bool) -> None:
        """A task has ended here. If it is not `done`, its checkpoint stays, so that another worker can resume it."""
        known = self._known.pop(claim, None)
        if done and known:
            await self._objects.delete(known)
