"""What workers say of themselves does not become names of metrics."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from unfuse.core.clock import SystemClock
from unfuse.core.messages import TransferStats
from unfuse.core.plan import readable_pool
from unfuse.core.request import RequestRecord
from unfuse.queues.base import QueueLimits, QueueStats
from unfuse.queues.memory import MemoryQueue
from unfuse.server.metrics import MAX_LABEL_VALUES, Metrics
from unfuse.server.metrics_table import METRICS
from unfuse.testing.queue_samples import plan_with_costs, request, task


async def test_metrics_page_lists_the_metrics_table_in_order() -> None:
    page = (await Metrics("memory").render(MemoryQueue(SystemClock()), [], [])).decode()
    help = re.findall(r"^# HELP (\w+) (.*)$", page, re.MULTILINE)
    kinds = re.findall(r"^# TYPE (\w+) (\w+)$", page, re.MULTILINE)
    assert [one for one in help if not one[0].endswith("_created")] == [(spec.name, spec.help) for spec in METRICS]
    assert [one for one in kinds if not one[0].endswith("_created")] == [(spec.name, spec.kind) for spec in METRICS]


async def test_unknown_transfer_engines_are_counted_as_other() -> None:
    metrics = Metrics("memory")
    for engine in ("tcp", *(f"made-up-{number}" for number in range(1000))):
        metrics.on_transfer(engine, TransferStats(3))
    page = (await metrics.render(MemoryQueue(SystemClock()), [], [])).decode()
    assert 'unfuse_transfer_bytes_total{engine="tcp"} 3.0' in page
    assert 'unfuse_transfer_bytes_total{engine="other"} 3000.0' in page
    assert "made-up" not in page


async def test_metrics_scrape_loads_no_request_records() -> None:
    """Given more in progress than anybody would look through, then all are counted, and no record is asked for."""

    class Unread(MemoryQueue):
        async def load(self, request: str) -> RequestRecord:
            raise AssertionError("a record was loaded")

        async def list(self, *args: Any, **more: Any) -> list[RequestRecord]:
            raise AssertionError("records were listed")

    queue, many = Unread(SystemClock()), QueueLimits(max_active=2000, max_queue=2000)
    for number in range(1500):
        await queue.submit(request(f"{number}", plan=plan_with_costs(p=0.1)), [task(f"{number}")], [], many)
    page = (await Metrics("memory").render(queue, [], ["p"])).decode().splitlines()
    labels = f'{{numerics="",pool="{readable_pool("p")}"}}'
    assert {"unfuse_requests_active 1500.0", f"unfuse_queue_size{labels} 1500.0"} <= {*page}
    assert f"unfuse_pool_predicted_seconds{labels} 150.0" in page


async def test_predicted_seconds_are_summed_by_role_even_without_workers() -> None:
    """Given a request for the pool of workers of one kind, then its seconds count for their role while there are such
    workers, and when they are gone and nobody names that pool any more; and not where nothing is left."""
    queue, metrics = MemoryQueue(SystemClock()), Metrics("memory")
    roles = {"p": ("denoiser", "transformer"), "q": ("encoder", "text_encoder")}

    async def told(*pools: str) -> list[str]:
        page = (await metrics.render(queue, [], pools, roles, ["p"])).decode().splitlines()
        return [
            line for line in page if line.startswith(("unfuse_role_predicted", "unfuse_queue_size{", "unfuse_pool_s"))
        ]

    of_role = 'unfuse_role_predicted_seconds{component="transformer",role="denoiser"}'
    plan = plan_with_costs(p=0.5).with_pools({"p": "p@1a2b"})
    await queue.submit(request("1", plan=plan), [task("1", pool="p@1a2b")], [], QueueLimits())
    assert f"{of_role} 0.5" in await told("p@1a2b", "q")
    labels = f'{{numerics="1a2b",pool="{readable_pool("p@1a2b")}"}}'
    assert f"unfuse_pool_scaled_to_zero{labels} 1.0" in await told("p", "q")
    asleep = await told("p", "q")
    assert f"{of_role} 0.5" in asleep and f"unfuse_queue_size{labels} 1.0" in asleep
    assert 'unfuse_role_predicted_seconds{component="text_encoder",role="encoder"} 0.0' in asleep
    queue = MemoryQueue(SystemClock())
    idle = await told("p", "q")
    assert f"{of_role} 0.0" in idle and not any("1a2b" in line for line in idle)


async def test_waiting_tasks_are_counted_only_for_their_role() -> None:
    """Given two that wait for denoisers of different numerics, then both count, for these and for no encoder."""
    queue, metrics = MemoryQueue(SystemClock()), Metrics("memory")
    roles = {"p": ("denoiser", "transformer"), "q": ("encoder", "text_encoder")}
    for name, pool in (("1", "p@1a2b"), ("2", "p@3c4d")):
        plan = plan_with_costs(p=0.5).with_pools({"p": pool})
        await queue.submit(request(name, plan=plan), [task(name, pool=pool)], [], QueueLimits())
    page = (await metrics.render(queue, [], ["p@1a2b", "p@3c4d", "q"], roles)).decode().splitlines()
    assert {
        'unfuse_role_queue_size{component="transformer",role="denoiser"} 2.0',
        'unfuse_role_queue_size{component="text_encoder",role="encoder"} 0.0',
    } <= {*page}


async def test_number_of_pools_remembered_for_metrics_is_bounded() -> None:
    queue, metrics = MemoryQueue(SystemClock()), Metrics("memory")
    await metrics.render(queue, [], [f"p@{number:08x}" for number in range(2 * MAX_LABEL_VALUES)])
    asked: list[int] = []
    stats = queue.stats

    async def counted(pools: Sequence[str]) -> QueueStats:
        asked.append(len(pools))
        return await stats(pools)

    queue.stats = counted  # type: ignore[method-assign]
    await metrics.render(queue, [], [])
    assert asked == [MAX_LABEL_VALUES]
