"""The Prometheus metrics of one gateway, filtered by what the caller of /metrics may see.

Counters and histograms count transitions of this gateway's scheduler. Gauges are read at each scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import get_args

import msgspec
from prometheus_client import Counter, Histogram, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from typing_extensions import override

from unfuse.core.messages import Memory, TransferStats, WorkerInfo
from unfuse.core.plan import numerics_of
from unfuse.core.request import RequestContext
from unfuse.core.text import PREFILL_CHUNK_TOKENS
from unfuse.core.worker_status import DeviceErrorKind, DeviceErrors, MemoryRetry
from unfuse.queues.base import QueueBackend, RegisteredWorker
from unfuse.scheduler.observer import Observer
from unfuse.server.metrics_table import METRICS, Scrape, pool_labels
from unfuse.server.request_objects import Prices
from unfuse.transfer import PREFERENCE

#: The most pools that are remembered after they had workers: tasks may wait there for the next worker.
MAX_LABEL_VALUES = 1024

#: Labels that a stranger sees. A sample with any other label is hidden, so that a new label is hidden by default.
PUBLIC_LABELS = frozenset(
    {
        "backend",
        "component",
        "device",
        "engine",
        "le",
        "memory",
        "node",
        "of",
        "numerics",
        "pool",
        "rank",
        "role",
        "state",
    }
)


class Audience:
    """Decides which samples the caller of /metrics sees.

    tenant: the tenant of the caller, which sees its own samples and those with public labels; None for a stranger.
    sees_models: whether it also sees the other samples without a tenant, such as those of models.
    sees_all: whether it sees all samples.
    """

    def __init__(self, tenant: str | None = None, *, sees_models: bool = False, sees_all: bool = False) -> None:
        self._tenant = tenant
        self._sees_models = sees_models
        self.sees_all = sees_all

    def may_see(self, labels: Mapping[str, str]) -> bool:
        """Return whether a sample with these labels is shown."""
        if self.sees_all:
            return True
        if "tenant" in labels:
            return labels["tenant"] == self._tenant
        return self._sees_models or labels.keys() <= PUBLIC_LABELS


EVERYTHING = Audience(sees_all=True)


class VisibleMetrics:
    """A Prometheus collector of the samples that an audience sees.

    Metrics without a visible sample are left out.
    """

    def __init__(self, metrics: Iterable[Metric], audience: Audience) -> None:
        self._metrics = metrics
        self._audience = audience

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with their visible samples."""
        for metric in self._metrics:
            if self._audience.sees_all:
                yield metric
            elif samples := [sample for sample in metric.samples if self._audience.may_see(sample.labels)]:
                visible = Metric(metric.name, metric.documentation, metric.type, metric.unit)
                visible.samples = samples
                yield visible


