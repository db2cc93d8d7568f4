"""The table of all metrics: name, kind, labels, help, and how to read gauges.

Counters and histograms are not read: `Metrics` changes them when the scheduler reports a transition. /metrics has the
order of this table, and `docs/reference/metrics.md` is generated from it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import fmean
from typing import Literal, NamedTuple

from unfuse.core.messages import WorkerInfo
from unfuse.core.plan import declared_pool, numerics_of, readable_pool
from unfuse.core.text import TextStats
from unfuse.core.worker_status import BatchInvarianceStats
from unfuse.queues.base import PoolStats, RegisteredWorker
from unfuse.stages.specs import DECODE, PREFILL

#: Names of labels, or their values in that order.
Labels = tuple[str, ...]

Samples = Iterable[tuple[Labels, float]]


@dataclass(frozen=True)
class Scrape:
    """The state that gauges are read from at one scrape."""

    #: The healthy workers.
    workers: Sequence[RegisteredWorker]
    #: The workers that run no tasks because of a device.
    unhealthy: Sequence[WorkerInfo]
    #: Statistics of the pools of the served models, and of pools that had workers.
    all_pools: Mapping[str, PoolStats]
    #: The pools of `all_pools` that have samples with their own label.
    pools: Mapping[str, PoolStats]
    #: The role and the component of workers, by declared pool.
    roles: Mapping[str, tuple[str, str]]
    #: The declared pools that are scaled to zero.
    scaled_to_zero: Collection[str]
    #: The number of requests that are not over.
    requests: int
    #: The backend of the workers' tensor stores.
    store: str
    #: Bytes of encoder outputs in the encoder cache.
    cached_bytes: int
    #: Whether results can be stored now.
    results_writable: bool
    #: The number of tasks that wait to store their results.
    results_waiting: int
    #: The number of requests that wait in this gateway until their grammar is compiled.
    grammars: int

    @cached_property
    def infos(self) -> list[WorkerInfo]:
        """The self-descriptions of the workers."""
        return [member.info for member in self.workers]

    @cached_property
    def text_loads(self) -> list[tuple[WorkerInfo, TextStats]]:
        """The workers with language stages, with the statistics of their texts."""
        return [(info, info.status.texts) for info in self.infos if info.status.texts]

    @cached_property
    def members(self) -> Mapping[str, list[RegisteredWorker]]:
        """The workers of each pool."""
        members: dict[str, list[RegisteredWorker]] = {pool: [] for pool in self.pools}
        for member in self.workers:
            for pool in members.keys() & set(member.info.pools):
                members[pool].append(member)
        return members


class MetricSpec(NamedTuple):
    """The definition of one metric."""

    #: The exported name.
    name: str
    #: Its type in Prometheus. Only gauges have `read`, and only histograms have `buckets`.
    kind: Literal["counter", "gauge", "histogram"]
    #: The names of its labels.
    labels: Labels
    #: Its description in /metrics, and in `docs/reference/metrics.md`.
    help: str
    #: Returns the samples of a gauge, as (values of the labels, value).
    read: Callable[[Scrape], Samples] = lambda scrape: ()
    #: The upper bounds of a histogram's buckets.
    buckets: Sequence[float] = ()


def pool_labels(pool: str) -> Labels:
    """Return the values of the labels POOL for a pool."""
    return readable_pool(pool), numerics_of(pool)


def _compares_no_more(pool: str, member: RegisteredWorker) -> bool:
    """Return whether comparisons of a worker's pool have ended because of differences."""
    return member.info.status.batch_invariance.get(pool, BatchInvarianceStats()).mode != "compared"


def _single_sample(value: Callable[[Scrape], float]) -> Callable[[Scrape], Samples]:
    """Return a reader of one sample without labels."""
    return lambda scrape: [((), value(scrape))]


def _of_pools(value: Callable[[Scrape, str], float]) -> Callable[[Scrape], Samples]:
    """Return a reader of one sample for each pool."""
    return lambda scrape: [(pool_labels(pool), value(scrape, pool)) for pool in scrape.pools]


def _of_nodes(value: Callable[[RegisteredWorker], int]) -> Callable[[Scrape], Samples]:
    """Return a reader of one sample for each node: the sum over its workers."""
    return lambda scrape: _summed(((member.info.node,), value(member)) for member in scrape.workers)


def _grouped(attribute: str, value: Callable[[list[WorkerInfo]], float]) -> Callable[[Scrape], Samples]:
    """Return a reader of one sample for each device or role, computed from its workers.

    attribute: the attribute of the workers, `device` or `role`.
    """

    def read(scrape: Scrape) -> Samples:
        for label in dict.fromkeys(getattr(info, attribute) for info in scrape.infos):
            yield (label,), value([info for info in scrape.infos if getattr(info, attribute) == label])

    return read


