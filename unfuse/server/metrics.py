"""The metrics of one gateway. Counters are its scheduler's; gauges are read from the queue at each scrape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from typing_extensions import override

from unfuse.core.messages import Moved
from unfuse.core.pool import declared, outcome_of
from unfuse.core.request import RequestContext
from unfuse.queues.base import Member, QueueBackend, Stats
from unfuse.scheduler.observer import Observer
from unfuse.server.device_metrics import CostMetrics, DeviceMetrics
from unfuse.server.metrics_audience import EVERYTHING, Audience, VisibleMetrics
from unfuse.server.text_metrics import TextMetrics
from unfuse.transfer import PREFERENCE

_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
POOL = ("pool", "outcome")  # the labels of a pool: its declared name, and the hash of its outcome
REMEMBERED = 1024  # pools that had workers are looked at again, so many of them: tasks may wait there for the next one

_LEFT = "Predicted seconds of all stages of accepted requests that are not done and that such workers run"
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025)


class Metrics(Observer):
    """The metrics of one gateway, in a registry of its own. `store` is the backend that workers put outputs into.

    `shown` returns the name of a model that clients see, which is its label.
    """

    def __init__(self, store: str, shown: Callable[[str], str] = str) -> None:
        self._store, self._registry, self._shown = store, CollectorRegistry(), shown
        self.texts, self.devices = TextMetrics(self._registry, shown), DeviceMetrics(self._registry, shown)
        self._submitted = self._counter("submitted", "Requests accepted", plain=True)
        self._completed = self._counter("completed", "Requests that ended with their result", plain=True)
        self._failed = self._counter("failed", "Requests that ended without result, or too late", plain=True)
        self._cancelled = self._counter("cancelled", "Requests that were cancelled")
        self._rejected = self._counter("rejected", "Requests refused because too much was waiting")
        self._latency = self._histogram("request_latency_seconds", "Seconds from acceptance to completion", ["model"])
        self._stage_latency = self._histogram(
            "stage_latency_seconds", "Seconds a stage read, ran and wrote", ["model", "stage"]
        )
        self._step_latency = self._histogram(
            "step_latency_seconds", "Seconds of a step, as the mean of a stage's", POOL, (*_SHORT, *_BUCKETS)
        )
        self._batch_size = self._histogram(
            "batch_size", "Tasks in a forward, as the mean of a stage's steps", POOL, (1, 2, 4, 8, 16, 32, 64, 128)
        )
        self._dispatched = Counter(
            "unfuse_tasks_dispatched", "Tasks that were given to workers", POOL, registry=self._registry
        )
        self._expired = Counter("unfuse_lease_expired", "Leases that ran out", POOL, registry=self._registry)
        self._hits = Counter("unfuse_cache_hits", "Outputs of encoders that were in the cache", registry=self._registry)
        self._misses = Counter("unfuse_cache_misses", "Those that were not, and could be", registry=self._registry)
        self._moved = [
            Counter(f"unfuse_transfer_{name}", says, ["engine"], registry=self._registry)
            for name, says in (
                ("bytes", "Verified bytes that workers pulled from other nodes"),
                ("seconds", "Seconds that they took"),
                ("failures", "Pulls that broke, and were tried again or given up"),
            )
        ]
        self.costs = CostMetrics(self._registry)
        self._told = Counter("unfuse_webhooks", "Calls of webhooks", ["state"], registry=self._registry)
        self._active = self._gauge("requests_active", "Requests that are not over")
        self._bytes = self._gauge("store_bytes", "Bytes that live workers hold for requests", "backend")
        self._arenas = {
            name: self._gauge(f"arena_{name}", says, "role")
            for name, says in (
                ("occupancy", "Share of the arena that is taken, in the fullest healthy worker"),
                ("fragmentation", "Share of an arena's free bytes that no one object can have, at the worst"),
                ("high_water", "Share of the arena that ever was taken, at the most"),
            )
        }
        says = "Seconds that ranks computed steps, and waited for others of their worker"
        self._ranks = self._gauge("rank_seconds", says, "role", "rank", "of")
        self._cached = self._gauge("cache_bytes", "Bytes of encoder outputs that later requests may read")
        self._predicted = self._gauge(
            "pool_predicted_seconds", "Predicted seconds of all stages of accepted requests that are not done", *POOL
        )
        self._predicted_of_role = self._gauge("role_predicted_seconds", _LEFT, "role", "component")
        self._waiting_of_role = self._gauge("role_queue_size", "Tasks that wait for such workers", "role", "component")
        self._had: dict[str, None] = {}
        self._kept = self._gauge("results_writable", "Whether results can be kept now, 0 or 1")
        self._unwritten = self._gauge("results_waiting", "Tasks that wait until they can be")
        self._size = self._gauge("queue_size", "Tasks that wait", *POOL)
        self._oldest = self._gauge("queue_oldest_seconds", "Longest wait of the first few tasks in line", *POOL)
        self._busy = self._gauge("worker_active", "Healthy workers that hold a task", *POOL)
        self._idle = self._gauge("worker_idle", "Healthy workers that hold none", *POOL)
        self._asleep = self._gauge("pool_asleep", "Whether it has no worker, as it may, 0 or 1", *POOL)

    def rejected(self) -> None:
        """A request was refused as overload."""
        _count(self._rejected)

    @override
    def submitted(self, context: RequestContext) -> None:
        _count(self._submitted)

    @override
    def ended(self, context: RequestContext) -> None:
        match context.status:
            case "completed":
                _count(self._completed)
                self._observe(context)
            case "cancelled":
                _count(self._cancelled)
            case "failed" | "expired":
                _count(self._failed)

    @override
    def written_off(self, context: RequestContext, seconds: Mapping[str, float]) -> None:
        self.costs.written_off(self._shown(context.model), seconds)

    @override
    def dispatched(self, pool: str) -> None:
        self._dispatched.labels(*_named(pool)).inc()

    @override
    def lease_expired(self, pool: str) -> None:
        self._expired.labels(*_named(pool)).inc()

    @override
    def moved(self, engine: str, moved: Moved) -> None:
        for counter, count in zip(self._moved, msgspec.structs.astuple(moved), strict=True):
            counter.labels(engine if engine in PREFERENCE else "other").inc(count)

    @override
    def told(self, outcome: str) -> None:
        self._told.labels(outcome).inc()

    @override
    def looked_up(self, hits: int, misses: int) -> None:
        self._hits.inc(hits)
        self._misses.inc(misses)

    def results(self, kept: bool, waiting: int) -> None:
        """Set whether results can be stored now, and how many tasks wait for that."""
        self._kept.set(kept)
        self._unwritten.set(waiting)

    async def page(
        self,
        queue: QueueBackend,
        members: Sequence[Member],
        pools: Sequence[str],
        roles: Mapping[str, tuple[str, str]] | None = None,
        asleep: Collection[str] = (),
        audience: Audience = EVERYTHING,
    ) -> bytes:
        """All metrics in Prometheus' text format, with statistics of these pools.

        `roles` are the role and the component of workers by declared pool, of which some are `asleep`. The page has
        the samples that the `audience` sees.
        """
        roles = roles or {}
        stats = await queue.stats([*pools, *(pool for pool in self._had if pool not in pools)])
        self._remember(pools)
        self._sum_by_role(stats, roles)
        stats = msgspec.structs.replace(
            stats, pools={pool: line for pool, line in stats.pools.items() if pool in pools or line.left_s}
        )
        self.texts.look(members, stats)
        self.devices.look(members, {pool: _named(pool) for pool in stats.pools})
        self._active.set(stats.active)
        self._cached.set(await queue.cached_bytes())
        self._bytes.labels(self._store).set(sum(member.info.used for member in members))
        by_pool = self._size, self._oldest, self._predicted, self._busy, self._idle, self._asleep
        for gauge in (*by_pool, self._ranks, *self._arenas.values()):
            gauge.clear()
        for member in members:
            for rank, spent in enumerate(member.info.ranks):
                for of, seconds in (("compute", spent.compute_s), ("exchange", spent.exchange_s)):
                    self._ranks.labels(member.info.role, str(rank), of).inc(seconds)
        for role in {member.info.role for member in members}:
            infos = [member.info for member in members if member.info.role == role and member.info.room]
            for name, shares in {
                "occupancy": [info.used / info.room for info in infos],
                "fragmentation": [info.fragmentation for info in infos],
                "high_water": [info.high_water / info.room for info in infos],
            }.items():
                self._arenas[name].labels(role).set(max(shares, default=0.0))
        for pool, line in stats.pools.items():
            self._predicted.labels(*_named(pool)).set(line.left_s)
            held = [member.leased > 0 for member in members if pool in member.info.pools]
            self._oldest.labels(*_named(pool)).set(line.oldest_s)
            self._size.labels(*_named(pool)).set(line.waiting)
            self._busy.labels(*_named(pool)).set(sum(held))
            self._idle.labels(*_named(pool)).set(len(held) - sum(held))
            self._asleep.labels(*_named(pool)).set(declared(pool) in asleep)
        return generate_latest(VisibleMetrics(self._registry, audience))

    def _remember(self, pools: Sequence[str]) -> None:
        """Look at these again, also when their last worker is gone."""
        self._had |= dict.fromkeys(pool for pool in pools if outcome_of(pool))
        for pool in list(self._had)[:-REMEMBERED]:
            del self._had[pool]

    def _sum_by_role(self, stats: Stats, roles: Mapping[str, tuple[str, str]]) -> None:
        seconds = defaultdict[tuple[str, str], float](float, dict.fromkeys(roles.values(), 0.0))
        waiting = defaultdict[tuple[str, str], int](int, dict.fromkeys(roles.values(), 0))
        for pool, line in stats.pools.items():
            if role := roles.get(declared(pool)):
                seconds[role] += line.left_s
                waiting[role] += line.waiting

        self._predicted_of_role.clear()
        self._waiting_of_role.clear()
        for role in seconds:
            self._predicted_of_role.labels(*role).set(seconds[role])
            self._waiting_of_role.labels(*role).set(waiting[role])

    def _observe(self, context: RequestContext) -> None:
        model = self._shown(context.model)
        if context.completed_at is not None:
            self._latency.labels(model).observe(max(0.0, context.completed_at - context.created_at))
        for stage in (stage for stage in context.plan.stages if context.stages[stage.name].attempt):
            timings = context.stages[stage.name].timings
            spent = timings.get_s + timings.run_s + timings.put_s
            self._stage_latency.labels(model, stage.name.partition(".")[0]).observe(spent)
            if timings.steps:
                self._step_latency.labels(*_named(stage.pool)).observe(timings.run_s / timings.steps)
                self._batch_size.labels(*_named(stage.pool)).observe(timings.batch)

    def _counter(self, what: str, says: str, *, plain: bool = False) -> list[Counter]:
        names = [f"unfuse_requests_{what}", *([f"requests_{what}"] if plain else [])]
        return [Counter(name, says, registry=self._registry) for name in names]

    def _gauge(self, what: str, says: str, *labels: str) -> Gauge:
        return Gauge(f"unfuse_{what}", says, labels, registry=self._registry)

    def _histogram(self, what: str, says: str, labels: Sequence[str], buckets: Sequence[float] = _BUCKETS) -> Histogram:
        says += ", in requests that succeeded"
        return Histogram(f"unfuse_{what}", says, labels, registry=self._registry, buckets=buckets)


def _named(pool: str) -> tuple[str, str]:
    """The labels of a pool."""
    return declared(pool), outcome_of(pool)


def _count(counters: list[Counter]) -> None:
    for counter in counters:
        counter.inc()
