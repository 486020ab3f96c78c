"""Layer 0: is this evidence at all? Each check fails closed, names the items and makes the verdict INVALID.

One small function a check, all in ``CHECKS``; the table in ``docs/gate.md`` is generated from it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.gate import ledger
from pipeline.gate.evidence import BASELINE, CANDIDATE, REPEAT, REQUIRED, RUNTIME, Evidence
from pipeline.gate.health import SYMPTOMS, health
from pipeline.gate.policy import Policy

SHOWN = 20
PLATFORM_KEYS = ("gpu", "sm", "tensorrt")


@dataclass(frozen=True)
class Finding:
    """What one check found; ``items`` holds at most 20 ids."""

    check: str
    ok: bool
    detail: str
    items: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return {"check": self.check, "ok": self.ok, "detail": self.detail, "items": list(self.items)}


@dataclass(frozen=True)
class Problem:
    """Why a check fails, and at which items."""

    detail: str
    items: tuple[str, ...] = ()


Answer = Problem | str  # a problem, or what was found to be in order


@dataclass(frozen=True)
class Check:
    """One check: its name, what it asks, and the function that answers. ``structural`` ones come first:
    when one of them fails, the arms cannot be laid side by side and no metric is computed."""

    name: str
    asks: str
    find: Callable[[Evidence, Policy], Answer]
    structural: bool = False


def run_checks(evidence: Evidence, policy: Policy) -> list[Finding]:
    """The findings of all checks, in the table's order."""
    return [_finding(check, check.find(evidence, policy)) for check in CHECKS]


def comparable(findings: Iterable[Finding]) -> bool:
    """Whether the structural checks all passed."""
    structural = {check.name for check in CHECKS if check.structural}
    return all(finding.ok for finding in findings if finding.check in structural)


def _finding(check: Check, answer: Answer) -> Finding:
    if isinstance(answer, str):
        return Finding(check.name, True, answer)
    return Finding(check.name, False, answer.detail, answer.items[:SHOWN])


def _arms(evidence: Evidence, _policy: Policy) -> Answer:
    missing = [role for role in REQUIRED if role not in evidence.arms]
    if missing:
        return Problem(f"no answers from: {', '.join(missing)}")
    return f"{', '.join(evidence.present())} answered"


def _items(evidence: Evidence, _policy: Policy) -> Answer:
    twice = _twice(item.id for item in evidence.items)
    if not evidence.items:
        return Problem("the evaluation set is empty")
    return Problem("ids stand twice in the evaluation set", twice) if twice else f"{len(evidence.items)} items"


def _unique_ids(evidence: Evidence, _policy: Policy) -> Answer:
    for role in evidence.present():
        if twice := _twice(record.id for record in evidence.records(role)):
            return Problem(f"{role} answered these items more than once", twice)
    return "every arm answered an item once"


def _same_ids(evidence: Evidence, _policy: Policy) -> Answer:
    asked = {item.id for item in evidence.items}
    for role in evidence.present():
        answered = {record.id for record in evidence.records(role)}
        if missing := sorted(asked - answered):
            return Problem(f"{role} has no answer to {len(missing)} items", tuple(missing))
        if foreign := sorted(answered - asked):
            return Problem(f"{role} answered {len(foreign)} items that are not in the evaluation set", tuple(foreign))
    return "every arm answered every item of the evaluation set, and no other"


def _well_formed(evidence: Evidence, _policy: Policy) -> Answer:
    for role in evidence.present():
        broken = tuple(
            record.id
            for record in evidence.records(role)
            if not isinstance(record.text, str) or record.finish_reason not in ("stop", "length")
        )
        if broken:
            return Problem(f"{role}: answers without text, or that ended neither by stop nor by length", broken)
    return "every answer has a text and a finish reason"


def _same_prompts(evidence: Evidence, _policy: Policy) -> Answer:
    asked = {item.id: tuple(item.prompt_token_ids) for item in evidence.items}
    for role in evidence.present():
        records = evidence.records(role)
        wrong = tuple(row.id for row in records if tuple(row.prompt_token_ids) != asked.get(row.id, ()))
        if wrong:
            return Problem(f"{role} was asked other prompt tokens than the evaluation set holds", wrong)
    return "every arm read the same prompt tokens"


def _same(what: str, attribute: str) -> Callable[[Evidence, Policy], Answer]:
    def find(evidence: Evidence, _policy: Policy) -> Answer:
        values = {role: getattr(evidence.arms[role][0], attribute) for role in evidence.present()}
        other = [role for role in values if values[role] != values.get(BASELINE)]
        if other or not values.get(BASELINE):
            return Problem(f"{what} differs from the baseline's, or is not known: {values}")
        return f"one {what} for all arms"

    return find