def _of_arenas(value: Callable[[WorkerInfo], float]) -> Callable[[Scrape], Samples]:
    """Return a reader of one sample per role: the largest value of its workers' arenas."""
    return _grouped("role", lambda infos: max((value(info) for info in infos if info.arena_bytes), default=0.0))


def _of_roles(value: Callable[[PoolStats], float]) -> Callable[[Scrape], Samples]:
    """Return a reader of one sample per role and component: the sum over its pools."""

    def read(scrape: Scrape) -> Samples:
        roles = scrape.roles
        stats = {pool: pool_stats for pool, pool_stats in scrape.all_pools.items() if declared_pool(pool) in roles}
        samples = [(roles[declared_pool(pool)], value(pool_stats)) for pool, pool_stats in stats.items()]
        # A role without tasks has samples of 0, so that an autoscaler can read them.
        return _summed([*((role, 0.0) for role in roles.values()), *samples])

    return read


def _summed(samples: Samples) -> Samples:
    """Return one sample for each combination of labels: the sum of the samples with it."""
    totals: dict[Labels, float] = {}
    for labels, value in samples:
        totals[labels] = totals.get(labels, 0.0) + value
    return totals.items()


def _kv_blocks(scrape: Scrape) -> Samples:
    """Return the used and free blocks of the KV caches of each role."""
    return _summed(
        ((info.role, state), blocks)
        for info, texts in scrape.text_loads
        for state, blocks in (("used", texts.used), ("free", texts.free))
    )


def _rank_seconds(scrape: Scrape) -> Samples:
    """Return the seconds of computation and of exchange, by role and rank."""
    ranks = [(info.role, str(rank), times) for info in scrape.infos for rank, times in enumerate(info.status.ranks)]
    return _summed(
        ((role, rank, activity), seconds)
        for role, rank, times in ranks
        for activity, seconds in (("compute", times.compute_s), ("exchange", times.exchange_s))
    )


def _healthy_devices(scrape: Scrape) -> Samples:
    """Return whether each device of each worker is healthy."""
    for info in (*scrape.infos, *scrape.unhealthy):
        fault = info.status.device_fault
        for rank, device in enumerate(info.devices):
            labels = info.node, info.id, device.index, device.uuid
            yield labels, float(fault is None or fault.rank != rank)


def _waiting(scrape: Scrape, kind: str) -> int:
    """Return how many tasks of a stage kind wait."""
    return sum(stats.waiting for pool, stats in scrape.pools.items() if pool.partition(":")[0] == kind)


#: The labels of a pool: its readable name, and the hash of its numerics.
POOL = ("pool", "numerics")

# The buckets of histograms, in seconds.
_LATENCY_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, *_LATENCY_BUCKETS)
_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_INTER_TOKEN_BUCKETS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


def _counter(name: str, help: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, "counter", labels, help)


def _gauge(name: str, help: str, read: Callable[[Scrape], Samples], *labels: str) -> MetricSpec:
    return MetricSpec(name, "gauge", labels, help, read)


def _histogram(name: str, help: str, buckets: Sequence[float], *labels: str) -> MetricSpec:
    return MetricSpec(name, "histogram", labels, help, buckets=buckets)


