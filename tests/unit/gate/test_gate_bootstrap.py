"""The bootstrap: sums, pairing, BCa against SciPy, error rates where losses are rare, flat memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from scipy import stats

from pipeline.evaluate.base import Floats
from pipeline.gate import bootstrap


def mean(totals: Floats) -> Floats:
    return np.asarray(100 * totals[..., 0] / np.where(totals[..., 1] > 0, totals[..., 1], 1))


def rows(values: Floats) -> Floats:
    return np.column_stack([values, np.ones(len(values))])


def differences(one: Floats, other: Floats, score: bootstrap.Score, resamples: int, seed: int) -> Floats:
    draws = bootstrap.resample_together({"one": one, "other": other}, resamples, seed)
    return score(draws["other"]) - score(draws["one"])


def test_a_draw_has_n_rows_of_the_sample() -> None:
    statistics = np.column_stack([np.ones(50), 2.0 ** np.arange(50)])
    totals = bootstrap.resample(statistics, 200, seed=1)
    assert (totals[:, 0] == 50).all()
    assert len(np.unique(totals[:, 1])) > 190
    assert totals.min() >= 0
    # Each row is drawn n times on average over many draws: 200 * 50 draws of 50 rows.
    assert abs(bootstrap.resample(np.eye(50), 200, seed=1).mean() - 1) < 1e-12


@pytest.mark.parametrize("n", [1, 2, 2000, 20_000, 70_000])
def test_draws_of_any_size_are_of_that_size_and_reach_every_item(n: int) -> None:
    ends = np.zeros((n, 3))
    ends[:, 0], ends[0, 1], ends[-1, 2] = 1, 1, 1
    totals = bootstrap.resample(ends, 60, seed=5)
    assert (totals[:, 0] == n).all()
    assert totals[:, 1].sum() > 20  # each end is drawn once on average
    assert totals[:, 2].sum() > 20
    assert (bootstrap.resample(ends, 60, seed=5) == totals).all()


def test_both_arms_get_the_same_draw() -> None:
    values = np.random.default_rng(3).random(80)
    found = differences(rows(values), rows(values + 0.01), mean, 500, seed=2)
    assert found == pytest.approx(np.ones(500))


def test_bca_is_scipys() -> None:
    source = np.random.default_rng(11)
    values = source.exponential(size=60) - 0.9  # skewed, so that bias and acceleration matter
    theirs = stats.bootstrap(
        (values,), np.mean, confidence_level=0.9, n_resamples=40_000, method="BCa", rng=np.random.default_rng(1)
    ).confidence_interval
    zero = rows(np.zeros(60))
    draws = differences(zero, rows(values), mean, 40_000, seed=4)
    jackknife = bootstrap.jackknife_differences(zero, rows(values), mean)
    mine = bootstrap.bca(draws, 100 * float(values.mean()), jackknife, 0.95)
    plain = np.quantile(draws, [0.05, 0.95])
    expected = (100 * theirs.low, 100 * theirs.high)
    assert mine == pytest.approx(expected, abs=0.4)
    assert abs(plain[0] - expected[0]) > 0.8  # plain percentiles are elsewhere


def test_leaving_one_out() -> None:
    values = np.array([0.0, 3.0, 6.0])
    found = bootstrap.jackknife_differences(rows(np.zeros(3)), rows(values), mean)
    assert found == pytest.approx([450.0, 300.0, 150.0])


def test_groups_are_summed() -> None:
    sums = bootstrap.grouped(np.array([[1.0, 1], [2, 1], [4, 1]]), np.array([1, 0, 1]))
    assert sums.tolist() == [[2, 1], [5, 2]]


@pytest.mark.parametrize("n", [150, 300])
def test_rare_total_losses_pass_at_most_as_often_as_promised(n: int) -> None:
    """2 % of answers lose everything, which is the margin: 5 % may pass; plain percentiles pass more at 300."""
    source = np.random.default_rng(0)
    base = np.full(n, 0.7)
    passed = 0
    trials = 300
    for turn in range(trials):
        candidate = np.where(source.random(n) < 0.02, 0.0, base)
        observed = float(mean(rows(candidate).sum(axis=0)) - mean(rows(base).sum(axis=0)))
        draws = differences(rows(base), rows(candidate), mean, 2000, turn)
        jackknife = bootstrap.jackknife_differences(rows(base), rows(candidate), mean)
        lower, _ = bootstrap.bca(draws, observed, jackknife, 0.95)
        passed += round(lower, 9) > -1.4
    assert passed / trials < 0.05 + 2 * (0.05 * 0.95 / trials) ** 0.5


def test_memory_is_flat_in_the_number_of_draws() -> None:
    statistics = np.random.default_rng(0).integers(0, 9, size=(2000, 20)).astype(float)

    def peak(draws: int) -> float:
        tracemalloc.start()
        bootstrap.resample(statistics, draws, seed=1)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used - draws * 20 * 8  # the result itself

    assert peak(8000) < 1.2 * peak(2000)