def _greedy(evidence: Evidence, _policy: Policy) -> Answer:
    for role in evidence.present():
        temperature = evidence.arms[role][0].sampling.get("temperature")
        if temperature != 0:
            return Problem(f"{role} sampled at temperature {temperature}: an evaluation decodes greedily")
    return "temperature 0"


def _repeat(evidence: Evidence, _policy: Policy) -> Answer:
    if not {BASELINE, REPEAT} <= evidence.arms.keys():
        return Problem("baseline or repeat is missing")
    one, other = evidence.arms[BASELINE][0], evidence.arms[REPEAT][0]
    for name in ("backend", "dtype", "versions", "platform"):
        if getattr(one, name) != getattr(other, name):
            return Problem(f"the repeat is not the baseline: {name} {getattr(one, name)} and {getattr(other, name)}")
    if one.order_seed == other.order_seed:
        return Problem("the repeat asked in the baseline's order, so it does not show what batching changes")
    return "the baseline ran twice, in two orders"


def _runtime(evidence: Evidence, _policy: Policy) -> Answer:
    if RUNTIME not in evidence.arms or CANDIDATE not in evidence.arms:
        return "no runtime arm: the loss is not split into runtime and quantisation"
    one, other = evidence.arms[RUNTIME][0], evidence.arms[CANDIDATE][0]
    if one.backend != other.backend:
        return Problem(f"runtime ran on {one.backend}, the candidate on {other.backend}: they cannot be told apart")
    return f"engine with and without quantisation on {one.backend}"


def _health(evidence: Evidence, policy: Policy) -> Answer:
    references = {item.id: item.reference for item in evidence.items}
    seen = []
    for role in evidence.present():
        records = evidence.records(role)
        counts = health(records, references)
        seen.append(f"{role} " + ", ".join(f"{len(counts[name])} {name}" for name in SYMPTOMS))
        for name in SYMPTOMS:
            limit = getattr(policy.health, name)
            if records and 100 * len(counts[name]) > limit * len(records):
                share = f"{len(counts[name])} of {len(records)}"
                return Problem(f"{role}: {share} answers are {name}; at most {limit} % may be", tuple(counts[name]))
    return "; ".join(seen)


def _engine(evidence: Evidence, _policy: Policy) -> Answer:
    evaluated = evidence.arms[CANDIDATE][0].engine_digest if CANDIDATE in evidence.arms else None
    stated = evidence.manifest.get("digest")
    if not stated or evaluated != stated:
        return Problem(f"the engine that answered is {evaluated}, the manifest speaks of {stated}")
    return f"{stated} answered and would be promoted"


def _recipe(evidence: Evidence, _policy: Policy) -> Answer:
    if CANDIDATE not in evidence.arms:
        return Problem("no candidate")
    answered = evidence.arms[CANDIDATE][0].recipe
    if answered != evidence.recipe:
        return Problem(f"the verdict is asked for {evidence.recipe}, but the answers are those of {answered}")
    return f"the answers are those of {answered}"


def _platform(evidence: Evidence, _policy: Policy) -> Answer:
    built, ran = evidence.manifest.get("platform"), None
    if CANDIDATE in evidence.arms:
        ran = evidence.arms[CANDIDATE][0].platform
    if not isinstance(built, dict) or not isinstance(ran, dict):
        return Problem("the manifest or the candidate does not say on what platform it was built or ran")
    if unchecked := evidence.manifest.get("build", {}).get("unchecked"):
        return Problem(f"{unchecked}: nothing has compared this engine with the model that it was made from")
    for key in PLATFORM_KEYS:
        if built.get(key) != ran.get(key):
            return Problem(f"built for {key} {built.get(key)}, ran on {key} {ran.get(key)}")
    return "built for the platform that ran it"


def _census(evidence: Evidence, _policy: Policy) -> Answer:
    if not evidence.census and evidence.manifest.get("recipe", evidence.recipe) is None:
        return "an engine without quantisation has no census"
    return _counted(evidence.census)


def _counted(census: Mapping[str, Any]) -> Answer:
    if missing := [key for key in ("quantized", "promised", "bad") if key not in census]:
        return Problem(f"the census does not say: {', '.join(missing)}")
    quantized, promised = census["quantized"], census["promised"]
    if quantized == 0:
        return Problem("the recipe matched no layer: this engine is not quantised")
    if quantized != promised:
        return Problem(f"{quantized} layers are quantised, the recipe promises {promised}")
    wrong = {
        "layers quantised against the recipe, or left out of it": census.get("unexpected", ()),
        "layers whose range is zero, not finite or was never calibrated": census["bad"],
    }
    for what, layers in wrong.items():
        if layers:
            return Problem(what, tuple(layers))
    return f"{quantized} layers quantised, as the recipe promises"


def _leakage(evidence: Evidence, _policy: Policy) -> Answer:
    leakage = evidence.card.get("leakage")
    if not isinstance(leakage, dict) or "overlaps" not in leakage:
        return Problem("the data card does not say whether calibration and evaluation overlap")
    if leakage["overlaps"]:
        return Problem("these evaluation items are in the calibration set too", tuple(map(str, leakage["overlaps"])))
    return "calibration and evaluation share no item"


