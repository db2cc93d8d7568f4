"""The rules by themselves: without an event loop, and what they tell those who wait and write."""

from unfuse.core.event import Event
from unfuse.core.request import Change, Record
from unfuse.queues.base import Filter
from unfuse.queues.index import Entry
from unfuse.queues.memory import MemoryQueue
from unfuse.queues.sqlite import SqliteQueue
from unfuse.queues.state import QueueState
from unfuse.testing import ManualClock
from unfuse.testing.queue_samples import LIMITS, TTL, change, request, task, wanted


def filled(state: QueueState) -> Record:
    """A request of three tasks: one that is leased first, one beside it, and one of later."""
    tasks = [task("a"), task("a", "t", pool="q"), task("a", "u", pool="r", not_before=1_005.0)]
    return state.record(state.submit(request("a"), tasks, [Event("queued")], LIMITS))


def test_a_request_lives_without_an_event_loop() -> None:
    """Submitted, leased, handed back, ripened, ended and dropped, by plain calls."""
    clock = ManualClock()
    state = QueueState(clock)
    record = filled(state)
    (lease,) = state.claim("w", wanted("p"), TTL)
    assert state.hand_back(lease.claim)
    assert state.pool_queues.front("r", 9) == []
    assert state.pool_queues.next_due() == 1_005.0
    clock.advance(5)
    state.release_due(clock.now())
    assert [rank[3].stage for rank in state.pool_queues.front("r", 9)] == ["u"]
    assert state.pool_queues.next_due() is None
    state.commit(change(record, status="cancelled", completed_at=1.0))
    assert (state.pool_queues.size("p"), state.list(Filter(over=False), None, 9, False)) == (0, [])
    assert state.drop("a") and state.requests == {}


def test_what_changes_is_told_to_who_waits_and_to_who_writes() -> None:
    """The pools that somebody may take from, and the request, once for each change; progress is nobody's to write."""
    clock, written = ManualClock(), list[Entry]()
    state = QueueState(clock, written.append)
    record = filled(state)
    assert (set(state.changed_pools), len(written)) == ({"p", "q", "r"}, 1)
    state.changed_pools.clear()
    (lease,) = state.claim("w", wanted("p"), TTL)
    assert state.progress(lease.claim, [Event("progress", step=1, steps=2)])
    assert (set(state.changed_pools), len(written)) == ({"p"}, 2)
    state.changed_pools.clear()
    clock.advance(5)
    state.release_due(clock.now())
    assert set(state.changed_pools) == {"r"}
    state.commit(Change(change(record).context, close=(("a", "t"),)))
    assert (set(state.changed_pools), len(written)) == ({"q", "r"}, 3)


def test_a_row_is_all_that_a_restart_needs() -> None:
    """Given a state that was restored from its rows, then it stands as the first one, and leases are still held."""
    state, heir = QueueState(ManualClock()), QueueState(ManualClock())
    filled(state)
    (lease,) = state.claim("w", wanted("p"), TTL)
    for entry in state.requests.values():
        row = state.row(entry)
        assert row
        assert heir.restore(entry.number, row, row.last) == [lease.claim]
    assert [heir.row(entry) for entry in heir.requests.values()] == [
        state.row(entry) for entry in state.requests.values()
    ]
    assert heir.leases.renew([lease.claim], TTL).held == (lease.claim,)
    numbers = [one.submit(request("b"), [], [], LIMITS).number for one in (heir, state)]
    assert numbers[0] == numbers[1]


def test_the_queues_of_one_process_hold_it_and_are_not_each_other() -> None:
    assert not issubclass(SqliteQueue, MemoryQueue)
    assert not issubclass(MemoryQueue, QueueState)
