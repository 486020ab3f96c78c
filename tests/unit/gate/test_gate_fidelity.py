"""Layer 2 and 3: flips over the noise floor, tokens, lengths, log-likelihoods, and where a loss comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from pipeline.gate.evidence import Evidence, align
from pipeline.gate.fidelity import delta_nll, divergence, flips, length_ratio, token_agreement
from pipeline.gate.policy import Fidelity, Limit, Policy
from pipeline.gate.verdict import decide

Make = Callable[..., Evidence]


def test_flips_are_counted_over_the_baselines_own(make: Make, tools: dict[str, Any]) -> None:
    texts = tools["sentences"](200)
    # The repeat changes 10 answers, the candidate the same 10 and 30 others: 15 points of excess.
    repeat = [f"{text} x" if place < 10 else text for place, text in enumerate(texts)]
    candidate = [f"{text} y" if place < 40 else text for place, text in enumerate(texts)]
    evidence = make(candidate, baseline=texts, references=texts, repeat=repeat)
    found = flips(align(evidence, cluster=True), Policy())
    assert (found["candidate"], found["repeat"]) == (20.0, 5.0)
    assert found["excess"] == pytest.approx(15.0)
    assert found["lower"] < 15.0 < found["upper"]


@pytest.mark.parametrize(
    ("importance", "word"), [("critical", "REJECT"), ("supporting", "REJECT"), ("advisory", "PROMOTE")]
)
def test_a_flip_limit_counts_as_the_policy_says(make: Make, tools: dict[str, Any], importance: Any, word: str) -> None:
    texts = tools["sentences"](400)
    candidate = [f"{text}." for text in texts]  # every answer changes, no metric of words does
    policy = Policy(
        metrics={"token_f1": replace(Policy().metrics["chrf"], options={})},
        fidelity=Fidelity(excess_flips=Limit(Decimal(50), importance)),
    )
    assert decide(make(candidate, baseline=texts, references=texts), policy).verdict == word


def test_tokens_and_first_divergence(make: Make) -> None:
    baseline = ["a b c d", "a b c d", "a b", "a b c"]
    candidate = ["a b x d", "a b c d", "a b c d", "x b c"]
    evidence = make(candidate, baseline=baseline, references=baseline)
    found = token_agreement(align(evidence, cluster=False), "candidate")
    # Agreeing in place: 3 of 4, 4 of 4, 2 of 4, 2 of 3. They part at 2, never, 2 and 0.
    assert found == {"agreement": pytest.approx(100 * 11 / 15), "changed": 3, "median_first_divergence": 2}


@pytest.mark.parametrize(("factor", "outcome"), [(1.0, "pass"), (1.5, "fail"), (0.5, "fail")])
def test_length_ratio(make: Make, factor: float, outcome: str) -> None:
    baseline = [" ".join(["w"] * (8 + place % 5)) for place in range(100)]
    candidate = [" ".join(["w"] * round(factor * len(text.split()))) for text in baseline]
    evidence = make(candidate, baseline=baseline, references=baseline)
    found = length_ratio(align(evidence, cluster=False), Policy())
    assert found["value"] == pytest.approx(factor, rel=0.05)
    assert found["lower"] <= found["value"] <= found["upper"]
    assert found["outcome"] == outcome


def test_a_length_ratio_outside_by_chance_is_inconclusive(make: Make) -> None:
    baseline = ["a b c d e"] * 20
    candidate = [" ".join(["a"] * 20) if place == 7 else text for place, text in enumerate(baseline)]
    evidence = make(candidate, baseline=baseline, references=baseline)
    found = length_ratio(align(evidence, cluster=False), Policy())
    assert found["value"] == pytest.approx(1.15)
    assert found["outcome"] == "inconclusive"


def test_delta_nll_is_a_mean_over_tokens(make: Make, tools: dict[str, Any]) -> None:
    texts = tools["sentences"](3)
    forced = {
        "baseline": {"i0000": [1.0, 1.0], "i0001": [2.0], "i0002": [0.5]},
        "candidate": {"i0000": [1.1, 1.1], "i0001": [2.3], "i0002": [0.4]},
    }
    evidence = make(texts, forced=forced, divergence={"i0000": [0.1, 0.3], "i0001": [0.2]})
    found = delta_nll(evidence, align(evidence, cluster=False), Policy())
    assert found is not None
    assert found["value"] == pytest.approx((0.2 + 0.3 - 0.1) / 4)
    assert found["lower"] <= found["value"] <= found["upper"]
    assert divergence(evidence) == {"mean": pytest.approx(0.2), "p99": pytest.approx(0.298), "tokens": 3}


def test_without_log_probabilities_there_is_no_figure(make: Make, tools: dict[str, Any]) -> None:
    evidence = make(tools["sentences"](3))
    assert delta_nll(evidence, align(evidence, cluster=False), Policy()) is None
    assert divergence(evidence) is None


def test_attribution_adds_up_and_blames_the_runtime(make: Make, tools: dict[str, Any]) -> None:
    texts = tools["sentences"](400)
    runtime = tools["spoiled"](texts, 0.10)
    candidate = tools["spoiled"](runtime, 0.02, seed=5)
    verdict = decide(make(candidate, baseline=texts, references=texts, runtime=runtime), Policy())
    parts = verdict.attribution["metrics"]["exact_match"]
    total = next(row for row in verdict.metrics if row.name == "exact_match").difference
    assert parts["runtime"]["difference"] == pytest.approx(-10)
    assert parts["runtime"]["difference"] + parts["quantization"]["difference"] == pytest.approx(total)
    assert parts["noise"]["difference"] == 0
    assert any("look at the runtime" in line for line in verdict.attribution["text"])


def test_attribution_blames_quantisation(make: Make, tools: dict[str, Any]) -> None:
    texts = tools["sentences"](400)
    verdict = decide(make(tools["spoiled"](texts, 0.1), baseline=texts, references=texts, runtime=texts), Policy())
    assert any("mostly quantisation" in line for line in verdict.attribution["text"])


def test_without_a_runtime_arm_nothing_is_claimed(make: Make, tools: dict[str, Any]) -> None:
    verdict = decide(make(tools["sentences"](200)), Policy())
    assert set(verdict.attribution["metrics"]["bleu"]) == {"noise"}
    assert all("cannot be split" in line for line in verdict.attribution["text"])
