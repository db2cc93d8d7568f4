"""What each tenant has, held against what it may have."""

from __future__ import annotations

from collections import Counter
from math import ceil

from unfuse.core.errors import LimitReached
from unfuse.core.request import Allowance

MICROSECONDS = 10**6  # times are whole microseconds, which every backend adds exactly


class Tenants:
    """A queue's tenants: how many requests are not over, and when each rate will be whole again."""

    def __init__(self) -> None:
        self._active = Counter[str]()
        self._whole_at: dict[str, int] = {}

    def count(self, tenant: str, change: int) -> None:
        """Count requests that begin, or end."""
        self._active[tenant] += change
        if not self._active[tenant]:
            del self._active[tenant]

    def require(self, tenant: str, may: Allowance, now: float) -> None:
        """Raise LimitReached if the tenant may not have another request now, in seconds of the queue's clock."""
        if may.concurrent and (has := self._active[tenant]) >= may.concurrent:
            message = f"{tenant} has {has} requests in progress, its key allows {may.concurrent}"
            raise LimitReached(f"{message}: try again when one is over")
        early = self._next(tenant, may, now) - int(now * MICROSECONDS) - may.per_s * MICROSECONDS
        if may.rate and early > 0:
            wait = ceil(early / MICROSECONDS)
            message = f"the key of {tenant} allows {may.rate} requests in {may.per_s} s: try again in {wait} s"
            raise LimitReached(message, early / MICROSECONDS)

    def take(self, tenant: str, may: Allowance, now: float) -> None:
        """Use some of the tenant's rate, if it has one."""
        if may.rate:
            self._whole_at[tenant] = self._next(tenant, may, now)

    def _next(self, tenant: str, may: Allowance, now: float) -> int:
        """When all of the rate is there again if another request is accepted now."""
        each = may.per_s * MICROSECONDS // may.rate if may.rate else 0
        return max(self._whole_at.get(tenant, 0), int(now * MICROSECONDS)) + each
