"""Layer 1: margins are exact, bounds move as they must, undefined scores are INVALID and not a loss."""

from __future__ import annotations

import math
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.evaluate.base import Floats, Metric
from pipeline.evaluate.registry import make_metric
from pipeline.gate.noninferiority import Comparison, compare, judged, measure
from pipeline.gate.policy import MetricRule, Policy
from pipeline.records import Item

ITEMS = [Item(f"i{place}", "", "a", (1,)) for place in range(400)]


def policy_of(name: str, **rule: object) -> Policy:
    fields = {"margin": Decimal(2)} | rule
    return Policy(metrics={name: MetricRule(**fields)})  # type: ignore[arg-type]


Statistics = tuple[Floats, Floats, list[int]]


def sample(metric: Metric, baseline: list[str], candidate: list[str], groups: list[int] | None = None) -> Statistics:
    items = ITEMS[: len(baseline)]
    numbers = groups if groups is not None else list(range(len(items)))
    return metric.statistics(baseline, items), metric.statistics(candidate, items), numbers


def judge(metric: Metric, statistics: Statistics, policy: Policy) -> Comparison:
    baseline, candidate, groups = statistics
    measured = measure({"baseline": baseline, "candidate": candidate}, np.array(groups), policy)
    return compare(metric, measured["baseline"], measured["candidate"], policy)


def right(count: int, n: int) -> list[str]:
    return ["a"] * count + ["b"] * (n - count)


@pytest.mark.parametrize(
    ("lower", "upper", "outcome"),
    [
        (-1.999, 0.0, "pass"),
        (-2.0, 0.0, "inconclusive"),  # a bound of exactly the margin is not above it
        (-2.0 - 1e-13, 0.0, "inconclusive"),
        (-2.0 + 1e-13, 0.0, "inconclusive"),  # float luck of the last bits changes nothing
        (100 * 0.68 - 100 * 0.70, 0.0, "inconclusive"),  # -2.0000000000000142
        (-9.0, -2.0, "inconclusive"),  # nor is a loss of exactly the margin proven to exceed it
        (-9.0, -2.001, "fail"),
    ],
)
def test_the_boundary_has_one_answer(lower: float, upper: float, outcome: str) -> None:
    assert judged(lower, upper, Decimal(2)) == outcome


def test_a_relative_margin_is_exact_too() -> None:
    # Every item loses 2 % of a baseline of 35: the bootstrap has no spread and the bound is -0.7 = -2 % of 35.
    metric = make_metric("token_f1")
    baseline = np.column_stack([np.full(400, 0.35), np.ones(400)])
    candidate = np.column_stack([np.full(400, 0.343), np.ones(400)])
    found = judge(metric, (baseline, candidate, list(range(400))), policy_of("token_f1", margin_kind="relative"))
    assert found.margin_points == pytest.approx(0.7)
    assert found.lower == pytest.approx(-0.7)
    assert found.outcome == "inconclusive"


def test_a_relative_margin_of_a_baseline_of_nothing_is_invalid() -> None:
    metric = make_metric("exact_match")
    found = judge(metric, sample(metric, ["b"] * 50, ["b"] * 50), policy_of("exact_match", margin_kind="relative"))
    assert found.outcome == "invalid"
    assert found.difference is None


def test_bleu_without_4grams_is_invalid_not_a_loss() -> None:
    metric = make_metric("bleu")
    found = judge(metric, sample(metric, ["a b c"] * 50, ["a b c"] * 50), policy_of("bleu"))
    assert found.outcome == "invalid"
    assert "4-gram" in found.detail


def test_newcombe_and_tango_are_chosen_by_the_policy() -> None:
    metric = make_metric("exact_match")
    rows = sample(metric, right(300, 400), right(297, 400))
    one = judge(metric, rows, policy_of("exact_match"))
    other = judge(metric, rows, policy_of("exact_match", method="tango"))
    assert one.method == "Newcombe method 10"
    assert other.method == "Tango score"
    assert one.difference == other.difference == pytest.approx(-0.75)
    assert one.lower != other.lower


