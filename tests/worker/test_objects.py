"""A worker's objects: what lies on another node is brought here once, while tasks use it, and leaves nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from tests.disks import small_disk
from tests.transfer.conftest import SECRET
from unfuse.core.errors import ArenaFull, ObjectLost
from unfuse.core.messages import (
    FailureKind,
    LeasesGranted,
    StorageLocations,
    TaskCompleted,
    TaskFailed,
    TaskStopped,
    TransferStats,
)
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import Timings
from unfuse.core.task import Claim, Lease
from unfuse.stores.keyed import stored_objects
from unfuse.stores.results import copies_here
from unfuse.stores.tensor_store import TensorStore
from unfuse.testing.queue_samples import task_of
from unfuse.testing.transfer_owner import soon
from unfuse.transfer import open_engine
from unfuse.transfer.base import TransferOptions
from unfuse.worker import remote_inputs
from unfuse.worker.objects import WorkerObjects

PIECE = 64 * 1024
CAPACITY = 8 * PIECE
OPTIONS = TransferOptions(secret=SECRET, bootstrap_s=0.5, attempts=2)


@pytest.fixture
def folders() -> Iterator[Callable[[], str]]:
    """Run folders."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(TemporaryDirectory(prefix="run-"))


def opened(name: str, places: StorageLocations, **own: str) -> TensorStore:
    """The store of a worker."""
    copies, options = copies_here(places), {"node": name, "durable": places.durable} | own
    return TensorStore.create(places.store, owner=name, capacity=CAPACITY, copies=copies, **options)  # type: ignore[arg-type]


@asynccontextmanager
async def node(
    name: str, run_dir: str, places: StorageLocations | None = None, called: str = "", keys: bool = True
) -> AsyncIterator[WorkerObjects]:
    engines = {"tcp": open_engine("tcp", OPTIONS)} if keys else {}
    places = places or StorageLocations("")
    store = opened(name, places, run_dir=run_dir, node=called or name)
    objects = WorkerObjects(store, places, engines, OPTIONS)
    try:
        yield objects
    finally:
        await objects.close()


@pytest.fixture
async def far(folders: Callable[[], str]) -> AsyncIterator[WorkerObjects]:
    """A worker of a machine with the same name."""
    async with node("far", folders(), called="name") as objects:
        yield objects


@pytest.fixture
async def near(folders: Callable[[], str]) -> AsyncIterator[WorkerObjects]:
    async with node("near", folders(), called="name") as objects:
        yield objects


def made(objects: WorkerObjects, value: int = 7, nbytes: int = PIECE, request: str = "req_a") -> ObjectRef:
    return objects.store.put({"x": np.full(nbytes, value, np.uint8)}, request=request, stage="s", attempt=1)


def reading(*refs: ObjectRef, request: str = "req_a", stage: str = "next") -> Lease:
    return Lease(task_of(request, stage, 1, "pool", "kind", "model", {}, refs), "near", stage.encode(), 0.0)


def granted(*owners: WorkerObjects) -> LeasesGranted:
    names = [owner.store.owner for owner in owners]
    peers = {owner.store.owner: (owner.store.node, owner.store.address) for owner in owners}
    return LeasesGranted(
        (), peers, {name: dict(owner.copies.served_at) for name, owner in zip(names, owners, strict=True)}
    )


def read(objects: WorkerObjects, ref: ObjectRef) -> set[int]:
    with objects.store.get(ref) as held:
        return set(held["x"].tolist())


async def test_input_copy_is_shared_by_tasks_and_freed_with_the_last_one(
    far: WorkerObjects, near: WorkerObjects
) -> None:
    ref = made(far)
    first, second = reading(ref, stage="one"), reading(ref, stage="two")

    brought = await asyncio.gather(near.copies.fetch(first, granted(far)), near.copies.fetch(second, granted(far)))

    copies = {lease.task.inputs[0].id for lease in brought if lease}
    assert len(copies) == 1 and ref.id not in copies
    assert brought[0] and read(near, brought[0].task.inputs[0]) == {7}
    assert near.copies.counters.take_counts() == {"tcp": TransferStats(PIECE, pytest.approx(0, abs=60))}
    near.copies.drop_unused(first.claim)
    assert near.usage().used == PIECE
    near.copies.drop_unused(second.claim)
    await freed(near)


async def freed(objects: WorkerObjects) -> None:
    async with asyncio.timeout(600):
        while objects.usage().used:
            await asyncio.sleep(0.01)


async def test_dropped_object_frees_its_memory_once_no_reader_has_it_open(near: WorkerObjects) -> None:
    kept, lost = made(near), made(near)
    with near.store.get(lost):
        assert not near.drop([lost.id])  # somebody reads it
        assert near.usage().used == 2 * PIECE
    assert near.usage().used == PIECE
    again = made(near)
    assert near.drop(["of another worker", again.id])
    assert (near.usage().used, near.drop([again.id]), read(near, kept)) == (PIECE, False, {7})


