"""What a store moved out of its arena, and a reader on another node pulls: it comes back, or is lost, or is full."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from tests.stores.processes import Start
from tests.stores.test_shared_memory import decoded
from tests.transfer.conftest import SECRET
from unfuse.arena.arena import Arena
from unfuse.arena.objects import Extent
from unfuse.core.errors import ArenaFull, ObjectLost
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import new_request_id
from unfuse.stores.spill import SpillBackend
from unfuse.stores.tensor_store import TensorStore
from unfuse.testing.transfer_owner import soon
from unfuse.transfer import open_engine
from unfuse.transfer.base import TransferOptions
from unfuse.transfer.session import ArenaSink, Transfers

PIECE = 128 * 1024
CAPACITY = 8 * PIECE
OPTIONS = TransferOptions(secret=SECRET, attempts=3, bootstrap_s=60, trusted_network=True)


class Reader:
    """A reader on what is another node to the owner: it has an arena of its own, and an engine."""

    def __init__(self, name: str, address: str, options: TransferOptions = OPTIONS) -> None:
        self.arena, self.engine = Arena(128 * PIECE), open_engine(name, options)
        self.engine.register(self.arena.memory)
        self.transfers = Transfers({name: self.engine}, lambda _: {name: address}, options)

    def get(self, ref: ObjectRef) -> np.ndarray:  # type: ignore[type-arg]
        """The bytes of an object, verified."""
        self.transfers.fetch(ref, sink := ArenaSink(self.arena, ref)).result(60)
        assert sink.extent
        got = self.arena.view[sink.extent.offset : sink.extent.offset + ref.nbytes].copy()
        self.arena.delete(sink.extent.id)
        return got

    def close(self) -> None:
        self.transfers.close()
        self.engine.close()
        assert self.arena.usage().used == 0
        self.arena.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "slow"


@pytest.fixture
def store(folder: Path) -> Iterator[TensorStore]:
    """Half of what is put moves to the folder."""
    options: dict[str, Any] = {"owner": "w", "capacity": CAPACITY, "threshold": 0.5}
    with TensorStore.create(f"spill:shared_memory+disk:{folder}", **options) as store:
        yield store


@contextmanager
def reading(store: TensorStore, options: TransferOptions = OPTIONS) -> Iterator[Reader]:
    """A reader of what a store of this process has."""
    assert store.arena
    serving = open_engine("tcp", options)
    reader = Reader("tcp", serving.serve(store.arena), options)
    yield reader
    reader.close()
    serving.close()


def put(store: TensorStore, value: int, nbytes: int = PIECE, request: str = "") -> ObjectRef:
    tensors = {"x": np.full(nbytes, value, np.uint8)}
    return store.put(tensors, request=request or new_request_id(), stage="s", attempt=1)


def moved(folder: Path) -> set[str]:
    """Ids of the objects that are in files."""
    return {path.name.partition(".")[0] for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["tcp", "zmq"])
def test_remote_node_pulls_objects_spilled_by_another_process(
    start: Start, folder: Path, stack: ExitStack, name: str
) -> None:
    url = f"spill:shared_memory+disk:{folder}"
    owner = start(name=url, owner="a", capacity=CAPACITY, threshold=0.5)
    writer = start(name=url, owner="a", capacity=CAPACITY, threshold=0.5, **owner.where)
    count = PIECE // 8
    refs = [decoded(writer("put", value, count)) for value in range(24)]
    assert len(moved(folder)) >= 16, "most do not lie in the arena"

    reader = Reader(name, owner("serve", name, "127.0.0.1", SECRET))
    stack.callback(reader.close)
    for value in (*range(24), *range(24)):
        assert (reader.get(refs[value]).view(np.int64) == value).all()

    writer("release", refs[3].request)
    with pytest.raises(ObjectLost, match="it was released"):
        reader.get(refs[3])


def test_concurrent_pulls_of_spilled_objects_return_correct_data(store: TensorStore, folder: Path) -> None:
    refs = [put(store, value) for value in range(24)]
    chosen = [int(value) for value in np.random.default_rng(1).integers(0, 24, 200)]
    with reading(store) as reader, ThreadPoolExecutor(8) as pool:
        for value, got in zip(chosen, pool.map(lambda value: reader.get(refs[value]), chosen), strict=True):
            assert (got == value).all()
    for ref in refs:
        store.delete(ref)
    assert store.usage().used == 0 and not moved(folder) and not store.stored_requests()


def test_concurrent_put_pull_and_release_is_correct_or_object_lost(store: TensorStore, folder: Path) -> None:
    """Moved by two threads, brought back by two, released by all: nothing is wrong, and nothing is left."""

    def work(reader: Reader, number: int) -> int:
        random, found = np.random.default_rng(number), 0
        for turn in range(60):
            request = new_request_id()
            refs = [put(store, (turn + one) % 251, PIECE // 4, request) for one in range(3)]
            for one, ref in enumerate(refs):
                if random.random() < 0.1:
                    store.release(request)
                try:
                    assert (reader.get(ref) == (turn + one) % 251).all()
                    found += 1
                except ObjectLost:
                    assert request not in store.stored_requests()
            if random.random() < 0.9:
                store.release(request)
        return found

    with reading(store) as reader, ThreadPoolExecutor(4) as pool:
        found = sum(pool.map(lambda number: work(reader, number), range(4)))
    assert found > 4 * 60 * 2
    for request in store.stored_requests():
        store.release(request)
    assert store.usage().used == 0 and not moved(folder)


def test_pull_waits_until_the_owner_has_arena_space(store: TensorStore) -> None:
    first = put(store, 1, 2 * PIECE)
    helds = [store.get(put(store, value, 2 * PIECE)) for value in range(4)]
    assert store.arena and store.arena.usage().free == 0
    with reading(store) as reader:
        session = reader.transfers.fetch(first, sink := ArenaSink(reader.arena, first))
        soon(lambda: session.state == "waiting_for_input", "it does not wait")
        assert not session.wait(0.2)
        for held in helds:
            held.close()
        session.result(60)
        assert session.setbacks == 0 and sink.extent
        reader.arena.delete(sink.extent.id)


def test_pull_raises_arena_full_if_the_owner_never_has_space(store: TensorStore) -> None:
    first = put(store, 1, 2 * PIECE)
    helds = [store.get(put(store, value, 2 * PIECE)) for value in range(4)]
    options = TransferOptions(secret=SECRET, bootstrap_s=0.2)
    for name in ("tcp", "zmq", "unfuse.testing.fake_transfer:FakeEngine"):
        assert store.arena
        serving = open_engine(name, options)
        reader = Reader(name, serving.serve(store.arena), options)
        with pytest.raises(ArenaFull, match="no contiguous room"):
            reader.get(first)
        reader.close()
        serving.close()
    for held in helds:
        held.close()
    assert (store.get(first)["x"] == 1).all()


def backend_of(store: TensorStore) -> SpillBackend:
    backend = store._backend
    assert isinstance(backend, SpillBackend)
    return backend


def test_object_released_during_recall_is_lost_and_fully_removed(
    store: TensorStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = [put(store, value) for value in range(8)]
    load = backend_of(store)._slow.load

    def released_meanwhile(extent: Extent, memory: np.ndarray) -> None:  # type: ignore[type-arg]
        load(extent, memory)
        store.release(extent.request)

    monkeypatch.setattr(backend_of(store)._slow, "load", released_meanwhile)
    assert refs[0].id in moved(folder)
    with reading(store) as reader, pytest.raises(ObjectLost):
        reader.get(refs[0])
    assert refs[0].id not in moved(folder) and refs[0].request not in store.stored_requests()
    for ref in refs[1:]:
        store.delete(ref)
    assert store.usage().used == 0


@pytest.mark.parametrize("wreck", [b"", b"short", None, bytes(PIECE - 1) + b"\1", bytes(PIECE + 1)])
def test_damaged_spill_file_raises_object_lost(store: TensorStore, folder: Path, wreck: bytes | None) -> None:
    refs = [put(store, value) for value in range(8)]
    (file,) = (path for path in folder.rglob("*") if path.name.startswith(refs[0].id))
    file.unlink() if wreck is None else file.write_bytes(wreck)
    with reading(store) as reader:
        with pytest.raises(ObjectLost) as lost:
            reader.get(refs[0])
        assert lost.value.object_id == refs[0].id
        assert (reader.get(refs[1]) == 1).all()
    for ref in refs:
        store.delete(ref)
    assert store.usage().used == 0 and not moved(folder)


def test_recall_requires_matching_key_generation_and_size(store: TensorStore) -> None:
    refs = [put(store, value) for value in range(8)]
    assert store.arena
    before = store.arena.usage()
    for key, generation, nbytes in (
        (b"wrong", refs[0].generation, PIECE),
        (refs[0].key, 99, PIECE),
        (refs[0].key, refs[0].generation, 1),
    ):
        with pytest.raises(ObjectLost):
            store.arena.hold(refs[0].id, key, generation, nbytes, announced=True)
    assert store.arena.usage() == before


def test_local_reads_of_spilled_objects_do_not_use_the_arena(store: TensorStore) -> None:
    refs = [put(store, value) for value in range(8)]
    assert store.arena
    before = store.arena.usage()
    assert (store.get(refs[0])["x"] == 0).all()
    assert store.arena.usage() == before


def test_object_spilled_by_two_threads_at_once_is_not_lost(store: TensorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes second finds it moved, not given up: its file stays."""
    backend, refs = backend_of(store), [put(store, value) for value in range(4)]
    keep = backend._slow.store

    def moved_by_another(ref: ObjectRef, memory: np.ndarray) -> None:  # type: ignore[type-arg]
        monkeypatch.setattr(backend._slow, "store", keep)
        keep(ref, memory)
        with ThreadPoolExecutor(1) as another:
            another.submit(put, store, 9, CAPACITY // 2).result()
        assert store.arena and refs[0].id not in {extent.id for extent in store.arena.idle()}

    monkeypatch.setattr(backend._slow, "store", moved_by_another)
    put(store, 8)
    for value, ref in enumerate(refs):
        with store.get(ref) as held:
            assert (held["x"] == value).all()


def test_concurrent_recalls_of_one_object_share_one_load(store: TensorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    refs, load, loads, together = (
        [put(store, value) for value in range(8)],
        backend_of(store)._slow.load,
        [],
        Barrier(6),
    )

    def slowly(extent: Extent, memory: np.ndarray) -> None:  # type: ignore[type-arg]
        loads.append(extent.id)
        time.sleep(0.05)
        load(extent, memory)

    def hold(ref: ObjectRef) -> Extent:
        assert store.arena
        together.wait(600)
        return store.arena.hold(ref.id, ref.key, ref.generation, ref.nbytes, announced=True)

    monkeypatch.setattr(backend_of(store)._slow, "load", slowly)
    with ThreadPoolExecutor(6) as pool:
        extents = list(pool.map(hold, [refs[0]] * 6))
    assert loads == [refs[0].id] and len(set(extents)) == 1
