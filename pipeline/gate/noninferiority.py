"""Layer 1: is the candidate shown to lose less than the margin?

For each metric and slice: one-sided bounds of the gain (candidate minus baseline, turned so that more is
better). Lower bound above -margin: pass. Upper bound below -margin: fail, the loss is proven. Else
inconclusive. A bound of exactly -margin is neither shown nor proven, so it is inconclusive; bounds are rounded
to 1e-9 points first, as is the margin, so that this answer never hangs on the last bit of a float.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.evaluate.base import Floats, Metric
from pipeline.gate import bootstrap, plan, proportions
from pipeline.gate.bootstrap import K
from pipeline.gate.policy import Method, MetricRule, Policy

GRID = Decimal("1e-9")
Outcome = Literal["pass", "fail", "inconclusive", "invalid"]


@dataclass(frozen=True)
class Measured:
    """One arm under one metric: statistics of items [n, k], of groups [g, k], of draws [resamples, k], and the
    number of each item's group [n]."""

    items: Floats
    units: Floats
    draws: Floats
    groups: NDArray[np.intp]


@dataclass(frozen=True)
class Bounds:
    """The gain in points, its one-sided bounds, the variance of one item (points squared) and the method."""

    gain: float
    lower: float
    upper: float
    variance: float
    method: str


@dataclass(frozen=True)
class Comparison:
    """One metric on one slice; scores and bounds in points, ``difference`` positive when the candidate is better."""

    name: str
    importance: str
    slice: str
    n: int
    baseline: float
    candidate: float
    difference: float | None
    lower: float | None
    upper: float | None
    confidence: float
    margin: str
    margin_kind: str
    margin_points: float | None
    method: str
    signature: str
    higher_is_better: bool
    outcome: Outcome
    needs_n: int | None
    detail: str

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)


def exact(value: float) -> Decimal:
    """A float on the grid of 1e-9 points: what is compared with a margin."""
    return Decimal(value).quantize(GRID)


def judged(lower: float, upper: float, margin: Decimal) -> Outcome:
    """The outcome of bounds against a margin in points."""
    limit = -margin.quantize(GRID)
    if exact(lower) > limit:
        return "pass"
    return "fail" if exact(upper) < limit else "inconclusive"


def measure(statistics: Mapping[K, Floats], groups: NDArray[np.intp], policy: Policy) -> dict[K, Measured]:
    """Draws once for all metrics and arms; ``statistics`` have shape [items, k], ``groups`` shape [items]."""
    units = {key: bootstrap.grouped(rows, groups) for key, rows in statistics.items()}
    draws = bootstrap.resample_together(units, policy.resamples, policy.seed)
    return {key: Measured(rows, units[key], draws[key], groups) for key, rows in statistics.items()}


def bounds(
    metric: Metric, baseline: Measured, candidate: Measured, policy: Policy, rule: MetricRule | None = None
) -> Bounds:
    """Bounds of the gain by the method that fits the metric. ``rule`` stands in for the policy's."""
    confidence = policy.confidence_of_a_look
    if metric.kind == "binary":
        return _score_bounds(baseline, candidate, confidence, (rule or policy.metrics[metric.name]).method)
    sign = 1.0 if metric.higher_is_better else -1.0

    def gain(totals: Floats) -> Floats:
        return sign * metric.score(totals)

    observed = float(gain(candidate.items.sum(axis=0)) - gain(baseline.items.sum(axis=0)))
    draws = gain(candidate.draws) - gain(baseline.draws)
    jackknife = bootstrap.jackknife_differences(baseline.units, candidate.units, gain)
    lower, upper = bootstrap.bca(draws, observed, jackknife, confidence)
    n = len(baseline.items)
    units = f", {len(baseline.units)} groups" if len(baseline.units) < n else ""
    spread = float(draws.var()) * n
    return Bounds(observed, lower, upper, spread, f"paired bootstrap, BCa, {policy.resamples} draws{units}")


def _score_bounds(baseline: Measured, candidate: Measured, confidence: float, method: Method) -> Bounds:
    one, other = baseline.items[:, 0], candidate.items[:, 0]
    counts = proportions.table(one > 0, other > 0)
    effect = proportions.design_effect(other - one, baseline.groups)
    interval = proportions.tango if method == "tango" else proportions.newcombe
    lower, upper = interval(counts.scaled(1 / effect), confidence)
    name = "Tango score" if method == "tango" else "Newcombe method 10"
    note = f", design effect {effect:.2f}" if effect > 1 else ""
    variance = 1e4 * counts.discordance * effect
    return Bounds(100 * counts.difference, 100 * lower, 100 * upper, variance, name + note)


