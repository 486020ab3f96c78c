"""Intervals over repeats. Requests of one run share a server and a queue, so only fresh servers are independent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import special

LEAST = 3  # with fewer repeats the spread is not known


@dataclass(frozen=True)
class Repeated:
    """The mean of one number over repeats with its one-sided bounds; None with fewer than three repeats."""

    mean: float
    lower: float | None
    upper: float | None
    repeats: int


def over_repeats(values: Sequence[float], confidence: float) -> Repeated:
    """Student's t: mean +- t(k - 1) s / sqrt(k), each bound at ``confidence``. ValueError for no values.

    An infinite value (a percentile that lies among failed requests) makes the mean infinite and leaves no bounds.
    """
    if not values:
        raise ValueError("no repeat")
    count = len(values)
    mean = math.fsum(values) / count
    if count < LEAST or not math.isfinite(mean):
        return Repeated(mean, None, None, count)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    half = float(special.stdtrit(count - 1, confidence)) * spread / math.sqrt(count)
    return Repeated(mean, mean - half, mean + half, count)
