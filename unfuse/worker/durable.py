"""Durable copies of a worker's objects, in a store that outlives it."""

from __future__ import annotations

import asyncio

import structlog

from unfuse.core.errors import ObjectLost, TransientError
from unfuse.core.messages import Places
from unfuse.core.object_ref import ObjectRef
from unfuse.stores.tensor_store import TensorStore

log = structlog.get_logger(__name__)


class DurableCopies:
    """Writes durable copies in threads, if `places` name a store for them. For one event loop."""

    def __init__(self, store: TensorStore, places: Places) -> None:
        self._store, self._kinds = store, frozenset(places.saved)
        self.wanted = places.durable != "none"
        """Whether there is a store for copies."""
        self._writing: set[asyncio.Task[None]] = set()

    def begin(self, ref: ObjectRef, kind: str) -> bool:
        """Begin to copy this output, if outputs of this stage kind are to be copied. Returns whether they are."""
        if not self.wanted or kind not in self._kinds:
            return False
        writing = asyncio.create_task(self.write(ref))
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)
        return True

    async def write(self, ref: ObjectRef) -> None:
        """Copy an object. An error is only logged: without a copy, the stage runs again if the worker dies."""
        try:
            await asyncio.to_thread(self._store.save, ref)
        except (ObjectLost, TransientError) as error:
            log.warning("no durable copy", request=ref.request, stage=ref.stage, reason=str(error))

    async def wait_until_written(self) -> None:
        """Wait until every copy that was begun is written."""
        while self._writing:
            await asyncio.wait(self._writing)