def compare(
    metric: Metric,
    baseline: Measured,
    candidate: Measured,
    policy: Policy,
    *,
    part: str = "all",
    rule: MetricRule | None = None,
) -> Comparison:
    """Judges one metric on one slice by its rule in the policy, or by ``rule``."""
    rule = rule or policy.metrics[metric.name]
    n = len(baseline.items)
    totals = baseline.items.sum(axis=0), candidate.items.sum(axis=0)
    scores = float(metric.score(totals[0])), float(metric.score(totals[1]))

    def result(outcome: Outcome, detail: str, found: Bounds | None = None, **more: Any) -> Comparison:
        return Comparison(
            name=metric.name,
            importance=rule.importance,
            slice=part,
            n=n,
            baseline=scores[0],
            candidate=scores[1],
            difference=found.gain if found else None,
            lower=found.lower if found else None,
            upper=found.upper if found else None,
            confidence=policy.confidence_of_a_look,
            margin=format(rule.margin.normalize(), "f"),
            margin_kind=rule.margin_kind,
            margin_points=more.get("margin_points"),
            method=found.method if found else "none",
            signature=metric.signature(),
            higher_is_better=metric.higher_is_better,
            outcome=outcome,
            needs_n=more.get("needs_n"),
            detail=detail,
        )

    if (reason := metric.undefined(totals[0])) is not None:
        return result("invalid", f"undefined on the baseline: {reason}")
    try:
        margin = rule.points(exact(scores[0]))
    except ValueError as error:
        return result("invalid", str(error))
    found = bounds(metric, baseline, candidate, policy, rule)
    outcome = judged(found.lower, found.upper, margin)
    floor = _floor(metric, scores[0], float(margin), policy.confidence_of_a_look)
    if outcome == "pass" and n < floor:
        detail = f"nothing lost among {n} items cannot certify this margin: it takes {floor} items"
        return result("inconclusive", detail, found, margin_points=float(margin), needs_n=floor)
    needs = _needs(found, float(margin), n, floor, policy) if outcome == "inconclusive" else None
    return result(outcome, _detail(found, margin, outcome, needs), found, margin_points=float(margin), needs_n=needs)


def _floor(metric: Metric, baseline: float, margin: float, confidence: float) -> int:
    """Items below which a resampling interval cannot certify ``margin``, whatever it shows.

    A bootstrap knows only what was drawn: if no answer broke among n, up to 1 - (1 - confidence)^(1/n) of all
    answers may still break, and an answer that breaks loses what it scored. Score intervals know this by
    themselves.
    """
    if metric.kind == "binary":
        return 1
    at_stake = baseline if metric.higher_is_better else 100 - baseline
    return plan.items_to_see(margin / at_stake, confidence) if at_stake > margin else 1


def _needs(found: Bounds, margin: float, n: int, floor: int, policy: Policy) -> int:
    """Items with which an engine without loss passes (80 % power).

    With that many already, the shortfall is rather loss than noise: then items with which the gain as observed
    would pass, if it is within the margin at all (a bound's distance shrinks with the root of n).
    """
    lossless = max(plan.items_needed(found.variance, margin, policy.confidence_of_a_look), floor)
    room = found.gain + margin
    if lossless > n or exact(room) <= 0:
        return max(lossless, n + 1)
    return max(math.ceil(n * ((found.gain - found.lower) / room) ** 2), n + 1)


def _detail(found: Bounds, margin: Decimal, outcome: Outcome, needs: int | None) -> str:
    budget = f"{float(margin):.3g} points"
    if outcome == "pass":
        return f"loses at most {max(0.0, -found.lower):.3g} of {budget}"
    if outcome == "fail":
        return f"loses at least {-found.upper:.3g}, the budget is {budget}"
    shown = f"may lose {-found.lower:.3g}, the budget is {budget}; needs n >= {needs} at the observed discordance"
    if exact(found.gain) > -margin:
        return shown
    return f"{shown}, if the observed loss of {-found.gain:.3g} is chance"
