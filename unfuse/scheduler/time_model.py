"""How long a stage takes by how much it has to do: a model of four parts, fitted to what was measured of late."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from statistics import median_low

import numpy as np
from numpy.typing import NDArray

from unfuse.core.media import Work

Times = list[tuple[int, float]]  # which measurement of its model each was, and the seconds

Array = NDArray[np.float64]

SIZES, EACH = 64, 8  # amounts of work that are remembered, the latest ones, and how many of the newest times of each
FORGET = 0.98  # what a measurement weighs after each newer one

MAIN, SIMPLE, FAR = 2, 0.05, 3.0
"""Every part but the main one has a penalty of so much of a measurement, if it grows FAR + 1 times as much as the main
one over what was measured. Where the two are harder to tell apart it is larger, and the main one explains it."""

SPREAD = 0.1  # relative errors of this size are usual, however well the others fit
ROUNDS = 3  # how often a fit is weighed again


class TimeModel:
    """Seconds are a + forwards × (b + c × size + d × size²), no part below 0: more work is never predicted to be less.

    Attention is what grows with the square. A single measurement, or many of one size, are scaled in proportion, by c.
    Fitted are the medians of each amount of work, so that frequent ones do not displace what is known of others, by
    their relative errors under non-negative least squares (Lawson and Hanson 1974; of four parts, every support can be
    tried), weighed again by Cauchy's function (Holland and Welsch 1977). The first weights are of the measured seconds:
    a cold start takes 20 times what is usual, and nothing a twentieth.
    """

    def __init__(self, known: Iterable[tuple[Work, Times]] = ()) -> None:
        self.times: dict[Work, Times] = dict(known)
        self._seen = self._news = max((number for times in self.times.values() for number, _ in times), default=0)
        self._parts = [0.0] * 4

    def add(self, work: Work, seconds: float) -> None:
        """Take in a measurement, of more than 0 seconds."""
        self._seen, self._news = self._seen + 1, self._news + 1
        self.times[work] = [*self.times.pop(work, ()), (self._seen, seconds)][-EACH:]
        if len(self.times) > SIZES:
            del self.times[next(iter(self.times))]

    def seconds(self, work: Work) -> float:
        """Predicted seconds, once anything was measured; at most an eighth of all measurements is not yet taken in."""
        if self._news > self._seen // 8:
            self.fit()
        return sum(part * feature for part, feature in zip(self._parts, _features(work), strict=True))

    def fit(self) -> None:
        """Take in what was measured since the last fit: about a millisecond, if there is anything."""
        if self._news <= 0:
            return
        features = np.array([_features(work) for work in self.times])
        found = np.array([median_low(seconds for _, seconds in times) for times in self.times.values()])
        ages = np.array([sum(FORGET ** (self._seen - number) for number, _ in one) for one in self.times.values()])
        usual, weights = found, ages
        for _ in range(ROUNDS):
            parts = _fit(features / usual[:, None], found / usual, weights)
            usual = features @ parts
            off = np.abs(found / usual - 1)
            weights = ages / (1 + (off / (2 * max(SPREAD, np.median(off)))) ** 2)
        self._news, self._parts = 0, [float(part) for part in parts]


def _features(work: Work) -> list[float]:
    forwards, size = work
    return [1.0, forwards, forwards * size, forwards * size * size]


def _fit(rows: Array, shares: Array, weights: Array) -> Array:
    """The parts, none below 0, with the least squared errors of these shares, and penalties."""
    tops = rows.max(0)
    rows = rows / tops
    ratios = rows / rows[:, [MAIN]]
    penalties = SIMPLE * np.maximum(1, FAR / np.maximum(ratios.max(0) / ratios.min(0) - 1, 1e-3)) ** 2
    penalties[MAIN] = 1e-12
    a, b = (rows.T * weights) @ rows + np.diag(penalties), rows.T @ (weights * shares)
    best = np.zeros(4)
    for support in (list(some) for size in range(1, 5) for some in combinations(range(4), size)):
        found = np.zeros(4)
        found[support] = np.linalg.solve(a[np.ix_(support, support)], b[support])
        if found.min() >= 0 and b @ found > b @ best:  # of those within bounds, the best one explains most
            best = found
    parts: Array = best / tops
    return parts