class Metrics(Observer):
    """The metrics of one gateway, as an observer of its scheduler.

    store: the backend of the workers' tensor stores, as a label.
    public_name: returns the public name of a model, which is its label.

    Tokens are counted when they are recorded, before clients get them. Those of prompts are counted at acceptance.
    """

    def __init__(self, store: str, public_name: Callable[[str], str] = str) -> None:
        self._store = store
        self._public_name = public_name
        self._counters = {
            spec.name: Counter(spec.name, spec.help, spec.labels, registry=None)
            for spec in METRICS
            if spec.kind == "counter"
        }
        self._histograms = {
            spec.name: Histogram(spec.name, spec.help, spec.labels, registry=None, buckets=spec.buckets)
            for spec in METRICS
            if spec.kind == "histogram"
        }
        #: The number of requests that wait in this gateway until their grammar is compiled.
        self.grammars = 0
        self._remembered_pools: dict[str, None] = {}  # pools that had workers, in the order they were first seen

    @override
    def on_submitted(self, context: RequestContext) -> None:
        self.count("unfuse_requests_submitted_total")
        self.count("requests_submitted_total")
        if tokens := context.request.derived.prompt_tokens:
            self.count("unfuse_tokens_total", self._public_name(context.request.model), "prompt", by=tokens)
            # 0, so that the sample exists before the first prefix is cached.
            self.count("unfuse_tokens_total", self._public_name(context.request.model), "cached", by=0)

    @override
    def on_ended(self, context: RequestContext) -> None:
        match context.status:
            case "completed":
                self.count("unfuse_requests_completed_total")
                self.count("requests_completed_total")
                self._observe_stages(context)
            case "cancelled":
                self.count("unfuse_requests_cancelled_total")
            case "failed" | "expired":
                self.count("unfuse_requests_failed_total")
                self.count("requests_failed_total")

        if cached_blocks := context.cached_prefix_blocks:
            tokens = PREFILL_CHUNK_TOKENS * cached_blocks
            self.count("unfuse_tokens_total", self._public_name(context.request.model), "cached", by=tokens)

    @override
    def on_first_delta(self, model: str, pieces: int, seconds: float) -> None:
        self._observe("unfuse_time_to_first_token_seconds", seconds, self._public_name(model))
        self.count("unfuse_tokens_total", self._public_name(model), "completion", by=pieces)

    @override
    def on_deltas(self, model: str, pieces: int, seconds: float | None) -> None:
        self.count("unfuse_tokens_total", self._public_name(model), "completion", by=pieces)
        for _ in range(pieces if seconds is not None else 0):
            self._observe("unfuse_inter_token_seconds", (seconds or 0.0) / pieces, self._public_name(model))

    @override
    def on_retracted(self, times: int) -> None:
        self.count("unfuse_retractions_total", by=times)

    @override
    def on_swapped(self, holds: str, seconds: float) -> None:
        self.count("unfuse_swaps_total", self._public_name(holds))
        self.count("unfuse_loading_seconds_total", self._public_name(holds), by=seconds)

    @override
    def on_leaked(self, role: str, memory: Memory, nbytes: int) -> None:
        self.count("unfuse_leaked_bytes_total", role, memory, by=nbytes)

    @override
    def on_device_errors(self, worker: WorkerInfo, errors: DeviceErrors) -> None:
        device = errors.device
        labels = worker.node, device.index, device.uuid, errors.kind
        self.count("unfuse_device_errors_total", *labels, by=errors.count)
        if errors.retry:
            self.count("unfuse_memory_retries_total", worker.role, errors.retry, by=errors.count)

    @override
    def on_dispatched(self, pool: str) -> None:
        self.count("unfuse_tasks_dispatched_total", *pool_labels(pool))

    @override
    def on_lease_expired(self, pool: str) -> None:
        self.count("unfuse_lease_expired_total", *pool_labels(pool))

    @override
    def on_transfer(self, engine: str, moved: TransferStats) -> None:
        for name, count in msgspec.structs.asdict(moved).items():
            self.count(f"unfuse_transfer_{name}_total", engine if engine in PREFERENCE else "other", by=count)

    @override
    def on_webhook_attempt(self, outcome: str) -> None:
        self.count("unfuse_webhooks_total", outcome)

    @override
    def on_cache_lookup(self, hits: int, misses: int) -> None:
        self.count("unfuse_cache_hits_total", by=hits)
        self.count("unfuse_cache_misses_total", by=misses)

    @override
    def on_lost_device_time(self, context: RequestContext, seconds: Mapping[str, float]) -> None:
        for device, device_seconds in seconds.items():
            self.count(
                "unfuse_lost_device_seconds_total", self._public_name(context.request.model), device, by=device_seconds
            )

    def count_device_seconds(self, model: str, tenant: str, seconds: Mapping[str, float], prices: Prices) -> None:
        """Count the device seconds that a tenant has used, and their price.

        model: the public name of the model.
        seconds: the device seconds by device.
        """
        for device, device_seconds in seconds.items():
            self.count("unfuse_device_seconds_total", model, tenant, device, by=device_seconds)
        if (money := prices.money(seconds)) is not None:
            self.count("unfuse_money_total", model, tenant, by=money)

    async def render(
        self,
        queue: QueueBackend,
        workers: Sequence[RegisteredWorker],
        pools: Sequence[str],
        roles: Mapping[str, tuple[str, str]] | None = None,
        scaled_to_zero: Collection[str] = (),
        audience: Audience = EVERYTHING,
        results: tuple[bool, int] = (False, 0),
        unhealthy: Sequence[WorkerInfo] = (),
    ) -> bytes:
        """Return all metrics in the text format of Prometheus.

        workers: the healthy workers.
        pools: the pools of the served models.
        roles: the role and the component of workers, by declared pool.
        scaled_to_zero: the declared pools that are scaled to zero.
        audience: decides which samples are included.
        results: whether results can be stored now, and how many tasks wait to store theirs.
        unhealthy: the workers that run no tasks because of a device.
        """
        stats = await queue.stats([*pools, *(pool for pool in self._remembered_pools if pool not in pools)])
        self._remembered_pools |= dict.fromkeys(pool for pool in pools if numerics_of(pool))
        for pool in list(self._remembered_pools)[:-MAX_LABEL_VALUES]:
            del self._remembered_pools[pool]

        scrape = Scrape(
            workers=workers,
            unhealthy=unhealthy,
            all_pools=stats.pools,
            pools={pool: pool_stats for pool, pool_stats in stats.pools.items() if pool in pools or pool_stats.left_s},
            roles=roles or {},
            scaled_to_zero=scaled_to_zero,
            requests=stats.active,
            store=self._store,
            cached_bytes=await queue.cached_bytes(),
            results_writable=results[0],
            results_waiting=results[1],
            grammars=self.grammars,
        )
        for info in (*scrape.infos, *unhealthy):
            self._begin_counts(info)
        return generate_latest(VisibleMetrics(self._collect(scrape), audience))

    def _begin_counts(self, worker: WorkerInfo) -> None:
        """Count 0 leaks and errors of a worker.

        An alert then sees the first one as an increase.
        """
        for memory in get_args(Memory):
            self.count("unfuse_leaked_bytes_total", worker.role, memory, by=0)
        for device, kind in product(worker.devices, get_args(DeviceErrorKind)):
            self.on_device_errors(worker, DeviceErrors(device, kind, count=0))
        for retry in get_args(MemoryRetry):
            self.count("unfuse_memory_retries_total", worker.role, retry, by=0)

    def _collect(self, scrape: Scrape) -> Iterator[Metric]:
        """Yield all metrics in the order of their table."""
        for spec in METRICS:
            if spec.kind != "gauge":
                yield from (self._counters.get(spec.name) or self._histograms[spec.name]).collect()
                continue
            gauge = GaugeMetricFamily(spec.name, spec.help, labels=spec.labels)
            for labels, value in spec.read(scrape):
                gauge.add_metric(labels, value)
            yield gauge

    def _observe_stages(self, context: RequestContext) -> None:
        """Observe the latencies of a completed request and of its stages.

        Cached stages, which had no attempt, are left out.
        """
        model = self._public_name(context.request.model)
        if context.completed_at is not None:
            self._observe("unfuse_request_latency_seconds", max(0.0, context.completed_at - context.created_at), model)
        for stage in (stage for stage in context.plan.stages if context.stages[stage.name].attempt):
            timings = context.stages[stage.name].timings
            seconds = timings.get_s + timings.run_s + timings.put_s
            self._observe("unfuse_stage_latency_seconds", seconds, model, stage.name.partition(".")[0])
            if timings.steps:
                labels = pool_labels(stage.pool)
                self._observe("unfuse_step_latency_seconds", timings.run_s / timings.steps, *labels)
                self._observe("unfuse_batch_size", timings.batch, *labels)

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        """Increase a counter with these values of its labels."""
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc(by)

    def _observe(self, name: str, value: float, *labels: str) -> None:
        self._histograms[name].labels(*labels).observe(value)
