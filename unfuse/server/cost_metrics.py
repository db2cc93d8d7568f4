"""Metrics of what requests cost."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from unfuse.core.request import RequestContext
from unfuse.server.prices import Prices, spent

WHOSE = ("model", "tenant")


class CostMetrics:
    """Seconds of devices and money, by model and tenant."""

    def __init__(self, registry: CollectorRegistry) -> None:
        says = "Seconds of devices that requests took"
        self._spent = Counter("unfuse_device_seconds", says, (*WHOSE, "device"), registry=registry)
        self._money = Counter("unfuse_money", "What requests cost, by --price", WHOSE, registry=registry)

    def spent(self, context: RequestContext, tenant: str, prices: Prices) -> None:
        """Add what a request took, and what that costs, if anything has a price."""
        took = spent(context)
        for device, seconds in took.items():
            self._spent.labels(context.model, tenant, device).inc(seconds)
        if (money := prices.money(took)) is not None:
            self._money.labels(context.model, tenant).inc(money)
