"""Judges item scores that another tool logged, by the same statistics as the gate's own metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.evaluate.base import MeanMetric
from pipeline.evaluate.lm_eval import ItemScore
from pipeline.gate.noninferiority import Comparison, compare, measure
from pipeline.gate.policy import MetricRule, Policy
from pipeline.records import Item

VERDICTS = {"pass": "PROMOTE", "fail": "REJECT", "inconclusive": "INCONCLUSIVE", "invalid": "INVALID"}
SHOWN = 5  # ids named in a reason


@dataclass(frozen=True)
class Judged:
    """The verdict's word, why, and the numbers (None when the two logs cannot be paired)."""

    verdict: str
    reason: str
    row: Comparison | None


class _Logged(MeanMetric):
    """The mean of scores that exist already."""

    def value(self, answer: str, item: Item) -> float:
        """Never asked: the statistics are the logged scores."""
        raise NotImplementedError


def judge(
    name: str,
    baseline: Sequence[ItemScore],
    candidate: Sequence[ItemScore],
    rule: MetricRule,
    policy: Policy,
    *,
    higher_is_better: bool = True,
) -> Judged:
    """Pairs the scores (0 to 1) by id and judges their mean, in points, by ``rule``.

    Right-or-wrong scores get a score interval, others the paired bootstrap; every item is its own group. Logs
    of other items, documents, prompts or targets are INVALID.
    """
    if problem := _problem(baseline, candidate):
        return Judged("INVALID", problem, None)
    pairs = [[one.score for one in sorted(rows, key=lambda row: row.id)] for rows in (baseline, candidate)]
    binary = all(score in (0, 1) for scores in pairs for score in scores)
    fields: dict[str, Any] = {"name": name, "kind": "binary" if binary else "item"}
    metric: MeanMetric = type("Logged", (_Logged,), {**fields, "higher_is_better": higher_is_better})()
    statistics = {
        arm: np.column_stack([np.array(scores), np.ones(len(scores))])
        for arm, scores in zip(("baseline", "candidate"), pairs, strict=True)
    }
    measured = measure(statistics, np.arange(len(baseline)), policy)
    row = compare(metric, measured["baseline"], measured["candidate"], policy, rule=rule)
    return Judged(VERDICTS[row.outcome], row.detail, row)


def _problem(baseline: Sequence[ItemScore], candidate: Sequence[ItemScore]) -> str:
    """Why the two cannot be paired; empty when they can."""
    arms = [{one.id: one.hashes for one in rows} for rows in (baseline, candidate)]
    if not baseline or any(len(arm) != len(rows) for arm, rows in zip(arms, (baseline, candidate), strict=True)):
        return "no items, or an item twice"
    if missing := sorted(arms[0].keys() ^ arms[1].keys()):
        return f"{len(missing)} items were asked of one arm alone: {', '.join(missing[:SHOWN])}"
    if changed := sorted(name for name in arms[0] if arms[0][name] != arms[1][name]):
        return f"{len(changed)} items differ in document, prompt or target: {', '.join(changed[:SHOWN])}"
    return ""
