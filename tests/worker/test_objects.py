"""A worker's objects: what lies on another node is brought here once, while tasks use it, and leaves nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from unfuse.core.errors import ArenaFull
from unfuse.core.messages import Done, Granted, Moved, Places
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import Timings
from unfuse.core.task import Claim, Lease, Task
from unfuse.transfer import open_engine
from unfuse.transfer.base import TransferOptions
from unfuse.worker.objects import Objects

PIECE = 64 * 1024
CAPACITY = 8 * PIECE
OPTIONS = TransferOptions(bootstrap_s=0.5, attempts=2)


@asynccontextmanager
async def node(name: str, places: Places | None = None) -> AsyncIterator[Objects]:
    places = places or Places("")
    objects = Objects(name, name, CAPACITY, places, {"tcp": open_engine("tcp", OPTIONS)}, OPTIONS)
    try:
        yield objects
    finally:
        await objects.close()


@pytest.fixture
async def far() -> AsyncIterator[Objects]:
    async with node("far") as objects:
        yield objects


@pytest.fixture
async def near() -> AsyncIterator[Objects]:
    async with node("near") as objects:
        yield objects


def made(objects: Objects, value: int = 7, nbytes: int = PIECE, request: str = "req_a") -> ObjectRef:
    return objects.store.put({"x": np.full(nbytes, value, np.uint8)}, request=request, stage="s", attempt=1)


def reading(*refs: ObjectRef, request: str = "req_a", stage: str = "next") -> Lease:
    return Lease(Task(request, stage, 1, "pool", "kind", "model", {}, refs), "near", stage.encode(), 0.0)


def granted(*owners: Objects) -> Granted:
    names = [owner.store.owner for owner in owners]
    peers = {name: (name, owner.store.address) for name, owner in zip(names, owners, strict=True)}
    return Granted((), peers, {name: dict(owner.engines) for name, owner in zip(names, owners, strict=True)})


def read(objects: Objects, ref: ObjectRef) -> set[int]:
    with objects.store.get(ref) as held:
        return set(held["x"].tolist())


async def test_two_tasks_share_a_copy_that_goes_with_the_last_of_them(far: Objects, near: Objects) -> None:
    ref = made(far)
    first, second = reading(ref, stage="one"), reading(ref, stage="two")

    brought = await asyncio.gather(near.bring(first, granted(far)), near.bring(second, granted(far)))

    copies = {lease.task.inputs[0].id for lease in brought if lease}
    assert len(copies) == 1 and ref.id not in copies
    assert brought[0] and read(near, brought[0].task.inputs[0]) == {7}
    assert near.tally.take() == {"tcp": Moved(PIECE, pytest.approx(0, abs=60))}
    near.let_go(first.claim)
    assert near.usage().used == PIECE
    near.let_go(second.claim)
    await freed(near)


async def freed(objects: Objects) -> None:
    async with asyncio.timeout(600):
        while objects.usage().used:
            await asyncio.sleep(0.01)


async def test_a_copy_is_its_reader_s_and_lost_under_its_first_name(far: Objects, near: Objects) -> None:
    """Given an object that an earlier request made, then it is not dropped here with that one, and the scheduler hears
    of the object that it knows."""
    ref = made(far, request="req_earlier")
    brought = await near.bring(reading(ref, request="req_later"), granted(far))
    assert brought
    (copy,) = brought.task.inputs
    assert near.holding() == {"req_later"} and copy.request == "req_later"
    await near.release(["req_earlier"])
    assert read(near, copy) == {7}
    assert (near.original(copy.id), near.original("another")) == (ref.id, "another")


async def test_what_is_near_is_left_where_it_is(far: Objects, near: Objects) -> None:
    own, other = made(near), made(far)
    lease = reading(own, other)
    brought = await near.bring(lease, granted(near, far))
    assert brought and brought.task.inputs[0] == own and brought.task.inputs[1].owner == "near"
    assert await near.bring(reading(own), granted(near)) == reading(own)


async def test_what_cannot_be_had_is_left_to_the_durable_copy(far: Objects, near: Objects) -> None:
    ref = made(far)
    await far.release(["req_a"])
    lease = reading(ref)
    assert await near.bring(lease, granted(far)) == lease
    near.let_go(lease.claim)
    assert near.usage().used == 0


async def test_however_many_inputs_are_at_silent_owners_others_are_brought_meanwhile(far: Objects) -> None:
    patient = msgspec.structs.replace(OPTIONS, heartbeat_s=15.0, max_missed=4)
    near = Objects("near", "near", CAPACITY, Places(""), {"tcp": open_engine("tcp", patient)}, patient)
    with socket.create_server(("127.0.0.1", 0), backlog=200) as silent:
        address = {"tcp": f"tcp://127.0.0.1:{silent.getsockname()[1]}"}
        waiting = []
        for number in range(100):
            name = f"silent-{number}"
            lost = msgspec.structs.replace(made(far, request=name, nbytes=8), owner=name)
            told = Granted((), {name: (name, "unix:@nowhere")}, {name: address})
            waiting.append(asyncio.create_task(near.bring(reading(lost, request=name), told)))
        while len(near._copies) < len(waiting):
            await asyncio.sleep(0)
        brought = await near.bring(reading(made(far)), granted(far))
        assert brought and read(near, brought.task.inputs[0]) == {7}
        assert not any(task.done() for task in waiting)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await near.close()


async def test_a_task_that_is_cancelled_does_not_wait_for_its_inputs(far: Objects, near: Objects) -> None:
    """Given an arena without room, so that an input is waited for, when its task is cancelled, then it ends."""
    full, ref = made(near, nbytes=CAPACITY), made(far)
    lease = reading(ref)
    bringing = asyncio.create_task(near.bring(lease, granted(far)))
    while not near.cancel(lease.claim):
        await asyncio.sleep(0)
    assert await bringing is None
    assert not near.cancel(lease.claim)
    near.let_go(lease.claim)
    near.store.delete(full)
    await freed(near)


async def test_without_room_for_long_the_task_is_told(far: Objects, near: Objects) -> None:
    made(near, nbytes=CAPACITY)
    lease = reading(made(far))
    with pytest.raises(ArenaFull):
        await near.bring(lease, granted(far))
    near.let_go(lease.claim)


@pytest.mark.parametrize("kind", ["denoise", "text_encode"])
async def test_chosen_stages_leave_a_copy_that_goes_with_their_request(kind: str, tmp_path: Path) -> None:
    async with node("near", Places("", durable=f"disk:{tmp_path}")) as near:
        ref = made(near)
        near.made(Done(Claim("req_a", "s", 1, b""), ref, (), Timings()), kind)
        await near.saved()
        assert len(list(files(tmp_path))) == (kind == "denoise")
        near.store.delete(ref)
        assert near.holding() == ({"req_a"} if kind == "denoise" else set())
        await near.release(["req_a"])
        assert not list(files(tmp_path)) and not near.holding()


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
