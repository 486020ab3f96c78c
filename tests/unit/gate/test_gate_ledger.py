"""The ledger: what counts as an attempt, what it shows, and planned looks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pipeline.gate.evidence import Evidence
from pipeline.gate.ledger import chance_by_luck, with_attempt
from pipeline.gate.policy import Policy
from pipeline.gate.verdict import decide

Make = Callable[..., Evidence]
POLICY = Policy()


def attempt(
    make: Make, tools: dict[str, Any], count: int, engine: str, *, policy: Policy = POLICY, ledger: Sequence[Any] = ()
) -> Any:
    """One verdict about an engine on a number of items."""
    evidence = make(tools["sentences"](count), ledger=ledger)
    described, records = evidence.arms["candidate"]
    arms = {**evidence.arms, "candidate": (replace(described, engine_digest=engine), records)}
    return decide(replace(evidence, arms=arms, manifest={**evidence.manifest, "digest": engine}), policy)


def test_three_tries_lift_five_per_cent_to_fourteen() -> None:
    assert chance_by_luck(3, 0.05) == pytest.approx(0.1426, abs=1e-4)


def test_attempts_add_up_and_are_shown(make: Make, tools: dict[str, Any]) -> None:
    ledger: list[Any] = []
    for turn, engine in enumerate(["one", "two", "three"], start=1):
        verdict = attempt(make, tools, 40, engine, ledger=ledger)
        ledger = with_attempt(ledger, verdict.ledger[-1])
        assert len(verdict.ledger) == turn
    assert any("attempt 3" in reason and "14 %" in reason for reason in verdict.reasons)


def test_the_same_attempt_again_is_none(make: Make, tools: dict[str, Any]) -> None:
    first = attempt(make, tools, 40, "one")
    ledger = with_attempt([], first.ledger[-1])
    again = attempt(make, tools, 40, "one", ledger=ledger)
    assert with_attempt(ledger, again.ledger[-1]) == ledger
    assert again == first


def test_another_policy_starts_another_series(make: Make, tools: dict[str, Any]) -> None:
    ledger = [attempt(make, tools, 40, "one").ledger[-1]]
    other = attempt(make, tools, 40, "two", policy=Policy(seed=5), ledger=ledger)
    assert len(other.ledger) == 1


def test_a_planned_second_look_and_no_third(make: Make, tools: dict[str, Any]) -> None:
    policy = Policy(looks=2)
    ledger: list[Any] = []
    found = []
    for count in (40, 60, 80):
        verdict = attempt(make, tools, count, "one", policy=policy, ledger=ledger)
        ledger = with_attempt(ledger, verdict.ledger[-1])
        looks = next(finding for finding in verdict.validity if finding.check == "looks")
        found.append((looks.ok, verdict.metrics[0].confidence))
    assert found == [(True, 0.975), (True, 0.975), (False, 0.975)]
    assert verdict.verdict == "INVALID"


def test_two_looks_at_975_promise_what_one_at_95_does() -> None:
    assert chance_by_luck(2, 0.025) < 0.05
