"""The life of an object: writing, sealed, deleted; and who keeps its bytes."""

import pytest

from unfuse.arena.buddy import Buddy
from unfuse.arena.objects import OBJECT_MOVES, Extent, ObjectTable
from unfuse.core.errors import ArenaFull, ObjectLost, ProtocolError

REQUEST = "req_" + "a" * 32


@pytest.fixture
def table() -> ObjectTable:
    return ObjectTable(Buddy(8 * 4096))


def hold(table: ObjectTable, extent: Extent) -> Extent:
    return table.hold(extent.id, extent.key, extent.generation, extent.nbytes)


def test_every_state_leads_to_deleted_and_deleted_nowhere() -> None:
    assert set(OBJECT_MOVES) == {state for moves in OBJECT_MOVES.values() for state in moves} | {"writing"}
    assert OBJECT_MOVES["deleted"] == frozenset()
    assert all("deleted" in moves for state, moves in OBJECT_MOVES.items() if state != "deleted")


def test_an_object_is_read_only_after_it_is_sealed(table: ObjectTable) -> None:
    extent = table.create(100, REQUEST)
    with pytest.raises(ObjectLost):
        hold(table, extent)
    table.seal(extent.id)
    assert hold(table, extent) == extent


def test_an_aborted_object_leaves_no_trace(table: ObjectTable) -> None:
    extent = table.create(100, REQUEST)
    table.abort(extent.id)
    assert table.usage().used == 0 and not table.requests()
    with pytest.raises(ObjectLost, match=extent.id):
        table.seal(extent.id)


def test_a_sealed_object_is_neither_sealed_again_nor_aborted(table: ObjectTable) -> None:
    extent = table.create(100, REQUEST)
    table.seal(extent.id)
    with pytest.raises(ProtocolError, match="is sealed: it cannot become sealed"):
        table.seal(extent.id)


def test_a_deleted_object_keeps_its_bytes_for_every_holder(table: ObjectTable) -> None:
    extent = table.create(100, REQUEST)
    table.seal(extent.id)
    hold(table, extent)
    hold(table, extent)
    table.delete(extent.id)
    table.unhold(extent.id)
    assert table.usage().used == 4096
    table.unhold(extent.id)
    assert table.usage().used == 0


def test_an_object_released_while_it_is_written_keeps_its_bytes_until_its_writer_lets_go(table: ObjectTable) -> None:
    sealed, aborted = table.create(100, REQUEST), table.create(100, REQUEST)
    table.release(REQUEST)
    assert table.usage().used == 2 * 4096 and not table.requests()
    with pytest.raises(ObjectLost, match="its request is over"):
        table.seal(sealed.id)
    assert table.usage().used == 4096
    table.abort(aborted.id)
    assert table.usage().used == 0


def test_a_new_object_in_the_same_place_has_another_generation(table: ObjectTable) -> None:
    first = table.create(8 * 4096, REQUEST)
    table.seal(first.id)
    table.delete(first.id)
    second = table.create(8 * 4096, REQUEST)
    table.seal(second.id)
    assert second.offset == first.offset and second.generation != first.generation
    with pytest.raises(ObjectLost):
        table.hold(second.id, second.key, first.generation, second.nbytes)


@pytest.mark.parametrize("wrong", ["id", "key", "generation", "nbytes"])
def test_a_hold_needs_all_that_the_ref_says(table: ObjectTable, wrong: str) -> None:
    extent = table.create(100, REQUEST)
    table.seal(extent.id)
    said = {"id": extent.id, "key": extent.key, "generation": extent.generation, "nbytes": extent.nbytes}
    said[wrong] = {"id": "f" * 32, "key": bytes(16), "generation": 99, "nbytes": 101}[wrong]
    with pytest.raises(ObjectLost) as lost:
        table.hold(**said)  # type: ignore[arg-type]
    assert lost.value.object_id == said["id"]
    table.delete(extent.id)
    assert table.usage().used == 0


def test_release_and_requests_go_by_request(table: ObjectTable) -> None:
    mine, other = table.create(1, REQUEST), table.create(1, "req_other")
    table.seal(mine.id)
    assert table.requests() == {REQUEST, "req_other"}
    table.release(REQUEST)
    assert table.requests() == {"req_other"}
    table.abort(other.id)
    assert table.usage().used == 0


def test_a_full_space_changes_nothing(table: ObjectTable) -> None:
    with pytest.raises(ArenaFull, match="start the worker with a larger --arena"):
        table.create(9 * 4096, REQUEST)
    assert not table.requests()
