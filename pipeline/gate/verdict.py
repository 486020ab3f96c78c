"""From evidence and policy to a verdict: ``decide``, a pure function.

PROMOTE: every critical metric, on the whole set and on each slice, is shown to stay within its margin.
REJECT: a loss beyond a margin is proven, or the answers' length is. INCONCLUSIVE: neither; the verdict says how
many items would do. INVALID: the evidence does not hold. Requiring every critical metric to pass, each at 5 %,
keeps the whole at 5 % (an intersection-union test), so there is no correction for their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pipeline.evaluate.base import Floats, Metric
from pipeline.evaluate.registry import make_metric
from pipeline.gate import attribution, ledger
from pipeline.gate.evidence import BASELINE, CANDIDATE, REPEAT, RUNTIME, Aligned, Evidence, align
from pipeline.gate.fidelity import fidelity
from pipeline.gate.health import health
from pipeline.gate.levels import Judged, judge_levels
from pipeline.gate.noninferiority import Comparison, Measured, bounds, compare, measure
from pipeline.gate.policy import Policy
from pipeline.gate.validity import Finding, comparable, run_checks

SCHEMA = 1
Word = Literal["PROMOTE", "REJECT", "INCONCLUSIVE", "INVALID"]
EXIT_CODES: dict[str, int] = {"PROMOTE": 0, "REJECT": 1, "INCONCLUSIVE": 2, "INVALID": 3}
BINDING = ("critical", "supporting")


@dataclass(frozen=True)
class Verdict:
    """The decision with every number that led to it; ``plain`` is the JSON of docs/verdict.md."""

    recipe: str
    engine_digest: str | None
    verdict: Word
    reasons: tuple[str, ...]
    policy: Policy
    validity: tuple[Finding, ...]
    metrics: tuple[Comparison, ...]
    fidelity: dict[str, Any]
    attribution: dict[str, Any]
    service: dict[str, tuple[Judged, ...]]
    ledger: tuple[dict[str, Any], ...]
    arms: dict[str, dict[str, Any]]

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return {
            "schema": SCHEMA,
            "recipe": self.recipe,
            "engine_digest": self.engine_digest,
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "policy_digest": self.policy.digest(),
            "policy": self.policy.plain(),
            "validity": [finding.plain() for finding in self.validity],
            "metrics": [comparison.plain() for comparison in self.metrics],
            "fidelity": self.fidelity,
            "attribution": self.attribution,
            "service": {role: [level.plain() for level in levels] for role, levels in self.service.items()},
            "ledger": list(self.ledger),
            "arms": self.arms,
        }


Key = tuple[str, str]  # metric, role
Pair = tuple[Measured, Measured]


def decide(evidence: Evidence, policy: Policy) -> Verdict:
    """Judges a candidate. The order of items and records plays no part."""
    findings = run_checks(evidence, policy)
    comparisons: list[Comparison] = []
    measures: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    if comparable(findings):
        aligned = align(evidence, cluster=policy.cluster)
        metrics = {name: make_metric(name, rule.options) for name, rule in policy.metrics.items()}
        statistics = {
            (name, role): metric.statistics(aligned.texts(role), aligned.items)
            for name, metric in metrics.items()
            for role in aligned.records
        }
        measured = measure(statistics, aligned.groups, policy)
        whole = [compare(metric, *_pair(measured, name), policy) for name, metric in metrics.items()]
        comparisons = [*whole, *_sliced(metrics, statistics, aligned, policy)]
        measures = fidelity(evidence, aligned, policy)
        parts = _attributed(metrics, measured, policy, whole)
        findings.append(_steady(metrics, measured, policy))
    service = _service(evidence, policy)
    word, reasons = _word(findings, comparisons, measures, service[CANDIDATE])
    attempt = {**ledger.entry(evidence, policy), "verdict": word}
    return Verdict(
        recipe=evidence.recipe,
        engine_digest=attempt["engine"],
        verdict=word,
        reasons=(*reasons, *parts.get("text", []), *_luck(evidence, policy)),
        policy=policy,
        validity=tuple(findings),
        metrics=tuple(comparisons),
        fidelity=measures,
        attribution=parts,
        service=service,
        ledger=(*ledger.attempts(evidence, policy), attempt),
        arms=_described(evidence),
    )


def _pair(measured: Mapping[Key, Measured], name: str, one: str = BASELINE, other: str = CANDIDATE) -> Pair:
    return measured[name, one], measured[name, other]


def _sliced(
    metrics: Mapping[str, Metric], statistics: Mapping[Key, Floats], aligned: Aligned, policy: Policy
) -> list[Comparison]:
    found = []
    for slice_name, part in policy.slices.items():
        places = [place for place, item in enumerate(aligned.items) if part.holds(item.source, item.tags)]
        if not places:
            continue  # a finding of its own
        groups = np.unique(aligned.groups[places], return_inverse=True)[1]
        chosen = {key: rows[places] for key, rows in statistics.items() if key[1] in (BASELINE, CANDIDATE)}
        measured = measure(chosen, groups, policy)
        found += [compare(metric, *_pair(measured, name), policy, part=slice_name) for name, metric in metrics.items()]
    return found


def _attributed(
    metrics: Mapping[str, Metric], measured: Mapping[Key, Measured], policy: Policy, whole: list[Comparison]
) -> dict[str, Any]:
    pairs = {"noise": (BASELINE, REPEAT), "runtime": (BASELINE, RUNTIME), "quantization": (RUNTIME, CANDIDATE)}
    parts: dict[str, dict[str, dict[str, float]]] = {}
    text = []
    for comparison in whole:
        if comparison.outcome == "invalid":
            continue
        name = comparison.name
        parts[name] = {
            part: attribution.part(bounds(metrics[name], *_pair(measured, name, *roles), policy))
            for part, roles in pairs.items()
            if all((name, role) in measured for role in roles)
        }
        if comparison.importance == "critical":
            text.append(attribution.explain(comparison, parts[name]))
    return attribution.attribution(parts, text)


def _steady(metrics: Mapping[str, Metric], measured: Mapping[Key, Measured], policy: Policy) -> Finding:
    """The baseline must pass its own gate: a repeat that is proven worse makes every comparison worthless."""
    for name, metric in metrics.items():
        if policy.metrics[name].importance == "critical":
            repeated = compare(metric, *_pair(measured, name, BASELINE, REPEAT), policy)
            if repeated.outcome == "fail":
                return Finding("steady", False, f"the baseline's repeat fails {name} against it: {repeated.detail}")
    return Finding("steady", True, "the baseline's repeat does not fail against it")


def _service(evidence: Evidence, policy: Policy) -> dict[str, tuple[Judged, ...]]:
    """The levels of both arms; only the candidate's decide."""
    confidence = policy.confidence_of_a_look
    arm = evidence.arms[CANDIDATE][0] if CANDIDATE in evidence.arms else None
    return {
        role: judge_levels(policy.service, evidence.bench.get(role), evidence.prices, confidence, digest)
        for role, digest in ((BASELINE, None), (CANDIDATE, arm.engine_digest if arm else None))
    }


