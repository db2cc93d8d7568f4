"""A token bucket: limits a rate, with room for bursts."""

from __future__ import annotations


class TokenBucket:
    """Allows `burst` units at once and `rate` units a second in the long run. All times are seconds of one clock."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate, self.burst = rate, burst
        self._left, self._at = burst, now

    def take(self, amount: float, now: float) -> bool:
        """Take that many units. False, with nothing taken, when there are not so many."""
        self._left = min(self.burst, self._left + (now - self._at) * self.rate)
        self._at = now
        if amount > self._left:
            return False
        self._left -= amount
        return True
