"""The encoder cache: what one request has encoded serves others that ask for the same, or for the same beginning.

The objects stay where they were made, each held by its owner under a name of its own; the queue has the index, so that
all schedulers share it. What is found there may be lost all the same: it is then made again, as any lost object is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import takewhile

from unfuse.core.errors import TransientError
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import ExecutionPlan
from unfuse.core.task import CACHED, cached_as
from unfuse.queues.base import EncoderIndex, Member


class EncoderCache:
    """Up to `room` bytes of encoder outputs, 0 for none at all. `workers` tells who lives."""

    def __init__(self, index: EncoderIndex, workers: Callable[[], Awaitable[Sequence[Member]]], room: int) -> None:
        self._index, self._workers, self._room = index, workers, room

    def shared_by(self, tenant: str, wanted: bool) -> tuple[str, ...] | None:
        """Which requests share what they encode with one of this tenant; None if it shares nothing."""
        return (tenant,) if wanted and self._room else None

    async def find(self, plan: ExecutionPlan) -> tuple[dict[str, ObjectRef], int]:
        """The outputs, by stage, that are there for a request, and how many more it could have had."""
        keys = {stage.name: stage.cache for stage in plan.stages if stage.cache and self._room}
        found = await self._index.cached(list(keys.values())) if keys else {}
        live = {member.info.id for member in await self._workers()} if found else set()
        for key, ref in found.items():
            if ref.owner not in live:
                with suppress(TransientError):
                    await self._index.uncache(key, ref.id)
        hits = {name: found[key] for name, key in keys.items() if key in found and found[key].owner in live}
        return hits, len(keys) - len(hits)

    async def prefix(self, keys: Sequence[str]) -> tuple[ObjectRef, ...]:
        """What is there of these keys, from the first one on without a gap."""
        found = await self._index.cached(keys[::-1]) if self._room else {}
        live = {member.info.id for member in await self._workers()} if found else set()
        refs = [found.get(key) for key in keys]
        return tuple(ref for ref in takewhile(lambda ref: ref is not None and ref.owner in live, refs) if ref)

    async def keep(self, key: str, output: ObjectRef) -> None:
        """Let others have what a stage made, if it has a key. That may fail: nothing but time is lost by it."""
        if key and self._room:
            with suppress(TransientError):
                await self._index.cache(key, output, self._room)

    async def lost(self, plan: ExecutionPlan, reader: str, id: str) -> None:
        """A stage could not read the object of that id: if it is one that others would be given, they are not."""
        with suppress(TransientError):
            for name in plan.stage(reader).after:
                if key := plan.stage(name).cache:
                    await self._index.uncache(key, id)

    async def over(self, names: Sequence[str]) -> list[str]:
        """Which of these names (see `cached_as`) are of objects that the index, if it answers, has no more."""
        keys = [name.removeprefix(CACHED).partition(":")[0] for name in names]
        try:
            found = await self._index.cached(keys, use=False) if keys else {}
        except TransientError:
            return []
        kept = {cached_as(key, ref.id) for key, ref in found.items()}
        return [name for name in names if name not in kept]
