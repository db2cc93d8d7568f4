"""Describe how requests of a plan share forwards on this machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from unfuse.core.plan import StageSpec, declared_pool, readable_pool
from unfuse.models import find
from unfuse.service.plan import ServingPlan
from unfuse.worker.batch_invariance import TRUSTED_AFTER, InvarianceResult, InvarianceResults
from unfuse.worker.compute_messages import EXACTNESS

#: How requests of a stage share forwards, as far as it is known on this machine.
BATCHED = "batched: results within a tolerance"
ALONE = "one request per forward"
CHANGES_BYTES = f"{ALONE}: batches change bytes here"
NOT_COMPARED = "not compared yet"
NOT_TRUSTED = f"fewer than {TRUSTED_AFTER} comparisons"


def batching_rows(plan: ServingPlan, data_dir: str) -> list[dict[str, Any]]:
    """Return a table row for each stage and each compared pool of it.

    `batching`: how requests share forwards.
    `exact_to`: the largest batch size that changes no byte.
    `not_from`: the smallest batch size that changes bytes, or None if none did.
    `because_of`: what differed at that size; "" if nothing did.
    `time`: the time for each request in the largest compared batch, over its time alone. None if it is unknown.
    """
    stored = InvarianceResults(Path(data_dir, EXACTNESS))
    results: defaultdict[str, dict[str, list[InvarianceResult]]] = defaultdict(dict)
    for result in stored.all():
        results[declared_pool(result.pool)].setdefault(result.pool, []).append(result)

    settled_pools = stored.settled_pools()
    batching = plan.worker_plan.compute.batching
    if batching in ("auto", "exact-or-batched") and all(find(model.folder).batches for model in plan.models):
        batching = "batched"

    rows = []
    for declared, spec in _stages(plan).items():
        for pool, pool_results in sorted(results[declared].items()) or [(declared, [])]:
            figures = _figures(pool_results)
            settled = pool in settled_pools
            if batching == "batched" or (settled and batching == "exact-or-batched"):
                text = BATCHED
            elif not spec.batch_invariant:
                text = ALONE
            else:
                text = _exact_batching(figures, settled, bool(pool_results))
            rows.append({"pool": readable_pool(pool), "batching": text, **figures})
    return rows


def _stages(plan: ServingPlan) -> dict[str, StageSpec]:
    """Return the stages of all models, by declared pool."""
    return {
        pool: spec
        for model in plan.models
        for spec in model.spec.pipeline.stages
        if (pool := model.spec.pools().get(spec.name))
    }


def _figures(results: Sequence[InvarianceResult]) -> dict[str, Any]:
    """Return the figures of one pool's row."""
    differing = (result for result in results if result.difference)
    smallest = min(differing, key=lambda result: result.size, default=InvarianceResult())
    timed = [result for result in results if result.size > 1 and result.alone_s and result.together_s]
    largest = max((result.size for result in timed), default=0)
    ratios = [result.together_s / result.alone_s for result in timed if result.size == largest]
    return {
        "exact_to": max((result.size for result in results if result.is_trusted), default=1),
        "not_from": smallest.size or None,
        "because_of": smallest.difference,
        "time": round(median(ratios), 2) if ratios else None,
    }


def _exact_batching(figures: dict[str, Any], settled: bool, is_compared: bool) -> str:
    """Return how requests of a stage share forwards in an exact pool.

    `settled`: whether the pool compares no more. `is_compared`: whether a batch of it was compared.
    """
    if not is_compared:
        return NOT_COMPARED
    if settled:
        return CHANGES_BYTES
    if figures["exact_to"] > 1:
        return f"exact batches up to {figures['exact_to']}"
    return CHANGES_BYTES if figures["not_from"] else NOT_TRUSTED