async def test_input_copy_belongs_to_the_request_that_reads_it(far: WorkerObjects, near: WorkerObjects) -> None:
    """Given an object that an earlier request made, then it is not dropped here with that one, and the scheduler hears
    of the object that it knows."""
    ref = made(far, request="req_earlier")
    brought = await near.copies.fetch(reading(ref, request="req_later"), granted(far))
    assert brought
    (copy,) = brought.task.inputs
    assert near.stored_requests() == {"req_later"} and copy.request == "req_later"
    await near.release(["req_earlier"])
    assert read(near, copy) == {7}
    assert (near.copies.original(copy.id), near.copies.original("another")) == (ref.id, "another")


async def test_objects_in_mappable_memory_are_not_copied(folders: Callable[[], str], far: WorkerObjects) -> None:
    here = folders()
    async with node("one", here) as one, node("two", here) as two:
        own, mapped, other = made(two), made(one), made(far)
        brought = await two.copies.fetch(reading(own, mapped, other), granted(one, two, far))
        assert brought and brought.task.inputs[:2] == (own, mapped) and brought.task.inputs[2].owner == "two"
        assert read(two, mapped) == {7}
        assert await two.copies.fetch(reading(own), granted(two)) == reading(own)


async def test_owner_is_reachable_by_shared_memory_until_it_exits(
    folders: Callable[[], str], near: WorkerObjects
) -> None:
    """Given an owner whose memory was mapped, when it is gone, then what it had cannot be had, and is not waited for;
    and another one at its address is not taken for it."""
    here = folders()
    async with node("two", here) as two:
        async with node("one", here) as one:
            lease, grant = reading(made(one)), granted(one)
            assert await two.copies.fetch(lease, grant) == lease and two.store.reaches("one")
        async with node("three", here) as three:
            address = three.store.address
            soon(lambda: not two.store.reaches("one"), "a dead owner is still taken for near")
            two.store.register_owners({"one": ("name", address)})
            assert not two.store.reaches("one")
            assert await two.copies.fetch(lease, grant) == lease


async def test_object_is_fetched_if_another_owner_has_its_address_locally(
    folders: Callable[[], str], far: WorkerObjects
) -> None:
    """Given a path that is used here, too, by somebody else, then the object comes from its owner."""
    here = folders()
    async with node("one", here) as one, node("two", here) as two:
        grant = granted(far)
        grant.peers["far"] = "name", one.store.address
        brought = await two.copies.fetch(reading(made(far)), grant)
        assert brought and brought.task.inputs[0].owner == "two"


async def test_unresponsive_local_owner_does_not_block_other_inputs(folders: Callable[[], str]) -> None:
    """Given an owner that is stopped, when tasks with inputs of it wait, then others get theirs."""
    here = folders()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(path := f"{here}/arena-{'0' * 24}")
        silent.listen()
        async with node("one", here) as one, node("two", here) as two:
            ref = made(one)
            grant = granted(one)
            grant.peers["stopped"] = "name", f"unix:{path}"
            waiting = [
                asyncio.create_task(
                    two.copies.fetch(reading(msgspec.structs.replace(ref, owner="stopped"), stage=name), grant)
                )
                for name in map(str, range(100))
            ]
            for _ in range(3):
                assert await two.copies.fetch(reading(ref), grant) == reading(ref)
            assert not any(task.done() for task in waiting)
            assert all(two.copies.cancel(reading(stage=str(number)).claim) for number in range(100))
            assert await asyncio.gather(*waiting) == [None] * 100
            silent.close()


async def test_unmappable_input_is_not_fetched_without_keys(folders: Callable[[], str]) -> None:
    async with node("one", folders(), keys=False) as one, node("two", folders(), keys=False) as two:
        lease = reading(made(one))
        assert not one.copies.served_at and await two.copies.fetch(lease, granted(one)) == lease
        with pytest.raises(ObjectLost):
            two.store.get(lease.task.inputs[0])


async def test_released_input_is_left_to_its_durable_copy(far: WorkerObjects, near: WorkerObjects) -> None:
    ref = made(far)
    await far.release(["req_a"])
    lease = reading(ref)
    assert await near.copies.fetch(lease, granted(far)) == lease
    near.copies.drop_unused(lease.claim)
    assert near.usage().used == 0