def _word(
    findings: list[Finding], comparisons: list[Comparison], measures: dict[str, Any], levels: tuple[Judged, ...]
) -> tuple[Word, list[str]]:
    invalid = [f"{finding.check}: {finding.detail}" for finding in findings if not finding.ok]
    rejected, open_questions = [], []
    for row in comparisons:
        place = row.name if row.slice == "all" else f"{row.name} on {row.slice}"
        if row.importance in BINDING and row.outcome == "invalid":
            invalid.append(f"{place}: {row.detail}")
        if row.importance in BINDING and row.outcome == "fail":
            rejected.append(f"{place} {row.detail}")
        if row.importance == "critical" and row.outcome == "inconclusive":
            open_questions.append(f"{place} {row.detail}")
    for name, found in measures.items():
        outcome = found.get("outcome") if found else None
        if outcome == "fail" and found["importance"] in BINDING:
            rejected.append(f"{name}: {_limit(name, found)}")
        if outcome == "inconclusive" and found["importance"] == "critical":
            open_questions.append(f"{name}: {_limit(name, found)}, though not beyond doubt")
    critical_levels = [level for level in levels if level.importance == "critical"]
    by_outcome = {"invalid": invalid, "not met": rejected, "not enough": open_questions, "absent": open_questions}
    for level in critical_levels:
        if level.outcome in by_outcome:
            by_outcome[level.outcome].append(f"service level {level.sentence()}")
    if invalid:
        return "INVALID", invalid
    if rejected:
        return "REJECT", rejected
    if open_questions:
        return "INCONCLUSIVE", open_questions
    critical = [row for row in comparisons if row.importance == "critical"]
    shown = [f"{row.name} on {row.slice} {row.detail}" for row in critical]
    return "PROMOTE", shown + [f"service level {level.sentence()}" for level in critical_levels]


def _limit(name: str, measure: dict[str, Any]) -> str:
    if name == "length_ratio":
        return f"{measure['value']:.3f}, outside {measure['least']} to {measure['most']}"
    return f"{measure['excess']:.1f} points above the baseline's own, more than {measure['most']}"


def _luck(evidence: Evidence, policy: Policy) -> list[str]:
    tries = 1 + len(ledger.attempts(evidence, policy))
    if tries == 1:
        return []
    chance = ledger.chance_by_luck(tries, 1 - policy.confidence_of_a_look)
    return [
        f"attempt {tries} for this checkpoint, recipe and policy: "
        f"an engine at its margin would have passed by luck with up to {100 * chance:.0f} %"
    ]


def _described(evidence: Evidence) -> dict[str, dict[str, Any]]:
    references = {item.id: item.reference for item in evidence.items}
    described = {}
    for role in evidence.present():
        arm, records = evidence.arms[role]
        described[role] = {
            "name": arm.name,
            "backend": arm.backend,
            "dtype": arm.dtype,
            "engine_digest": arm.engine_digest,
            "versions": arm.versions,
            "platform": arm.platform,
            "sampling": arm.sampling,
            "order_seed": arm.order_seed,
            "wall_s": arm.wall_s,
            "answers": len(records),
            "output_tokens": sum(len(record.output_token_ids) for record in records),
            "health": {name: len(ids) for name, ids in health(records, references).items()},
        }
    return described
