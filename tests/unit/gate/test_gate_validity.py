"""Layer 0: every check fails on the smallest input that it is about, names the items, and makes the verdict INVALID."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.gate.evidence import Evidence
from pipeline.gate.policy import Policy, Slice
from pipeline.gate.validity import CHECKS, run_checks
from pipeline.gate.verdict import decide

Make = Callable[..., Evidence]
Change = Callable[[Evidence], Evidence]
N = 30


def arm(role: str, **changes: Any) -> Change:
    def change(evidence: Evidence) -> Evidence:
        described, records = evidence.arms[role]
        return replace(evidence, arms={**evidence.arms, role: (replace(described, **changes), records)})

    return change


def record(role: str, place: int, **changes: Any) -> Change:
    def change(evidence: Evidence) -> Evidence:
        described, records = evidence.arms[role]
        rows = list(records)
        rows[place] = replace(rows[place], **changes)
        return replace(evidence, arms={**evidence.arms, role: (described, rows)})

    return change


def rows(role: str, edit: Callable[[list[Any]], list[Any]]) -> Change:
    def change(evidence: Evidence) -> Evidence:
        described, records = evidence.arms[role]
        return replace(evidence, arms={**evidence.arms, role: (described, edit(list(records)))})

    return change


def many(role: str, count: int, **changes: Any) -> Change:
    def change(evidence: Evidence) -> Evidence:
        for place in range(count):
            evidence = record(role, place, **changes)(evidence)
        return evidence

    return change


def field(name: str, value: Any) -> Change:
    return lambda evidence: replace(evidence, **{name: value})


def census(**changes: Any) -> Change:
    return lambda evidence: replace(evidence, census={**evidence.census, **changes})


FAULTS: list[tuple[str, Change, tuple[str, ...]]] = [
    ("arms", lambda e: replace(e, arms={k: v for k, v in e.arms.items() if k != "repeat"}), ()),
    ("items", lambda e: replace(e, items=[*e.items, e.items[3]]), ("i0003",)),
    ("unique_ids", rows("candidate", lambda r: [*r, r[4]]), ("i0004",)),
    ("same_ids", rows("candidate", lambda r: r[:-1]), ("i0029",)),
    ("same_ids", rows("baseline", lambda r: [*r, replace(r[0], id="foreign")]), ("foreign",)),
    ("well_formed", record("candidate", 5, text=None), ("i0005",)),
    ("well_formed", record("baseline", 6, finish_reason="error"), ("i0006",)),
    # Silent truncation of a long prompt: one arm read fewer tokens. A doubled BOS: one arm read one more.
    ("same_prompts", record("candidate", 7, prompt_token_ids=(1,)), ("i0007",)),
    ("same_prompts", record("candidate", 8, prompt_token_ids=(1, 1, 8)), ("i0008",)),
    ("same_sampling", arm("candidate", sampling={"temperature": 0.0, "max_new_tokens": 32, "stop_token_ids": [2]}), ()),
    ("same_sampling", arm("candidate", sampling={"temperature": 0.0, "max_new_tokens": 64, "stop_token_ids": []}), ()),
    ("greedy", arm("baseline", sampling={"temperature": 0.7}), ()),
    ("greedy", arm("candidate", sampling={}), ()),
    ("same_tokenizer", arm("candidate", tokenizer_fingerprint="sha256:other"), ()),
    ("same_template", arm("candidate", template_fingerprint=""), ()),
    ("repeat", arm("repeat", order_seed=0), ()),
    ("repeat", arm("repeat", dtype="float16"), ()),
    ("repeat", arm("repeat", versions={"x": "2"}), ()),
    ("runtime", arm("runtime", backend="tensorrt"), ()),
    ("health", many("candidate", 4, finish_reason="length"), ("i0000", "i0001", "i0002", "i0003")),
    ("health", many("baseline", 2, text=" "), ("i0000", "i0001")),
    ("health", many("candidate", 1, text="caf\ufffd"), ("i0000",)),
    # FP16 overflow: "!!!!" at normal speed.
    ("health", many("candidate", 2, text="!!!!!!!!", output_token_ids=(0,) * 8), ("i0000", "i0001")),
    ("engine", arm("candidate", engine_digest="sha256:other"), ()),
    ("engine", field("manifest", {}), ()),
    ("recipe", field("recipe", "fp8"), ()),
    # Built for SM 89, device SM 90.
    (
        "platform",
        lambda e: replace(e, manifest={**e.manifest, "platform": {"gpu": None, "sm": 89, "tensorrt": None}}),
        (),
    ),
    ("platform", arm("candidate", platform={"gpu": None, "sm": None, "tensorrt": "10.9"}), ()),
    ("platform", lambda e: replace(e, manifest={"digest": e.manifest["digest"]}), ()),
    ("platform", lambda e: replace(e, manifest=e.manifest | {"build": {"unchecked": "compiled ahead of time"}}), ()),
    # A wildcard that matched nothing.
    ("census", census(quantized=0, promised=0), ()),
    ("census", census(quantized=209), ()),
    ("census", census(bad=["layers.3.mlp.experts.7.down_proj"]), ("layers.3.mlp.experts.7.down_proj",)),
    ("census", census(unexpected=["lm_head"]), ("lm_head",)),
    ("census", field("census", {}), ()),
    ("leakage", field("card", {"leakage": {"overlaps": ["i0009"]}}), ("i0009",)),
    ("leakage", field("card", {}), ()),
    ("log_probs", field("forced", {"baseline": {"i0001": [0.5]}, "candidate": {"i0001": [0.5, 0.1]}}), ()),
    ("log_probs", field("forced", {"baseline": {"i0001": [0.5, float("nan")]}}), ("i0001",)),
    ("log_probs", field("divergence", {"i0002": [float("inf")]}), ("i0002",)),
    ("policy_fixed", arm("candidate", extra={"policy_digest": "sha256:before"}), ()),
]


def sound(make: Make, tools: dict[str, Any]) -> Evidence:
    texts = tools["sentences"](N)
    return make(texts, runtime=texts)


def test_sound_evidence_passes_every_check(make: Make, tools: dict[str, Any]) -> None:
    assert [finding for finding in run_checks(sound(make, tools), Policy()) if not finding.ok] == []


@pytest.mark.parametrize(("check", "change", "named"), FAULTS, ids=[name for name, _, _ in FAULTS])
def test_each_fault_is_found_and_named(
    make: Make, tools: dict[str, Any], check: str, change: Change, named: tuple[str, ...]
) -> None:
    verdict = decide(change(sound(make, tools)), Policy())
    findings = {finding.check: finding for finding in verdict.validity}
    assert verdict.verdict == "INVALID"
    assert not findings[check].ok
    assert findings[check].items == named
    assert any(reason.startswith(f"{check}: ") for reason in verdict.reasons)


def test_no_more_than_20_items_are_listed(make: Make, tools: dict[str, Any]) -> None:
    evidence = many("candidate", 25, prompt_token_ids=(9,))(sound(make, tools))
    finding = next(found for found in run_checks(evidence, Policy()) if found.check == "same_prompts")
    assert len(finding.items) == 20


def test_an_empty_evaluation_set(make: Make) -> None:
    assert decide(make([]), Policy()).verdict == "INVALID"


def test_an_engine_without_quantisation_needs_no_census(make: Make, tools: dict[str, Any]) -> None:
    evidence = sound(make, tools)
    evidence = replace(evidence, census={}, manifest={**evidence.manifest, "recipe": None})
    assert all(finding.ok for finding in run_checks(evidence, Policy()))


def test_an_empty_reference_may_have_an_empty_answer(make: Make, tools: dict[str, Any]) -> None:
    texts = ["", "", *tools["sentences"](N - 2)]
    assert all(finding.ok for finding in run_checks(make(texts, references=texts), Policy()))


def test_too_few_groups_to_resample(make: Make, tools: dict[str, Any]) -> None:
    texts = tools["sentences"](N)
    groups = [f"g{place % 5}" for place in range(N)]
    failed = {found.check for found in run_checks(make(texts, groups=groups), Policy()) if not found.ok}
    assert failed == {"groups"}
    assert all(found.ok for found in run_checks(make(texts, groups=groups), Policy(cluster=False)))


def test_an_empty_slice(make: Make, tools: dict[str, Any]) -> None:
    policy = Policy(slices={"rare": Slice(tag="rare"), "short": Slice(max_words=5)})
    finding = next(found for found in run_checks(sound(make, tools), policy) if found.check == "slices")
    assert not finding.ok
    assert "rare" in finding.detail
    assert "short" not in finding.detail


def test_every_check_has_a_fault() -> None:
    elsewhere = {"groups", "slices", "looks"}  # above, and in test_gate_ledger.py
    assert {check.name for check in CHECKS} == {name for name, _, _ in FAULTS} | elsewhere


def test_the_docs_hold_the_table() -> None:
    page = (Path(__file__).parents[3] / "docs" / "gate.md").read_text()
    found = re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE)
    assert found[:-1] == [(check.name, check.asks) for check in CHECKS]
    assert found[-1][0] == "steady"
