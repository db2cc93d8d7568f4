"""What a worker may take beside the tasks that it holds."""

from __future__ import annotations

from typing import Any

from tests.worker.refs import ref
from unfuse.core.object_ref import CHUNK_BYTES
from unfuse.core.task import Claim, Lease
from unfuse.testing.queue_samples import task_of
from unfuse.worker.link import WITHDRAW, Holding

WHOLE = ref(CHUNK_BYTES * 2, 1, 2)
WRITTEN = ref(CHUNK_BYTES * 2, 1)


def lease(name: str, **more: Any) -> Lease:
    return Lease(task_of("req_a", name, 1, "pool", "decode", "m", {}, **more), "w", name.encode(), 0.0)


def holding(*leases: Lease, slots: int = 2, **resources: int) -> Holding:
    held = Holding(slots, resources)
    for one in leases:
        held.take(one)
    return held


def test_a_task_whose_input_is_not_whole_takes_its_share_and_no_slot_until_it_is() -> None:
    """Given two slots and room for ten tokens, when tasks come whose inputs are still written, then the worker asks on
    for both slots, with what room is left; and for one fewer as soon as one has arrived."""
    waits = [lease(name, inputs=(WRITTEN,), needs={"kv": 3}) for name in "abc"]
    held = holding(*waits, slots=2, kv=10)
    assert held.arriving == 3
    assert (held.ask(None, "").slots, held.ask(None, "").above, held.ask(None, "").amounts) == (2, None, {"kv": 1})
    held.arrived(waits[0].claim)
    assert (held.ask(None, "").slots, held.arriving) == (1, 2)
    held.arrived(waits[1].claim)
    assert (held.ask(None, "").slots, held.ask(None, "").above) == (1, 0)  # only for a more urgent one
    assert held.end(waits[2].claim) is waits[2] and held.end(waits[2].claim) is None
    assert held.ask(None, "").amounts == {"kv": 4} and held.arriving == 0


def test_a_task_takes_a_slot_at_once_where_its_input_is_whole_or_nothing_else_bounds_it() -> None:
    assert holding(lease("a", inputs=(WHOLE,), needs={"kv": 3}), kv=10).ask(None, "").slots == 1
    assert holding(lease("a", inputs=(WRITTEN,))).ask(None, "").slots == 1


def test_before_other_weights_are_loaded_one_task_is_asked_for_each_that_has_ended() -> None:
    ask = holding(lease("a"), slots=4).ask(None, "", "first", "pool")
    assert (ask.slots, ask.holds, ask.after) == (1, "first", "pool")
    assert holding(lease("a"), slots=4).ask(None, "", "first").slots == 3


def test_nothing_is_asked_for_beside_a_task_that_runs_alone_and_room_is_what_others_will_not_take() -> None:
    assert holding(lease("a", alone=True)).ask(None, "") is WITHDRAW
    held = holding(lease("a", room=30))
    assert (held.room(100, 5), held.room(20, 5), held.room(None, 5)) == (70, 0, None)
    held.placed(lease("a").claim)
    held.placed(lease("other").claim)
    assert held.room(70, 35) == 70  # it is not counted twice
    assert holding().room(100, 0) is None
    assert held.end(Claim("req_a", "other", 1, b"")) is None
