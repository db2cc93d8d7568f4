"""What goes wrong beside a transition changes nothing of it, and ends no loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.scheduler.model import DECODE, DENOISE, ENCODE, SHARING, params
from tests.scheduler.test_encoder_cache import WORKER, done
from tests.scheduler.test_scheduler import info, take
from tools.asking import asking
from unfuse.core.messages import (
    Accepted,
    Heartbeat,
    HeartbeatReply,
    LeasesGranted,
    Register,
    RequestTasks,
    StorageLocations,
    TaskFailed,
    TransferStats,
)
from unfuse.queues.memory import MemoryQueue
from unfuse.scheduler.dispatcher import Dispatcher
from unfuse.scheduler.maintenance import REVIEW_S
from unfuse.scheduler.observer import Observer
from unfuse.scheduler.scheduler import Scheduler
from unfuse.testing.clock import ManualClock
from unfuse.testing.virtual_time import VirtualClock, in_virtual_time

PEER = b"peer"


class Failing(Observer):
    """Fails at whatever it hears."""

    def __getattribute__(self, name: str) -> Any:
        return fails


def fails(*args: object, **more: object) -> None:
    raise OSError(28, "No space left on device")


async def fails_later(*args: object, **more: object) -> None:
    fails()


def failing(monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
    """A dispatcher and scheduler, of which nothing works that comes after a commit."""
    clock = ManualClock()
    scheduler = Scheduler(MemoryQueue(clock), specs=[SHARING], clock=clock, cache_bytes=1 << 20)
    scheduler.observers.add(Failing())
    for part, name, how in (
        (scheduler._transitions.output_sizes, "learn", fails),
        (scheduler._costs, "learn", fails),
        (scheduler._costs, "on_ended", fails),
        (scheduler._cache, "add", fails_later),
        (scheduler._cache, "evict_lost", fails_later),
    ):
        monkeypatch.setattr(part, name, how)
    return Dispatcher(scheduler, (), StorageLocations(""))


async def test_failures_after_a_commit_do_not_fail_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given that nothing works which comes after a commit, when a request is submitted, a lost input reported, every
    stage completed and another request cancelled, then each call says that it worked; each cause is told once."""
    dispatcher = failing(monkeypatch)
    scheduler = dispatcher.scheduler
    with capture_logs() as logs:
        await dispatcher.answer(PEER, Register(info(WORKER, ENCODE, DENOISE, DECODE), (SHARING,)))
        record = await scheduler.submit(*asking(SHARING, params()))
        other = await scheduler.submit(*asking(SHARING, params(), cache=False, priority=-1))
        for kind in ("text_encode", "denoise", "again", "denoise", "vae_decode"):
            granted = await dispatcher.answer(PEER, RequestTasks(1, None, 0.0))
            assert isinstance(granted, LeasesGranted)
            (lease,) = granted.leases
            if kind == "denoise" and lease.task.attempt == 1:
                lost = TaskFailed(lease.claim, "object_lost", "gone", object_id=lease.task.inputs[0].id)
                assert await dispatcher.answer(PEER, lost) == Accepted()
            else:
                assert await dispatcher.answer(PEER, done(lease)) == Accepted()
        assert (await scheduler.cancel(other.context.id)).context.status == "cancelled"
        pulse = await dispatcher.answer(PEER, Heartbeat(transfers={"tcp": TransferStats(1, 1.0)}))
        await scheduler.close()
    assert (await scheduler.queue.load(record.context.id)).context.status == "completed"
    assert isinstance(pulse, HeartbeatReply)
    assert {line["doing"] for line in logs if line["log_level"] == "error"} == {
        "learning the size of an output",
        "caching an output",
        "removing a lost output from the cache",
        "notifying Costs of on_ended",
        *(
            f"notifying Failing of {what}"
            for what in ("on_announced", "on_submitted", "on_cache_lookup", "on_dispatched", "on_ended", "on_transfer")
        ),
    }
    assert len([line for line in logs if line.get("doing") == "notifying Failing of on_submitted"]) == 1


@pytest.mark.parametrize("part", ["add_resume_data", "owners"])
async def test_lease_that_cannot_be_granted_is_requeued_uncharged(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a lease whose worker cannot be told of it, then the task is back in its place, and nothing is charged."""
    clock = ManualClock()
    dispatcher = Dispatcher(Scheduler(MemoryQueue(clock), specs=[SHARING], clock=clock), (), StorageLocations(""))
    await dispatcher.answer(PEER, Register(info(WORKER, ENCODE), (SHARING,)))
    record = await dispatcher.scheduler.submit(*asking(SHARING, params()))
    with monkeypatch.context() as patch:
        patch.setattr(
            dispatcher.scheduler if part == "add_resume_data" else dispatcher.scheduler.registry, part, fails_later
        )
        with pytest.raises(OSError, match="No space"):
            await dispatcher.answer(PEER, RequestTasks(1, None, 0.0))
    granted = await dispatcher.answer(PEER, RequestTasks(1, None, 0.0))
    assert isinstance(granted, LeasesGranted)
    assert [lease.task.key for lease in granted.leases] == [(record.context.id, "text_encode")]
    await dispatcher.scheduler.close()


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("queue", "sweep_expired"),
        ("queue", "workers"),
        ("queue", "list"),
        ("queue", "now"),
        ("_costs", "update_models"),
        ("_costs", "learn"),
    ],
)
@in_virtual_time
async def test_scheduler_loops_continue_after_an_unexpected_error(
    part: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given something that fails once, as nobody has foreseen, then each loop comes round again, and does all of it."""
    clock = VirtualClock()
    scheduler = Scheduler(MemoryQueue(clock), specs=[SHARING], clock=clock)
    scheduler.queue.shared = True  # so that it learns in every round
    await scheduler.submit(*asking(SHARING, params()))
    while leases := await take(scheduler):
        await scheduler.complete(done(leases[0]), WORKER)
    seen: list[str] = []
    for place, asked in (
        ("queue", "sweep_expired"),
        ("queue", "workers"),
        ("queue", "list"),
        ("_costs", "update_models"),
    ):
        monkeypatch.setattr(getattr(scheduler, place), asked, noting(getattr(getattr(scheduler, place), asked), seen))
    whole, errors = getattr(getattr(scheduler, part), name), [OSError(5, "Input/output error")]

    def once(*args: Any, **more: Any) -> Any:
        if errors:
            raise errors.pop()
        return whole(*args, **more)

    monkeypatch.setattr(getattr(scheduler, part), name, once)
    with capture_logs():
        await scheduler.start()
        await asyncio.sleep(2 * REVIEW_S)
        assert not errors
        seen.clear()
        await asyncio.sleep(2 * REVIEW_S)
        assert {"sweep_expired", "workers", "list", "update_models"} <= set(seen)
        await scheduler.close()


def noting(whole: Callable[..., Any], seen: list[str]) -> Callable[..., Any]:
    def noted(*args: Any, **more: Any) -> Any:
        seen.append(whole.__name__)
        return whole(*args, **more)

    return noted
