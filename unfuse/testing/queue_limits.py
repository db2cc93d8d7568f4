"""Rules of the queue port about tenant limits: concurrent requests and rates."""

from __future__ import annotations

import asyncio

from unfuse.core.errors import LimitReached, Overloaded
from unfuse.core.request import RequestRecord, TenantLimits
from unfuse.queues.base import QueueBackend, QueueLimits
from unfuse.testing.clock import ManualClock
from unfuse.testing.queue_samples import change, completion, count_waiting, expect_error, lease_next, request, task

TWO = TenantLimits(concurrent=2)
THREE_A_MINUTE = TenantLimits(rate=3, per_s=60)


async def _submit(
    queue: QueueBackend, name: str, allowance: TenantLimits, tenant: str = "t", **fields: str
) -> RequestRecord:
    limits = QueueLimits(max_active=1000, tenant=allowance)
    return await queue.submit(request(name, tenant=tenant, **fields), [task(name)], [], limits)


async def concurrent_requests_of_a_tenant_are_limited(queue: QueueBackend, clock: ManualClock) -> None:
    """A request beyond `concurrent` is refused, with nothing stored, until another is over.

    Requests of other tenants neither count nor are refused.
    """
    await _submit(queue, "a", TWO)
    record = await _submit(queue, "b", TWO)
    await _submit(queue, "other", TWO, "u")
    for _ in range(2):
        refused = await expect_error(LimitReached, _submit(queue, "c", TWO))
        assert "2 requests in progress" in str(refused) and not refused.retry_after
    await _submit(queue, "more", TWO, "u")
    lease = await lease_next(queue)
    await queue.hand_back(lease.claim)
    await expect_error(LimitReached, _submit(queue, "c", TWO))
    await queue.commit(change(record, status="cancelled", completed_at=1.0))
    assert await count_waiting(queue, "p") == 3
    await _submit(queue, "c", TWO)
    await expect_error(LimitReached, _submit(queue, "d", TWO))
    await queue.drop("b")
    await expect_error(LimitReached, _submit(queue, "d", TWO))


async def a_repeated_commit_changes_a_tenant_s_count_once(queue: QueueBackend, clock: ManualClock) -> None:
    """A repeated terminal commit, or a repeated submit, does not change the count again."""
    record = await _submit(queue, "a", TWO)
    ending = completion(record, await lease_next(queue), status="completed", completed_at=1.0)
    await _submit(queue, "b", TWO, idempotency_key="k")
    assert (await _submit(queue, "again", TWO, idempotency_key="k")).context.id == "b"
    assert (await _submit(queue, "b", TWO)).context.id == "b"
    await queue.commit(ending)
    await queue.commit(ending)
    await _submit(queue, "c", TWO)
    await expect_error(LimitReached, _submit(queue, "d", TWO))


async def concurrent_submits_respect_a_tenant_s_limit(queue: QueueBackend, clock: ManualClock) -> None:
    """The limit holds for concurrent submits: of twenty, exactly two are accepted."""
    tries = (_submit(queue, str(number), TWO) for number in range(20))
    answers = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(isinstance(answer, RequestRecord) for answer in answers) == 2
    assert sum(isinstance(answer, LimitReached) for answer in answers) == 18


async def a_rate_limit_refills_with_time(queue: QueueBackend, clock: ManualClock) -> None:
    """A rate of 3 a minute allows three requests, then one every 20 s.

    The error of an early request has the seconds to wait. Refused and repeated requests do not count, and ended
    requests give nothing back.
    """
    for name in "abc":
        record = await _submit(queue, name, THREE_A_MINUTE)
    await queue.commit(change(record, status="cancelled", completed_at=1.0))
    assert (await _submit(queue, "a", THREE_A_MINUTE)).context.id == "a"
    for passed in (0.0, 5.0):
        clock.advance(passed)
        refused = await expect_error(LimitReached, _submit(queue, "d", THREE_A_MINUTE))
        assert abs(refused.retry_after - (20.0 - passed)) < 0.001
        assert f"3 requests in 60 s: try again in {20 - int(passed)} s" in str(refused)
    await _submit(queue, "u", THREE_A_MINUTE, "u")
    clock.advance(15.0)
    await _submit(queue, "d", THREE_A_MINUTE)
    await expect_error(LimitReached, _submit(queue, "e", THREE_A_MINUTE))
    clock.advance(600.0)
    for name in "efg":
        await _submit(queue, name, THREE_A_MINUTE)
    await expect_error(LimitReached, _submit(queue, "h", THREE_A_MINUTE))


async def a_request_refused_by_the_queue_uses_no_rate(queue: QueueBackend, clock: ManualClock) -> None:
    """A request refused by a queue limit uses none of its tenant's rate."""
    once = TenantLimits(rate=1, per_s=60)
    await queue.submit(request("a"), [task("a")], [], QueueLimits())
    full = await expect_error(
        Overloaded, queue.submit(request("b", tenant="t"), [task("b")], [], QueueLimits(1, tenant=once))
    )
    assert not isinstance(full, LimitReached)
    await _submit(queue, "b", once)
    await expect_error(LimitReached, _submit(queue, "c", once))


LIMIT_RULES = (
    concurrent_requests_of_a_tenant_are_limited,
    a_repeated_commit_changes_a_tenant_s_count_once,
    concurrent_submits_respect_a_tenant_s_limit,
    a_rate_limit_refills_with_time,
    a_request_refused_by_the_queue_uses_no_rate,
)
