"""The docs name every key: of the policy, of the metrics' options, of the verdict."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipeline.evaluate.registry import METRICS
from pipeline.gate.evidence import Evidence
from pipeline.gate.policy import Health, MetricRule, Policy, Slice
from pipeline.gate.proportions import Table, newcombe
from pipeline.gate.service import PRESETS, Good, Level, Service
from pipeline.gate.verdict import decide

DOCS = Path(__file__).parents[3] / "docs"


def named(page: str) -> set[str]:
    """Every word in backticks, outside of blocks of code."""
    text = re.sub(r"```.*?```", "", (DOCS / page).read_text(), flags=re.DOTALL)
    return {word for span in re.findall(r"`([^`]+)`", text) for word in re.findall(r"\w+", span)}


def test_policy_keys() -> None:
    words = named("policy.md") | {"metrics"}
    for kind in (Policy, MetricRule, Slice, Health, Service, Good, Level):
        assert {field.name for field in fields(kind)} <= words
    assert all(f"`{name}`" in (DOCS / "policy.md").read_text() for name in PRESETS)
    for name, metric in METRICS.items():
        assert {name, *(field.name for field in fields(metric))} <= words  # type: ignore[arg-type]


def keys(value: Any) -> Iterator[str]:
    """The keys of nested JSON, but those that are data: ids, metric names, roles, platforms."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield key
            if key not in {"policy", "arms", "platform", "versions", "sampling", "metrics", "health", "tokens"}:
                yield from keys(child)
    elif isinstance(value, list):
        for child in value:
            yield from keys(child)


def test_verdict_keys(make: Callable[..., Evidence], tools: dict[str, Any]) -> None:
    texts = tools["sentences"](30)
    forced = {role: {"i0000": [0.5]} for role in ("baseline", "candidate")}
    evidence = make(texts, runtime=texts, forced=forced, divergence={"i0000": [0.1]})
    plain = decide(evidence, Policy()).plain()
    words = named("verdict.md")
    assert set(keys(plain)) <= words
    assert set(plain["metrics"][0]) <= words
    assert set(plain["arms"]["candidate"]) <= words
    assert set(plain["fidelity"]["tokens"]["candidate"]) <= words


def test_the_worked_example_of_the_gate_is_right() -> None:
    page = (DOCS / "gate.md").read_text()
    for counts, shown in (
        (Table(690, 10, 8, 292), "-0.92 and an upper bound of +0.52"),
        (Table(120, 20, 8, 52), "-10.4 and -1.6"),
        (Table(1200, 200, 80, 520), "-7.4 and -4.6"),
    ):
        digits = 2 if "upper" in shown else 1
        lower, upper = (f"{100 * bound:+.{digits}f}" for bound in newcombe(counts, 0.95))
        assert shown in page
        assert shown.startswith(lower)
        assert shown.endswith(upper)
