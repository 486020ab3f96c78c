"""Service levels: what each outcome takes, by hand and for any numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from pipeline.errors import ConfigError
from pipeline.gate.cost import Prices, capacity, cost_per_million
from pipeline.gate.evidence import Evidence
from pipeline.gate.levels import Judged, judge_levels
from pipeline.gate.policy import MetricRule, Policy, load_policy
from pipeline.gate.repeats import over_repeats
from pipeline.gate.service import PRESETS, Good, Level, Service
from pipeline.gate.verdict import decide

PRICES = Prices(hourly={"cpu": Decimal("0.36"), "NVIDIA H200": Decimal(4)})
DIGEST = "sha256:engine"
ENOUGH = 20_000


def run(load: str = "sweep", repeat: int = 0, **more: Any) -> dict[str, Any]:
    """One run of a bench.json, as far as the gate reads it."""
    percentiles = {"n": ENOUGH, "p50": 4.0, "p90": 4.0, "p95": 4.0, "p99": 4.0, "p99.9": 4.0}
    found: dict[str, Any] = {
        **{"load": load, "point": f"{load} 8", "weight": 8, "repeat": repeat, "requests": ENOUGH},
        "all_requests": {name: dict(percentiles) for name in ("ttft_ms", "tpot_ms", "e2e_ms")},
        "error_rate": 1.0,
        "spike": {"requests": 5000, "error_rates": [4.0, 1.0]} if load == "spike" else None,
        "good": {**{"share": 99.0, "requests_per_s": 10.0, "output_tokens_per_s": 1000.0, "input_tokens_per_s": 500.0}},
        "client": {"valid": True, "why": ""},
        "server": {"cpu_growth": 20.0 if load == "spike" else None},
    }
    return found | more


def bench(*runs: dict[str, Any], digest: str | None = DIGEST, **more: Any) -> dict[str, Any]:
    service = Policy().plain()["service"]
    about = {"arm": "int8", "engine_digest": digest, "device": {"gpu": None}, "devices": 1, "service": service}
    return {**about, "runs": list(runs), **more}


def three(load: str = "sweep", **more: Any) -> list[dict[str, Any]]:
    return [run(load, repeat, **more) for repeat in range(3)]


def judge(level: Level, *runs: dict[str, Any], name: str = "level", **more: Any) -> Judged:
    (found,) = judge_levels(Service(levels={name: level}), bench(*runs, **more), PRICES, 0.95, DIGEST)
    return found


def latency(values: Sequence[float | None], at: str = "p90", n: int = ENOUGH) -> list[dict[str, Any]]:
    """A repeat for each value of TPOT."""
    rows = [run(repeat=repeat, requests=n) for repeat in range(len(values))]
    for row, value in zip(rows, values, strict=True):
        row["all_requests"]["tpot_ms"] = {
            "n": n,
            **dict.fromkeys(("p50", "p90", "p95", "p99", "p99.9"), 4.0),
            at: value,
        }
    return rows


SPEED = Level(preset="speed-first")


def test_the_presets() -> None:
    levels = Service().resolved()
    assert list(levels) == list(PRESETS)
    assert {name: (level.measure, level.load) for name, level in levels.items()} == {
        "speed-first": ("tpot_ms", "sweep"),
        "infer-scale": ("e2e_ms", "poisson"),
        "reliability-first": ("error_rate", "spike"),
        "cost-efficiency": ("cost", "sweep"),
        "performance-first": ("cpu_growth", "spike"),
    }
    assert {level.importance for level in levels.values()} == {"advisory"}
    limits = {name: (level.below, level.most) for name, level in levels.items()}
    assert limits["speed-first"] == (5, None)
    assert limits["reliability-first"] == (5, None)
    assert limits["cost-efficiency"] == (Decimal("0.12"), None)
    assert limits["performance-first"] == (None, 30)
    assert levels["infer-scale"].at == Decimal("99.9")


@pytest.mark.parametrize(
    ("values", "outcome"),
    [
        ([4.0, 4.0, 4.0], "met"),
        ([4.9, 4.9, 4.9], "met"),
        ([5.0, 5.0, 5.0], "not met"),  # below 5 is asked
        ([4.0, 4.4, 4.9], "not enough"),  # mean 4.43, t(2) = 2.92: upper bound 5.19
        ([6.0, 6.1, 6.2], "not met"),
        ([4.9, 5.1, 5.3], "not enough"),
        ([4.0], "met"),
        ([6.0], "not met"),
        ([4.0, 6.0], "not enough"),
        ([None, None, None], "not met"),  # enough requests, but the percentile lies among failed ones
        ([4.0, 4.0, None], "not enough"),
    ],
)
def test_a_latency_level(values: list[float | None], outcome: str) -> None:
    found = judge(SPEED, *latency(values))
    assert found.outcome == outcome
    assert found.repeats == len(values)
    assert (found.measure, found.at, found.limit, found.unit) == ("tpot_ms", "90", "below 5", "ms")


def test_bounds_are_those_of_student() -> None:
    values = [4.0, 4.4, 4.9]
    found = judge(SPEED, *latency(values))
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.90)  # two-sided 90 % is one-sided 95 %
    assert (found.lower, found.upper) == pytest.approx((expected.low, expected.high))
    assert found.value == pytest.approx(sum(values) / 3)


def test_few_requests_are_not_enough() -> None:
    assert judge(SPEED, *latency([4.0] * 3, n=99)).outcome == "not enough"
    assert judge(SPEED, *latency([4.0] * 3, n=100)).outcome == "met"
    found = judge(replace(SPEED, at=Decimal("99.90")), *latency([4.0] * 3, at="p99.9", n=9999))
    assert found.detail == "not enough requests: 9999 of the 10000 that p99.9 needs"
    assert judge(replace(SPEED, at=Decimal("99.9")), *latency([4.0] * 3, at="p99.9", n=10_000)).outcome == "met"


def test_errors_through_the_spike_and_over_the_window() -> None:
    level = Level(preset="reliability-first")
    assert judge(level, *three("spike")).outcome == "met"
    assert judge(level, *three("spike", error_rate=6.0)).outcome == "not met"
    peak = judge(level, *three("spike", spike={"requests": 5000, "error_rates": [5.0, 1.0]}))
    assert (peak.outcome, peak.value) == ("not met", 5.0)
    few = judge(level, *three("spike", spike={"requests": 199, "error_rates": [0.0, 0.0]}))
    assert (few.outcome, few.requests) == ("not enough", 199)
    assert judge(replace(level, load="poisson"), *three("poisson")).outcome == "met"


def test_cpu_growth_may_be_equal() -> None:
    level = Level(preset="performance-first")
    assert judge(level, *three("spike", server={"cpu_growth": 30.0})).outcome == "met"
    assert judge(level, *three("spike", server={"cpu_growth": 30.5})).outcome == "not met"
    assert judge(level, *three("spike", server={"cpu_growth": None})).outcome == "absent"


def test_cost_by_hand() -> None:
    """0.36 an hour at 1 000 output tokens a second, 60 % used: 0.36 / (3 600 000 * 0.6) * 1e6 = 0.1667 a million."""
    assert cost_per_million(Decimal("0.36"), 1000, Decimal(60)) == pytest.approx(0.36 / 2.16)
    level = Level(preset="cost-efficiency")
    found = judge(level, *three())
    assert (found.outcome, found.point) == ("not met", "sweep 8")
    assert found.value == pytest.approx(1 / 6)
    assert "output tokens, USD 0.36 an hour, 60 % used" in found.detail
    total = replace(PRICES, basis="total")
    (cheaper,) = judge_levels(Service(levels={"c": level}), bench(*three()), total, 0.95, DIGEST)
    assert (cheaper.outcome, cheaper.value) == ("met", pytest.approx(1 / 9))
    assert judge(level, *three(), devices=2).value == pytest.approx(1 / 3)
    assert judge(level, *three(), device={"gpu": "NVIDIA L4"}).outcome == "absent"
    assert judge(level, *three(), device={"gpu": "NVIDIA H200"}).value == pytest.approx(4 / 2.16)
    slow = three(good={**run()["good"], "share": 50.0})
    assert (judge(level, *slow).outcome, judge(level, *slow).value) == ("not met", None)


def test_the_sweep_is_judged_at_its_best_point() -> None:
    """Concurrency 32 carries most but too few of its requests are good; 8 carries more than 1."""

    def point(weight: int, rate: float, share: float, tpot: float) -> dict[str, Any]:
        row = run(point=f"sweep {weight}", weight=weight)
        row["good"] = {**row["good"], "requests_per_s": rate, "share": share}
        row["all_requests"]["tpot_ms"]["p90"] = tpot
        return row

    runs = [point(32, 30, 80, 9.0), point(8, 10, 96, 4.5), point(1, 2, 100, 2.0)]
    best = capacity(runs, Decimal(95))
    assert best is not None
    assert (best.point, best.holds) == ("sweep 8", True)
    assert judge(SPEED, *runs).value == 4.5
    nothing = capacity([point(32, 30, 80, 9.0), point(1, 2, 90, 2.0)], Decimal(95))
    assert nothing is not None
    assert (nothing.point, nothing.holds) == ("sweep 1", False)
    assert capacity([run("spike")], Decimal(95)) is None


def test_of_several_rates_the_gravest_speaks() -> None:
    level = Level(measure="error_rate", load="poisson", below=Decimal(5))
    quiet, loud = three("poisson"), three("poisson", point="poisson 20/s", weight=20, error_rate=9.0)
    assert judge(level, *quiet, *loud).point == "poisson 20/s"
    assert judge(level, *quiet, *loud).outcome == "not met"


def test_a_client_that_lagged_is_invalid_and_another_engine_too() -> None:
    lagged = three()
    lagged[1]["client"] = {"valid": False, "why": "requests were sent late"}
    found = judge(SPEED, *lagged)
    assert found.outcome == "invalid"
    assert found.detail.startswith("sweep 8: requests were sent late: measure again")
    (other,) = judge_levels(Service(levels={"s": SPEED}), bench(*three(), digest="sha256:old"), PRICES, 0.95, DIGEST)
    assert other.outcome == "invalid"
    assert "the bench is of engine sha256:old, not of sha256:engine" in other.detail


def test_a_bench_that_counted_otherwise_is_invalid() -> None:
    for service in (Service(good=Good(ttft_ms=Decimal(500))), Service(share=Decimal(90))):
        (found,) = judge_levels(replace(service, levels={"s": SPEED}), bench(*three()), PRICES, 0.95, DIGEST)
        assert (found.outcome, "changed after the bench" in found.detail) == ("invalid", True)
    same = Service(good=Good(ttft_ms=Decimal("1000.0")), share=Decimal("95.00"), levels={"s": SPEED})
    assert judge_levels(same, bench(*three()), PRICES, 0.95, DIGEST)[0].outcome == "met"


def test_what_was_not_measured_is_absent() -> None:
    (found,) = judge_levels(Service(levels={"s": SPEED}), None, PRICES, 0.95, DIGEST)
    assert (found.outcome, "bench.kinds" in found.detail) == ("absent", True)
    assert "the load `sweep` was not run" in judge(SPEED, *three("spike")).detail


def test_a_critical_level_needs_repeats() -> None:
    level = replace(SPEED, importance="critical")
    assert judge(level, *latency([4.0])).outcome == "not enough"
    assert judge(level, *latency([9.0])).outcome == "not enough"
    assert "needs 3 repeats (bench.repeats), this bench has 1" in judge(level, *latency([4.0])).detail
    assert judge(level, *latency([4.0] * 3)).outcome == "met"
    single = Service(levels={"s": level}, repeats=1)
    (found,) = judge_levels(single, bench(*latency([9.0])), PRICES, 0.95, DIGEST)
    assert found.outcome == "not met"


Make = Callable[..., Evidence]


@pytest.mark.parametrize(
    ("values", "word"),
    [([4.0] * 3, "PROMOTE"), ([9.0] * 3, "REJECT"), ([4.0], "INCONCLUSIVE"), (None, "INCONCLUSIVE"), ([], "INVALID")],
)
def test_the_verdict_covers_critical_levels(
    make: Make, tools: dict[str, Any], values: list[float] | None, word: str
) -> None:
    texts = tools["sentences"](200)
    policy = Policy(
        metrics={"exact_match": MetricRule(Decimal(2))},
        service=Service(levels={"speed-first": Level(importance="critical")}),
    )
    evidence = make(texts, prices=PRICES)
    if values is not None:
        rows = latency(values or [4.0] * 3)
        rows[0]["client"]["valid"] = bool(values)
        evidence = replace(evidence, bench={"candidate": bench(*rows)})
    verdict = decide(evidence, policy)
    assert verdict.verdict == word
    assert sum("service level speed-first" in reason for reason in verdict.reasons) == 1
    assert verdict.service["baseline"][0].outcome == "absent"  # shown, and decides nothing
    if values is None:
        assert "set bench.kinds in params.yaml" in verdict.reasons[0]
    advisory = replace(policy, service=Service(levels={"speed-first": Level()}))
    assert decide(evidence, advisory).verdict == "PROMOTE"


def test_a_lost_answer_outweighs_a_kept_level(make: Make, tools: dict[str, Any]) -> None:
    texts = tools["sentences"](200)
    policy = Policy(
        metrics={"exact_match": MetricRule(Decimal(2))},
        service=Service(levels={"speed-first": Level(importance="critical")}),
    )
    evidence = make(tools["spoiled"](texts, 0.3), references=texts, baseline=texts)
    assert decide(replace(evidence, bench={"candidate": bench(*latency([4.0] * 3))}), policy).verdict == "REJECT"


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=8),
    st.decimals(0, 1000, places=3, allow_nan=False),
    st.booleans(),
)
def test_an_outcome_follows_from_its_bounds(values: list[float], limit: Decimal, strict: bool) -> None:
    level = Level(
        measure="tpot_ms", load="sweep", at=Decimal(90), below=limit if strict else None, most=None if strict else limit
    )
    found = judge(level, *latency(list(values)))
    assert found.outcome in ("met", "not met", "not enough")
    if len(values) < 3:
        assert (found.lower, found.upper) == (None, None)
        assert "no interval below 3 repeats" in found.detail
    else:
        assert found.lower is not None and found.upper is not None and found.value is not None
        assert found.lower <= found.value * (1 + 1e-9) + 1e-9
        assert found.upper >= found.value * (1 - 1e-9) - 1e-9
        if found.outcome == "met":
            assert found.upper <= float(limit) + 1e-6
        if found.outcome == "not met":
            assert found.lower >= float(limit) - 1e-6


@given(st.lists(st.floats(0, 100), min_size=3, max_size=6), st.floats(0, 50))
def test_slower_repeats_never_help(values: list[float], more: float) -> None:
    order = ["met", "not enough", "not met"]
    level = Level(measure="tpot_ms", load="sweep", at=Decimal(90), below=Decimal(20))
    before = judge(level, *latency(list(values))).outcome
    after = judge(level, *latency([value + more for value in values])).outcome
    assert order.index(after) >= order.index(before)


@given(st.permutations(range(4)))
def test_the_order_of_runs_plays_no_part(order: list[int]) -> None:
    rows = latency([4.0, 4.2, 4.4, 4.6])
    assert judge(SPEED, *(rows[place] for place in order)) == judge(SPEED, *rows)


@given(st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=9), st.floats(0.8, 0.99))
def test_intervals_over_repeats_are_those_of_scipy(values: list[float], confidence: float) -> None:
    found = over_repeats(values, confidence)
    assert found.mean == pytest.approx(math.fsum(values) / len(values))
    assert found.lower is not None and found.upper is not None
    spread = stats.sem(values)
    if spread > 0:
        low, high = stats.t.interval(2 * confidence - 1, len(values) - 1, found.mean, spread)
        assert (found.lower, found.upper) == pytest.approx((low, high), rel=1e-6, abs=1e-6)


def test_two_repeats_have_no_interval() -> None:
    found = over_repeats([1.0, 2.0], 0.95)
    assert (found.mean, found.lower, found.upper, found.repeats) == (1.5, None, None, 2)
    with pytest.raises(ValueError, match="no repeat"):
        over_repeats([], 0.95)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("service:\n  levels:\n    mine: {}\n", r":3: service\.levels\.mine\.measure: name a measure"),
        ("service:\n  levels:\n    mine: {measure: tpot_ms, load: sweep, most: 5}\n", r"mine\.at: name the percentile"),
        ("service:\n  levels:\n    mine: {measure: error_rate, most: 5}\n", r"levels\.mine\.load: name a load"),
        ("service:\n  levels:\n    mine: {measure: error_rate, load: spike}\n", r"levels\.mine\.most: give a limit"),
        ("service:\n  levels:\n    speed-first: {below: 4, most: 5}\n", r"speed-first\.most: give `below` or `most`"),
        ("service:\n  levels:\n    speed-first: {at: 42}\n", r"speed-first\.at: must be one of 50, 90, 95, 99, 99\.9"),
        ("service:\n  levels:\n    fast: {preset: speedy}\n", r"levels\.fast\.preset: must be one of speed-first"),
        ("service:\n  levels:\n    cost-efficiency: {load: spike}\n", r"cost-efficiency\.load: cost is measured by"),
        ("service:\n  levels:\n    speed-first: {below: -1}\n", r"speed-first\.below: must be 0 or more"),
        ("service:\n  good: {ttft_ms: 0}\n", r":2: service\.good\.ttft_ms: must be more than 0"),
        ("service: {share: 101}\n", r":1: service\.share: must be more than 0"),
        ("service: {repeats: 0}\n", r":1: service\.repeats: must be at least 1"),
    ],
)
def test_mistakes_in_levels_name_file_line_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"policy\.yaml.*" + message):
        load_policy(path)


def test_a_preset_can_be_changed_and_named_anew(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(
        "service:\n  levels:\n    speed-first: {below: 12, importance: critical}\n"
        "    tail: {preset: infer-scale, at: 99.90, most: 800, load: constant}\n"
    )
    levels = load_policy(path).service.resolved()
    assert (levels["speed-first"].below, levels["speed-first"].importance) == (12, "critical")
    assert (levels["tail"].most, levels["tail"].below, levels["tail"].at) == (800, None, Decimal("99.9"))
    assert levels["tail"].load == "constant"


def test_the_digest_covers_what_a_preset_says(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Policy().digest()
    monkeypatch.setitem(PRESETS, "speed-first", replace(PRESETS["speed-first"], below=Decimal(6)))
    assert Policy().digest() != before
