"""Engine, baseline or both: a recommendation with its reasons, the numbers behind each, and what would change it.

Two questions are asked, each of measured numbers: which arm is the better one for steady load (goodput at the service
level, or its cost where both have a price), and which for bursts (errors through the spike, then the time to recover).
One arm for both answers is the recommendation; two arms make it hybrid. Differences within the tolerance, or within
the spread of the repeats, are no difference, and a tie goes with the other answer, or with the baseline, which needs
no change. An engine that its verdict does not promote is never recommended, however fast it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any, Literal

from pipeline.gate.cost import Capacity, Prices, capacity, cost_per_million
from pipeline.gate.repeats import over_repeats

Choice = Literal["engine", "baseline", "hybrid", "undecided"]
Side = Literal["engine", "baseline"]
TOLERANCE = 0.05  # a smaller relative difference is none
ERROR_POINTS = 1.0  # points of error rate that matter
RECOVERY_S = 2.0  # seconds that matter
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Reason:
    """One comparison: what it says, who wins it (None: neither), and its numbers."""

    question: str
    winner: Side | None
    text: str
    numbers: dict[str, float | None]


@dataclass(frozen=True)
class Recommendation:
    """The choice for one engine; ``plain`` is JSON data."""

    recipe: str
    choice: Choice
    headline: str
    reasons: tuple[Reason, ...]
    would_change: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)


def recommend(
    recipe: str,
    verdict: str,
    baseline: Mapping[str, Any] | None,
    engine: Mapping[str, Any] | None,
    *,
    share: Decimal,
    prices: Prices,
) -> Recommendation:
    """Compares the two arms' bench.json. ``verdict`` is the gate's word about the engine."""
    missing = [name for name, bench in (("the baseline", baseline), (recipe, engine)) if bench is None]
    if missing or baseline is None or engine is None:
        change = "set bench.kinds (and bench.engines) in params.yaml and run `dvc repro`"
        return Recommendation(
            recipe, "undecided", f"Nothing was measured under load for {' and '.join(missing)}.", (), (change,)
        )
    lagged = [run for bench in (baseline, engine) for run in bench["runs"] if not run["client"]["valid"]]
    if lagged:
        why = f"{len(lagged)} runs are invalid, first {lagged[0]['point']}: {lagged[0]['client']['why']}"
        change = "measure on a machine with a core to spare for the client, or raise bench.max_lag_ms knowingly"
        return Recommendation(recipe, "undecided", f"The client could not keep up: {why}.", (), (change,))
    steady = _steady(recipe, baseline, engine, share, prices)
    burst = _burst(recipe, baseline, engine)
    start = _start(recipe, baseline, engine)
    reasons = tuple(reason for reason in (steady, burst, start) if reason is not None)
    if verdict != "PROMOTE":
        text = f"The verdict on {recipe} is {verdict}: its speed does not count before its answers do."
        return Recommendation(recipe, "baseline", text, reasons, (f"a verdict PROMOTE for {recipe}",))
    if steady is None and burst is None:
        change = "run the loads `sweep` and `spike` (bench.kinds)"
        return Recommendation(recipe, "undecided", "Neither a sweep nor a spike was run.", reasons, (change,))
    return _chosen(recipe, steady, burst, reasons)


def _chosen(recipe: str, steady: Reason | None, burst: Reason | None, reasons: Sequence[Reason]) -> Recommendation:
    wins = {reason.winner for reason in (steady, burst) if reason is not None and reason.winner is not None}
    changes = tuple(change for reason in (steady, burst) if reason for change in _change(recipe, reason))
    if len(wins) == 2:
        assert steady is not None and burst is not None
        names = {"engine": recipe, "baseline": "the baseline"}
        text = (
            f"Both: {names[str(steady.winner)]} for endpoints of steady, high throughput, "
            f"{names[str(burst.winner)]} for bursty or rare ones."
        )
        return Recommendation(recipe, "hybrid", text, tuple(reasons), changes)
    if wins == {"engine"}:
        return Recommendation(recipe, "engine", f"{recipe} replaces the baseline.", tuple(reasons), changes)
    text = (
        "The baseline stays."
        if wins
        else f"The baseline stays: {recipe} is no better under any load that was measured."
    )
    return Recommendation(recipe, "baseline", text, tuple(reasons), changes)


def _steady(
    recipe: str, baseline: Mapping[str, Any], engine: Mapping[str, Any], share: Decimal, prices: Prices
) -> Reason | None:
    """Cost at the service level where both devices have a price, else goodput."""
    found = [capacity(bench["runs"], share) for bench in (baseline, engine)]
    if None in found:
        return None
    one, other = (capacity_ for capacity_ in found if capacity_ is not None)
    numbers: dict[str, float | None] = {
        "baseline_requests_per_s": _mean(one.requests_per_s) if one.holds else 0.0,
        "engine_requests_per_s": _mean(other.requests_per_s) if other.holds else 0.0,
    }
    if not (one.holds and other.holds):
        return _one_holds(recipe, one, other, numbers)
    hourly = [prices.of(bench) for bench in (baseline, engine)]
    if None not in hourly:
        costs = [
            [cost_per_million(price, rate, prices.utilisation) for rate in arm.tokens_per_s(prices.basis)]
            for price, arm in zip(hourly, (one, other), strict=True)
            if price is not None
        ]
        numbers |= {"baseline_cost": _mean(costs[0]), "engine_cost": _mean(costs[1])}
        winner = _less(costs[0], costs[1])
        text = (
            f"steady load: 1M {prices.basis} tokens cost {prices.currency} {_mean(costs[1]):.3g} on {recipe}, "
            f"{_mean(costs[0]):.3g} on the baseline "
            f"({_mean(other.requests_per_s):.3g} and {_mean(one.requests_per_s):.3g} good requests/s)"
        )
        return Reason("steady", winner, text, numbers)
    winner = _less([-rate for rate in one.requests_per_s], [-rate for rate in other.requests_per_s])
    text = (
        f"steady load: {recipe} carries {_mean(other.requests_per_s):.3g} good requests/s, "
        f"the baseline {_mean(one.requests_per_s):.3g}"
    )
    return Reason("steady", winner, text, numbers)


def _one_holds(recipe: str, one: Capacity, other: Capacity, numbers: dict[str, float | None]) -> Reason:
    if not one.holds and not other.holds:
        text = "steady load: neither arm keeps the service level at any point of the sweep"
        return Reason("steady", None, text, numbers)
    winner: Side = "engine" if other.holds else "baseline"
    names = {"engine": recipe, "baseline": "the baseline"}
    return Reason("steady", winner, f"steady load: only {names[winner]} keeps the service level", numbers)


def _burst(recipe: str, baseline: Mapping[str, Any], engine: Mapping[str, Any]) -> Reason | None:
    """Errors through the spike; where they are alike, the time to recover."""
    spikes = [[run["spike"] for run in bench["runs"] if run["spike"]] for bench in (baseline, engine)]
    if not all(spikes):
        return None
    errors = [_mean([max(spike["error_rates"]) for spike in arm]) for arm in spikes]
    recovered = [_recovery(arm) for arm in spikes]
    winner: Side | None = None
    if abs(errors[0] - errors[1]) > ERROR_POINTS:
        winner = "baseline" if errors[0] < errors[1] else "engine"
    elif recovered[0] != recovered[1] and abs(recovered[0] - recovered[1]) > RECOVERY_S:
        winner = "baseline" if recovered[0] < recovered[1] else "engine"
    text = (
        f"bursts: {errors[1]:.1f} % of requests fail in the spike on {recipe}, {errors[0]:.1f} % on the baseline; "
        f"back at the service level: {recipe} {_after(recovered[1])}, the baseline {_after(recovered[0])}"
    )
    numbers = {
        "baseline_error_rate": errors[0],
        "engine_error_rate": errors[1],
        "baseline_recovery_s": recovered[0] if math.isfinite(recovered[0]) else None,
        "engine_recovery_s": recovered[1] if math.isfinite(recovered[1]) else None,
    }
    return Reason("burst", winner, text, numbers)


def _start(recipe: str, baseline: Mapping[str, Any], engine: Mapping[str, Any]) -> Reason | None:
    """How long a server takes to start: what a rare endpoint waits for. It explains, and decides nothing."""
    times = [
        [run["server"]["start_s"] for run in bench["runs"] if run["server"]["start_s"] is not None]
        for bench in (baseline, engine)
    ]
    if not all(times):
        return None
    one, other = map(_mean, times)
    text = f"rare endpoints: a server of {recipe} starts in {other:.0f} s, one of the baseline in {one:.0f} s"
    return Reason("start", None, text, {"baseline_start_s": one, "engine_start_s": other})


def _change(recipe: str, reason: Reason) -> list[str]:
    """What would turn this comparison round."""
    numbers = reason.numbers
    if reason.question == "steady":
        one, other = numbers["baseline_requests_per_s"], numbers["engine_requests_per_s"]
        if "engine_cost" in numbers and numbers["baseline_cost"] and numbers["engine_cost"]:
            ratio = numbers["baseline_cost"] / numbers["engine_cost"]
            return [f"for steady load: an hour of {recipe}'s device at {100 * (ratio - 1):+.0f} % would cost the same"]
        if one and other:
            return [f"for steady load: {100 * (one / other - 1):+.0f} % goodput of {recipe} would make them equal"]
        return ["for steady load: a service level (policy.yaml, service.good) that both arms can keep"]
    if reason.winner is None:
        return [f"for bursts: a difference of over {ERROR_POINTS:g} point of errors or {RECOVERY_S:g} s of recovery"]
    return ["for bursts: more headroom or a smaller spike (bench.spike) for the arm that fails more"]


def _less(one: Sequence[float], other: Sequence[float]) -> Side | None:
    """Which arm has the smaller numbers, one a repeat: the baseline's (``one``) or the engine's; None within the
    tolerance, or within the spread of the repeats."""
    left, right = _mean(one), _mean(other)
    if abs(left - right) <= TOLERANCE * max(abs(left), abs(right)):
        return None
    first, second = over_repeats(one, CONFIDENCE), over_repeats(other, CONFIDENCE)
    low, high = (first, second) if left < right else (second, first)
    if low.upper is not None and high.lower is not None and low.upper >= high.lower:
        return None
    return "baseline" if left < right else "engine"


def _recovery(spikes: Sequence[Mapping[str, Any]]) -> float:
    """Mean seconds; infinite when one repeat never came back."""
    return _mean([math.inf if spike["recovery_s"] is None else spike["recovery_s"] for spike in spikes])


def _after(seconds: float) -> str:
    return f"after {seconds:.0f} s" if math.isfinite(seconds) else "not within the run"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
