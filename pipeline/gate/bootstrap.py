"""The paired bootstrap over sufficient statistics.

Items (or groups of items) are drawn with replacement, the same draw for both arms; a draw is a row of
counts, so the summed statistics of many draws are one matrix product, and the metric's formula runs on all
of them at once. Draws are made in blocks: memory does not grow with their number.

Bounds are BCa (Efron 1987): bias-corrected and accelerated percentiles, which keep their error rate when
losses are rare and large, where plain percentiles promise too much.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import special

from pipeline.evaluate.base import Floats

DRAWN = 1 << 15  # items drawn at once: their counts stay in a core's second cache
MATRIX = 1 << 18  # counts multiplied at once: 2 MiB
TIE = 1e-9
K = TypeVar("K", bound=Hashable)
Score = Callable[[Floats], Floats]


def resample(statistics: Floats, resamples: int, seed: int) -> Floats:
    """Summed statistics of ``resamples`` draws: shape [n, k] to [resamples, k]. Integer sums are exact."""
    n = len(statistics)
    generator = np.random.Generator(np.random.SFC64(seed))
    totals = np.empty((resamples, statistics.shape[1]))
    rows = max(1, MATRIX // n)
    counts = np.empty((min(rows, resamples), n))
    for start in range(0, resamples, rows):
        block = counts[: min(rows, resamples - start)]
        _draw(generator, block)
        totals[start : start + len(block)] = block @ statistics
    return totals


def _draw(generator: np.random.Generator, counts: Floats) -> None:
    """Fills ``counts``, shape [rows, n]: how often each of n items is drawn in n draws with replacement."""
    rows, n = counts.shape
    step = max(1, DRAWN // n)
    # 16 random bits are enough for most evaluation sets, and three times as fast as 64.
    kind = np.uint16 if n <= 1 << 16 else np.uint32
    offsets = np.arange(step)[:, None] * n
    for start in range(0, rows, step):
        places = generator.integers(0, n, size=(min(step, rows - start), n), dtype=kind)
        drawn = np.add(places, offsets[: len(places)], dtype=np.intp)
        counts[start : start + step] = np.bincount(drawn.ravel(), minlength=drawn.size).reshape(drawn.shape)


def grouped(statistics: Floats, groups: NDArray[np.intp]) -> Floats:
    """Statistics summed by group: shape [items, k] and [items] to [groups, k]."""
    sums = np.zeros((int(groups.max()) + 1, statistics.shape[1]))
    np.add.at(sums, groups, statistics)
    return sums


def resample_together(statistics: Mapping[K, Floats], resamples: int, seed: int) -> dict[K, Floats]:
    """``resample`` of several statistics of the same items with the same draws: [n, k] to [resamples, k] each.

    This is what pairs the arms, and one set of draws serves all metrics and arms.
    """
    widths = np.cumsum([rows.shape[1] for rows in statistics.values()])
    totals = resample(np.hstack(list(statistics.values())), resamples, seed)
    return dict(zip(statistics, np.split(totals, widths[:-1], axis=1), strict=True))


def jackknife_differences(baseline: Floats, candidate: Floats, score: Score) -> Floats:
    """Candidate minus baseline with each row left out in turn, shape [n]."""
    return score(candidate.sum(axis=0) - candidate) - score(baseline.sum(axis=0) - baseline)


def bca(draws: Floats, observed: float, jackknife: Floats, confidence: float) -> tuple[float, float]:
    """One-sided lower and upper BCa bounds from the draws, the observed value and the jackknife."""
    if np.ptp(draws) <= TIE:
        return observed, observed
    tied = np.abs(draws - observed) <= TIE  # sums in another order may differ in the last bit
    below = ((draws < observed) & ~tied).mean() + 0.5 * tied.mean()
    bias = float(special.ndtri(np.clip(below, 0.5 / len(draws), 1 - 0.5 / len(draws))))
    influence = jackknife.mean() - jackknife
    spread = float((influence**2).sum())
    acceleration = float((influence**3).sum()) / (6 * spread**1.5) if spread > 0 else 0.0
    z = float(special.ndtri(confidence))
    levels = [_level(bias, acceleration, -z), _level(bias, acceleration, z)]
    lower, upper = np.quantile(draws, levels)
    return float(lower), float(upper)


def _level(bias: float, acceleration: float, z: float) -> float:
    """The percentile that stands for the normal quantile ``z``; past the pole it is the outermost one."""
    denominator = 1 - acceleration * (bias + z)
    if denominator <= 0:
        return 0.0 if z < 0 else 1.0
    return float(special.ndtr(bias + (bias + z) / denominator))
