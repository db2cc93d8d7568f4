"""Every backend, and every way to it, is a tensor store; the suite notices one that is not."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.stores.servers import S3Server
from tools.redis_server import RedisServer
from unfuse.arena.arena import Arena
from unfuse.core.errors import ConfigError, ObjectLost
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import new_request_id
from unfuse.stores.base import ObjectDraft, ObjectHold, StoreOptions
from unfuse.stores.blobs import StoredBlob, open_blobs
from unfuse.stores.memory import MemoryBackend
from unfuse.stores.tensor_store import TensorStore, UnsealedObject
from unfuse.testing import check_store

CAPACITY = 48 << 20
assert torch, "the suite checks torch tensors where torch has been imported"


def join(name: str) -> Callable[[TensorStore], TensorStore]:
    """How another owner's store is opened, which knows the first."""

    def opened(first: TensorStore) -> TensorStore:
        other = TensorStore.create(name, owner="w2", node="n1", capacity=CAPACITY)
        other.register_owners({first.owner: (first.node, first.address)})
        return other

    return opened


@pytest.mark.parametrize(("name", "joined"), [("memory", None), ("shared_memory", join("shared_memory"))])
def test_backends_pass_the_store_suite(name: str, joined: Callable[[TensorStore], TensorStore] | None) -> None:
    check_store(lambda: TensorStore.create(name, owner="w1", node="n1", capacity=CAPACITY), join=joined)