def _groups(evidence: Evidence, policy: Policy) -> Answer:
    groups = Counter(item.group for item in evidence.items if item.group is not None)
    if not policy.cluster or all(count == 1 for count in groups.values()):
        return "items are independent"
    units = len(groups) + sum(item.group is None for item in evidence.items)
    if units < policy.min_groups:
        return Problem(
            f"the items form {units} groups, fewer than {policy.min_groups}: too few to resample "
            "(evaluate more groups, or set `cluster: false` if the items are independent)"
        )
    return f"{len(evidence.items)} items in {units} groups"


def _slices(evidence: Evidence, policy: Policy) -> Answer:
    sizes = {
        name: sum(part.holds(item.source, item.tags) for item in evidence.items) for name, part in policy.slices.items()
    }
    if empty := [name for name, size in sizes.items() if size == 0]:
        return Problem(f"no item belongs to the slice {', '.join(empty)}")
    return ", ".join(f"{name}: {size} items" for name, size in sizes.items()) or "no slices"


def _log_probs(evidence: Evidence, _policy: Policy) -> Answer:
    series = [*evidence.forced.items(), ("divergence", evidence.divergence)]
    for role, tokens in series:
        bad = tuple(name for name, values in tokens.items() if not all(map(math.isfinite, values)))
        if bad:
            return Problem(f"{role}: log-probabilities that are not finite", bad)
    lengths = {role: {name: len(values) for name, values in tokens.items()} for role, tokens in evidence.forced.items()}
    if any(counts != lengths.get(BASELINE) for counts in lengths.values()):
        return Problem("the arms scored different tokens, so their log-likelihoods cannot be compared")
    return "finite" if evidence.forced or evidence.divergence else "none were asked for"


def _looks(evidence: Evidence, policy: Policy) -> Answer:
    look = ledger.look_number(evidence, policy)
    if policy.looks > 1 and look > policy.looks:
        return Problem(f"this is look {look} at this engine; the policy plans {policy.looks}")
    return f"look {look}" + (f" of {policy.looks} planned" if policy.looks > 1 else "")


def _policy_fixed(evidence: Evidence, policy: Policy) -> Answer:
    noted = {role: evidence.arms[role][0].extra.get("policy_digest") for role in evidence.present()}
    changed = [role for role, digest in noted.items() if digest is not None and digest != policy.digest()]
    if changed:
        return Problem(f"the policy changed after {', '.join(changed)} answered: run `dvc repro` to ask again; {noted}")
    return "the policy is the one noted when the arms answered" if any(noted.values()) else "not noted by the arms"


def _twice(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(name for name, count in Counter(names).items() if count > 1))


CHECKS: tuple[Check, ...] = (
    Check("arms", "Baseline, its repeat and the candidate all answered.", _arms, structural=True),
    Check("items", "The evaluation set is not empty and no id stands twice.", _items, structural=True),
    Check("unique_ids", "No arm answered an item twice.", _unique_ids, structural=True),
    Check("same_ids", "Every arm answered exactly the evaluation set, never an intersection.", _same_ids, True),
    Check("well_formed", "Every answer is a text that ended by `stop` or `length`.", _well_formed, structural=True),
    Check("same_prompts", "Every arm read the same prompt token ids.", _same_prompts),
    Check("same_sampling", "Temperature, limits and stop tokens are equal.", _same("sampling", "sampling")),
    Check("greedy", "Decoding is greedy.", _greedy),
    Check("same_tokenizer", "The tokenizer is the same.", _same("tokenizer", "tokenizer_fingerprint")),
    Check("same_template", "The chat template is the same.", _same("chat template", "template_fingerprint")),
    Check("repeat", "The repeat is the baseline again, in another order.", _repeat),
    Check("runtime", "The engine without quantisation ran on the candidate's backend.", _runtime),
    Check("health", "Few answers are truncated, empty, degenerate or hold a replacement character.", _health),
    Check("engine", "The digest that was evaluated is the digest to be promoted.", _engine),
    Check("recipe", "The answers are those of the recipe that is judged.", _recipe),
    Check("platform", "GPU, SM and TensorRT of the build are those of the run.", _platform),
    Check("census", "Every layer that the recipe promises is quantised, with a sound range.", _census),
    Check("leakage", "Calibration and evaluation are disjoint.", _leakage),
    Check("groups", "There are enough groups of items to resample.", _groups),
    Check("slices", "Every declared slice has items.", _slices),
    Check("log_probs", "Log-probabilities, where asked for, are finite and of the same tokens.", _log_probs),
    Check("looks", "No more looks at an engine than were planned.", _looks),
    Check("policy_fixed", "The policy did not change between the answers and the decision.", _policy_fixed),
)
