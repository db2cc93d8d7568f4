"""The counts in heartbeats: each is reported once, also if a heartbeat reaches no scheduler."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from unfuse.core.messages import Heartbeat, HeartbeatReply, TransferStats
from unfuse.core.worker_status import DeviceErrors, DeviceId, WorkerStatus
from unfuse.transfer.session import TransferCounters
from unfuse.worker.compute_messages import DeviceFailed, Leak
from unfuse.worker.device_health import DeviceHealth
from unfuse.worker.heartbeats import Heartbeats


class Link:
    """A link whose next heartbeats have these ends: a reply, or an error."""

    def __init__(self, *ends: HeartbeatReply | OSError) -> None:
        self.ends = [*ends]
        self.sent = list[Heartbeat]()

    async def once(self, heartbeat: Heartbeat, timeout: float) -> HeartbeatReply:
        self.sent.append(heartbeat)
        if isinstance(end := self.ends.pop(0), OSError):
            raise end
        return end


async def counted(link: Link, count: Callable[[DeviceHealth], object]) -> list[Heartbeat]:
    """The heartbeats of a worker in which something was counted before the first."""
    executor = SimpleNamespace(ready=False, retracted=2, health=DeviceHealth())
    executor.health.record_started([DeviceId("cuda:0", "GPU-0")])
    counters = TransferCounters()
    counters.put_back({"tcp": TransferStats(8, 1.0)})
    objects = SimpleNamespace(copies=SimpleNamespace(counters=counters), stored_requests=list)
    surroundings: Any = link, executor, objects
    heartbeats = Heartbeats(*surroundings, {}, 1.0)
    heartbeats.record_leaks([Leak("kv", "a text", 64)])
    count(executor.health)
    while link.ends:
        await heartbeats.send(WorkerStatus(), idle=False)
    return link.sent


def counts_of(heartbeat: Heartbeat) -> tuple[object, ...]:
    return heartbeat.device_errors, heartbeat.retracted, heartbeat.leaks, heartbeat.transfers


@pytest.mark.parametrize("error", [ConnectionError("gone"), TimeoutError()], ids=["not sent", "answered late"])
async def test_heartbeat_that_reached_no_scheduler_is_counted_in_the_next_one(error: OSError) -> None:
    reply = HeartbeatReply((), ())
    failure = DeviceFailed(0, "CUDA error: an illegal memory access was encountered")
    first, second, third = await counted(Link(error, reply, reply), lambda health: health.record_failure(failure, []))

    assert first.device_errors == (DeviceErrors(DeviceId("cuda:0", "GPU-0"), "failed"),)
    assert (first.retracted, first.leaks) == (2, {"kv": 64})
    if isinstance(error, TimeoutError):  # the scheduler may have counted them
        assert not any(counts_of(second))
    else:
        assert counts_of(second) == counts_of(first)
    assert not any(counts_of(third))
