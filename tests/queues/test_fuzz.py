"""What no queue stores, and what all of them do: the same on every backend, and none is broken by it."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings, strategies as st

from tests.queues.conftest import Server
from unfuse import queues
from unfuse.core.errors import NotFound, ProtocolError
from unfuse.core.request import Event
from unfuse.core.task import Claim
from unfuse.queues.base import MAX_SAFE_INTEGER, QueueBackend, RequestFilter
from unfuse.testing import ManualClock
from unfuse.testing.queue_samples import (
    LIMITS,
    TTL,
    change,
    completion,
    expect_error,
    lease_next,
    lease_request,
    request,
    submit,
    task,
)

names = st.text(max_size=40)
whole = st.integers(-(2**63), 2**64 - 1) | st.sampled_from(
    [0, 1, -1, MAX_SAFE_INTEGER, MAX_SAFE_INTEGER + 1, -MAX_SAFE_INTEGER, 2**63]
)
real = st.floats() | st.sampled_from([0.0, -0.0, 5e-324, 1e15, -1e15, float(MAX_SAFE_INTEGER)])
times = st.sampled_from([0.0, -1e15, 1e15, 1e300, float("nan"), float("inf"), -float("inf")])
parts = st.fixed_dictionaries(
    {"request": names, "stage": names, "pool": names, "preferred_node": names, "affinity": names},
    optional={"output_size": whole, "priority": whole, "attempt": whole, "order": real, "not_before": times},
)
wishes = st.fixed_dictionaries(
    {"slots": st.integers(1, 2**40), "arena_bytes": st.none() | st.integers(0, MAX_SAFE_INTEGER)},
    optional={
        "priority_above": st.integers(-MAX_SAFE_INTEGER, MAX_SAFE_INTEGER),
        "rank": st.floats(),
        "preferred_node": names,
        "affinity": names,
    },
)


async def refuses_and_goes_on(queue: QueueBackend) -> None:
    """Numbers that are none or too large to be exact, text that is not Unicode, more than a message may hold: refused
    as a whole, and everything goes on. What is merely odd is stored.
    """
    record = await submit(queue, "a")
    lease = await lease_next(queue)
    fields: list[dict[str, Any]] = [{name: 2**60} for name in ("output_size", "priority", "attempt", "not_before")]
    fields += [
        {"order": float("nan")},
        {"order": float("inf")},
        {"preferred_node": "\ud800"},
        {"affinity": "a" * 2**23},
    ]
    for number, wrong in enumerate(fields):
        bad = task("a", **({"stage": "t"} | wrong))
        context = request(f"b{number}", idempotency_key="k")
        await expect_error(ProtocolError, queue.submit(context, [bad], [], LIMITS))
        await expect_error(NotFound, queue.load(context.id))
        await expect_error(ProtocolError, queue.commit(change(record, lease.claim, push=(task("a", "u"), bad))))
    for context in (request("c", cost=float("inf")), request("c", cost=float("nan")), request("c", version=2**60)):
        await expect_error(ProtocolError, queue.submit(context, [], [], LIMITS))
    many = [task("c", f"s{number}", affinity="a" * 2**20) for number in range(9)]
    await expect_error(ProtocolError, queue.submit(request("c"), many, [], LIMITS))
    for event in (Event("progress", step=2**63), Event("progress", at=float("nan")), Event("failed", message="\udfff")):
        await expect_error(ProtocolError, queue.progress(lease.claim, [event]))
        await expect_error(ProtocolError, queue.commit(change(record, lease.claim, events=(event,))))
    assert (await queue.load("a")).context == record.context
    await queue.commit(completion(record, lease, push=(task("a", "t"),)))
    for name in ("", "a:1:b", "\0\r\n\t", "{x}%s%d\\", "é" * 5000, "-inf", "(1"):
        names = request(name, tenant=name, idempotency_key=name, metadata={name: name})
        sent = task(
            name, name, pool=name, preferred_node=name, affinity=name, order=1e-320, not_before=-1e15, output_size=2**53
        )
        await queue.submit(names, [sent], [Event("queued", message=name)], LIMITS)
        assert (await queue.load(name)).context == names
        takes = lease_request(
            name, slots=2**40, arena_bytes=2**62, stage_depths={name: -(2**40)}, preferred_node=name, rank=float("nan")
        )
        assert [lease.task for lease in await queue.lease(name, takes, TTL)] == [sent]
    assert [lease.task.stage for lease in await queue.lease("w", lease_request("p", slots=9), TTL)] == ["t"]


async def outcome(queue: QueueBackend, sent: dict[str, Any], wish: dict[str, Any], stolen: Claim) -> list[object]:
    """What became of a task that is made of anything, of one who asks for anything, and of a claim to nothing."""
    told: list[object] = []
    name, pool = sent["request"], sent["pool"]
    made = task(**({"name": name} | {k: v for k, v in sent.items() if k != "request"}))
    for work in (
        lambda: queue.submit(request(name), [made], [Event("queued", message=name)], LIMITS),
        lambda: queue.peek(pool),
        lambda: queue.lease(name, lease_request(pool, **wish, stage_depths={pool: 1}, reserves={pool: 1}), TTL),
        lambda: queue.renew([stolen], TTL),
        lambda: queue.hand_back(stolen),
        lambda: queue.list(RequestFilter(tenant=name)),
        lambda: queue.ended_among([name, pool]),
        lambda: queue.stats([name, pool]),
    ):
        try:
            answer = await work()
        except ProtocolError:
            told.append(ProtocolError)
        else:
            told.append(len(answer) if isinstance(answer, list) else type(answer).__name__)
    return told


def test_all_backends_handle_random_values_identically(server: Server) -> None:
    async def compare(folder: str, sent: dict[str, Any], wish: dict[str, Any]) -> None:
        server.client.flushall()
        stolen = Claim(sent["request"], sent["stage"], 1, b"")
        told = []
        for url in ("memory", f"sqlite:{folder}/queue.db", server.url):
            queue = queues.open(url, ManualClock())
            told.append(await outcome(queue, sent, wish, stolen))
            await submit(queue, "good", pool="good", priority=MAX_SAFE_INTEGER)
            assert (await lease_next(queue, "good")).task.request == "good"
            await queue.close()
        assert told[0] == told[1] == told[2]

    @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(parts, wishes)
    def compared(sent: dict[str, Any], wish: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(compare(folder, sent, wish))

    compared()


async def test_memory_and_sqlite_reject_invalid_values_and_continue(tmp_path: Path) -> None:
    for url in ("memory", f"sqlite:{tmp_path}/queue.db"):
        queue = queues.open(url, ManualClock())
        await refuses_and_goes_on(queue)
        await queue.close()


async def test_redis_and_valkey_reject_invalid_values_and_continue(server: Server) -> None:
    queue = queues.open(server.url, ManualClock())
    await refuses_and_goes_on(queue)
    await queue.close()
