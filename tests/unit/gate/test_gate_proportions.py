"""Intervals of paired proportions against published examples, R, and the definition solved by brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from pipeline.gate.proportions import Table, design_effect, newcombe, tango, wilson

TWO_SIDED_95 = 0.975  # a two-sided 95 % interval is a pair of one-sided 97.5 % bounds

# In the sources the difference is first minus second, with the counts both, only first, only second, neither.
# Here it is candidate minus baseline: "only first" are the gains.
BENTUR = Table(both=1, gains=1, losses=7, neither=12)
CAVO = Table(both=59, gains=6, losses=16, neither=80)


@pytest.mark.parametrize(
    ("counts", "lower", "upper", "digits"),
    [
        # R contingencytables 3.0, its test of Newcombe_square_and_add_CI_paired_2x2(cavo_2012).
        (CAVO, -0.1186, -0.0046, 4),
        # Fagerland, Lydersen, Laake, Stat. Med. 33 (2014) 2850-2875, airway example.
        (BENTUR, -0.507, -0.026, 3),
        # Newcombe 1998, table II, 36/12/2/0.
        (Table(both=36, gains=12, losses=2, neither=0), 0.0569, 0.3404, 4),
    ],
)
def test_newcombe_method_10(counts: Table, lower: float, upper: float, digits: int) -> None:
    found = newcombe(counts, TWO_SIDED_95)
    assert [round(bound, digits) for bound in found] == [lower, upper]


@pytest.mark.parametrize(
    ("counts", "confidence", "lower", "upper", "digits"),
    [
        # R contingencytables 3.0, its test of Tango_asymptotic_score_CI_paired_2x2(cavo_2012).
        (CAVO, 0.975, -0.1240, -0.0054, 4),
        (BENTUR, 0.975, -0.517, -0.026, 3),  # Fagerland et al. 2014
        # R PropCIs 0.3-0, scoreci.mp(b = 25, c = 28, n = 618, conf.level = 0.90).
        (Table(both=500, losses=25, gains=28, neither=65), 0.95, -0.0148, 0.0247, 4),
    ],
)
def test_tango(counts: Table, confidence: float, lower: float, upper: float, digits: int) -> None:
    found = tango(counts, confidence)
    assert [round(bound, digits) for bound in found] == [lower, upper]


def _score_by_likelihood(losses: int, gains: int, n: int, delta: float) -> float:
    """Tango's statistic from its definition: the restricted maximum found by a general optimiser."""

    def negative(share: float) -> float:
        rest = 1 - 2 * share - delta
        terms = ((losses, share), (gains, share + delta), (n - losses - gains, rest))
        return -sum(count * math.log(max(part, 1e-300)) for count, part in terms if count)

    low, high = max(0.0, -delta), (1 - delta) / 2
    share = optimize.minimize_scalar(negative, bounds=(low, high), method="bounded", options={"xatol": 1e-12}).x
    return float((gains - losses - n * delta) / math.sqrt(n * (2 * share + delta * (1 - delta))))


@pytest.mark.parametrize(("losses", "gains", "n"), [(40, 20, 160), (13, 3, 400), (2, 2, 30), (0, 5, 25)])
def test_tango_bounds_solve_the_score_equation(losses: int, gains: int, n: int) -> None:
    lower, upper = tango(Table(n - losses - gains, losses, gains, 0), 0.95)
    z = float(stats.norm.ppf(0.95))
    assert _score_by_likelihood(losses, gains, n, lower) == pytest.approx(z, abs=1e-4)
    assert _score_by_likelihood(losses, gains, n, upper) == pytest.approx(-z, abs=1e-4)


@pytest.mark.parametrize(("successes", "n"), [(0, 10), (3, 21), (19, 20), (20, 20)])
def test_wilson_is_scipys(successes: int, n: int) -> None:
    theirs = stats.binomtest(successes, n).proportion_ci(0.9, method="wilson")
    assert wilson(successes, n, 0.95) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


counts = st.integers(0, 60)


@settings(deadline=None)
@given(counts, counts, counts, counts, st.sampled_from([newcombe, tango]))
def test_bounds_hold_the_difference_and_mirror(both, losses, gains, neither, interval) -> None:  # type: ignore[no-untyped-def]
    if both + losses + gains + neither == 0:
        return
    one = Table(both, losses, gains, neither)
    lower, upper = interval(one, 0.95)
    assert -1 <= lower <= one.difference + 1e-9
    assert one.difference - 1e-9 <= upper <= 1
    mirrored = interval(Table(both, gains, losses, neither), 0.95)
    assert mirrored == pytest.approx((-upper, -lower), abs=1e-8)


@settings(deadline=None)
@given(st.integers(1, 40), counts, counts, counts, st.sampled_from([newcombe, tango]))
def test_one_more_loss_never_raises_the_lower_bound(both, losses, gains, neither, interval) -> None:  # type: ignore[no-untyped-def]
    before, _ = interval(Table(both, losses, gains, neither), 0.95)
    after, _ = interval(Table(both - 1, losses + 1, gains, neither), 0.95)
    assert after <= before + 1e-9


@settings(deadline=None)
@given(st.integers(1, 500), st.sampled_from([newcombe, tango]))
def test_no_discordance_still_leaves_doubt(n: int, interval) -> None:  # type: ignore[no-untyped-def]
    lower, upper = interval(Table(n, 0, 0, 0), 0.95)
    assert lower < 0 < upper


def test_tables_refuse_nonsense() -> None:
    for wrong in ((-1, 0, 0, 2), (0, 0, 0, 0)):
        with pytest.raises(ValueError, match="counts"):
            Table(*wrong)


def test_design_effect() -> None:
    values = np.array([1.0, 0.0, -1.0, 0.0])
    # Each item four times in its own group: the mean is that of 4 items, not 16. The exact ratio for G groups
    # of m equal items is m * G / (G - 1).
    groups = np.repeat(np.arange(4), 4)
    assert design_effect(np.repeat(values, 4), groups) == pytest.approx(4 * 4 / 3)
    # Groups that cancel inside would give less than 1, which is not taken.
    assert design_effect(np.array([1.0, -1.0, 1.0, -1.0]), np.array([0, 0, 1, 1])) == 1.0
    assert design_effect(np.zeros(6), np.arange(6)) == 1.0
