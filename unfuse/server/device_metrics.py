"""Metrics of what workers compute with, and of what requests cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge
from typing_extensions import override

from unfuse.core.messages import Memory
from unfuse.queues.base import Member
from unfuse.scheduler.observer import Observer
from unfuse.server.prices import Prices

WHOSE = ("model", "tenant")


class CostMetrics:
    """Seconds of devices and money, by model and tenant."""

    def __init__(self, registry: CollectorRegistry) -> None:
        says = "Seconds of devices that requests used, as on their bills"
        self._spent = Counter("unfuse_device_seconds", says, (*WHOSE, "device"), registry=registry)
        self._money = Counter("unfuse_money", "What requests cost, by --price", WHOSE, registry=registry)
        says = "Seconds of devices that attempts used which failed or were lost; nobody is billed for them"
        self._lost = Counter("unfuse_lost_device_seconds", says, ("model", "device"), registry=registry)

    def billed(self, model: str, tenant: str, used: Mapping[str, float], prices: Prices) -> None:
        """Add the seconds of each device that a tenant has used, and what they cost, if anything has a price."""
        for device, seconds in used.items():
            self._spent.labels(model, tenant, device).inc(seconds)
        if (money := prices.money(used)) is not None:
            self._money.labels(model, tenant).inc(money)

    def written_off(self, model: str, used: Mapping[str, float]) -> None:
        """Add the seconds of each device that lost attempts have used."""
        for device, seconds in used.items():
            self._lost.labels(model, device).inc(seconds)


class DeviceMetrics(Observer):
    """How busy workers are, what their compute processes hold, as they told last, what they loaded and leaked.

    `shown` returns the name of a model that clients see, which is its label.
    """

    def __init__(self, registry: CollectorRegistry, shown: Callable[[str], str] = str) -> None:
        self._shown = shown
        says = "Share of the last 15 s in which a worker had something to compute, as a mean of healthy ones"
        self._shares = Gauge("unfuse_worker_busy_ratio", says, ["pool", "outcome"], registry=registry)
        says = "The same of the busiest worker on such a device"
        self._busy = Gauge("unfuse_device_busy_ratio", says, ["device"], registry=registry)
        says = "Tasks that the healthy workers of a node hold"
        self._tasks = Gauge("unfuse_node_tasks", says, ["node"], registry=registry)
        says = "Ranks of the healthy workers of a node: compute processes, with a device each"
        self._ranks = Gauge("unfuse_node_ranks", says, ["node"], registry=registry)
        says = "Bytes that compute processes hold: of a GPU what torch has reserved, of host memory what is resident"
        self._memory = Gauge("unfuse_device_memory_bytes", says, ["device"], registry=registry)

        says = "Times that a worker loaded a set of weights in the place of another"
        self._swaps = Counter("unfuse_swaps", says, ["loaded"], registry=registry)
        self._loading = Counter("unfuse_loading_seconds", "Seconds that it took", ["loaded"], registry=registry)
        says = "Bytes that leaked, as workers without tasks found them: of keys and values (kv) or in arenas (arena)"
        self._leaked = Counter("unfuse_leaked_bytes", says, ["role", "memory"], registry=registry)

    @override
    def leaked(self, role: str, memory: Memory, nbytes: int) -> None:
        self._leaked.labels(role, memory).inc(nbytes)

    @override
    def swapped(self, holds: str, seconds: float) -> None:
        self._swaps.labels(self._shown(holds)).inc()
        self._loading.labels(self._shown(holds)).inc(seconds)

    def look(self, members: Sequence[Member], pools: Mapping[str, tuple[str, str]]) -> None:
        """Set them by these workers; `pools` are the labels of each pool."""
        for gauge in (self._shares, self._busy, self._memory, self._tasks, self._ranks):
            gauge.clear()
        for role in {member.info.role for member in members}:
            for memory in get_args(Memory):
                self._leaked.labels(role, memory)  # 0 until there is a leak, so that an alert sees the first one
        for member in members:
            self._tasks.labels(member.info.node).inc(member.leased)
            self._ranks.labels(member.info.node).inc(len(member.info.status.ranks) or 1)
        for device in {member.info.device for member in members}:
            infos = [member.info for member in members if member.info.device == device]
            self._busy.labels(device).set(max(info.status.utilization for info in infos))
            self._memory.labels(device).set(sum(info.status.memory for info in infos))
        for pool, labels in pools.items():
            inside = [member.info.status.utilization for member in members if pool in member.info.pools]
            self._shares.labels(*labels).set(fmean(inside) if inside else 0.0)
