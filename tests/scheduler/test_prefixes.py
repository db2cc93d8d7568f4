"""What a stage makes on the way serves requests that begin alike: who finds it, and what may go wrong then."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest

from tests.scheduler.model import CARD, DECODE, DENOISE, ENCODE, PIPELINE, params
from tests.scheduler.test_scheduler import done, info
from tools.asking import asking
from unfuse.core.errors import LeaseLost
from unfuse.core.messages import CachePrefix
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import Pipeline, prefix_key
from unfuse.core.task import Lease
from unfuse.queues.memory import MemoryQueue
from unfuse.scheduler.scheduler import Scheduler
from unfuse.testing.clock import ManualClock
from unfuse.testing.queue_samples import lease_request, object_ref

GOES_ON = msgspec.structs.replace(
    CARD,
    pipeline=Pipeline(
        (
            msgspec.structs.replace(PIPELINE.stages[0], prefix_cached=True),
            msgspec.structs.replace(PIPELINE.stages[1], extends_prefix_of="embeds"),
            *PIPELINE.stages[2:],
        )
    ),
)
ONE, TWO, ROOM = "worker-1", "worker-2", 100


@asynccontextmanager
async def scheduling(room: int = ROOM) -> AsyncIterator[Scheduler]:
    clock = ManualClock()
    scheduler = Scheduler(MemoryQueue(clock), specs=[GOES_ON], clock=clock, cache_bytes=room)
    for worker in (ONE, TWO):
        await scheduler.queue.register(info(worker, ENCODE, DENOISE, DECODE), [GOES_ON])
    try:
        yield scheduler
    finally:
        await scheduler.close()


async def leased(
    scheduler: Scheduler, begins: Sequence[str], worker: str = ONE, tenant: str = "default", cache: bool = True
) -> Lease:
    """The lease of the encoder of a new request that begins so."""
    await scheduler.submit(*asking(GOES_ON, params(), prefixes=begins, cache=cache, tenant=tenant))
    (lease,) = await scheduler.queue.lease(worker, lease_request(ENCODE), scheduler.lease_ttl)
    return await scheduler.add_resume_data(lease)


def made(id: str, worker: str = ONE, nbytes: int = 10) -> ObjectRef:
    return msgspec.structs.replace(object_ref(id, nbytes), owner=worker)


async def extending(scheduler: Scheduler, begins: Sequence[str], tenant: str = "default", cache: bool = True) -> Lease:
    """The lease of the stage that goes on behind the encoder of a new request."""
    encode = await leased(scheduler, begins, ONE, tenant, cache)
    await scheduler.complete(done(encode), ONE)
    (lease,) = await scheduler.queue.lease(ONE, lease_request(DENOISE), scheduler.lease_ttl)
    return await scheduler.add_resume_data(lease)


def added(lease: Lease, digest: str, ref: ObjectRef) -> CachePrefix:
    """What a stage says of a portion that it adds."""
    return CachePrefix(lease.claim, prefix_key(lease.task.planned.extends_prefix_of, digest), ref, digest)


async def keep(scheduler: Scheduler, lease: Lease, number: int, ref: ObjectRef) -> None:
    await scheduler.cache_prefix(CachePrefix(lease.claim, lease.task.planned.prefixes[number], ref), lease.worker)


async def test_requests_with_a_common_prefix_reuse_its_cached_blocks() -> None:
    """Given two of three portions that a task has kept, when others begin with one, two and all of them alike, and
    one otherwise, then each finds those that it has in common, on whichever worker it runs."""
    async with scheduling() as scheduler:
        first = await leased(scheduler, ["a", "ab", "abc"])
        assert first.prefix == ()
        kept = [made("x"), made("y")]
        for number, ref in enumerate(kept):
            await keep(scheduler, first, number, ref)
        assert (await leased(scheduler, ["a"])).prefix == (kept[0],)
        lease = await leased(scheduler, ["a", "ab", "abd"], TWO)
        assert lease.prefix == tuple(kept)
        assert lease.input_objects == tuple(kept)
        assert (await leased(scheduler, ["a", "ac"])).prefix == (kept[0],)
        assert (await leased(scheduler, ["b"])).prefix == ()


async def test_prefix_block_behind_a_gap_is_not_used() -> None:
    async with scheduling() as scheduler:
        first = await leased(scheduler, ["a", "ab"])
        await keep(scheduler, first, 1, made("y"))
        assert (await leased(scheduler, ["a", "ab"])).prefix == ()
        await keep(scheduler, first, 0, made("x"))
        assert [ref.id for ref in (await leased(scheduler, ["a", "ab"])).prefix] == ["x", "y"]


async def test_prefixes_are_not_shared_across_tenants_or_with_cache_disabled() -> None:
    async with scheduling() as scheduler:
        await keep(scheduler, await leased(scheduler, ["a"]), 0, made("x"))
        assert (await leased(scheduler, ["a"], tenant="another")).prefix == ()
        alone = await leased(scheduler, ["a"], cache=False)
        assert (alone.task.planned.prefixes, alone.prefix) == ((), ())


async def test_prefix_cache_is_bounded_and_evicts_the_least_recently_used() -> None:
    async with scheduling(0) as scheduler:
        assert (await leased(scheduler, ["a"])).task.planned.prefixes == ()
    async with scheduling() as scheduler:
        lease = await leased(scheduler, ["a", "ab", "abc"])
        for number, nbytes in enumerate((40, 40, 40)):
            await keep(scheduler, lease, number, made(f"p{number}", nbytes=nbytes))
        assert await scheduler.queue.cached_bytes() <= ROOM
        await keep(scheduler, lease, 0, made("p0", nbytes=40))
        assert [ref.id for ref in (await leased(scheduler, ["a", "ab"])).prefix][:1] == ["p0"]


async def test_prefix_blocks_of_an_unregistered_worker_are_skipped() -> None:
    async with scheduling() as scheduler:
        lease = await leased(scheduler, ["a", "ab"])
        await keep(scheduler, lease, 0, made("x"))
        await keep(scheduler, lease, 1, msgspec.structs.replace(made("y")))
        await scheduler.queue.unregister(ONE)
        assert (await leased(scheduler, ["a", "ab"], TWO)).prefix == ()


async def test_caching_a_prefix_without_the_lease_raises_lease_lost() -> None:
    """Given a lease, when another worker, or under a key of its own, or with an object of another one, keeps something,
    then that is refused and nobody finds it."""
    async with scheduling() as scheduler:
        lease = await leased(scheduler, ["a"])
        key = lease.task.planned.prefixes[0]
        for worker, message in (
            (TWO, CachePrefix(lease.claim, key, made("x", TWO))),
            (ONE, CachePrefix(lease.claim, "another", made("x"))),
            (ONE, CachePrefix(lease.claim, key, made("x", TWO))),
        ):
            with pytest.raises(LeaseLost):
                await scheduler.cache_prefix(message, worker)
        assert (await leased(scheduler, ["a"])).prefix == ()


async def test_prefix_block_added_by_a_later_stage_is_reused() -> None:
    """Given a portion of the encoder and one that the stage behind it adds, when others begin with both, then they find
    both, and other tenants, or who shares nothing, neither."""
    async with scheduling() as scheduler:
        lease = await extending(scheduler, ["a"])
        first = await leased(scheduler, ["a"])
        await keep(scheduler, first, 0, made("x"))
        await scheduler.cache_prefix(added(lease, "ab", made("y")), ONE)
        assert [ref.id for ref in (await leased(scheduler, ["a", "ab", "abc"], TWO)).prefix] == ["x", "y"]
        assert [ref.id for ref in (await leased(scheduler, ["a", "ac"], TWO)).prefix] == ["x"]
        assert (await leased(scheduler, ["a", "ab"], tenant="another")).prefix == ()
        assert (await leased(scheduler, ["a", "ab"], cache=False)).prefix == ()
        assert (await extending(scheduler, ["b"], cache=False)).task.planned.extends_prefix_of == ""


async def test_stage_can_add_prefix_blocks_only_for_its_own_running_request() -> None:
    """Given a running stage, when something is kept under another tenant's key, under one of another digest, without a
    digest, by another worker, or once the stage has ended, then that is refused, and nobody finds it."""
    async with scheduling() as scheduler:
        lease, other = await extending(scheduler, ["a"]), await extending(scheduler, ["a"], "another")
        right = added(lease, "ab", made("y"))
        theirs = prefix_key(other.task.planned.extends_prefix_of, "ab")
        for worker, message in (
            (ONE, msgspec.structs.replace(right, key=theirs)),
            (ONE, msgspec.structs.replace(right, digest="ac")),
            (ONE, msgspec.structs.replace(right, digest="")),
            (ONE, msgspec.structs.replace(right, output=made("y", TWO))),
            (TWO, right),
        ):
            with pytest.raises(LeaseLost):
                await scheduler.cache_prefix(message, worker)
        await scheduler.complete(done(lease), ONE)
        with pytest.raises(LeaseLost):
            await scheduler.cache_prefix(right, ONE)
        await scheduler.cancel(other.task.request)
        with pytest.raises(LeaseLost):
            await scheduler.cache_prefix(added(other, "ab", made("y")), ONE)
        assert await scheduler.queue.find_encoding([right.key, theirs]) == {}