@pytest.fixture(params=["disk", "redis", pytest.param("s3", marks=pytest.mark.nightly)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a store that outlives its process keeps objects."""
    if request.param == "disk":
        return f"disk:{tmp_path}/kept"
    server: RedisServer | S3Server = request.getfixturevalue(f"{request.param}_server")
    return server.url


def behind_the_back(place: str) -> Callable[[ObjectRef, bytes | None], None]:
    """Replace what a place keeps of an object, as somebody does who is not the store."""
    blobs, found = open_blobs(place), dict[str, StoredBlob]()

    def overwrite(ref: ObjectRef, data: bytes | None) -> None:
        if ref.id not in found:
            (found[ref.id],) = (entry for entry in blobs.entries() if entry.name.startswith(ref.id))
        folder, name, *_ = found[ref.id]
        blobs.remove(folder, name) if data is None else blobs.write(folder, name, data, durable=False)

    return overwrite


def test_external_stores_pass_the_store_suite_and_detect_corruption(place: str) -> None:
    opened = lambda: TensorStore.create(place, owner="w/1", node="n1", capacity=CAPACITY)  # noqa: E731
    check_store(opened, behind_the_back(place), join(place))


SPILLS = [
    ("shared_memory", "disk"),
    ("memory", "redis"),
    *(
        pytest.param(*pair, marks=pytest.mark.nightly)
        for pair in [("memory", "disk"), ("memory", "s3"), ("shared_memory", "redis"), ("shared_memory", "s3")]
    ),
]
"""All pairs; by day those of places that cost little to start."""


@pytest.mark.parametrize(("fast", "place"), SPILLS, indirect=["place"])
def test_spill_stores_pass_the_store_suite(fast: str, place: str) -> None:
    url = f"spill:{fast}+{place}"
    check_store(
        lambda: TensorStore.create(url, owner="w1", capacity=CAPACITY // 2, spill_capacity=CAPACITY),
        join=join(url) if fast == "shared_memory" else None,
    )


@pytest.fixture
def parent() -> Iterator[TensorStore]:
    with TensorStore.create("shared_memory", owner="w1", capacity=CAPACITY) as parent:
        yield parent


def test_writer_to_another_process_arena_passes_the_store_suite(parent: TensorStore) -> None:
    check_store(
        lambda: TensorStore.create("shared_memory", owner="w1", address=parent.address, write_token=parent.write_token),
        join=join("shared_memory"),
    )
    while parent.usage().used:  # until it has heard that the last of its readers is gone
        time.sleep(0.01)


def test_capacity_need_not_be_a_power_of_two(parent: TensorStore) -> None:
    check_store(lambda: TensorStore.create("shared_memory", capacity=(40 << 20) + 12345))


class Leaky(MemoryBackend):
    """Never frees."""

    def delete(self, ref: ObjectRef) -> None:
        """Does nothing."""


class Trusting(MemoryBackend):
    """Lets anybody read who knows an id."""

    def open(self, ref: ObjectRef) -> ObjectHold:
        entry = self._objects._entries.get(ref.id)
        if entry is None or entry.state != "sealed":
            raise ObjectLost("gone", ref.id)
        entry.holds += 1
        return ObjectHold(self._heap.buffers[entry.extent.offset], lambda: self._objects.unhold(ref.id))


class Copying(MemoryBackend):
    """Frees at once what is still held, and hands out what comes next."""

    def open(self, ref: ObjectRef) -> ObjectHold:
        hold = super().open(ref)
        self._objects.unhold(ref.id)
        return ObjectHold(hold.bytes(), lambda: None)


class Forgetful(MemoryBackend):
    """Loses the last byte."""

    def create(self, nbytes: int, request: str) -> ObjectDraft:
        draft = super().create(nbytes, request)
        draft.memory.flags.writeable = True
        return ObjectDraft(draft.id, draft.key, draft.generation, np.zeros_like(draft.memory))


class Early(MemoryBackend):
    """Seals what it begins."""

    def create(self, nbytes: int, request: str) -> ObjectDraft:
        draft = super().create(nbytes, request)
        self._objects.seal(draft.id)
        return draft

    def seal(self, id: str) -> None:
        """Is done already."""

    def abort(self, id: str) -> None:
        self._objects.delete(id)


class Eager(MemoryBackend):
    """Has what is held moved."""

    def idle(self):  # type: ignore[no-untyped-def]
        entries = self._objects._entries.values()
        return [entry.extent for entry in entries if entry.state == "sealed"]


class Endless(MemoryBackend):
    """Knows no bound."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity << 10)

    def usage(self):  # type: ignore[no-untyped-def]
        usage = super().usage()
        return type(usage)(CAPACITY, usage.used, usage.requested, CAPACITY - usage.used, CAPACITY, usage.high_water)


@pytest.mark.parametrize(
    "broken",
    [
        Leaky,
        Trusting,
        Forgetful,
        *(pytest.param(broken, marks=pytest.mark.nightly) for broken in (Copying, Early, Eager, Endless)),
    ],
)
def test_store_suite_detects_contract_violations(broken: Callable[[int], MemoryBackend]) -> None:
    from unfuse.core.clock import SystemClock

    with pytest.raises(AssertionError):
        check_store(lambda: TensorStore(broken(CAPACITY), "w1", "n1", SystemClock()))


def test_auto_selects_shared_memory_and_import_paths_are_accepted() -> None:
    with TensorStore.create(capacity=1 << 20) as auto, TensorStore.create("unfuse.stores.memory:open_memory") as named:
        assert auto.address.startswith("unix:/")
        assert named.address == ""


def test_unknown_backend_error_suggests_a_known_one() -> None:
    with pytest.raises(ConfigError, match="did you mean memory"):
        TensorStore.create("memori")


def test_store_without_owner_gets_a_unique_owner_name() -> None:
    with TensorStore.create("memory") as one, TensorStore.create("memory") as two:
        assert one.owner and one.owner != two.owner
        assert (one.address, one.write_token) == ("", b"")


def test_memory_store_cannot_read_another_memory_store() -> None:
    with TensorStore.create("memory", owner="a") as one, TensorStore.create("memory", owner="b") as two:
        two.register_owners({"a": ("n", "unix:@nowhere")})
        ref = one.put({"x": np.ones(3)}, request=new_request_id(), stage="s", attempt=1)
        with pytest.raises(ObjectLost):
            two.get(ref)


@pytest.mark.parametrize("where", ["start", "end", "second chunk"])
def test_verified_get_detects_corrupted_memory(parent: TensorStore, where: str) -> None:
    value = np.zeros(6 << 20, np.uint8)
    ref = parent.put({"x": value}, request=new_request_id(), stage="s", attempt=1)
    arena = parent._backend._local_arena
    assert isinstance(arena, Arena)
    place = {"start": 0, "end": ref.nbytes - 1, "second chunk": 4 << 20}[where]
    arena.memory[arena._entries[ref.id].extent.offset + place] ^= 1
    parent.get(ref).close()
    with pytest.raises(ObjectLost, match="do not match its checksums") as lost:
        parent.get(ref, verify=True)
    assert lost.value.object_id == ref.id


def test_failed_put_frees_its_memory(parent: TensorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unfuse.stores.tensor_store.flat_bytes", lambda value: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        parent.put({"x": np.ones(3)}, request=new_request_id(), stage="s", attempt=1)
    assert parent.usage().used == 0


def test_put_for_a_released_request_raises_object_lost(parent: TensorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    request, write = new_request_id(), UnsealedObject.write

    def release_while_writing(*arguments):  # type: ignore[no-untyped-def]
        parent.release(request)
        return write(*arguments)

    monkeypatch.setattr(UnsealedObject, "write", release_while_writing)
    with pytest.raises(ObjectLost, match="its request has ended"):
        parent.put({"x": np.ones(3)}, request=request, stage="s", attempt=1)
    assert parent.usage().used == 0


def test_padding_between_tensors_has_no_earlier_data(parent: TensorStore) -> None:
    def put(byte: int) -> ObjectRef:
        tensors = {"a": np.full(3, byte, np.uint8), "b": np.full(70, byte, np.uint8)}
        return parent.put(tensors, request=new_request_id(), stage="s", attempt=1)

    filled = parent.put({"x": np.full(192, 255, np.uint8)}, request=new_request_id(), stage="s", attempt=1)
    parent.delete(filled)
    assert put(7).checksums == put(7).checksums


def test_store_options_default_to_an_own_arena() -> None:
    options = StoreOptions("w")
    assert (options.address, options.write_token) == ("", b"")
