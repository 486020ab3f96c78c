"""``decide`` as a whole: the four words, the gate's rows of facts/faults.md, and its properties."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.files import canonical_json
from pipeline.gate.evidence import Evidence
from pipeline.gate.policy import MetricRule, Policy, Slice
from pipeline.gate.verdict import EXIT_CODES, decide

Make = Callable[..., Evidence]
Tools = dict[str, Any]
POLICY = Policy()
EXACT = Policy(metrics={"exact_match": MetricRule(Decimal(2))})
quick = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])


def test_an_engine_without_loss_is_promoted(make: Make, tools: Tools) -> None:
    texts = tools["sentences"](400)
    verdict = decide(make(texts, runtime=texts), POLICY)
    assert verdict.verdict == "PROMOTE"
    assert {row.outcome for row in verdict.metrics} == {"pass"}


def test_a_proven_loss_is_rejected(make: Make, tools: Tools) -> None:
    texts = tools["sentences"](400)
    verdict = decide(make(tools["spoiled"](texts, 0.15), references=texts, baseline=texts), POLICY)
    assert verdict.verdict == "REJECT"
    assert any(reason.startswith("bleu loses at least") for reason in verdict.reasons)


def test_doubt_is_inconclusive_and_says_how_many_items_it_takes(make: Make, tools: Tools) -> None:
    texts = tools["sentences"](400)
    verdict = decide(make(tools["spoiled"](texts, 0.015), references=texts, baseline=texts), POLICY)
    assert verdict.verdict == "INCONCLUSIVE"
    assert any("needs n >= " in reason for reason in verdict.reasons)
    assert all(row.needs_n > row.n for row in verdict.metrics if row.outcome == "inconclusive" and row.needs_n)


@pytest.mark.parametrize(("n", "changed"), [(10, 0), (20, 1), (20, 0)])
def test_few_items_never_certify(make: Make, tools: Tools, n: int, changed: int) -> None:
    texts = tools["sentences"](n)
    verdict = decide(make(tools["spoiled"](texts, changed / n), references=texts, baseline=texts), POLICY)
    assert verdict.verdict == "INCONCLUSIVE"


@pytest.mark.parametrize("n", [20, 300])
def test_random_answers_are_refused(make: Make, tools: Tools, n: int) -> None:
    texts = tools["sentences"](n)
    shuffled = random.Random(4).sample(texts, n)
    assert decide(make(shuffled, references=texts, baseline=texts), POLICY).verdict in ("REJECT", "INVALID")


def test_an_engine_that_overflows_is_refused(make: Make, tools: Tools) -> None:
    texts = tools["sentences"](100)
    evidence = make(["!!!!!!!!"] * 100, references=texts, baseline=texts)
    described, records = evidence.arms["candidate"]
    broken = [replace(row, output_token_ids=(0,) * 64, finish_reason="length") for row in records]
    verdict = decide(replace(evidence, arms={**evidence.arms, "candidate": (described, broken)}), POLICY)
    assert verdict.verdict == "INVALID"
    assert any(reason.startswith("health: candidate") for reason in verdict.reasons)


def test_segments_without_4grams_are_invalid_not_a_loss(make: Make) -> None:
    texts = ["turn it on"] * 200
    verdict = decide(make(texts, references=texts), POLICY)
    assert verdict.verdict == "INVALID"
    assert any(reason.startswith("bleu: undefined") for reason in verdict.reasons)


def test_a_supporting_metric_refuses_only_a_proven_loss(make: Make, tools: Tools) -> None:
    texts = tools["sentences"](400)
    policy = Policy(
        metrics={
            "token_f1": MetricRule(Decimal(20)),
            "exact_match": MetricRule(Decimal(2), importance="supporting"),
        }
    )
    for share, word in ((0.02, "PROMOTE"), (0.10, "REJECT")):
        candidate = tools["spoiled"](texts, share)
        assert decide(make(candidate, references=texts, baseline=texts), policy).verdict == word
    advisory = Policy(metrics={**policy.metrics, "exact_match": MetricRule(Decimal(2), importance="advisory")})
    assert decide(make(candidate, references=texts, baseline=texts), advisory).verdict == "PROMOTE"


def test_a_slice_must_hold_by_itself(make: Make, tools: Tools) -> None:
    texts = tools["sentences"](900)
    long = [place for place, text in enumerate(texts) if len(text.split()) == 9]
    spoilt = set(long[:25])
    candidate = [" ".join(["z"] * 9) if place in spoilt else text for place, text in enumerate(texts)]
    evidence = make(candidate, references=texts, baseline=texts)
    whole = Policy(metrics={"exact_match": MetricRule(Decimal(6))})
    sliced = replace(whole, slices={"long": Slice(min_words=9), "short": Slice(max_words=8)})
    assert decide(evidence, whole).verdict == "PROMOTE"
    verdict = decide(evidence, sliced)
    assert verdict.verdict == "REJECT"
    assert next(reason for reason in verdict.reasons if "loses at least" in reason).startswith("exact_match on long")
    assert {(row.slice, row.outcome) for row in verdict.metrics} == {
        ("all", "pass"),
        ("long", "fail"),
        ("short", "pass"),
    }


def test_a_baseline_that_fails_against_itself_proves_nothing(make: Make, tools: Tools) -> None:
    texts = tools["sentences"](400)
    verdict = decide(make(texts, repeat=tools["spoiled"](texts, 0.2)), POLICY)
    assert verdict.verdict == "INVALID"
    assert verdict.reasons[0].startswith("steady: ")


def test_arms_that_cannot_be_laid_side_by_side_get_no_metrics(make: Make, tools: Tools) -> None:
    evidence = make(tools["sentences"](50))
    described, records = evidence.arms["candidate"]
    verdict = decide(replace(evidence, arms={**evidence.arms, "candidate": (described, records[1:])}), POLICY)
    assert verdict.verdict == "INVALID"
    assert verdict.metrics == ()
    assert json.loads(canonical_json(verdict.plain()))["verdict"] == "INVALID"


def test_the_verdict_is_plain_json_with_every_number(make: Make, tools: Tools) -> None:
    texts = tools["sentences"](60)
    verdict = decide(make(tools["spoiled"](texts, 0.1), references=texts, runtime=texts), POLICY)
    plain = json.loads(canonical_json(verdict.plain()))
    assert plain["schema"] == 1
    assert plain["policy_digest"] == POLICY.digest()
    assert plain["policy"] == POLICY.plain()
    assert plain["metrics"][0].keys() >= {"lower", "upper", "confidence", "margin", "margin_points", "signature"}
    assert plain["metrics"][0]["margin"] == "2"
    assert plain["arms"].keys() == {"baseline", "repeat", "runtime", "candidate"}
    assert plain["engine_digest"] == "sha256:engine"


def test_exit_codes() -> None:
    assert EXIT_CODES == {"PROMOTE": 0, "REJECT": 1, "INCONCLUSIVE": 2, "INVALID": 3}


def test_the_same_evidence_gives_the_same_verdict(make: Make, tools: Tools) -> None:
    texts = tools["sentences"](100)
    candidate = tools["spoiled"](texts, 0.1)
    one, other = (decide(make(candidate, references=texts, baseline=texts), POLICY) for _ in range(2))
    assert canonical_json(one.plain()) == canonical_json(other.plain())


@quick
@given(st.integers(0, 2**32), st.floats(0, 0.5))
def test_order_changes_nothing(make: Make, tools: Tools, seed: int, share: float) -> None:
    texts = tools["sentences"](40)
    groups = [f"g{place // 2}" if place % 3 else None for place in range(40)]
    evidence = make(tools["spoiled"](texts, share, seed), references=texts, baseline=texts, groups=groups)
    source = random.Random(seed)
    arms = {
        role: (described, source.sample(list(records), len(records)))
        for role, (described, records) in evidence.arms.items()
    }
    mixed = replace(evidence, items=source.sample(list(evidence.items), 40), arms=arms)
    assert canonical_json(decide(mixed, POLICY).plain()) == canonical_json(decide(evidence, POLICY).plain())


@quick
@given(st.integers(0, 2**32), st.floats(0, 1), st.integers(5, 60))
def test_the_baseline_against_itself_is_never_rejected(
    make: Make, tools: Tools, seed: int, share: float, n: int
) -> None:
    texts = tools["sentences"](n)
    answers = tools["spoiled"](texts, share, seed)
    assert decide(make(answers, references=texts, baseline=answers), POLICY).verdict != "REJECT"


@quick
@given(st.integers(0, 2**32), st.tuples(st.integers(0, 120), st.integers(1, 60)), st.sampled_from([POLICY, EXACT]))
def test_more_loss_never_turns_a_refusal_into_a_promotion(
    make: Make, tools: Tools, seed: int, steps: tuple[int, int], policy: Policy
) -> None:
    n = 200
    texts = tools["sentences"](n)
    order = random.Random(seed).sample(range(n), n)
    rank = {"PROMOTE": 0, "INCONCLUSIVE": 1, "REJECT": 2}

    def judged(lost: int) -> int:
        gone = set(order[:lost])
        candidate = [
            " ".join(f"z{turn}" for turn, _ in enumerate(text.split())) if place in gone else text
            for place, text in enumerate(texts)
        ]
        return rank[decide(make(candidate, references=texts, baseline=texts), policy).verdict]

    before, after = judged(steps[0]), judged(sum(steps))
    assert not (before == rank["REJECT"] and after == rank["PROMOTE"])
    if policy is EXACT:  # a score interval moves down with every loss; a bootstrap's corrections may wobble a little
        assert after >= before
