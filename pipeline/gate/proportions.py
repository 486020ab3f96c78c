"""Intervals for the difference of two paired proportions, and what clusters do to them.

The table of a paired right-or-wrong comparison holds four counts: both right, only the baseline right (the
losses), only the candidate right (the gains), both wrong. The difference is (gains - losses) / n, as a
fraction between -1 and 1. Bounds are one-sided at ``confidence``; lower and upper together are the two-sided
interval at ``2 * confidence - 1``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from pipeline.evaluate.base import Floats


@dataclass(frozen=True)
class Table:
    """Counts of paired outcomes; fractions are allowed (counts scaled by a design effect)."""

    both: float
    losses: float
    gains: float
    neither: float

    def __post_init__(self) -> None:
        if min(self.both, self.losses, self.gains, self.neither) < 0 or self.n <= 0:
            raise ValueError("counts must be 0 or more, and one of them more than 0")

    @property
    def n(self) -> float:
        """The number of items."""
        return self.both + self.losses + self.gains + self.neither

    @property
    def difference(self) -> float:
        """Candidate minus baseline, a fraction."""
        return (self.gains - self.losses) / self.n

    @property
    def discordance(self) -> float:
        """The fraction of items on which the two differ."""
        return (self.gains + self.losses) / self.n

    def scaled(self, factor: float) -> Table:
        """Every count times ``factor``."""
        return Table(self.both * factor, self.losses * factor, self.gains * factor, self.neither * factor)


def table(baseline: NDArray[np.bool_], candidate: NDArray[np.bool_]) -> Table:
    """Counts from two arrays of shape [items]."""
    both, neither = int((baseline & candidate).sum()), int((~baseline & ~candidate).sum())
    return Table(both, int((baseline & ~candidate).sum()), int((~baseline & candidate).sum()), neither)


def wilson(successes: float, n: float, confidence: float) -> tuple[float, float]:
    """One-sided lower and upper Wilson score bounds of one proportion (Wilson 1927)."""
    z = float(special.ndtri(confidence))
    centre = (successes + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(successes * (n - successes) / n + z * z / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


def newcombe(counts: Table, confidence: float) -> tuple[float, float]:
    """Lower and upper bound of the difference: method 10 of Newcombe, Stat. Med. 17 (1998) 2635-2650.

    Square-and-add of two Wilson intervals, with their correlation from the continuity-corrected phi.
    """
    n = counts.n
    right_candidate, right_baseline = counts.both + counts.gains, counts.both + counts.losses
    one, other = right_candidate / n, right_baseline / n
    one_low, one_high = wilson(right_candidate, n, confidence)
    other_low, other_high = wilson(right_baseline, n, confidence)
    phi = _phi(counts)
    down, up = (one - one_low, other_high - other), (one_high - one, other - other_low)
    lower = counts.difference - _added(down, phi)
    upper = counts.difference + _added(up, phi)
    return max(-1.0, lower), min(1.0, upper)


def _added(parts: tuple[float, float], phi: float) -> float:
    one, other = parts
    return math.sqrt(max(0.0, one * one - 2 * phi * one * other + other * other))


def _phi(counts: Table) -> float:
    margins = (
        (counts.both + counts.losses)
        * (counts.gains + counts.neither)
        * (counts.both + counts.gains)
        * (counts.losses + counts.neither)
    )
    if margins == 0:
        return 0.0
    product = counts.both * counts.neither - counts.losses * counts.gains
    if product > 0:
        product = max(0.0, product - counts.n / 2)
    return product / math.sqrt(margins)


def tango(counts: Table, confidence: float) -> tuple[float, float]:
    """Lower and upper bound of the difference: the score interval of Tango, Stat. Med. 17 (1998) 891-908.

    The bounds are the differences at which the score statistic equals +z and -z.
    """
    z = float(special.ndtri(confidence))
    lower = _root(lambda delta: _score(counts, delta) - z, -1.0, counts.difference)
    upper = _root(lambda delta: _score(counts, delta) + z, counts.difference, 1.0)
    return lower, upper


def _score(counts: Table, delta: float) -> float:
    """The score statistic at ``delta``, with the restricted maximum-likelihood estimate of the losses."""
    n = counts.n
    b = -counts.gains - counts.losses + (2 * n - counts.gains + counts.losses) * delta
    c = -counts.losses * delta * (1 - delta)
    losses = (math.sqrt(max(0.0, b * b - 8 * n * c)) - b) / (4 * n)
    variance = n * (2 * losses + delta * (1 - delta))
    excess = counts.gains - counts.losses - n * delta
    if variance <= 0:
        return 0.0 if excess == 0 else math.copysign(math.inf, excess)
    return excess / math.sqrt(variance)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """The root between ``low`` and ``high``, or the outer end when the statistic never gets there."""

    def clipped(delta: float) -> float:
        return min(max(function(delta), -1e6), 1e6)

    first, last = clipped(low), clipped(high)
    if first == 0 or first * last > 0:
        return low if low == -1.0 else high
    if last == 0:
        return high
    return float(cast(Any, optimize.brentq)(clipped, low, high, xtol=1e-12))


def design_effect(differences: Floats, groups: NDArray[np.intp]) -> float:
    """How many times the variance of the mean grows because items share groups; at least 1.

    ``differences`` has shape [items], ``groups`` the group number of each. The ratio of the between-cluster
    variance estimate to that of independent items; dividing the counts by it is the method of Rao and Scott,
    Biometrics 48 (1992) 577-585.
    """
    deviations = differences - differences.mean()
    independent = float((deviations**2).sum())
    sums = np.bincount(groups, weights=deviations)
    count = len(sums)
    if independent == 0 or count < 2 or count == len(differences):
        return 1.0
    return max(1.0, count / (count - 1) * float((sums**2).sum()) / independent)
