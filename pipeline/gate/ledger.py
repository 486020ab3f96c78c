"""Attempts: how often the same checkpoint, recipe and policy were put to the test.

Each try at the margin is another chance to pass by luck: at 5 % each, three tries pass a boundary engine with
14 %. So each attempt is kept and shown. The gate only reads the list and says what this attempt would add;
the stage ``decide`` keeps the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.files import digest_json
from pipeline.gate.evidence import CANDIDATE, Evidence
from pipeline.gate.policy import Policy

SERIES = ("checkpoint", "recipe", "policy")  # attempts of one series compete for the same promotion
KEY = (*SERIES, "engine", "evaluation")  # the same engine on the same items is the same attempt


def entry(evidence: Evidence, policy: Policy) -> dict[str, Any]:
    """This attempt, without its verdict."""
    arm = evidence.arms[CANDIDATE][0] if CANDIDATE in evidence.arms else None
    sources = evidence.manifest.get("sources")
    checkpoint = sources.get("checkpoint") if isinstance(sources, dict) else None  # fingerprints of its parts
    return {
        "checkpoint": None if checkpoint is None else digest_json(checkpoint),
        "recipe": evidence.recipe,
        "policy": policy.digest(),
        "engine": arm.engine_digest if arm else None,
        "evaluation": evidence.evaluation_digest(),
        "items": len(evidence.items),
    }


def attempts(evidence: Evidence, policy: Policy) -> list[dict[str, Any]]:
    """The attempts of this series before this one, oldest first; a repetition of this very one is left out."""
    this = entry(evidence, policy)
    earlier: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in evidence.ledger:
        if all(row.get(key) == this[key] for key in SERIES) and not same(row, this):
            earlier.setdefault(tuple(row.get(key) for key in KEY), dict(row))
    return list(earlier.values())


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two entries are the same attempt."""
    return all(one.get(key) == other.get(key) for key in KEY)


def look_number(evidence: Evidence, policy: Policy) -> int:
    """Which look at this very engine this is, counted from 1: looks differ in their items."""
    this = entry(evidence, policy)
    return 1 + sum(1 for row in attempts(evidence, policy) if row.get("engine") == this["engine"])


def chance_by_luck(tries: int, error: float) -> float:
    """The chance that at least one of ``tries`` independent tests at ``error`` passes a boundary engine."""
    return float(1 - (1 - error) ** tries)


def with_attempt(ledger: Sequence[Mapping[str, Any]], attempt: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The ledger with ``attempt`` at its end, or unchanged when it is there already."""
    return list(ledger) if any(same(row, attempt) for row in ledger) else [*ledger, attempt]
