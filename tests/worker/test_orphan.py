"""A worker whose schedulers are gone for good keeps nothing for them; one that is only stopped, or busy, keeps all."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.worker.test_objects import opened
from unfuse.core.messages import Done, Places
from unfuse.core.request import Timings
from unfuse.core.task import Claim
from unfuse.stores.tensor_store import TensorStore
from unfuse.transfer.base import TransferOptions
from unfuse.worker.link import free_when_orphaned
from unfuse.worker.objects import Objects

LONG = 900.0


class Alone:
    """The watch over a worker without scheduler, which sleeps as fast as it is let."""

    def __init__(self) -> None:
        self.link, self.busy = SimpleNamespace(heard=0), False
        self.held, self.given_up = frozenset({"req_1"}), 0
        self._ticks = asyncio.Queue[None]()
        self._waits = asyncio.Event()
        watch: Any = free_when_orphaned
        self.watching = asyncio.create_task(watch(self.link, self, lambda: self.busy, LONG, self._sleep))

    def holding(self) -> frozenset[str]:
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


async def test_after_so_long_without_a_scheduler_all_is_given_up_once(alone: Alone) -> None:
    await alone.passes(int(LONG) - 1)
    assert not alone.given_up
    await alone.passes(1000)
    assert alone.given_up == 1
    alone.watching.cancel()


async def test_any_answer_of_any_scheduler_begins_the_count_anew(alone: Alone) -> None:
    for _ in range(4):
        await alone.passes(int(LONG) - 1)
        alone.link.heard += 1
        await alone.passes(1)
    assert not alone.given_up
    alone.watching.cancel()


async def test_what_runs_finishes_first(alone: Alone) -> None:
    alone.busy = True
    await alone.passes(3 * int(LONG))
    assert not alone.given_up
    alone.busy = False
    await alone.passes(1)
    assert alone.given_up == 1
    alone.watching.cancel()


async def test_durable_copies_and_what_a_reader_holds_are_left(tmp_path: Path) -> None:
    """Given an object with a durable copy that somebody reads, when all is given up, then nobody new gets it from
    here, the reader reads on, its room is free after, and the copy is there."""
    places = Places("", durable=f"disk:{tmp_path}")
    objects = Objects(opened("w", places), places, {}, TransferOptions())
    ref = objects.store.put({"x": np.arange(9.0)}, request="req_1", stage="denoise", attempt=1)
    objects.made(Done(Claim("req_1", "denoise", 1, b""), ref, (), Timings()), "denoise")
    await objects.wait_until_copied()
    held = objects.store.get(ref)
    await objects.abandon()
    assert not objects.holding()
    assert held["x"].tolist() == list(range(9))
    held.close()
    assert objects.usage().used == 0
    with TensorStore.create("memory", owner="other", durable=places.durable) as reader, reader.get(ref) as copy:
        assert copy["x"].tolist() == list(range(9))
    await objects.close()
