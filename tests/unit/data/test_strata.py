"""Quotas add up, bands cover the profile, and distances are SciPy's."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.strata import distance, largest_remainder, plan_strata


def test_the_largest_remainder_by_hand() -> None:
    """Hamilton's apportionment: 10 seats for 47, 16, 15.8, 12, 6.1 and 3.1 thousand votes give 5, 2, 1, 1, 1, 0
    (the example of https://en.wikipedia.org/wiki/Largest_remainder_method: 100 000 votes, quota 10 000)."""
    assert largest_remainder([47_000, 16_000, 15_800, 12_000, 6_100, 3_100], 10) == [5, 2, 1, 1, 1, 0]
    assert largest_remainder([1, 1, 1], 2) == [1, 1, 0]  # equal remainders: the earlier first
    assert largest_remainder([0, 5], 3) == [0, 3]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40).filter(any), st.integers(0, 20_000))
def test_quotas_add_up_and_are_within_one_of_the_exact_share(weights: list[int], total: int) -> None:
    quotas = largest_remainder(weights, total)
    assert sum(quotas) == total
    for weight, quota in zip(weights, quotas, strict=True):
        assert abs(quota - Fraction(weight * total, sum(weights))) < 1


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=200), st.integers(2, 40))
def test_every_length_of_the_profile_has_a_band_and_no_other(lengths: list[int], bands: int) -> None:
    strata = plan_strata(lengths, bands)
    assert sum(strata.counts) == len(lengths)
    assert len(strata.edges) == len(strata.counts) + 1 <= 2 * bands + 1
    assert list(strata.edges) == sorted(set(strata.edges))
    for band, count in enumerate(strata.counts):
        assert sum(strata.band(length) == band for length in lengths) == count
    assert strata.band(min(lengths) - 1) is None
    assert strata.band(max(lengths) + 1) is None


def test_quantile_bands_by_hand() -> None:
    # 1 to 8 in four bands: two lengths each.
    strata = plan_strata([8, 1, 7, 2, 6, 3, 5, 4], 4)
    assert strata.edges == (0, 2, 4, 6, 8)
    assert strata.counts == (2, 2, 2, 2)
    # Ties: half of all lengths are 5, so 5 is a band of its own; 1 is in the band below it.
    strata = plan_strata([5, 5, 5, 5, 1, 9, 10, 11], 4)
    assert (strata.edges, strata.counts) == ((0, 4, 5, 9, 11), (1, 4, 1, 2))
    # Nothing lies between 6 and 30: no quota there.
    strata = plan_strata([6] * 10 + [30] * 30, 5)
    assert (strata.edges, strata.counts) == ((5, 6, 29, 30), (10, 0, 30))


def test_distances_by_hand() -> None:
    # Cumulative shares: (1: 1/2, 3: 1) and (2: 1/2, 4: 1): the largest gap is 1/2, every value shifts by 1.
    assert distance([1, 3], [2, 4]) == {"ks": pytest.approx(0.5), "wasserstein": pytest.approx(1.0)}
    assert distance([5, 6], [6, 5]) == {"ks": 0.0, "wasserstein": 0.0}
