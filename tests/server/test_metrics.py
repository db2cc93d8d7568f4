"""What workers say of themselves does not become names of metrics."""

from __future__ import annotations

from typing import Any

from unfuse.core.messages import Moved
from unfuse.core.request import Record
from unfuse.queues.base import Limits
from unfuse.queues.memory import MemoryQueue
from unfuse.server.metrics import Metrics
from unfuse.supervision.clock import SystemClock
from unfuse.testing.queue_samples import planned, request, task


async def test_engines_that_nobody_knows_are_counted_together() -> None:
    metrics = Metrics("memory")
    for engine in ("tcp", *(f"made-up-{number}" for number in range(1000))):
        metrics.moved(engine, Moved(3))
    page = (await metrics.page(MemoryQueue(SystemClock()), [], [])).decode()
    assert 'unfuse_transfer_bytes_total{engine="tcp"} 3.0' in page
    assert 'unfuse_transfer_bytes_total{engine="other"} 3000.0' in page
    assert "made-up" not in page


async def test_a_scrape_loads_no_request() -> None:
    """Given more in progress than anybody would look through, then all are counted, and no record is asked for."""

    class Unread(MemoryQueue):
        async def load(self, request: str) -> Record:
            raise AssertionError("a record was loaded")

        async def list(self, *args: Any, **more: Any) -> list[Record]:
            raise AssertionError("records were listed")

    queue, many = Unread(SystemClock()), Limits(max_active=2000, max_queue=2000)
    for number in range(1500):
        await queue.submit(request(f"{number}", plan=planned(p=0.1)), [task(f"{number}")], [], many)
    page = (await Metrics("memory").page(queue, [], ["p"])).decode().splitlines()
    assert {"unfuse_requests_active 1500.0", 'unfuse_queue_size{outcome="",pool="p"} 1500.0'} <= {*page}
    assert 'unfuse_pool_predicted_seconds{outcome="",pool="p"} 150.0' in page
