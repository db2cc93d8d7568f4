"""Rules of the queue port about lists: every filter returns what a full scan would."""

from __future__ import annotations

import asyncio
from typing import Any

from unfuse.core.errors import NotFound
from unfuse.core.request import REQUEST_MOVES, RequestRecord, WebhookDelivery
from unfuse.queues.base import INDEXED_FIELDS, QueueBackend, RequestFilter
from unfuse.testing.clock import ManualClock
from unfuse.testing.queue_samples import (
    LIMITS,
    TTL,
    change,
    completion,
    count_waiting,
    expect_error,
    lease_request,
    request,
    submit,
    task,
)

TENANTS = (None, "t", "nobody")
#: The values by which each field is filtered, within each of TENANTS.
ASKED: dict[str, tuple[Any, ...]] = {
    "is_over": (True, False),
    "idempotency_key": ("", "kk", "kkk"),
    "fingerprint": ("x", "w"),
    "status": tuple(REQUEST_MOVES),
    "is_dead_letter": (True, False),
    "video": (True, False),
    "webhook_pending": (True, False),
}


async def filters_find_exactly_the_matching_requests(queue: QueueBackend, clock: ManualClock) -> None:
    """Every filter is right in both orders and any pages, through all changes of requests.

    Each is checked alone and within a tenant, while requests run, end, change after their end, and are dropped.
    """
    fields: dict[str, Any]
    for number, name in enumerate(("a", "video_b", "c", "video_d", "e", "video_f", "g", "h")):
        fields = {"tenant": "tu"[number // 2 % 2], "fingerprint": "xyz"[number % 3], "idempotency_key": "k" * number}
        fields |= {"webhook": "http://h"} if name in "ceg" else {}
        await queue.submit(request(name, **fields), [task(name)], [], LIMITS)
    await check_lists(queue)
    leases = await queue.lease("w", lease_request("p", slots=4), TTL)
    await check_lists(queue)
    await queue.commit(completion(await queue.load("a"), leases[0], push=(task("a", "t"),)))
    await queue.hand_back(leases[1].claim)
    await check_lists(queue)
    for name, status, dead in (("c", "failed", True), ("video_d", "cancelled", False), ("e", "completed", False)):
        await queue.commit(change(await queue.load(name), status=status, is_dead_letter=dead, completed_at=5.0))
    await check_lists(queue)
    delivered = WebhookDelivery("delivered", attempts=1)
    await queue.commit(change(await queue.load("c"), is_dead_letter=False, webhook=delivered))
    await queue.drop("e")
    await check_lists(queue)
    await queue.drop_ended_before(6.0)
    await check_lists(queue)
    assert {record.context.id for record in await queue.list(RequestFilter())} == {"a", "video_b", "video_f", "g", "h"}


async def a_status_filter_compares_the_displayed_status(queue: QueueBackend, clock: ManualClock) -> None:
    """A filter by status compares the displayed status: a leased request is in progress.

    After a hand-back it is queued again.
    """
    record = await submit(queue, "a")
    assert (record.status, await _ids(queue, RequestFilter(status="queued"))) == ("queued", ["a"])
    (lease,) = await queue.lease("w", lease_request("p"), TTL)
    assert (await queue.load("a")).status == "in_progress"
    assert (
        await _ids(queue, RequestFilter(status="queued")),
        await _ids(queue, RequestFilter(status="in_progress")),
    ) == ([], ["a"])
    await queue.hand_back(lease.claim)
    assert (
        await _ids(queue, RequestFilter(status="queued")),
        await _ids(queue, RequestFilter(status="in_progress")),
    ) == (["a"], [])


async def a_page_starts_after_any_request_of_the_tenant(queue: QueueBackend, clock: ManualClock) -> None:
    """A page may start after any request of the tenant, matching or not.

    A request of another tenant, a dropped one and an unknown one raise the same NotFound.
    """
    for name, tenant in (("a", "t"), ("b", "u"), ("g", "t"), ("c", "t")):
        await queue.submit(request(name, tenant=tenant), [], [], LIMITS)
    for name in ("c", "g"):
        await queue.commit(change(await queue.load(name), status="failed"))
    await queue.drop("g")
    assert await _ids(queue, RequestFilter(tenant="t", is_over=False), after="c") == ["a"]
    assert await _ids(queue, RequestFilter(), after="b") == ["a"]
    for which in (
        RequestFilter(tenant="t"),
        RequestFilter(tenant="t", status="queued"),
        RequestFilter(tenant="nobody"),
    ):
        for oldest_first in (False, True):
            refused = [queue.list(which, after=name, oldest_first=oldest_first) for name in "bgn"]
            messages = [str(await expect_error(NotFound, call)) for call in refused]
            assert messages == [messages[0].replace(" b", f" {name}") for name in "bgn"]


async def concurrent_repeats_store_one_request(queue: QueueBackend, clock: ManualClock) -> None:
    """Of concurrent submits with one idempotency key, one is stored, and all return its record."""
    same = (queue.submit(request(n, tenant="t", idempotency_key="k"), [task(n)], [], LIMITS) for n in "abcdefgh")
    assert len({record.context.id for record in await asyncio.gather(*same)}) == 1
    assert (len(await queue.list(RequestFilter())), await count_waiting(queue, "p")) == (1, 1)


async def check_lists(queue: QueueBackend) -> None:
    """Compare the result of each filter with a full scan."""
    everything = await queue.list(RequestFilter())
    filters = [RequestFilter(tenant=tenant) for tenant in TENANTS]
    filters += [RequestFilter(tenant=t, **{name: value}) for t in TENANTS for name in ASKED for value in ASKED[name]]
    filters += [
        RequestFilter(tenant="t", status="queued", video=True),
        RequestFilter(is_over=True, is_dead_letter=False, fingerprint="z"),
    ]
    await asyncio.gather(*(_check_list(queue, which, everything) for which in filters))


async def _check_list(queue: QueueBackend, which: RequestFilter, everything: list[RequestRecord]) -> None:
    expected = [record for record in everything if _matches(record, which)]
    assert await queue.list(which) == expected, which
    assert await queue.list(which, oldest_first=True) == expected[::-1], which
    for at, record in enumerate(expected[:2]):
        pages = [await queue.list(which, after=record.context.id, limit=2, oldest_first=o) for o in (False, True)]
        assert pages == [expected[at + 1 : at + 3], expected[:at][::-1][:2]], which


def _matches(record: RequestRecord, which: RequestFilter) -> bool:
    values = {name: read(record.context) for name, read in INDEXED_FIELDS.items()} | {"status": record.status}
    return all(values[name] == value for name, value in which.conditions().items())


async def _ids(queue: QueueBackend, which: RequestFilter, after: str | None = None) -> list[str]:
    return [record.context.id for record in await queue.list(which, after=after)]


LIST_RULES = (
    filters_find_exactly_the_matching_requests,
    a_status_filter_compares_the_displayed_status,
    a_page_starts_after_any_request_of_the_tenant,
    concurrent_repeats_store_one_request,
)