def test_needs_n_is_the_planned_number_at_the_observed_discordance() -> None:
    # 240 items, 6 losses and 6 gains: discordance 0.05, so 773 items for 2 points (facts/gate.md).
    metric = make_metric("exact_match")
    baseline, candidate = right(180, 240), ["b"] * 6 + right(180, 234)
    found = judge(metric, sample(metric, baseline, candidate), policy_of("exact_match"))
    assert (found.difference, found.outcome, found.needs_n) == (0.0, "inconclusive", 773)
    assert "n >= 773" in found.detail


def test_needs_n_follows_the_observed_loss_once_noise_is_no_excuse() -> None:
    # 400 items, 5 losses and no gain: 6.18 * 0.0125 / 0.02^2 = 194 items are there already. The gain of -1.25 is
    # 0.75 short of the margin; its bound is found.lower, so the items must grow by the square of that ratio.
    metric = make_metric("exact_match")
    baseline, candidate = right(300, 400), right(295, 400)
    found = judge(metric, sample(metric, baseline, candidate), policy_of("exact_match"))
    assert found.outcome == "inconclusive"
    assert found.lower is not None
    assert found.needs_n == math.ceil(400 * ((-1.25 - found.lower) / 0.75) ** 2)


@given(st.decimals("0.01", "50", places=4), st.floats(-4e-10, 4e-10))
def test_whatever_the_last_bits_say_a_bound_at_the_margin_is_inconclusive(margin: Decimal, luck: float) -> None:
    assert judged(-float(margin) + luck, 0.0, margin) == "inconclusive"
    assert judged(-99.0, -float(margin) + luck, margin) == "inconclusive"
    assert judged(-float(margin) + 1e-8, 0.0, margin) == "pass"
    assert judged(-99.0, -float(margin) - 1e-8, margin) == "fail"


def test_the_bootstrap_cannot_certify_what_it_could_not_have_seen() -> None:
    # ROUGE-L of 100 on the baseline: a margin of 1 point takes 299 items even when nothing changes.
    metric = make_metric("rouge_l")
    few = judge(metric, sample(metric, ["a"] * 298, ["a"] * 298), policy_of("rouge_l", margin=Decimal(1)))
    enough = judge(metric, sample(metric, ["a"] * 299, ["a"] * 299), policy_of("rouge_l", margin=Decimal(1)))
    assert (few.outcome, few.needs_n) == ("inconclusive", 299)
    assert enough.outcome == "pass"


def test_lower_is_better_is_turned_round() -> None:
    metric = make_metric("ter")
    policy = policy_of("ter")
    worse = judge(metric, sample(metric, ["a"] * 300, ["b"] * 150 + ["a"] * 150), policy)
    better = judge(metric, sample(metric, ["b"] * 150 + ["a"] * 150, ["a"] * 300), policy)
    assert (worse.difference, worse.outcome) == (pytest.approx(-50), "fail")
    assert (better.difference, better.outcome) == (pytest.approx(50), "pass")
    assert (worse.baseline, worse.candidate) == (0, pytest.approx(50))


@pytest.mark.parametrize("name", ["exact_match", "rouge_l"])
def test_copies_of_items_in_one_group_add_no_certainty(name: str) -> None:
    metric = make_metric(name)
    baseline, candidate = right(30, 40), ["b", *right(29, 39)]
    alone = judge(metric, sample(metric, baseline, candidate), policy_of(name))
    copies = [number for number in range(40) for _ in range(10)]
    tenfold = [[text for text in texts for _ in range(10)] for texts in (baseline, candidate)]
    grouped = judge(metric, sample(metric, *tenfold, copies), policy_of(name))
    naive = judge(metric, sample(metric, *tenfold), policy_of(name))
    assert grouped.difference == pytest.approx(alone.difference)
    assert alone.lower is not None
    assert grouped.lower is not None
    assert naive.lower is not None
    assert grouped.lower < naive.lower - 0.5
    assert grouped.lower == pytest.approx(alone.lower, abs=0.6)


def test_the_confidence_of_a_look_is_used() -> None:
    metric = make_metric("exact_match")
    rows = sample(metric, right(300, 400), right(297, 400))
    one = judge(metric, rows, policy_of("exact_match"))
    two = judge(metric, rows, Policy(metrics=policy_of("exact_match").metrics, looks=2))
    assert one.lower is not None
    assert two.lower is not None
    assert two.lower < one.lower
