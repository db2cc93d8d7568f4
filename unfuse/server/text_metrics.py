"""The metrics of texts: tokens and how fast they come, and what workers have of keys, values and prompts."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from typing_extensions import override

from unfuse.core.pool import declared
from unfuse.core.request import RequestContext
from unfuse.core.text import CHUNK
from unfuse.queues.base import Member, Stats
from unfuse.scheduler.observer import Observer
from unfuse.stages.specs import DECODE, PREFILL

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BETWEEN = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class TextMetrics(Observer):
    """Tokens are counted as they are recorded, which is before they are shown; prompts when they are accepted.

    `shown` returns the name of a model that clients see, which is its label.
    """

    def __init__(self, registry: CollectorRegistry, shown: Callable[[str], str] = str) -> None:
        self._shown = shown
        self._tokens = Counter(
            "unfuse_tokens",
            "Tokens of accepted prompts (prompt), those of them whose keys and values were there (cached), and tokens "
            "that were made (completion)",
            ["model", "kind"],
            registry=registry,
        )
        self._first = Histogram(
            "unfuse_time_to_first_token_seconds",
            "Seconds from the acceptance of a request until a choice's first token is recorded",
            ["model"],
            registry=registry,
            buckets=_FIRST,
        )
        self._between = Histogram(
            "unfuse_inter_token_seconds",
            "Seconds between tokens of a choice, as they are recorded; those that are recorded together share them",
            ["model"],
            registry=registry,
            buckets=_BETWEEN,
        )
        self._retractions = Counter(
            "unfuse_retractions", "How often texts gave up their keys and values for others", registry=registry
        )
        says = "Blocks of keys and values on live workers"
        self._blocks = Gauge("unfuse_kv_blocks", says, ["role", "state"], registry=registry)
        says = "Prompts whose keys and values are not there yet: they wait for a worker, or it computes them"
        self._prefill = Gauge("unfuse_prefill_queue", says, registry=registry)
        says = "Texts that wait until their grammar is compiled: before they are accepted, or at a worker"
        self._grammar = Gauge("unfuse_grammar_queue", says, registry=registry)
        self.trials = 0  # how many requests wait here, now, until their grammar was tried
        says = "Texts that no decoder has taken yet: there is no room for their keys and values, or no free slot"
        self._prealloc = Gauge("unfuse_decode_prealloc_queue", says, registry=registry)
        says = "Texts for which a decoder keeps room, and whose keys and values are not all there yet"
        self._transfer = Gauge("unfuse_decode_transfer_queue", says, registry=registry)

    @override
    def submitted(self, context: RequestContext) -> None:
        if tokens := context.derived.prompt_tokens:
            self._tokens.labels(self._shown(context.model), "prompt").inc(tokens)
            self._tokens.labels(self._shown(context.model), "cached").inc(0)

    @override
    def ended(self, context: RequestContext) -> None:
        if spared := context.spared:
            self._tokens.labels(self._shown(context.model), "cached").inc(CHUNK * spared)

    @override
    def began_to_grow(self, model: str, pieces: int, seconds: float) -> None:
        self._first.labels(self._shown(model)).observe(seconds)
        self._tokens.labels(self._shown(model), "completion").inc(pieces)

    @override
    def grew(self, model: str, pieces: int, seconds: float | None) -> None:
        self._tokens.labels(self._shown(model), "completion").inc(pieces)
        for _ in range(pieces if seconds is not None else 0):
            self._between.labels(self._shown(model)).observe((seconds or 0.0) / pieces)

    @override
    def retracted(self, times: int) -> None:
        self._retractions.inc(times)

    def look(self, members: Sequence[Member], stats: Stats) -> None:
        """Set what is read at each scrape: what these workers and pools have now."""
        self._blocks.clear()
        waiting = Counts[str]()
        for pool, line in stats.pools.items():
            waiting[_kind(pool)] += line.waiting
        prompts, arriving = waiting[PREFILL.kind], 0
        for info in (member.info for member in members):
            if texts := info.texts:
                prompts, arriving = prompts + texts.prompts, arriving + texts.arriving
                for state, blocks in (("used", texts.used), ("free", texts.free)):
                    self._blocks.labels(info.role, state).inc(blocks)
        self._prefill.set(prompts)
        self._prealloc.set(waiting[DECODE.kind])
        self._transfer.set(arriving)
        self._grammar.set(self.trials + sum(member.info.texts.grammars for member in members if member.info.texts))


def _kind(pool: str) -> str:
    """The stage kind in a pool's name."""
    return declared(pool).partition(":")[0]
