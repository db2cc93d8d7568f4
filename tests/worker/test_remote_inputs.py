"""Waiting for objects that are still written on this machine."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from msgspec.structs import replace

from tests.worker.refs import ref
from unfuse.core.errors import ObjectLost
from unfuse.core.object_ref import CHUNK_BYTES, ObjectRef
from unfuse.worker.remote_inputs import PendingInputs

WRITTEN = ref(2 * CHUNK_BYTES, 1)


class Store:
    """Objects are whole once they are among `whole`, and lost once they are among `lost`."""

    def __init__(self) -> None:
        self.whole, self.lost, self.looks = set[str](), set[str](), 0

    def is_whole(self, ref: ObjectRef) -> bool:
        self.looks += 1
        if ref.id in self.lost:
            raise ObjectLost("gone", ref.id)
        return ref.id in self.whole


async def test_each_task_waits_for_its_own_object_until_written_or_lost() -> None:
    """Given four who wait for three objects of two owners, one of whom gives up, then each of the others goes on when
    its object is whole or lost, and nobody looks any more; what is whole by its ref is not looked at."""
    store: Any = Store()
    with ThreadPoolExecutor(2) as lookers:
        unwritten = PendingInputs(store, lookers)
        await unwritten.wait_until_written(ref(2 * CHUNK_BYTES, 1, 2))
        assert store.looks == 0
        named = [replace(WRITTEN, id=id, owner=owner) for id, owner in (("a", "x"), ("a", "x"), ("b", "x"), ("c", "y"))]
        first, second, gives_up, third = (asyncio.create_task(unwritten.wait_until_written(one)) for one in named)
        await asyncio.sleep(0.05)
        assert store.looks and not first.done()
        gives_up.cancel()
        store.lost.add("c")
        await third
        store.whole.add("a")
        await asyncio.gather(first, second)
        with pytest.raises(asyncio.CancelledError):
            await gives_up
        await asyncio.gather(*unwritten._polls)
        assert not unwritten._waiting
        again = asyncio.create_task(unwritten.wait_until_written(named[2]))
        store.whole.add("b")
        await again
