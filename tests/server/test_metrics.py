"""What workers say of themselves does not become names of metrics."""

from __future__ import annotations

from unfuse.core.clock import SystemClock
from unfuse.core.messages import Moved
from unfuse.queues.memory import MemoryQueue
from unfuse.server.metrics import Metrics


async def test_engines_that_nobody_knows_are_counted_together() -> None:
    metrics = Metrics("memory")
    for engine in ("tcp", *(f"made-up-{number}" for number in range(1000))):
        metrics.moved(engine, Moved(3))
    page = (await metrics.page(MemoryQueue(SystemClock()), [], {})).decode()
    assert 'unfuse_transfer_bytes_total{engine="tcp"} 3.0' in page
    assert 'unfuse_transfer_bytes_total{engine="other"} 3000.0' in page
    assert "made-up" not in page
