"""Objects on a disk, in Redis and in S3: they outlive their owner, and what fails is said and heals."""

import errno
import os
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.stores.processes import Start
from tests.stores.servers import S3Server
from tests.stores.test_shared_memory import decoded
from tools.redis_server import RedisServer
from unfuse.core.errors import ArenaFull, ConfigError, NotFound, ObjectLost, TransientError
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import new_request_id
from unfuse.stores.blobs import BlobStore, folder_of, last_part, open_blobs
from unfuse.stores.keyed import open_copies
from unfuse.stores.results import open_results
from unfuse.stores.tensor_store import TensorStore

MIB = 1 << 20


@pytest.fixture(
    params=["disk", pytest.param("redis", marks=pytest.mark.slow), pytest.param("s3", marks=pytest.mark.slow)]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "disk":
        return f"disk:{tmp_path}/kept"
    url: str = request.getfixturevalue(f"{request.param}_server").url
    return url


@pytest.fixture
def blobs(place: str) -> BlobStore:
    return open_blobs(place)


def put(store: TensorStore, value: int, nbytes: int = 1000, request: str = "") -> ObjectRef:
    tensors = {"x": np.full(nbytes, value, np.uint8)}
    return store.put(tensors, request=request or new_request_id(), stage="s", attempt=1)


def check(store: TensorStore, ref: ObjectRef, value: int) -> None:
    with store.get(ref) as held:
        assert (held["x"] == value).all()


def test_stored_objects_survive_sigkill_and_are_readable_by_others(start: Start, place: str) -> None:
    owner = start(name=place, owner="a", capacity=16 * MIB)
    refs = [owner("put", value, 700_000) for value in (5, 6)]
    assert owner.kill() == -9

    reader = start(name=place, owner="b", capacity=MIB)
    assert reader("get", refs[0]) == [5, 5 * 700_000]
    with TensorStore.create(place, owner="a", capacity=16 * MIB) as again:
        assert again.stored_requests() == {decoded(ref).request for ref in refs}
        with again.get(decoded(refs[1])) as held:
            assert (held["x"] == 6).all()
        for ref in refs:
            again.delete(decoded(ref))
        assert again.usage().used == 0 and not again.stored_requests()


def test_owner_killed_during_a_write_leaves_no_object(start: Start, place: str) -> None:
    owner = start(name=place, owner="half", capacity=16 * MIB)
    owner("begin", 5 * MIB)
    owner.kill()
    with TensorStore.create(place, owner="half") as again:
        assert not again.stored_requests() and again.usage().used == 0


def test_other_owners_can_read_but_not_delete_objects(place: str) -> None:
    with TensorStore.create(place, owner="one") as one, TensorStore.create(place, owner="two") as two:
        ref = put(one, 3)
        two.delete(ref)
        two.release(ref.request)
        check(two, ref, 3)
        assert not two.stored_requests() and two.usage().used == 0
        one.release(ref.request)
        with pytest.raises(ObjectLost):
            two.get(ref)


def test_owner_and_request_names_may_contain_any_characters(blobs: BlobStore, place: str) -> None:
    for odd in ("../../etc", "..", "a/b", "~", "%2E", "ü x\n", "."):
        with TensorStore.create(place, owner=odd, capacity=MIB) as store:
            ref = put(store, 1, request=odd)
            check(store, ref, 1)
            assert store.stored_requests() == {odd}
            store.release(odd)
            assert not store.stored_requests()
        assert last_part(folder_of("a", odd)) == odd and ".." not in folder_of(odd)


def test_blob_store_writes_lists_removes_and_drops_whole_blobs(blobs: BlobStore) -> None:
    def read(folder: str, name: str) -> bytes:
        nbytes, parts = blobs.read(folder, name)
        data = b"".join(parts)
        assert nbytes == len(data)
        return data

    large = os.urandom(9 * MIB)
    for data in (b"first", b"", large, b"last"):
        blobs.write("blobs/a", "x", data)
        assert read("blobs/a", "x") == data
    blobs.write("blobs/a", "y", b"12")
    blobs.write("blobs/b", "x", b"123")
    assert sorted((entry.folder, entry.name, entry.nbytes) for entry in blobs.entries("blobs")) == [
        ("blobs/a", "x", 4),
        ("blobs/a", "y", 2),
        ("blobs/b", "x", 3),
    ]
    blobs.remove("blobs/a", "x")
    blobs.remove("blobs/a", "x")
    blobs.drop("blobs/b")
    blobs.drop("blobs/b")
    for folder in ("blobs/a", "blobs/b"):
        with pytest.raises(NotFound):
            read(folder, "x")
    assert [entry.name for entry in blobs.entries("blobs")] == ["y"]
    blobs.drop("blobs")
    assert list(blobs.entries("blobs")) == []


def test_missing_redis_chunk_raises_object_lost(redis_server: RedisServer) -> None:
    with TensorStore.create(redis_server.url, owner="w", capacity=64 * MIB) as store:
        ref = put(store, 1, 9 * MIB)
        (key,) = redis_server.client.keys(f"*{ref.id}*")
        redis_server.client.hdel(key, str(4 * MIB))
        with pytest.raises(ObjectLost, match="is no longer in Redis at"):
            store.get(ref)
        store.release(ref.request)


def test_redis_objects_expire_after_their_ttl(redis_server: RedisServer) -> None:
    with TensorStore.create(redis_server.url + "?prefix=long&ttl=600", owner="w") as store:
        put(store, 1)
        (key,) = redis_server.client.keys("{long}:objects/w/*")
        assert 0 < redis_server.client.ttl(key) <= 600
    with TensorStore.create(redis_server.url + "?prefix=brief&ttl=1", owner="w") as store:
        ref = put(store, 1)
        gone = threading.Event()
        while store.stored_requests():
            gone.wait(0.05)
        with pytest.raises(ObjectLost):
            store.get(ref)
        assert redis_server.client.keys("{brief}*") == []


def test_full_redis_raises_transient_error_and_leaves_no_partial_object(redis_server: RedisServer) -> None:
    client = redis_server.client
    with TensorStore.create(redis_server.url, owner="full", capacity=64 * MIB) as store:
        small = put(store, 1)
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 24 * MIB)
        try:
            with pytest.raises(TransientError, match="cannot store .*maxmemory"):
                put(store, 2, 60 * MIB)
        finally:
            client.config_set("maxmemory", 0)
        assert store.stored_requests() == {small.request} and len(client.keys("*full*")) == 1
        check(store, put(store, 3, 30 * MIB), 3)
        check(store, small, 1)
        for request in store.stored_requests():
            store.release(request)


