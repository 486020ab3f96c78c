"""Length strata: a sample with the length profile of another set.

Bands are quantiles of the profile's lengths, so that each holds about the same share of it; a length that alone has
such a share is a band of its own. A band's quota is its share of the sample by the largest remainder (Hamilton's
method), so quotas add up to what was asked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Strata:
    """Bands of lengths in tokens: band ``i`` holds lengths above ``edges[i]`` up to and including ``edges[i + 1]``.

    ``counts`` is how many lengths of the profile each band holds. ``edges`` is one longer.
    """

    edges: tuple[int, ...]
    counts: tuple[int, ...]

    def band(self, length: int) -> int | None:
        """The band of a length; None for one outside the profile."""
        if not self.edges[0] < length <= self.edges[-1]:
            return None
        return bisect_left(self.edges, length) - 1


def plan_strata(lengths: Sequence[int], bands: int) -> Strata:
    """About ``bands`` bands over the profile ``lengths`` (tokens, not empty): fewer for ties, more for frequent
    lengths, each of which is cut off from those below it (at most twice as many)."""
    import numpy as np

    steps = np.quantile(lengths, np.linspace(0, 1, bands + 1)[1:], method="inverted_cdf")
    values, counts = np.unique(lengths, return_counts=True)
    frequent = values[counts * bands >= len(lengths)]
    edges = tuple(sorted({min(lengths) - 1, *(int(step) for step in steps), *(int(one) - 1 for one in frequent)}))
    places = np.searchsorted(edges, lengths, side="left") - 1
    return Strata(edges, tuple(int(count) for count in np.bincount(places, minlength=len(edges) - 1)))


def largest_remainder(weights: Sequence[int], total: int) -> list[int]:
    """``total`` spread over ``weights``: rounded down, and the rest to the largest remainders (earlier first)."""
    whole = sum(weights)
    quotas = [weight * total // whole for weight in weights]
    rest = sorted(range(len(weights)), key=lambda place: (-(weights[place] * total % whole), place))
    for place in rest[: total - sum(quotas)]:
        quotas[place] += 1
    return quotas


def distance(one: Sequence[int], other: Sequence[int]) -> dict[str, Any]:
    """How far two sets of lengths are apart: the largest gap between their cumulative shares
    (``ks``, 0 to 1; Kolmogorov-Smirnov) and the mean shift in tokens (``wasserstein``)."""
    from scipy.stats import ks_2samp, wasserstein_distance

    return {
        "ks": round(float(ks_2samp(one, other, method="asymp").statistic), 6),
        "wasserstein": round(float(wasserstein_distance(one, other)), 4),
    }
