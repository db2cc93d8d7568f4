"""A store made of two: what is moved, what is not, and that nobody can tell by reading."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.examples import examples
from tests.stores.processes import Start
from unfuse.core.errors import ArenaFull, ConfigError, ObjectLost, TransientError
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import new_request_id
from unfuse.stores.spill import SpillBackend
from unfuse.stores.tensor_store import HeldTensors, TensorStore

PIECE = 128 * 1024
CAPACITY = 8 * PIECE


def put(store: TensorStore, value: int, nbytes: int = PIECE, request: str = "") -> ObjectRef:
    tensors = {"x": np.full(nbytes, value, np.uint8)}
    return store.put(tensors, request=request or new_request_id(), stage="s", attempt=1)


def moved(folder: Path) -> set[str]:
    """Ids of the objects that are in files."""
    return {path.name.partition(".")[0] for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "slow"


Open = Callable[..., TensorStore]


@pytest.fixture(params=["memory", "shared_memory", "a writer of shared memory"])
def opened(request: pytest.FixtureRequest, folder: Path) -> Iterator[Open]:
    """Stores of CAPACITY bytes that spill above half of it into the folder; the last kind seen by another process."""
    stores: list[TensorStore] = []

    def create(**options: Any) -> TensorStore:
        url = f"spill:{'memory' if request.param == 'memory' else 'shared_memory'}+disk:{folder}"
        options = {"owner": "w1", "capacity": CAPACITY, "threshold": 0.5, **options}
        stores.append(TensorStore.create(url, **options))
        if request.param.startswith("a writer"):
            where = {"address": stores[-1].address, "write_token": stores[-1].write_token}
            stores.append(TensorStore.create(url, **{**options, **where}))
        return stores[-1]

    yield create
    for store in reversed(stores):
        store.close()


@pytest.fixture
def store(opened: Open) -> TensorStore:
    return opened()


def test_least_recently_used_objects_spill_above_the_threshold(store: TensorStore, folder: Path) -> None:
    refs = [put(store, value) for value in range(4)]
    assert moved(folder) == set()
    store.get(refs[0]).close()

    refs += [put(store, 4), put(store, 5)]

    assert moved(folder) == {refs[1].id, refs[2].id}, "0 was read later than 1 and 2"
    for value, ref in enumerate(refs):
        with store.get(ref) as held:
            assert (held["x"] == value).all()


def test_objects_in_use_are_not_spilled(store: TensorStore, folder: Path) -> None:
    refs = [put(store, value) for value in range(4)]
    with store.get(refs[0]) as held:
        for _ in range(4):
            put(store, 9)
        assert refs[0].id not in moved(folder) and {ref.id for ref in refs[1:]} <= moved(folder)
        assert (held["x"] == 0).all()


def test_put_raises_arena_full_while_all_objects_are_in_use(store: TensorStore) -> None:
    helds = [store.get(put(store, value, 2 * PIECE)) for value in range(4)]
    with pytest.raises(ArenaFull):
        put(store, 7, 2 * PIECE)
    for held in helds:
        held.close()
    with store.get(put(store, 8, 2 * PIECE)) as held:
        assert (held["x"] == 8).all()


def test_object_larger_than_the_arena_raises_arena_full(store: TensorStore, folder: Path) -> None:
    ref = put(store, 1)
    with pytest.raises(ArenaFull, match=f"room for {2 * CAPACITY} bytes"):
        put(store, 2, 2 * CAPACITY)
    store.get(ref).close()


def test_failing_spill_disk_raises_transient_error_until_recovery(store: TensorStore, folder: Path) -> None:
    in_the_way = folder / "objects" / "w1"
    in_the_way.parent.mkdir()
    in_the_way.write_text("in the way")
    refs = []
    with pytest.raises(TransientError, match="cannot be written: .*check the folder"):
        for value in range(20):
            refs.append(put(store, value))
    assert len(refs) >= 7, "as long as the fast store has room, it does not matter"
    in_the_way.unlink()
    refs.append(put(store, len(refs)))
    for value, ref in enumerate(refs):
        with store.get(ref) as held:
            assert (held["x"] == value).all()


def test_reserve_spills_idle_objects_for_a_transfer(folder: Path) -> None:
    """Given an arena that is full of what nobody reads, when a transfer needs most of it, then it gets that."""
    options = {"owner": "w1", "capacity": CAPACITY, "threshold": 1.0}
    with TensorStore.create(f"spill:shared_memory+disk:{folder}", **options) as store:
        refs = [put(store, value) for value in range(8)]
        assert not moved(folder)

        extent = store.reserve(6 * PIECE, "req_far")

        assert extent.nbytes == 6 * PIECE and store.arena
        store.arena.abort(extent.id)
        for value, ref in enumerate(refs):
            with store.get(ref) as held:
                assert (held["x"] == value).all()


def test_spill_store_enforces_spill_capacity(opened: Open) -> None:
    store = opened(spill_capacity=2 * PIECE)
    with pytest.raises(ArenaFull, match="the disk store has no room for .* increase spill.capacity"):
        for value in range(20):
            put(store, value)
    assert store.usage().capacity == CAPACITY + 2 * PIECE


def test_corrupted_spill_file_raises_object_lost_without_verify(store: TensorStore, folder: Path) -> None:
    refs = [put(store, value) for value in range(6)]
    (file,) = (path for path in folder.rglob("*") if path.name.startswith(refs[0].id))
    data = bytearray(file.read_bytes())
    data[PIECE // 2] ^= 16
    file.write_bytes(data)
    with pytest.raises(ObjectLost, match="do not match its checksums") as lost:
        store.get(refs[0])
    assert lost.value.object_id == refs[0].id


def test_release_deletes_spilled_objects_of_the_request(store: TensorStore, folder: Path) -> None:
    mine, other = new_request_id(), new_request_id()
    refs = [put(store, value, request=(mine, other)[value % 2]) for value in range(8)]
    assert store.stored_requests() == {mine, other} and moved(folder)
    store.release(mine)
    assert store.stored_requests() == {other} and moved(folder) <= {ref.id for ref in refs[1::2]}
    for ref in refs[1::2]:
        store.delete(ref)
    assert not store.stored_requests() and store.usage().used == 0 and moved(folder) == set()


def test_object_released_during_spill_leaves_no_file(
    store: TensorStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = store._backend
    assert isinstance(backend, SpillBackend)
    keep = backend._slow.store

    def released_meanwhile(ref: ObjectRef, memory: np.ndarray) -> None:
        store.release(ref.request)
        keep(ref, memory)

    monkeypatch.setattr(backend._slow, "store", released_meanwhile)
    for value in range(8):
        put(store, value)
    assert moved(folder) == set()


def test_spilled_objects_are_deleted_with_their_owner_not_a_writer(folder: Path) -> None:
    url = f"spill:shared_memory+disk:{folder}"
    options: dict[str, Any] = {"owner": "w1", "capacity": CAPACITY, "threshold": 0.5}
    with TensorStore.create(url, **options) as owner:
        where = {"address": owner.address, "write_token": owner.write_token}
        with TensorStore.create(url, **options, **where) as writer:
            for value in range(8):
                put(writer, value)
        assert moved(folder)
    assert not moved(folder)


def test_spill_files_of_killed_owners_are_deleted_after_a_day(start: Start, folder: Path) -> None:
    url = f"spill:shared_memory+disk:{folder}"
    options: dict[str, Any] = {"capacity": CAPACITY, "threshold": 0.5}
    for owner, age in (("old", 90_000), ("new", 80_000)):
        process = start(name=url, owner=owner, **options)
        for value in range(8):
            process("put", value, PIECE // 8)
        process.kill()
        for path in (folder / "objects" / owner).rglob("*"):
            os.utime(path, (time.time() - age,) * 2)
    with TensorStore.create(url, owner="third", **options):
        assert not moved(folder / "objects" / "old") and moved(folder / "objects" / "new")


def test_other_processes_read_spilled_objects(start: Start, folder: Path) -> None:
    url = f"spill:shared_memory+disk:{folder}"
    owner = start(name=url, owner="a", capacity=CAPACITY, threshold=0.5)
    writer = start(name=url, owner="a", capacity=CAPACITY, threshold=0.5, **owner.where)
    reader = start(name=url, owner="b", capacity=CAPACITY)
    reader("learn", {"a": ["n", owner.where["address"]]})
    count = PIECE // 8
    refs = [writer("put", value, count) for value in range(12)]
    assert len(moved(folder)) >= 8
    for process in (owner, writer, reader):
        for value, ref in enumerate(refs):
            assert process("get", ref, "x") == [value, value * count]
            process("close", "x")


@pytest.mark.parametrize("url", ["spill:", "spill:memory", "spill:memory+", "spill:+disk:/tmp/x", "spill:memory+tape"])
def test_spill_url_needs_two_known_stores(url: str) -> None:
    with pytest.raises(ConfigError, match="spill:FAST|unknown"):
        TensorStore.create(url)


def test_spill_auto_selects_shared_memory(folder: Path) -> None:
    with TensorStore.create(f"spill:auto+disk:{folder}", capacity=CAPACITY) as store:
        assert store.address.startswith("unix:/") and store.write_token


def test_spill_threshold_above_one_raises_config_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="a threshold of at most 1"):
        TensorStore.create(f"spill:memory+disk:{folder}", threshold=80)


class Histories(RuleBasedStateMachine):
    """Whatever is put, read, kept open, deleted and released: an object is right where it is, or lost."""

    @initialize(tmp=st.uuids())
    def start(self, tmp: object) -> None:
        self.folder = FOLDER[0] / str(tmp)
        self.store = TensorStore.create(
            f"spill:shared_memory+disk:{self.folder}", owner="w", capacity=CAPACITY // 8, threshold=0.6
        )
        self.alive: dict[str, tuple[ObjectRef, int]] = {}
        self.gone: list[ObjectRef] = []
        self.open: list[tuple[HeldTensors, int]] = []
        self.values = 0

    def pick(self, data: st.DataObject) -> str:
        """One of what is there, by the order it was put in: ids are new at every run, and so is their own order."""
        return list(self.alive)[data.draw(st.integers(0, len(self.alive) - 1))]

    @rule(pages=st.integers(0, 16), request=st.sampled_from("abc"))
    def put(self, pages: int, request: str) -> None:
        self.values += 1
        value = self.values % 251
        try:
            ref = put(self.store, value, pages * 1024, request)
        except ArenaFull:
            assert self.open, "with nothing held there is always room"
            return
        self.alive[ref.id] = ref, value

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), keep=st.booleans())
    def get(self, data: st.DataObject, keep: bool) -> None:
        ref, value = self.alive[self.pick(data)]
        held = self.store.get(ref, verify=True)
        assert (held["x"] == value).all()
        self.open.append((held, value)) if keep else held.close()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        held, value = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        assert (held["x"] == value).all()
        held.close()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        ref, _ = self.alive.pop(self.pick(data))
        self.store.delete(ref)
        self.gone.append(ref)

    @rule(request=st.sampled_from("abc"))
    def release(self, request: str) -> None:
        self.store.release(request)
        over = [id for id, (ref, _) in self.alive.items() if ref.request == request]
        self.gone += [self.alive.pop(id)[0] for id in over]

    @invariant()
    def what_is_open_does_not_change(self) -> None:
        assert all((held["x"] == value).all() for held, value in self.open)

    @invariant()
    def requests_are_known(self) -> None:
        assert self.store.stored_requests() == {ref.request for ref, _ in self.alive.values()}

    @invariant()
    def what_is_gone_is_lost(self) -> None:
        for ref in self.gone[-3:]:
            with pytest.raises(ObjectLost):
                self.store.get(ref)

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for held, _ in self.open:
            held.close()
        for request in self.store.stored_requests():
            self.store.release(request)
        assert self.store.usage().used == 0 and moved(self.folder) == set()
        self.store.close()


FOLDER: list[Path] = []


@pytest.fixture(scope="module", autouse=True)
def histories_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    FOLDER.append(tmp_path_factory.mktemp("histories"))


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=examples(20), stateful_step_count=30, deadline=None)