async def test_unresponsive_remote_owners_do_not_block_other_transfers(far: WorkerObjects) -> None:
    patient = msgspec.structs.replace(OPTIONS, heartbeat_s=15.0, max_missed=4)
    near = WorkerObjects(
        opened("near", StorageLocations("")), StorageLocations(""), {"tcp": open_engine("tcp", patient)}, patient
    )
    with socket.create_server(("127.0.0.1", 0), backlog=200) as silent:
        address = {"tcp": f"tcp://127.0.0.1:{silent.getsockname()[1]}"}
        waiting = []
        for number in range(100):
            name = f"silent-{number}"
            lost = msgspec.structs.replace(made(far, request=name, nbytes=8), owner=name)
            told = LeasesGranted((), {name: (name, "unix:@nowhere")}, {name: address})
            waiting.append(asyncio.create_task(near.copies.fetch(reading(lost, request=name), told)))
        while len(near.copies._copies) < len(waiting):
            await asyncio.sleep(0)
        brought = await near.copies.fetch(reading(made(far)), granted(far))
        assert brought and read(near, brought.task.inputs[0]) == {7}
        assert not any(task.done() for task in waiting)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await near.close()


async def test_a_task_that_is_cancelled_does_not_wait_for_its_inputs(far: WorkerObjects, near: WorkerObjects) -> None:
    """Given an arena without room, so that an input is waited for, when its task is cancelled, then it ends."""
    full, ref = made(near, nbytes=CAPACITY), made(far)
    lease = reading(ref)
    bringing = asyncio.create_task(near.copies.fetch(lease, granted(far)))
    while not near.copies.cancel(lease.claim):
        await asyncio.sleep(0)
    assert await bringing is None
    assert not near.copies.cancel(lease.claim)
    near.copies.drop_unused(lease.claim)
    near.store.delete(full)
    await freed(near)


