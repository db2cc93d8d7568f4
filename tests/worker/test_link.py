"""What a worker holds and asks for, and what becomes of it when no scheduler answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.worker.refs import ref
from tests.worker.test_objects import opened
from unfuse.core.messages import StorageLocations, TaskCompleted
from unfuse.core.object_ref import CHUNK_BYTES
from unfuse.core.request import Timings
from unfuse.core.task import Claim, Lease
from unfuse.stores.tensor_store import TensorStore
from unfuse.testing.queue_samples import task_of
from unfuse.transfer.base import TransferOptions
from unfuse.worker.link import WITHDRAW, TaskSlots, free_when_orphaned
from unfuse.worker.objects import WorkerObjects

WHOLE = ref(CHUNK_BYTES * 2, 1, 2)


WRITTEN = ref(CHUNK_BYTES * 2, 1)


def lease(name: str, **more: Any) -> Lease:
    return Lease(task_of("req_a", name, 1, "pool", "decode", "m", {}, **more), "w", name.encode(), 0.0)


def holding(*leases: Lease, slots: int = 2, **resources: int) -> TaskSlots:
    held = TaskSlots(slots, resources)
    for one in leases:
        held.add(one)
    return held


def test_task_with_unwritten_input_uses_resources_but_no_slot() -> None:
    """Given two slots and room for ten tokens, when tasks come whose inputs are still written, then the worker asks on
    for both slots, with what room is left; and for one fewer as soon as one has arrived."""
    waits = [lease(name, inputs=(WRITTEN,), needs={"kv": 3}) for name in "abc"]
    held = holding(*waits, slots=2, kv=10)
    assert held.arriving == 3
    assert (
        held.next_request(None, "").slots,
        held.next_request(None, "").min_priority,
        held.next_request(None, "").amounts,
    ) == (2, None, {"kv": 1})
    held.arrived(waits[0].claim)
    assert (held.next_request(None, "").slots, held.arriving) == (1, 2)
    held.arrived(waits[1].claim)
    assert (held.next_request(None, "").slots, held.next_request(None, "").min_priority) == (
        1,
        0,
    )  # only for a more urgent one
    assert held.remove(waits[2].claim) is waits[2] and held.remove(waits[2].claim) is None
    assert held.next_request(None, "").amounts == {"kv": 4} and held.arriving == 0


def test_task_uses_a_slot_if_its_input_is_written_or_it_needs_no_kv() -> None:
    assert holding(lease("a", inputs=(WHOLE,), needs={"kv": 3}), kv=10).next_request(None, "").slots == 1
    assert holding(lease("a", inputs=(WRITTEN,))).next_request(None, "").slots == 1


def test_worker_requests_one_task_per_ended_task_before_a_model_swap() -> None:
    ask = holding(lease("a"), slots=4).next_request(None, "", "first", "pool")
    assert (ask.slots, ask.loaded_model, ask.after_pool) == (1, "first", "pool")
    assert holding(lease("a"), slots=4).next_request(None, "", "first").slots == 3


def test_free_bytes_excludes_reservations_and_a_lone_task_withdraws() -> None:
    assert holding(lease("a", alone=True)).next_request(None, "") is WITHDRAW
    held = holding(lease("a", output_size=30))
    assert (held.free_bytes(100, 5), held.free_bytes(20, 5), held.free_bytes(None, 5)) == (70, 0, None)
    held.mark_reserved(lease("a").claim)
    held.mark_reserved(lease("other").claim)
    assert held.free_bytes(70, 35) == 70  # it is not counted twice
    assert holding().free_bytes(100, 0) is None
    assert held.remove(Claim("req_a", "other", 1, b"")) is None


LONG = 900.0


class Alone:
    """The watch over a worker without scheduler, which sleeps as fast as it is let."""

    def __init__(self) -> None:
        self.link, self.busy = SimpleNamespace(last_answer=0), False
        self.held, self.given_up = frozenset({"req_1"}), 0
        self._ticks = asyncio.Queue[None]()
        self._waits = asyncio.Event()
        watch: Any = free_when_orphaned
        self.watching = asyncio.create_task(watch(self.link, self, lambda: self.busy, LONG, self._sleep))

    def stored_requests(self) -> frozenset[str]:
        return self.held

    async def abandon(self) -> None:
        self.held, self.given_up = frozenset(), self.given_up + 1

    async def _sleep(self, seconds: float) -> None:
        assert seconds == 1.0
        self._waits.set()
        await self._ticks.get()

    async def passes(self, seconds: int) -> None:
        for _ in range(seconds):
            await self._waits.wait()
            self._waits.clear()
            self._ticks.put_nowait(None)
        await self._waits.wait()


@pytest.fixture
async def alone() -> Alone:
    return Alone()


async def test_orphaned_worker_abandons_its_objects_once_after_the_timeout(alone: Alone) -> None:
    await alone.passes(int(LONG) - 1)
    assert not alone.given_up
    await alone.passes(1000)
    assert alone.given_up == 1
    alone.watching.cancel()


async def test_any_scheduler_reply_resets_the_orphan_timeout(alone: Alone) -> None:
    for _ in range(4):
        await alone.passes(int(LONG) - 1)
        alone.link.last_answer += 1
        await alone.passes(1)
    assert not alone.given_up
    alone.watching.cancel()


async def test_orphaned_worker_abandons_nothing_while_a_task_runs(alone: Alone) -> None:
    alone.busy = True
    await alone.passes(3 * int(LONG))
    assert not alone.given_up
    alone.busy = False
    await alone.passes(1)
    assert alone.given_up == 1
    alone.watching.cancel()


async def test_abandon_leaves_durable_copies_and_open_objects(tmp_path: Path) -> None:
    """Given an object with a durable copy that somebody reads, when all is given up, then nobody new gets it from
    here, the reader reads on, its room is free after, and the copy is there."""
    places = StorageLocations("", durable=f"disk:{tmp_path}")
    objects = WorkerObjects(opened("w", places), places, {}, TransferOptions())
    ref = objects.store.put({"x": np.arange(9.0)}, request="req_1", stage="denoise", attempt=1)
    objects.add_output(TaskCompleted(Claim("req_1", "denoise", 1, b""), ref, (), Timings()), "denoise")
    await objects.wait_until_copied()
    held = objects.store.get(ref)
    await objects.abandon()
    assert not objects.stored_requests()
    assert held["x"].tolist() == list(range(9))
    held.close()
    assert objects.usage().used == 0
    with TensorStore.create("memory", owner="other", durable=places.durable) as reader, reader.get(ref) as copy:
        assert copy["x"].tolist() == list(range(9))
    await objects.close()
