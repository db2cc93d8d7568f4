"""The life of an object: writing, sealed, deleted; and who keeps its bytes."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tools.server import until
from unfuse.arena.extents import BuddyAllocator
from unfuse.arena.objects import OBJECT_MOVES, Extent, ObjectTable
from unfuse.core.errors import ArenaFull, ObjectLost, ProtocolError

REQUEST = "req_" + "a" * 32


@pytest.fixture
def table() -> ObjectTable:
    return ObjectTable(BuddyAllocator(8 * 4096))


def hold(table: ObjectTable, extent: Extent) -> Extent:
    return table.hold(extent.id, extent.key, extent.generation, extent.nbytes)


def test_every_object_state_leads_to_deleted_which_is_final() -> None:
    assert set(OBJECT_MOVES) == {state for moves in OBJECT_MOVES.values() for state in moves} | {"writing"}
    assert OBJECT_MOVES["deleted"] == frozenset()
    assert all("deleted" in moves for state, moves in OBJECT_MOVES.items() if state != "deleted")


def test_object_can_be_held_only_after_sealing(table: ObjectTable) -> None:
    extent = table.create(100, REQUEST)
    with pytest.raises(ObjectLost):
        hold(table, extent)
    table.seal(extent.id)
    assert hold(table, extent) == extent


@pytest.mark.parametrize("end", ["delete", "release"])
def test_deleted_object_ends_the_wait_for_its_next_chunk(table: ObjectTable, end: str) -> None:
    extent = table.create(100, REQUEST)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(table.written, extent.id, 0, 60.0)
        until(waiting.running, "the wait to begin")
        table.delete(extent.id) if end == "delete" else table.release(REQUEST)
        with pytest.raises(ObjectLost):
            waiting.result(20.0)


def test_aborted_object_frees_its_memory_and_cannot_be_sealed(table: ObjectTable) -> None:
    extent = table.create(100, REQUEST)
    table.abort(extent.id)
    assert table.usage().used == 0 and not table.requests()
    with pytest.raises(ObjectLost, match=extent.id):
        table.seal(extent.id)


def test_sealing_an_object_twice_raises_protocol_error(table: ObjectTable) -> None:
    extent = table.create(100, REQUEST)
    table.seal(extent.id)
    with pytest.raises(ProtocolError, match="cannot change from sealed to sealed"):
        table.seal(extent.id)


def test_memory_of_a_deleted_object_is_freed_at_the_last_unhold(table: ObjectTable) -> None:
    extent = table.create(100, REQUEST)
    table.seal(extent.id)
    hold(table, extent)
    hold(table, extent)
    table.delete(extent.id)
    table.unhold(extent.id)
    assert table.usage().used == 4096
    table.unhold(extent.id)
    assert table.usage().used == 0


def test_object_released_while_written_is_freed_at_seal_or_abort(table: ObjectTable) -> None:
    sealed, aborted = table.create(100, REQUEST), table.create(100, REQUEST)
    table.release(REQUEST)
    assert table.usage().used == 2 * 4096 and not table.requests()
    with pytest.raises(ObjectLost, match="its request has ended"):
        table.seal(sealed.id)
    assert table.usage().used == 4096
    table.abort(aborted.id)
    assert table.usage().used == 0


def test_object_at_a_reused_offset_has_a_new_generation(table: ObjectTable) -> None:
    first = table.create(8 * 4096, REQUEST)
    table.seal(first.id)
    table.delete(first.id)
    second = table.create(8 * 4096, REQUEST)
    table.seal(second.id)
    assert second.offset == first.offset and second.generation != first.generation
    with pytest.raises(ObjectLost):
        table.hold(second.id, second.key, first.generation, second.nbytes)


@pytest.mark.parametrize("wrong", ["id", "key", "generation", "nbytes"])
def test_hold_with_any_wrong_ref_field_raises_object_lost(table: ObjectTable, wrong: str) -> None:
    extent = table.create(100, REQUEST)
    table.seal(extent.id)
    said = {"id": extent.id, "key": extent.key, "generation": extent.generation, "nbytes": extent.nbytes}
    said[wrong] = {"id": "f" * 32, "key": bytes(16), "generation": 99, "nbytes": 101}[wrong]
    with pytest.raises(ObjectLost) as lost:
        table.hold(**said)  # type: ignore[arg-type]
    assert lost.value.object_id == said["id"]
    table.delete(extent.id)
    assert table.usage().used == 0


def test_release_frees_only_the_objects_of_its_request(table: ObjectTable) -> None:
    mine, other = table.create(1, REQUEST), table.create(1, "req_other")
    table.seal(mine.id)
    assert table.requests() == {REQUEST, "req_other"}
    table.release(REQUEST)
    assert table.requests() == {"req_other"}
    table.abort(other.id)
    assert table.usage().used == 0


def test_create_without_space_raises_arena_full_and_changes_nothing(table: ObjectTable) -> None:
    with pytest.raises(ArenaFull, match="start the worker with a larger --arena"):
        table.create(9 * 4096, REQUEST)
    assert not table.requests()


@pytest.fixture
def spilled(table: ObjectTable) -> Extent:
    extent = table.create(100, REQUEST)
    table.seal(extent.id)
    table.spill(extent.id)
    return extent


def test_spilled_object_uses_no_memory_and_is_tracked_until_release(table: ObjectTable, spilled: Extent) -> None:
    assert table.usage().used == 0 and table.requests() == {REQUEST} and not table.idle()
    with pytest.raises(ObjectLost):
        hold(table, spilled)
    table.spill(spilled.id)
    table.release(REQUEST)
    assert not table.requests()
    with pytest.raises(ObjectLost):
        table.spill(spilled.id)


def test_held_object_is_not_spilled(table: ObjectTable) -> None:
    extent = table.create(100, REQUEST)
    table.seal(extent.id)
    hold(table, extent)
    table.spill(extent.id)
    assert table.usage().used == 4096 and hold(table, extent) == extent
    table.delete(extent.id)
    with pytest.raises(ObjectLost):
        table.spill(extent.id)


def test_spilled_object_is_restored_at_a_new_offset_and_held(table: ObjectTable, spilled: Extent) -> None:
    table.create(100, "another, where it was")
    filled: list[int] = []
    extent = table.restore(spilled.id, filled.append)
    assert filled == [extent.offset] != [spilled.offset] and hold(table, spilled) == extent
    table.delete(spilled.id)
    for _ in range(2):
        table.unhold(spilled.id)
    assert table.usage().used == 4096


def test_failed_restore_leaves_the_object_spilled(table: ObjectTable, spilled: Extent) -> None:
    with pytest.raises(ZeroDivisionError):
        table.restore(spilled.id, lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    full = table.create(8 * 4096, "another")
    with pytest.raises(ArenaFull):
        table.restore(spilled.id, lambda _: None)
    table.abort(full.id)
    assert table.usage().used == 0
    with pytest.raises(ObjectLost):
        table.restore(spilled.id, lambda _: table.release(REQUEST))
    assert table.usage().used == 0 and not table.requests()
    with pytest.raises(ObjectLost):
        table.restore(spilled.id, lambda _: None)


def test_only_announced_holds_restore_a_spilled_object(table: ObjectTable, spilled: Extent) -> None:
    table.recall = lambda extent: table.restore(extent.id, lambda _: None)
    shown = spilled.id, spilled.key, spilled.generation, spilled.nbytes
    with pytest.raises(ObjectLost):
        table.hold(*shown)
    with pytest.raises(ObjectLost):
        table.hold(spilled.id, b"wrong", *shown[2:], announced=True)
    table.hold(*shown, announced=True)
    table.hold(*shown)
    assert [table.idle(), table.usage().used] == [[], 4096]


def test_shared_object_is_deleted_when_its_last_owner_is_released(table: ObjectTable) -> None:
    shared, own = table.create(100, REQUEST), table.create(100, REQUEST)
    for extent in (shared, own):
        table.seal(extent.id)
    for name in ("cache:k:1", "cache:k:1", "other", REQUEST):
        table.retain(shared.id, name)
    assert table.requests() == {REQUEST, "cache:k:1", "other"}

    table.release(REQUEST)

    assert table.requests() == {"cache:k:1", "other"}
    assert hold(table, shared).request == "cache:k:1"
    table.unhold(shared.id)
    with pytest.raises(ObjectLost):
        hold(table, own)
    table.release("other")
    table.release(REQUEST)
    assert table.requests() == {"cache:k:1"}
    table.release("cache:k:1")
    assert table.usage().used == 0 and not table.requests()


@pytest.mark.parametrize("first", [REQUEST, "cache:k:1"])
def test_shared_object_is_freed_in_any_order_of_release(table: ObjectTable, first: str) -> None:
    extent = table.create(100, REQUEST)
    table.retain(extent.id, "cache:k:1")
    table.seal(extent.id)
    table.release(first)
    hold(table, extent)
    table.unhold(extent.id)
    for name in (REQUEST, "cache:k:1"):
        table.release(name)
    assert table.usage().used == 0


def test_retain_of_a_deleted_or_unknown_object_raises_object_lost(table: ObjectTable) -> None:
    extent = table.create(100, REQUEST)
    table.seal(extent.id)
    hold(table, extent)
    table.release(REQUEST)
    for id in (extent.id, "unknown"):
        with pytest.raises(ObjectLost, match=id):
            table.retain(id, "cache:k:1")
    table.unhold(extent.id)
    assert table.usage().used == 0


def test_spilled_shared_object_is_deleted_with_its_request(table: ObjectTable) -> None:
    extent = table.create(100, REQUEST)
    table.seal(extent.id)
    table.retain(extent.id, "cache:k:1")
    table.spill(extent.id)
    table.release(REQUEST)
    assert not table.requests() and table.usage().used == 0


def shared(table: ObjectTable, pages: int, name: str) -> Extent:
    """An object that only that name keeps."""
    extent = table.create(pages * 4096 - 1, "over")
    table.seal(extent.id)
    table.retain(extent.id, name)
    table.release("over")
    return extent


def test_objects_without_a_request_are_evicted_in_lru_order(table: ObjectTable) -> None:
    first = shared(table, 2, "a")
    for pages, name in ((2, "b"), (4, "c")):
        shared(table, pages, name)
    hold(table, first)
    table.unhold(first.id)
    usage = table.usage()
    assert (usage.used, usage.requested, usage.free, usage.largest_free) == (0, 0, 8 * 4096, 0)

    needed = table.create(2 * 4096, "another")

    assert table.requests() == {"a", "c", "another"}
    table.abort(needed.id)
    table.create(6 * 4096, "another")
    assert table.requests() == {"a", "another"} and table.usage().used == 6 * 4096


def test_objects_held_or_owned_by_a_request_are_not_evicted(table: ObjectTable) -> None:
    read, own = shared(table, 2, "a"), table.create(2 * 4096, REQUEST)
    table.seal(own.id)
    table.retain(own.id, "b")
    hold(table, read)
    assert table.usage().used == 4 * 4096
    with pytest.raises(ArenaFull):
        table.create(5 * 4096, "another")
    assert table.requests() == {"a", "b", REQUEST}


def test_object_larger_than_the_arena_evicts_nothing(table: ObjectTable) -> None:
    shared(table, 2, "a")
    with pytest.raises(ArenaFull):
        table.create(9 * 4096, "another")
    assert table.requests() == {"a"}


def test_restore_of_a_spilled_object_evicts_spare_objects(table: ObjectTable, spilled: Extent) -> None:
    shared(table, 8, "a")
    table.restore(spilled.id, lambda offset: None)
    assert table.requests() == {REQUEST}


def test_spare_objects_are_not_listed_for_spilling(table: ObjectTable) -> None:
    shared(table, 1, "cache:k:1")
    own = table.create(100, REQUEST)
    table.seal(own.id)
    assert table.idle() == [own]


def test_memory_of_objects_is_accounted_for_in_every_state(table: ObjectTable) -> None:
    """Also of one without bytes, of one that is taken back, and of one that somebody reads; other room is not."""
    spilled, empty, whole, written = (table.create(size, REQUEST) for size in (5000, 0, 4096, 9000))
    for extent in (spilled, empty, whole):
        table.seal(extent.id)
    hold(table, whole)
    table.delete(whole.id)
    table.spill(spilled.id)
    assert table.unfinished() == [written]
    assert table.unaccounted() == 0

    seen = list[int]()
    table.restore(spilled.id, lambda _: seen.append(table.unaccounted()))
    table.unhold(spilled.id)
    table.spill(spilled.id)
    with pytest.raises(ZeroDivisionError):
        table.restore(spilled.id, lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    assert [*seen, table.unaccounted()] == [0, 0]

    table.release(REQUEST)
    assert table.unfinished() == [written], "its writer may not know that it is deleted"
    table.abort(written.id)
    assert not table.unfinished()

    table._space.allocate(1)
    assert table.unaccounted() == 4096
