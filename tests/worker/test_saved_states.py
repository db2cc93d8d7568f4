"""Which checkpoints are kept, whatever becomes of their tasks meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.core.graphs import object_for
from tools.addresses import a_worker, unix_address
from unfuse.core.messages import Accepted, Done, Failed, Keep, Refused, Saved
from unfuse.core.object_ref import ObjectRef
from unfuse.core.request import Timings
from unfuse.core.task import Claim, Lease
from unfuse.testing.queue_samples import task_of
from unfuse.worker.checkpoints import SavedStates
from unfuse.worker.link import Holding
from unfuse.worker.worker import Worker

CLAIM = Claim("req_1", "denoise.0", 1, b"token")


class Place:
    """Where checkpoints lie; making one durable takes until `written` is set."""

    def __init__(self) -> None:
        self.written, self.durable, self.gone = asyncio.Event(), list[str](), list[str]()
        self.shared: list[str] = []
        self.full = False
        self.written.set()

    def share(self, key: str, ref: ObjectRef) -> None:
        self.shared.append(key)

    async def save_copy(self, ref: ObjectRef, *, now: bool = False) -> bool:
        await self.written.wait()
        self.durable += [] if self.full else [ref.id]
        return not self.full

    def has_copy(self, ref: ObjectRef) -> bool:
        return ref.id in self.durable or ref.id == "from elsewhere"

    async def delete(self, ref: ObjectRef) -> None:
        self.gone.append(ref.id)


class Scheduler:
    """Answers with what it is told to; portions wait until `takes` is set."""

    def __init__(self) -> None:
        self.answer: Accepted | Refused = Accepted()
        self.saved: list[int] = []
        self.failed_after: list[list[int]] = []
        self.kept, self.done_after = list[Keep](), list[int]()
        self.takes = asyncio.Event()

    async def call(self, message: Saved | Failed | Keep | Done) -> Accepted | Refused:
        if isinstance(message, Failed):
            self.failed_after.append(list(self.saved))
        elif isinstance(message, Done):
            self.done_after.append(len(self.kept))
        elif isinstance(message, Keep):
            await self.takes.wait()
            self.kept.append(message)
        else:
            self.saved.append(message.step)
        return self.answer


def saving(before: str = "") -> tuple[SavedStates, Place, Scheduler]:
    """One whose task runs, perhaps from a checkpoint."""
    place, scheduler = Place(), Scheduler()
    made: Any = SavedStates(place, scheduler)  # type: ignore[arg-type]
    checkpoint = object_for(CLAIM, before) if before else None
    made.begin(Lease(task_of("req_1", "denoise.0", 1, "p", "denoise", "m", {}), "w", b"token", 0.0, checkpoint))
    return made, place, scheduler


def kept(step: int) -> Saved:
    return Saved(CLAIM, object_for(CLAIM, f"at {step}"), step)


async def test_the_one_before_is_given_up_once_the_new_one_is_recorded() -> None:
    made, place, scheduler = saving("from elsewhere")
    for step in (10, 20):
        await made.save(kept(step))
    assert (scheduler.saved, place.durable, place.gone) == ([10, 20], ["at 10", "at 20"], ["from elsewhere", "at 10"])


@pytest.mark.parametrize(("before", "recorded", "gone"), [("from elsewhere", [], ["at 10"]), ("", [10], [])])
async def test_one_that_cannot_be_copied_replaces_none_that_is(
    before: str, recorded: list[int], gone: list[str]
) -> None:
    """Given a full disk, then an older checkpoint on it is worth more than a newer one that ends with its worker."""
    made, place, scheduler = saving(before)
    place.full = True
    await made.save(kept(10))
    assert (scheduler.saved, place.gone) == (recorded, gone)


async def test_what_is_not_recorded_is_given_up_itself() -> None:
    made, place, scheduler = saving()
    await made.save(kept(10))
    scheduler.answer = Refused("not yours any more", lease_lost=True)
    await made.save(kept(20))
    assert place.gone == ["at 20"]


@pytest.mark.parametrize(("done", "gone"), [(True, ["at 10"]), (False, [])])
async def test_a_checkpoint_lasts_beyond_its_task_unless_that_is_done(done: bool, gone: list[str]) -> None:
    made, place, _ = saving()
    await made.save(kept(10))
    await made.end(CLAIM, done)
    assert place.gone == gone


async def test_one_that_is_recorded_after_its_task_failed_stays_for_the_next_attempt() -> None:
    """Given a slow durable place, when the task ends without being done before its checkpoint is there, then what the
    scheduler knows of is not given up; and who waits for it to be settled waits."""
    made, place, scheduler = saving()
    place.written.clear()
    keeping = asyncio.create_task(made.save(kept(10)))
    await asyncio.sleep(0)
    settled = asyncio.create_task(made.wait_until_saved())
    await asyncio.sleep(0)
    await made.end(CLAIM, done=False)
    assert not settled.done()
    place.written.set()
    await asyncio.gather(keeping, settled)
    assert (scheduler.saved, place.gone) == ([10], [])


def join(worker: Any, saved_states: SavedStates, link: Scheduler) -> None:
    """Have a worker serve, with a compute process that runs, and objects that stay."""
    worker._saved_states, worker._link = saved_states, link
    worker._executor = SimpleNamespace(ready=True)
    worker._objects = SimpleNamespace(end_task=lambda lease, message, read_here: message)
    worker._weights = SimpleNamespace(overwritten=lambda pool: None, changed=set())
    worker._served, worker._swapping = SimpleNamespace(read_here=()), SimpleNamespace(going="")
    worker._holding = Holding(1, {})
    worker._active = worker._holding.leases
    worker._wanted = lambda ended: None


async def test_a_failure_is_reported_once_the_checkpoint_before_it_is_recorded() -> None:
    """Else whoever tries again would begin at the checkpoint before."""
    made, place, scheduler = saving()
    place.written.clear()
    worker: Any = Worker(a_worker(unix_address()))
    await worker._link.close()
    join(worker, made, scheduler)
    await worker._hear(kept(10))
    await worker._hear(Failed(CLAIM, "crash", "gone"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert scheduler.failed_after == []
    place.written.set()
    await asyncio.gather(*worker._background._tasks)
    assert scheduler.failed_after == [[10]]


@pytest.mark.parametrize("answer", [Accepted(), Refused("not yours any more", lease_lost=True)])
async def test_the_end_of_a_text_is_reported_once_its_portions_are_recorded(answer: Accepted | Refused) -> None:
    """Given portions of an answer, when its task ends while the scheduler takes its time with them, then that waits for
    them, since none would be taken any more; what is not recorded is not held."""
    made, place, scheduler = saving()
    scheduler.answer = answer
    worker: Any = Worker(a_worker(unix_address()))
    await worker._link.close()
    join(worker, made, scheduler)
    worker._draining.set()
    task = task_of("req_1", "denoise.0", 1, "p", "denoise", "m", {}, final=True, extends="space")
    worker._holding.take(Lease(task, "w", b"token", 0.0))
    for key in ("a", "b"):
        await worker._hear(Keep(CLAIM, key, object_for(CLAIM, key), f"digest of {key}"))
    await worker._hear(Done(CLAIM, None, (), Timings()))
    for _ in range(5):
        await asyncio.sleep(0)
    assert scheduler.done_after == []
    scheduler.takes.set()
    await asyncio.gather(*worker._background._tasks)
    assert scheduler.done_after == [2]
    assert [(one.key, one.digest) for one in scheduler.kept] == [("a", "digest of a"), ("b", "digest of b")]
    assert place.shared == (["a", "b"] if isinstance(answer, Accepted) else [])
