"""Waits for objects that other workers of this machine still write."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from unfuse.core.errors import ObjectLost
from unfuse.core.object_ref import ObjectRef
from unfuse.stores.tensor_store import TensorStore

LOOK_AGAIN_S = 0.01  # seconds between two looks at the objects of one owner
LOOKS = 8  # objects that are looked at in that time; more take longer, so that waiting for many costs no more


class Unwritten:
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
