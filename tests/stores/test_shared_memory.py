"""Objects between real processes: mapped, not copied; let go by whoever dies; gone with the last of them."""

import json
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.descriptors import descriptors, settled
from tests.stores.processes import Process, Refused, Start
from unfuse.arena.client import ArenaClient
from unfuse.core.errors import ObjectLost
from unfuse.stores.tensor_store import TensorStore


def used(owner: Process | dict[str, str]) -> int:
    """Bytes in use at an owner, once it has seen everything that happened so far."""
    where = owner if isinstance(owner, dict) else owner.where
    client = ArenaClient(where["address"], bytes.fromhex(where["write_token"]))
    try:
        return client.usage().used
    finally:
        client.close()


def test_processes_map_shared_objects_read_only_without_a_copy(start: Start) -> None:
    owner = start(owner="a", capacity=16 << 20)
    writer = start(owner="a", **owner.where)
    reader = start(owner="b", capacity=1 << 20)
    reader("learn", {"a": ["n", owner.where["address"]]})

    ref = writer("put", 7, 100_000)
    for process in (owner, writer, reader):
        assert process("get", ref) == [7, 700_000]
    lines = [process("lies_in").split() for process in (owner, writer, reader)]

    assert {line[1] for line in lines} == {"r--s"}, "mapped shared, and not for writing"
    assert {line[4] for line in lines} == {str(owner("memory_file"))}, "all lie in the owner's memory"
    for process in (owner, writer, reader):
        process("close")


def test_deleted_object_is_freed_when_its_reader_closes(start: Start) -> None:
    owner, reader = start(owner="a", capacity=1 << 20), start(owner="b", capacity=1 << 20)
    reader("learn", {"a": ["n", owner.where["address"]]})
    with TensorStore.create(
        "shared_memory",
        owner="a",
        address=owner.where["address"],
        write_token=bytes.fromhex(owner.where["write_token"]),
    ) as store:
        ref = store.put({"x": np.ones(1000, int)}, request="r", stage="s", attempt=1)
        reader("get", encoded(ref))
        store.delete(ref)
        assert used(owner) > 0
        reader("close")
    assert used(owner) == 0


def encoded(ref: object) -> str:
    import msgspec

    return msgspec.msgpack.encode(ref).hex()


def test_sigkill_of_a_reader_releases_its_references(start: Start) -> None:
    with TensorStore.create(
        "shared_memory", owner="a", capacity=1 << 20, run_dir=os.environ["UNFUSE_RUN_DIR"]
    ) as owner:
        where = {"address": owner.address, "write_token": owner.write_token.hex()}
        reader = start(owner="b", capacity=1 << 20)
        reader("learn", {"a": ["n", owner.address]})
        ref = owner.put({"x": np.ones(1000, int)}, request="r", stage="s", attempt=1)
        reader("get", encoded(ref), "one")
        reader("get", encoded(ref), "two")
        owner.delete(ref)
        assert used(where) > 0
        assert reader.kill() == -9
        assert used(where) == 0


def test_sigkill_of_a_writer_aborts_only_unsealed_objects(start: Start) -> None:
    owner = start(owner="a", capacity=1 << 20)
    writer = start(owner="a", **owner.where)
    ref = writer("put", 3, 100)
    sealed = used(owner)
    writer("begin", 300_000)
    assert used(owner) > sealed + 300_000
    assert writer.kill() == -9
    assert used(owner) == sealed
    again = start(owner="a", **owner.where)
    assert again("get", ref) == [3, 300]
    assert owner("get", ref) == [3, 300]


def test_writing_to_a_read_only_mapping_crashes_only_the_reader(start: Start) -> None:
    owner, reader = start(owner="a", capacity=1 << 20), start(owner="b", capacity=1 << 20)
    reader("learn", {"a": ["n", owner.where["address"]]})
    ref = owner("put", 5, 10)
    reader("get", ref)
    with pytest.raises(json.JSONDecodeError):
        reader("poke")
    assert reader.end() == -11
    assert owner("get", ref) == [5, 50]


def test_mapped_object_outlives_its_killed_owner_and_others_are_lost(start: Start) -> None:
    owner, reader = start(owner="a", capacity=1 << 20), start(owner="b", capacity=1 << 20)
    reader("learn", {"a": ["n", owner.where["address"]]})
    held, other = owner("put", 5, 10), owner("put", 6, 10)
    reader("get", held)
    owner.kill()
    assert reader("first") == 5
    with pytest.raises(Refused, match="ObjectLost"):
        reader("get", other, "other")
    reader("close")


