"""Rules of the queue port about lists: whatever is asked, the answer is what looking through everything would find."""

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
    count_waiting,
    done,
    raised,
    request,
    submitted,
    task,
    wanted,
)

TENANTS = (None, "t", "nobody")
ASKED: dict[str, tuple[Any, ...]] = {
    "over": (True, False),
    "idempotency_key": ("", "kk", "kkk"),
    "fingerprint": ("x", "w"),
    "status": tuple(REQUEST_MOVES),
    "dead": (True, False),
    "video": (True, False),
    "unheard": (True, False),
}
"""What is asked of each field, within each tenant."""


async def every_filter_finds_what_there_is(queue: QueueBackend, clock: ManualClock) -> None:
    """Alone and within a tenant, in both orders, in any pages, while requests run, end, are looked at and are gone."""
    fields: dict[str, Any]
    for number, name in enumerate(("a", "video_b", "c", "video_d", "e", "video_f", "g", "h")):
        fields = {"tenant": "tu"[number // 2 % 2], "fingerprint": "xyz"[number % 3], "idempotency_key": "k" * number}
        fields |= {"webhook": "http://h"} if name in "ceg" else {}
        await queue.submit(request(name, **fields), [task(name)], [], LIMITS)
    await check_lists(queue)
    leases = await queue.lease("w", wanted("p", slots=4), TTL)
    await check_lists(queue)
    await queue.commit(done(await queue.load("a"), leases[0], push=(task("a", "t"),)))
    await queue.hand_back(leases[1].claim)
    await check_lists(queue)
    for name, status, dead in (("c", "failed", True), ("video_d", "cancelled", False), ("e", "completed", False)):
        await queue.commit(change(await queue.load(name), status=status, dead=dead, completed_at=5.0))
    await check_lists(queue)
    heard = WebhookDelivery("heard", attempts=1)
    await queue.commit(change(await queue.load("c"), dead=False, webhook=heard))
    await queue.drop("e")
    await check_lists(queue)
    await queue.forget(6.0)
    await check_lists(queue)
    assert {one.context.id for one in await queue.list(RequestFilter())} == {"a", "video_b", "video_f", "g", "h"}


async def a_status_is_the_one_that_is_shown(queue: QueueBackend, clock: ManualClock) -> None:
    """What runs is in progress, from its lease on; handed back it is queued again."""
    record = await submitted(queue, "a")
    assert (record.status, await _ids(queue, RequestFilter(status="queued"))) == ("queued", ["a"])
    (lease,) = await queue.lease("w", wanted("p"), TTL)
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


async def a_page_begins_behind_what_its_tenant_has(queue: QueueBackend, clock: ManualClock) -> None:
    """Behind any request of the tenant, asked for or not. What is another's, gone, or never was is unknown."""
    for name, tenant in (("a", "t"), ("b", "u"), ("g", "t"), ("c", "t")):
        await queue.submit(request(name, tenant=tenant), [], [], LIMITS)
    for name in ("c", "g"):
        await queue.commit(change(await queue.load(name), status="failed"))
    await queue.drop("g")
    assert await _ids(queue, RequestFilter(tenant="t", over=False), after="c") == ["a"]
    assert await _ids(queue, RequestFilter(), after="b") == ["a"]
    for which in (
        RequestFilter(tenant="t"),
        RequestFilter(tenant="t", status="queued"),
        RequestFilter(tenant="nobody"),
    ):
        for oldest_first in (False, True):
            refused = [queue.list(which, after=name, oldest_first=oldest_first) for name in "bgn"]
            told = [str(await raised(NotFound, one)) for one in refused]
            assert told == [told[0].replace(" b", f" {name}") for name in "bgn"]


async def of_simultaneous_repeats_one_is_stored(queue: QueueBackend, clock: ManualClock) -> None:
    """Submitted at the same time under one key, all are answered with the same request, which alone is queued."""
    same = (queue.submit(request(n, tenant="t", idempotency_key="k"), [task(n)], [], LIMITS) for n in "abcdefgh")
    assert len({record.context.id for record in await asyncio.gather(*same)}) == 1
    assert (len(await queue.list(RequestFilter())), await count_waiting(queue, "p")) == (1, 1)


async def check_lists(queue: QueueBackend) -> None:
    """Compare what each filter finds with what looking through everything does."""
    everything = await queue.list(RequestFilter())
    filters = [RequestFilter(tenant=tenant) for tenant in TENANTS]
    filters += [RequestFilter(tenant=t, **{name: value}) for t in TENANTS for name in ASKED for value in ASKED[name]]
    filters += [
        RequestFilter(tenant="t", status="queued", video=True),
        RequestFilter(over=True, dead=False, fingerprint="z"),
    ]
    await asyncio.gather(*(_check_list(queue, which, everything) for which in filters))


async def _check_list(queue: QueueBackend, which: RequestFilter, everything: list[RequestRecord]) -> None:
    found = [record for record in everything if _is_asked_for(record, which)]
    assert await queue.list(which) == found, which
    assert await queue.list(which, oldest_first=True) == found[::-1], which
    for at, record in enumerate(found[:2]):
        pages = [await queue.list(which, after=record.context.id, limit=2, oldest_first=o) for o in (False, True)]
        assert pages == [found[at + 1 : at + 3], found[:at][::-1][:2]], which


def _is_asked_for(record: RequestRecord, which: RequestFilter) -> bool:
    has = {name: read(record.context) for name, read in INDEXED_FIELDS.items()} | {"status": record.status}
    return all(has[name] == value for name, value in which.asked().items())


async def _ids(queue: QueueBackend, which: RequestFilter, after: str | None = None) -> list[str]:
    return [record.context.id for record in await queue.list(which, after=after)]


LIST_RULES = (
    every_filter_finds_what_there_is,
    a_status_is_the_one_that_is_shown,
    a_page_begins_behind_what_its_tenant_has,
    of_simultaneous_repeats_one_is_stored,
)
