"""Which metrics a client sees: all of them, or those that tell nothing about tenants, money and models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import Metric

PUBLIC_LABELS = frozenset({
    "backend", "component", "device", "engine", "le", "memory", "node", "of", "outcome", "pool", "rank", "role",
    "state",
})  # fmt: skip
"""Labels that a stranger sees. A sample with any other label is hidden, so that a new label is hidden by default."""


class Audience:
    """A client that sees some samples, or all.

    A stranger (`tenant` is None) sees samples with public labels. A tenant also sees its own samples and, if it
    `sees_models`, those of no tenant.
    """

    def __init__(self, tenant: str | None = None, *, sees_models: bool = False, sees_all: bool = False) -> None:
        self._tenant, self._sees_models, self.sees_all = tenant, sees_models, sees_all

    def sees(self, labels: Mapping[str, str]) -> bool:
        """Return whether a sample with these labels is shown."""
        if self.sees_all:
            return True
        if "tenant" in labels:
            return labels["tenant"] == self._tenant
        return self._sees_models or labels.keys() <= PUBLIC_LABELS


EVERYTHING = Audience(sees_all=True)


class VisibleMetrics:
    """Those of some metrics that a client sees. A metric without any such sample is left out."""

    def __init__(self, metrics: Iterable[Metric], audience: Audience) -> None:
        self._metrics, self._audience = metrics, audience

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, with the samples that are shown."""
        for metric in self._metrics:
            if self._audience.sees_all:
                yield metric
            elif samples := [sample for sample in metric.samples if self._audience.sees(sample.labels)]:
                visible = Metric(metric.name, metric.documentation, metric.type, metric.unit)
                visible.samples = samples
                yield visible