METRICS = (
    _counter(
        "unfuse_tokens_total",
        "Tokens of accepted prompts (prompt), prompt tokens whose KV was in the prefix cache (cached), and generated "
        "tokens (completion)",
        "model",
        "kind",
    ),
    _histogram(
        "unfuse_time_to_first_token_seconds",
        "Seconds from the acceptance of a request until a choice's first token is recorded",
        _FIRST_TOKEN_BUCKETS,
        "model",
    ),
    _histogram(
        "unfuse_inter_token_seconds",
        "Seconds between two tokens of a choice; tokens that are recorded together share the time",
        _INTER_TOKEN_BUCKETS,
        "model",
    ),
    _counter(
        "unfuse_retractions_total", "Retractions: how often a text lost its KV blocks because the KV cache was full"
    ),
    _gauge("unfuse_kv_blocks", "Blocks in the KV caches of live workers", _kv_blocks, "role", "state"),
    _gauge(
        "unfuse_prefill_queue",
        "Prompts whose KV is not complete: they wait for a worker, or are in prefill",
        _single_sample(
            lambda scrape: _waiting(scrape, PREFILL.kind) + sum(load.prompts for _, load in scrape.text_loads)
        ),
    ),
    _gauge(
        "unfuse_grammar_queue",
        "Text requests that wait for the compilation of their grammar, before they are accepted or in a worker",
        _single_sample(lambda scrape: scrape.grammars + sum(load.grammars for _, load in scrape.text_loads)),
    ),
    _gauge(
        "unfuse_decode_prealloc_queue",
        "Text requests that wait for a decode worker with room in its KV cache and a free slot",
        _single_sample(lambda scrape: _waiting(scrape, DECODE.kind)),
    ),
    _gauge(
        "unfuse_decode_transfer_queue",
        "Text requests with reserved room in the KV cache of a decode worker, whose KV has not arrived completely",
        _single_sample(lambda scrape: sum(info.status.waiting_for_inputs for info, _ in scrape.text_loads)),
    ),
    _gauge(
        "unfuse_worker_busy_ratio",
        "Share of the last 15 s in which a worker had tasks to compute, as the mean of the pool's healthy workers",
        _of_pools(
            lambda scrape, pool: fmean([member.info.status.utilization for member in scrape.members[pool]] or [0.0])
        ),
        *POOL,
    ),
    _gauge(
        "unfuse_device_busy_ratio",
        "Share of the last 15 s in which the busiest healthy worker on this device had tasks to compute",
        _grouped("device", lambda infos: max(info.status.utilization for info in infos)),
        "device",
    ),
    _gauge(
        "unfuse_device_healthy",
        "Whether a device of a worker is healthy, 0 or 1. 0: it failed repeatedly, or failed its check",
        _healthy_devices,
        "node",
        "worker",
        "index",
        "uuid",
    ),
    _counter(
        "unfuse_device_errors_total",
        "Errors of a device: its memory ran out (out_of_memory), an error ended the compute process (failed), or its "
        "check before a restart failed (unusable)",
        "node",
        "index",
        "uuid",
        "kind",
    ),
    _counter(
        "unfuse_memory_retries_total",
        "Steps that ran out of memory and were computed again: in smaller batches (halved), in the same way "
        "(repeated), or in smaller parts such as tiles (reduced)",
        "role",
        "retry",
    ),
    _gauge(
        "unfuse_node_tasks",
        "Tasks leased by the healthy workers of a node",
        _of_nodes(lambda member: member.leased),
        "node",
    ),
    _gauge(
        "unfuse_node_ranks",
        "Ranks of the healthy workers of a node: compute processes, each with its own device",
        _of_nodes(lambda member: len(member.info.status.ranks) or 1),
        "node",
    ),
    _gauge(
        "unfuse_device_memory_bytes",
        "Memory of compute processes: GPU memory reserved by PyTorch, without a GPU their resident host memory",
        _grouped("device", lambda infos: sum(info.status.memory for info in infos)),
        "device",
    ),
    _counter("unfuse_swaps_total", "Times that a worker loaded a set of weights in place of another", "loaded"),
    _counter(
        "unfuse_loading_seconds_total",
        "Seconds that workers took to load a set of weights in place of another",
        "loaded",
    ),
    _counter(
        "unfuse_leaked_bytes_total",
        "Leaked bytes that workers found while they had no task: in the KV cache (kv) or in the arena (arena)",
        "role",
        "memory",
    ),
    _counter("unfuse_requests_submitted_total", "Requests accepted"),
    _counter("requests_submitted_total", "Requests accepted"),
    _counter("unfuse_requests_completed_total", "Requests that ended with their result"),
    _counter("requests_completed_total", "Requests that ended with their result"),
    _counter("unfuse_requests_failed_total", "Requests that failed or expired"),
    _counter("requests_failed_total", "Requests that failed or expired"),
    _counter("unfuse_requests_cancelled_total", "Requests that were cancelled"),
    _counter("unfuse_requests_rejected_total", "Requests refused by admission control"),
    _histogram(
        "unfuse_request_latency_seconds",
        "Seconds from acceptance to completion, in requests that succeeded",
        _LATENCY_BUCKETS,
        "model",
    ),
    _histogram(
        "unfuse_stage_latency_seconds",
        "Seconds in which a stage read inputs, ran and wrote outputs, of requests that succeeded",
        _LATENCY_BUCKETS,
        "model",
        "stage",
    ),
    _histogram(
        "unfuse_step_latency_seconds",
        "Seconds of a step: the mean over a stage's steps, observed when the request succeeds",
        _STEP_BUCKETS,
        *POOL,
    ),
    _histogram(
        "unfuse_batch_size",
        "Requests in a forward: the mean over a stage's steps, observed when the request succeeds",
        (1, 2, 4, 8, 16, 32, 64, 128),
        *POOL,
    ),
    _counter("unfuse_tasks_dispatched_total", "Tasks leased to workers", *POOL),
    _counter("unfuse_lease_expired_total", "Leases that expired", *POOL),
    _counter("unfuse_cache_hits_total", "Encoder outputs found in the encoder cache"),
    _counter("unfuse_cache_misses_total", "Encoder outputs that may be cached and were not found in the encoder cache"),
    _counter("unfuse_transfer_bytes_total", "Verified bytes that workers pulled from other nodes", "engine"),
    _counter("unfuse_transfer_seconds_total", "Seconds that workers took to pull bytes from other nodes", "engine"),
    _counter(
        "unfuse_transfer_failures_total",
        "Transfers from other nodes that failed, including those that were retried",
        "engine",
    ),
    _counter(
        "unfuse_device_seconds_total",
        "Device seconds used by requests, as billed",
        "model",
        "tenant",
        "device",
    ),
    _counter("unfuse_money_total", "Cost of requests at the prices of --price", "model", "tenant"),
    _counter(
        "unfuse_lost_device_seconds_total",
        "Device seconds of attempts that failed or were lost, which are not billed",
        "model",
        "device",
    ),
    _counter("unfuse_webhooks_total", "Attempts of webhook deliveries", "state"),
    _gauge("unfuse_requests_active", "Active requests", _single_sample(lambda scrape: scrape.requests)),
    _gauge(
        "unfuse_store_bytes",
        "Bytes of stage outputs in the stores of live workers",
        lambda scrape: [((scrape.store,), sum(info.status.arena_used for info in scrape.infos))],
        "backend",
    ),
    _gauge(
        "unfuse_arena_occupancy",
        "Used share of the arena, in the fullest healthy worker",
        _of_arenas(lambda info: info.status.arena_used / info.arena_bytes),
        "role",
    ),
    _gauge(
        "unfuse_arena_fragmentation",
        "Share of an arena's free bytes that one object cannot use, in the worst healthy worker",
        _of_arenas(lambda info: info.status.arena_fragmentation),
        "role",
    ),
    _gauge(
        "unfuse_arena_high_water",
        "Highest share of the arena that was ever used, in any healthy worker",
        _of_arenas(lambda info: info.status.arena_high_water / info.arena_bytes),
        "role",
    ),
    _gauge(
        "unfuse_rank_seconds",
        "Seconds that ranks computed steps (compute), and waited for other ranks of their worker (exchange)",
        _rank_seconds,
        "role",
        "rank",
        "of",
    ),
    _gauge(
        "unfuse_cache_bytes",
        "Bytes of encoder outputs in the encoder cache",
        _single_sample(lambda scrape: scrape.cached_bytes),
    ),
    _gauge(
        "unfuse_pool_predicted_seconds",
        "Predicted seconds of the pool's stages that are not done, of all active requests",
        _of_pools(lambda scrape, pool: scrape.pools[pool].left_s),
        *POOL,
    ),
    _gauge(
        "unfuse_role_predicted_seconds",
        "Predicted seconds of the stages of this role and component that are not done, of all active requests",
        _of_roles(lambda stats: stats.left_s),
        "role",
        "component",
    ),
    _gauge(
        "unfuse_role_queue_size",
        "Tasks that wait for workers of this role and component",
        _of_roles(lambda stats: stats.waiting),
        "role",
        "component",
    ),
    _gauge(
        "unfuse_results_writable",
        "Whether results can be stored now, 0 or 1",
        _single_sample(lambda scrape: scrape.results_writable),
    ),
    _gauge(
        "unfuse_results_waiting",
        "Tasks that wait because their results cannot be stored",
        _single_sample(lambda scrape: scrape.results_waiting),
    ),
    _gauge(
        "unfuse_queue_size",
        "Tasks that wait in the pool's queue",
        _of_pools(lambda scrape, pool: scrape.pools[pool].waiting),
        *POOL,
    ),
    _gauge(
        "unfuse_queue_oldest_seconds",
        "Longest wait in seconds of the first few tasks in the pool's queue",
        _of_pools(lambda scrape, pool: scrape.pools[pool].oldest_s),
        *POOL,
    ),
    _gauge(
        "unfuse_worker_active",
        "Healthy workers with a leased task",
        _of_pools(lambda scrape, pool: sum(member.leased > 0 for member in scrape.members[pool])),
        *POOL,
    ),
    _gauge(
        "unfuse_worker_idle",
        "Healthy workers without a leased task",
        _of_pools(lambda scrape, pool: sum(member.leased == 0 for member in scrape.members[pool])),
        *POOL,
    ),
    _gauge(
        "unfuse_pool_not_batch_invariant",
        "Whether three keys of an exact pool showed that batches change bytes, so that it compares no more, 0 or 1",
        _of_pools(lambda scrape, pool: any(map(partial(_compares_no_more, pool), scrape.members[pool]))),
        *POOL,
    ),
    _gauge(
        "unfuse_pool_scaled_to_zero",
        "Whether the pool is scaled to zero, 0 or 1",
        _of_pools(lambda scrape, pool: declared_pool(pool) in scrape.scaled_to_zero),
        *POOL,
    ),
)