@contextmanager
def no_file_above(nbytes: int) -> Iterator[None]:
    """A disk that is full after so many bytes of a file: the kernel refuses to write more."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, most))


def test_file_size_limit_raises_transient_error_and_leaves_no_files(tmp_path: Path) -> None:
    with TensorStore.create(f"disk:{tmp_path}/kept", owner="w", capacity=64 * MIB) as store:
        small = put(store, 1)
        with no_file_above(MIB), pytest.raises(TransientError, match="File too large; check the folder"):
            put(store, 2, 3 * MIB)
        assert store.stored_requests() == {small.request}
        assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1
        check(store, put(store, 3, 3 * MIB), 3)
        check(store, small, 1)


@pytest.mark.slow
def test_full_file_system_raises_transient_error_until_space_is_freed(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        with TensorStore.create(f"disk:{tmp_path}/kept", owner="w", capacity=64 * MIB) as store:
            first = put(store, 1, 3 * MIB)
            with pytest.raises(TransientError, match=os.strerror(errno.ENOSPC)):
                put(store, 2, 2 * MIB)
            check(store, first, 1)
            store.release(first.request)
            check(store, put(store, 3, 3 * MIB), 3)
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_killed_server_raises_errors_and_its_objects_survive(request: pytest.FixtureRequest, kind: str) -> None:
    server: RedisServer | S3Server = request.getfixturevalue(f"{kind}_server")
    if isinstance(server, RedisServer):
        server.sync()
    with TensorStore.create(server.url, owner="k", capacity=64 * MIB) as store:
        kept = put(store, 1, 5 * MIB)
        server.kill()
        with pytest.raises(ObjectLost) as lost:
            store.get(kept)
        assert lost.value.object_id == kept.id
        for attempt in (lambda: put(store, 2), store.stored_requests, store.usage, lambda: store.release(kept.request)):
            with pytest.raises(TransientError):
                attempt()
        server.start()
        check(store, kept, 1)
        check(store, put(store, 3, 5 * MIB), 3)
        for over in store.stored_requests():
            store.release(over)
        assert store.usage().used == 0


@pytest.mark.slow
def test_closed_store_has_no_connections_to_redis(redis_server: RedisServer) -> None:
    """Given a store in Redis and one with copies there, then no connection is left to the collector of garbage."""
    stores = [
        TensorStore.create(redis_server.url, owner="k", capacity=MIB),
        TensorStore.create("memory", owner="k", capacity=MIB, durable=redis_server.url),
        TensorStore.create(f"spill:memory+{redis_server.url}", owner="k", capacity=MIB),
    ]
    for store in stores:
        store.save(put(store, 1))
    assert len(redis_server.client.client_list()) > 1
    for store in stores:
        store.close()
    assert len(redis_server.client.client_list()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_server_killed_during_writes_leaves_only_whole_objects(request: pytest.FixtureRequest, kind: str) -> None:
    server: RedisServer | S3Server = request.getfixturevalue(f"{kind}_server")
    if isinstance(server, RedisServer):
        server.sync()
    with TensorStore.create(server.url, owner="m", capacity=256 * MIB) as store:
        kept: list[ObjectRef] = []
        some, failed = threading.Event(), threading.Event()

        def write() -> None:
            try:
                for value in range(10_000):
                    kept.append(put(store, value % 251, 2 * MIB, "of this test"))
                    if len(kept) == 3:
                        some.set()
                    if len(kept) > 20:
                        store.delete(kept.pop(3))
            except TransientError:
                failed.set()

        thread = threading.Thread(target=write)
        thread.start()
        assert some.wait(600)
        server.kill()
        assert failed.wait(600)
        thread.join()
        server.start()
        for value, ref in enumerate(kept[:3]):
            check(store, ref, value)
        store.release("of this test")
        assert store.usage().used == 0 and not store.stored_requests()


def test_disk_store_enforces_its_capacity(tmp_path: Path) -> None:
    with TensorStore.create(f"disk:{tmp_path}", owner="w", capacity=3000) as store:
        first = put(store, 1, 2000)
        with pytest.raises(ArenaFull, match="the disk store has no room for 2048 bytes .* a larger --arena"):
            put(store, 2, 2000)
        with TensorStore.create(f"disk:{tmp_path}", owner="w", capacity=3000) as again:
            assert again.usage().free == 3000 - first.nbytes, "what is there counts, whoever put it there"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("disk", "use disk:PATH"),
        ("disk:/tmp/x?fsync=maybe", "use disk:PATH"),
        ("disk:/proc/nothing/here", "choose another folder"),
        ("redis://host:0", "the Redis URL is not valid"),
        ("redis://host/?ttl=0", "the Redis URL is not valid"),
        ("redis://host/?speed=9", "the Redis URL is not valid"),
        ("s3://", "use s3://BUCKET/PREFIX"),
        ("s3://Bucket", "use s3://BUCKET/PREFIX"),
        ("tape:/x", "cannot be loaded"),
    ],
)
def test_invalid_store_url_raises_config_error(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TensorStore.create(url)


@pytest.mark.parametrize(("option", "synced"), [("", False), ("?fsync=yes", True), ("?fsync=no", False)])
def test_disk_store_fsyncs_only_with_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, synced: bool
) -> None:
    with TensorStore.create(f"disk:{tmp_path}/kept{option}", owner="w") as store:
        names: list[str] = []
        monkeypatch.setattr(os, "fsync", lambda fd: names.append(os.readlink(f"/proc/self/fd/{fd}")))
        ref = put(store, 1)
        assert any(ref.id in name for name in names) == synced


Durable = Callable[[], TensorStore]


@pytest.fixture
def durable(place: str) -> Iterator[Durable]:
    """Stores in memory with copies at the place."""
    stores: list[TensorStore] = []

    def create() -> TensorStore:
        stores.append(TensorStore.create("memory", capacity=64 * MIB, durable=place))
        return stores[-1]

    yield create
    for store in stores:
        store.close()


def test_lost_object_is_read_from_its_durable_copy(durable: Durable) -> None:
    one, two = durable(), durable()
    request = new_request_id()
    ref, other = put(one, 7, 5 * MIB, request), put(one, 8, 10, request)
    one.save(ref)
    check(two, ref, 7)
    for given_up in (ref, other):
        one.delete(given_up)
    check(one, ref, 7)
    for store in (one, two):
        with pytest.raises(ObjectLost) as lost:
            store.get(other)
        assert lost.value.object_id == other.id
    one.release(request)
    for store in (one, two):
        with pytest.raises(ObjectLost):
            store.get(ref)


def test_durable_copy_exists_until_its_request_is_released(durable: Durable, place: str) -> None:
    store, copies = durable(), open_copies(place)
    assert copies is not None
    refs = [put(store, 1), put(store, 2)]
    for ref in refs:
        store.save(ref)
        store.delete(ref)
    assert copies.stored_requests() >= {ref.request for ref in refs}
    copies.release(refs[0].request)
    assert refs[0].request not in copies.stored_requests() and refs[1].request in copies.stored_requests()
    with pytest.raises(ObjectLost):
        store.get(refs[0])
    check(store, refs[1], 2)
    copies.release(refs[1].request)


def test_discard_deletes_the_object_and_its_durable_copy(durable: Durable, place: str) -> None:
    """And what is discarded twice, or of another owner, is no trouble: its copy goes too."""
    store, other = durable(), durable()
    ref = put(store, 1)
    store.save(ref)
    store.discard(ref)
    store.discard(ref)
    with pytest.raises(ObjectLost):
        store.get(ref)
    again = put(store, 2)
    store.save(again)
    other.discard(again)
    check(store, again, 2)
    store.delete(again)
    with pytest.raises(ObjectLost):
        store.get(again)


@pytest.mark.parametrize("kind", ["disk", pytest.param("s3", marks=pytest.mark.slow)])
def test_copies_objects_and_results_can_share_one_location(
    request: pytest.FixtureRequest, kind: str, tmp_path: Path
) -> None:
    url = f"disk:{tmp_path}" if kind == "disk" else request.getfixturevalue("s3_server").url
    results, copies, over = open_results(url), open_copies(url), new_request_id()
    assert copies is not None
    with TensorStore.create(url, owner="w", durable=url) as store:
        ref = put(store, 1, request=over)
        store.save(ref)
        results.put(over, 0, "image/png", b"a picture")
        results.forget(0.0)
        copies.release(over)
        assert over not in copies.stored_requests() and store.stored_requests() == {over}
        check(store, ref, 1)
        store.release(over)
        assert results.read(over, 0) == b"a picture"
        store.save(kept := put(store, 2, request=over))
        results.delete(over)
        store.delete(kept)
        check(store, kept, 2)
        copies.release(over)


def test_damaged_durable_copy_raises_object_lost(durable: Durable, blobs: BlobStore) -> None:
    store = durable()
    ref = put(store, 1)
    store.save(ref)
    store.delete(ref)
    (entry,) = (entry for entry in blobs.entries() if entry.name.startswith(ref.id))
    blobs.write(entry.folder, entry.name, bytes(999) + b"\1")
    with pytest.raises(ObjectLost):
        store.get(ref)
    blobs.drop(entry.folder)


def test_copy_that_grows_while_it_is_read_raises_object_lost(
    durable: Durable, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = durable()
    ref = put(store, 1)
    store.save(ref)
    store.delete(ref)
    read = type(blobs).read

    def read_while_it_grows(blobs: BlobStore, folder: str, name: str) -> tuple[int, Iterator[bytes]]:
        nbytes, parts = read(blobs, folder, name)
        return nbytes, iter([*parts, b"more", b"and more"])

    monkeypatch.setattr(type(blobs), "read", read_while_it_grows)
    with pytest.raises(ObjectLost):
        store.get(ref)


def test_damaged_object_is_read_from_its_durable_copy(durable: Durable) -> None:
    store = durable()
    ref = put(store, 7)
    store.save(ref)
    (buffer,) = store._backend._heap.buffers.values()  # type: ignore[attr-defined]
    buffer[500] ^= 4
    with store.get(ref, verify=True) as held:
        assert (held["x"] == 7).all()


def test_saving_a_copy_of_a_lost_object_raises_object_lost(durable: Durable) -> None:
    store = durable()
    ref = put(store, 1)
    store.delete(ref)
    with pytest.raises(ObjectLost):
        store.save(ref)


def test_save_without_durable_store_creates_no_copy() -> None:
    assert open_copies("none") is None
    with TensorStore.create("memory") as store:
        ref = put(store, 1)
        store.save(ref)
        store.delete(ref)
        with pytest.raises(ObjectLost, match="does not exist here"):
            store.get(ref)