@pytest.mark.parametrize("kind, reason", [("crash", ""), ("hand_back", "compute")])
async def test_input_copies_are_retained_after_a_compute_process_crash(
    kind: FailureKind, reason: str, far: WorkerObjects, near: WorkerObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given inputs that were brought, when compute dies, then they are kept, for a while, and do not come twice."""
    monkeypatch.setattr(remote_inputs, "RETAIN_S", 600.0)
    first = reading(made(far))
    again, last = (msgspec.structs.replace(first, token=token) for token in (b"again", b"last"))
    assert await near.copies.fetch(first, granted(far))
    near.end_task(first, TaskFailed(first.claim, kind, "it died", reason=reason), False)
    brought = await near.copies.fetch(again, granted(far))
    assert brought and read(near, brought.task.inputs[0]) == {7}
    assert near.copies.counters.take_counts() == {"tcp": TransferStats(PIECE, pytest.approx(0, abs=60))}
    near.copies.drop_unused(first.claim)
    near.end_task(again, TaskFailed(again.claim, "transient", "it failed"), False)
    await freed(near)

    monkeypatch.setattr(remote_inputs, "RETAIN_S", 0.0)
    assert await near.copies.fetch(last, granted(far))
    near.end_task(last, TaskFailed(last.claim, kind, "it died", reason=reason), False)
    await freed(near)


async def test_input_copies_are_retained_for_the_next_stage_or_attempt(
    far: WorkerObjects, near: WorkerObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given an input that was brought, when its task is done, and others here read what it made, or when the task is
    withdrawn since another input will not come, then the input does not come twice; nor is its owner needed any more.
    """
    monkeypatch.setattr(remote_inputs, "NEXT_S", 600.0)
    there = made(far)
    announced = msgspec.structs.replace(there, id="announced", checksums=())
    first, lost, last = (msgspec.structs.replace(reading(there), token=token) for token in (b"1", b"2", b"3"))
    assert await near.copies.fetch(first, granted(far))
    near.end_task(first, TaskCompleted(first.claim, None, (), Timings()), True)
    assert await near.copies.fetch(lost, granted(far))
    near.copies.drop_unused(first.claim)
    task = msgspec.structs.replace(lost.task, inputs=(*lost.task.inputs, announced))
    near.end_task(msgspec.structs.replace(lost, task=task), TaskStopped(lost.claim), False)
    brought = await near.copies.fetch(last, granted())
    assert brought and read(near, brought.task.inputs[0]) == {7}
    assert near.copies.counters.take_counts() == {"tcp": TransferStats(PIECE, pytest.approx(0, abs=60))}
    near.end_task(last, TaskCompleted(last.claim, None, (), Timings()), False)
    near.copies.drop_unused(lost.claim)
    await freed(near)


async def test_retained_input_copies_are_freed_with_their_request(far: WorkerObjects, near: WorkerObjects) -> None:
    lease = reading(made(far))
    assert await near.copies.fetch(lease, granted(far))
    near.end_task(lease, TaskFailed(lease.claim, "crash", "it died"), False)
    await near.release(["req_a"])
    assert near.usage().used == 0


async def test_fetch_into_a_full_arena_raises_arena_full(far: WorkerObjects, near: WorkerObjects) -> None:
    made(near, nbytes=CAPACITY)
    lease = reading(made(far))
    with pytest.raises(ArenaFull):
        await near.copies.fetch(lease, granted(far))
    near.copies.drop_unused(lease.claim)


@pytest.mark.parametrize("kind", ["denoise", "text_encode"])
async def test_durable_copies_of_chosen_stages_are_deleted_with_the_request(
    kind: str, tmp_path: Path, folders: Callable[[], str]
) -> None:
    async with node("near", folders(), StorageLocations("", durable=f"disk:{tmp_path}")) as near:
        ref = made(near)
        near.add_output(TaskCompleted(Claim("req_a", "s", 1, b""), ref, (), Timings()), kind)
        await near.wait_until_copied()
        assert len(list(files(tmp_path))) == (kind == "denoise")
        near.store.delete(ref)
        assert near.stored_requests() == ({"req_a"} if kind == "denoise" else set())
        await near.release(["req_a"])
        assert not list(files(tmp_path)) and not near.stored_requests()


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


async def stopped(objects: WorkerObjects, *inputs: tuple[str, ObjectRef]) -> None:
    """Copy what a worker has, and end it."""
    await objects.copy_all(inputs)
    await objects.close()


def report(ref: ObjectRef) -> TaskCompleted:
    return TaskCompleted(Claim(ref.request, ref.stage, 1, b""), ref, (), Timings())


async def test_objects_of_a_stopped_worker_are_read_from_the_result_store(
    folders: Callable[[], str], tmp_path: Path
) -> None:
    """Given results on a disk and nothing else that lasts, when a worker stops, then the outputs and checkpoints of
    requests that are not over can be read, and of a request that reads another one's object that, too."""
    places = StorageLocations(f"disk:{tmp_path}")
    objects = WorkerObjects(opened("w", places, run_dir=folders()), places, {}, OPTIONS)
    output, checkpoint = made(objects, 1), made(objects, 2)
    over, cached = made(objects, 3, request="req_b"), made(objects, 4, request="req_c")
    for ref in (output, over, cached):
        objects.add_output(report(ref), "text_encode")
    assert await objects.save_copy(checkpoint)
    objects.retain("key", cached)
    await objects.release(["req_b", "req_c"])
    assert objects.needed() == {"req_a"} and not list(tmp_path.rglob("copies/*/*"))

    await stopped(objects, ("req_a", cached))

    async with node("later", folders(), places) as later:
        assert [read(later, ref) for ref in (output, checkpoint)] == [{1}, {2}]
        with pytest.raises(ObjectLost):
            read(later, cached)
        with later.store.get(cached, reader="req_a") as held:
            assert set(held["x"].tolist()) == {4}
        with pytest.raises(ObjectLost):
            read(later, over)
        (place,) = stored_objects(places.store, places.durable_url)
        assert set(place.requests()) == {"req_a"}


@pytest.mark.slow
@pytest.mark.parametrize("durable", ["none", "disk"])
async def test_full_disk_prevents_a_durable_copy_and_is_logged(
    durable: str, folders: Callable[[], str], tmp_path: Path
) -> None:
    """Given a checkpoint that is larger than the disk, then there is no copy, nothing half-written, and the worker has
    it still; what fits is copied all the same."""
    with small_disk(tmp_path, 4 * PIECE >> 10) as disk:
        places = StorageLocations(f"disk:{disk}", durable=f"disk:{disk}" if durable == "disk" else "none")
        async with node("w", folders(), places) as objects:
            small, large = made(objects, 1, nbytes=PIECE // 4), made(objects, 2, nbytes=5 * PIECE)
            with capture_logs() as logs:
                assert not await objects.save_copy(large, now=True)
                assert await objects.save_copy(small, now=True)
            assert [line["event"] for line in logs] == ["durable copy not written"]
            assert (objects.has_copy(small), objects.has_copy(large)) == (True, False)
            assert read(objects, large) == {2}
            assert [path.stat().st_size for path in disk.rglob("copies/**/*") if path.is_file()] == [PIECE // 4]


async def test_worker_without_access_to_the_result_store_writes_no_copies(
    folders: Callable[[], str], tmp_path: Path
) -> None:
    """Given the folder of another machine, then no folder of that name is made here."""
    places = StorageLocations(f"disk:{tmp_path / 'theirs'}", results_store_id="another")
    async with node("w", folders(), places) as objects:
        assert not objects.outlasts
        await objects.save_copy(made(objects), now=True)
        await objects.copy_all(())
    assert not (tmp_path / "theirs").exists()