def test_restarted_owner_is_found_after_its_address_is_registered(start: Start) -> None:
    owner, reader = start(owner="a", capacity=1 << 20), start(owner="b", capacity=1 << 20)
    ref = owner("put", 5, 10)
    with pytest.raises(Refused, match="owner a is unknown"):
        reader("get", ref)
    owner.kill()
    reader("learn", {"a": ["n", owner.where["address"]]})
    with pytest.raises(Refused, match="lost with its owner"):
        reader("get", ref)
    again = start(owner="a", capacity=1 << 20)
    reader("learn", {"a": ["n", again.where["address"]]})
    with pytest.raises(Refused, match="does not exist here"):
        reader("get", ref)
    assert reader("get", again("put", 8, 10)) == [8, 80]


def processes_with(inode: int) -> set[str]:
    """Ids of the processes that have a memory file open or mapped."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            maps = (process / "maps").read_text()
            open_files = [os.stat(fd).st_ino for fd in (process / "fd").iterdir()]
        except (OSError, PermissionError):
            continue
        mapped = any("memfd:unfuse-arena" in line and line.split()[4] == str(inode) for line in maps.splitlines())
        if mapped or inode in open_files:
            found.add(process.name)
    return found


def arenas() -> set[Path]:
    """The sockets of arenas in the run folder; servers that other tests share have theirs there, too."""
    return {*Path(os.environ["UNFUSE_RUN_DIR"]).glob("arena-*")}


def test_next_store_removes_sockets_left_after_sigkill_of_all_processes(
    start: Start,
) -> None:
    before = arenas()
    owner = start(owner="a", capacity=16 << 20)
    writer = start(owner="a", **owner.where)
    reader = start(owner="b", capacity=1 << 20)
    reader("learn", {"a": ["n", owner.where["address"]]})
    reader("get", writer("put", 7, 100_000))
    writer("begin", 1000)
    inode = owner("memory_file")
    assert processes_with(inode) == {str(process.process.pid) for process in (owner, writer, reader)}
    path = Path(owner.where["address"].removeprefix("unix:"))
    assert path.is_socket() and str(path.parent) == os.environ["UNFUSE_RUN_DIR"]

    for process in (owner, writer, reader):
        process.kill()

    assert processes_with(inode) == set()
    living = start(owner="b", capacity=1 << 20)
    assert not path.exists() and arenas() - before == {Path(living.where["address"].removeprefix("unix:"))}
    assert not [name for name in os.listdir("/dev/shm") if "unfuse" in name]


def test_idle_reader_unmaps_memory_of_a_dead_owner(start: Start) -> None:
    owner = start(owner="a", capacity=4 << 20)
    ref = owner("put", 5, 10)
    with TensorStore.create("shared_memory", owner="b", capacity=1 << 20) as reader:
        reader.register_owners({"a": ("n", owner.where["address"])})
        reader.get(decoded(ref)).close()
        (client,) = reader._backend._readers._clients.values()
        gone = threading.Event()
        weakref.finalize(client.view, gone.set)
        del client
        owner.kill()
        assert gone.wait(600)
        with pytest.raises(ObjectLost, match="lost with its owner"):
            reader.get(decoded(ref))


def test_reader_that_detects_owner_death_unmaps_its_memory(start: Start) -> None:
    owner = start(owner="a", capacity=4 << 20)
    ref = owner("put", 5, 10)
    with TensorStore.create("shared_memory", owner="b", capacity=1 << 20) as reader:
        reader.register_owners({"a": ("n", owner.where["address"])})
        held = reader.get(decoded(ref))
        readers = reader._backend._readers
        (client,) = readers._clients.values()
        gone = threading.Event()
        weakref.finalize(client.view, gone.set)
        with readers._lock:
            owner.kill()
            held.close()
            del client, held
        assert gone.wait(600)


def decoded(ref: str) -> Any:
    import msgspec

    from unfuse.core.object_ref import ObjectRef

    return msgspec.msgpack.decode(bytes.fromhex(ref), type=ObjectRef)


def test_object_server_does_not_import_torch_or_asyncio(start: Start) -> None:
    owner = start(owner="a", capacity=1 << 20)
    owner("get", owner("put", 1, 1))
    modules = owner("modules")
    assert "numpy" in modules and "unfuse" in modules
    assert not {"torch", "diffusers", "transformers", "asyncio"} & set(modules)


def test_closing_a_store_leaves_no_descriptor_and_no_thread() -> None:
    settled()
    threads, before = {*threading.enumerate()}, descriptors()
    with TensorStore.create("shared_memory", owner="a", capacity=1 << 20) as owner:
        ref = owner.put({"x": np.ones(3)}, request="r", stage="s", attempt=1)
        with TensorStore.create("shared_memory", owner="b", capacity=1 << 20) as reader:
            reader.register_owners({"a": ("n", owner.address)})
            array = reader.get(ref)["x"]
    assert array.tolist() == [1, 1, 1], "what was got outlives the store"
    del array
    owner.__dict__.clear(), reader.__dict__.clear()
    assert {*threading.enumerate()} <= threads
    assert descriptors() <= before
