"""Layer 2: how far the candidate's answers are from the baseline's, whatever they score.

Greedy decoding is not reproducible on real servers (batches change the order of sums), so the baseline runs
twice, and only what exceeds the difference of these two runs is held against the candidate.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.evaluate.base import Floats
from pipeline.gate import bootstrap, proportions
from pipeline.gate.evidence import BASELINE, CANDIDATE, REPEAT, Aligned, Evidence
from pipeline.gate.noninferiority import Outcome, exact
from pipeline.gate.policy import Policy


def fidelity(evidence: Evidence, aligned: Aligned, policy: Policy) -> dict[str, Any]:
    """All measures as JSON data; those with a limit carry ``outcome`` and ``importance``."""
    return {
        "length_ratio": length_ratio(aligned, policy),
        "flips": flips(aligned, policy),
        "tokens": {role: token_agreement(aligned, role) for role in (CANDIDATE, REPEAT)},
        "delta_nll": delta_nll(evidence, aligned, policy),
        "divergence": divergence(evidence),
    }


def length_ratio(aligned: Aligned, policy: Policy) -> dict[str, Any]:
    """Output tokens of the candidate over the baseline's, with bootstrap bounds.

    Within the limits: pass. Wholly outside: fail. Outside, but not beyond doubt: inconclusive.
    """
    limit = policy.fidelity.length_ratio
    lengths = np.array(
        [
            [len(one.output_token_ids), len(other.output_token_ids)]
            for one, other in zip(aligned.records[CANDIDATE], aligned.records[BASELINE], strict=True)
        ],
        dtype=np.float64,
    )
    value, lower, upper = _ratio(lengths, aligned.groups, policy)
    outcome: Outcome = "inconclusive"
    if exact(lower) > limit.most or exact(upper) < limit.least:
        outcome = "fail"
    elif limit.least <= exact(value) <= limit.most:
        outcome = "pass"
    return {
        "value": value,
        "lower": lower,
        "upper": upper,
        "least": str(limit.least),
        "most": str(limit.most),
        "importance": limit.importance,
        "outcome": outcome,
    }


def flips(aligned: Aligned, policy: Policy) -> dict[str, Any]:
    """Items whose text changed, in per cent: candidate and repeat against the baseline, and the excess."""
    limit = policy.fidelity.excess_flips
    texts = {role: np.array(aligned.texts(role), dtype=object) for role in (BASELINE, REPEAT, CANDIDATE)}
    changed = {role: np.asarray(texts[role] != texts[BASELINE], dtype=np.bool_) for role in (REPEAT, CANDIDATE)}
    excess = changed[CANDIDATE].astype(np.float64) - changed[REPEAT].astype(np.float64)
    effect = proportions.design_effect(excess, aligned.groups)
    counts = proportions.table(changed[REPEAT], changed[CANDIDATE])
    lower, upper = proportions.newcombe(counts.scaled(1 / effect), policy.confidence_of_a_look)
    outcome: Outcome = "inconclusive"
    if exact(100 * lower) > limit.most:
        outcome = "fail"
    elif exact(100 * upper) <= limit.most:
        outcome = "pass"
    return {
        "candidate": 100 * float(changed[CANDIDATE].mean()),
        "repeat": 100 * float(changed[REPEAT].mean()),
        "excess": 100 * counts.difference,
        "lower": 100 * lower,
        "upper": 100 * upper,
        "most": str(limit.most),
        "importance": limit.importance,
        "outcome": outcome,
    }


def token_agreement(aligned: Aligned, role: str) -> dict[str, Any]:
    """Tokens that agree in place, in per cent of the longer answer, and where changed answers first part."""
    same = longer = 0
    parted = []
    for one, other in zip(aligned.records[BASELINE], aligned.records[role], strict=True):
        mine, theirs = one.output_token_ids, other.output_token_ids
        same += sum(left == right for left, right in zip(mine, theirs, strict=False))
        longer += max(len(mine), len(theirs))
        if (place := _first_divergence(mine, theirs)) is not None:
            parted.append(place)
    return {
        "agreement": 100 * same / longer if longer else 100.0,
        "changed": len(parted),
        "median_first_divergence": statistics.median(parted) if parted else None,
    }


def delta_nll(evidence: Evidence, aligned: Aligned, policy: Policy) -> dict[str, Any] | None:
    """Mean increase of the negative log-likelihood of the same tokens, nats a token, with bounds."""
    if not {BASELINE, CANDIDATE} <= evidence.forced.keys():
        return None
    one, other = evidence.forced[BASELINE], evidence.forced[CANDIDATE]
    places = [place for place, item in enumerate(aligned.items) if one.get(item.id)]  # some of the items, often
    ids = [aligned.items[place].id for place in places]
    rows = np.array([[sum(other.get(name, ())) - sum(one[name]), len(one[name])] for name in ids], dtype=np.float64)
    if not ids or not np.isfinite(rows).all():
        return None  # a finding of its own
    groups = np.unique(aligned.groups[places], return_inverse=True)[1]
    value, lower, upper = _ratio(rows, groups, policy)
    return {"value": value, "lower": lower, "upper": upper}


def divergence(evidence: Evidence) -> dict[str, Any] | None:
    """Mean and 99th percentile of the KL divergence over all tokens, in nats."""
    tokens = [value for values in evidence.divergence.values() for value in values]
    if not tokens or not np.isfinite(tokens).all():
        return None
    return {"mean": float(np.mean(tokens)), "p99": float(np.quantile(tokens, 0.99)), "tokens": len(tokens)}


def _ratio(rows: Floats, groups: NDArray[np.intp], policy: Policy) -> tuple[float, float, float]:
    """Ratio of two sums with its bounds; rows have shape [items, 2]."""
    sums = bootstrap.grouped(rows, groups)
    value = float(_divided(sums.sum(axis=0)))
    draws = _divided(bootstrap.resample(sums, policy.resamples, policy.seed))
    left_out = _divided(sums.sum(axis=0) - sums)
    lower, upper = bootstrap.bca(draws, value, left_out, policy.confidence_of_a_look)
    return value, lower, upper


def _divided(totals: Floats) -> Floats:
    below = totals[..., 1]
    return np.asarray(totals[..., 0] / np.where(below != 0, below, 1.0))


def _first_divergence(one: Sequence[int], other: Sequence[int]) -> int | None:
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))
