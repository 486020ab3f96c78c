"""Lines, Markdown and JUnit XML of verdicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pytest

from pipeline.gate.enforcement import exit_code
from pipeline.gate.evidence import Evidence
from pipeline.gate.policy import Policy
from pipeline.gate.rendering import as_junit, as_lines, as_markdown
from pipeline.gate.verdict import decide
from pipeline.report.text import verdict_lines

Make = Callable[..., Evidence]


@pytest.fixture(scope="module")
def verdicts(make: Make, tools: dict[str, Any]) -> dict[str, Any]:
    texts = tools["sentences"](300)
    bad = make(tools["spoiled"](texts, 0.2), references=texts, baseline=texts)
    broken = make(texts, card={"leakage": {"overlaps": ["a|b\x07", "<c>"]}})
    found = {"good": decide(make(texts), Policy()), "bad": decide(bad, Policy()), "broken": decide(broken, Policy())}
    return {name: verdict.plain() | {"recipe": name} for name, verdict in found.items()}


def test_lines(verdicts: dict[str, Any]) -> None:
    first, *reasons = as_lines(verdicts["bad"])
    assert first == "bad: REJECT"
    assert len(reasons) == len(verdicts["bad"]["reasons"])


def test_markdown(verdicts: dict[str, Any]) -> None:
    page = as_markdown(verdicts)
    assert "### good: PROMOTE" in page
    assert "### broken: INVALID" in page
    rows = [line for line in page.splitlines() if line.startswith("| bleu")]
    assert len(rows) == 3
    assert all(row.count(" | ") == 8 for row in rows)
    assert "2 %" in rows[0]


def test_junit(verdicts: dict[str, Any]) -> None:
    root = ElementTree.fromstring(as_junit(verdicts))
    suites = {suite.get("name"): suite for suite in root}
    assert suites["good"].get("failures") == "0"
    failed = [case.get("name") for case in suites["bad"] if case.find("failure") is not None]
    assert failed == ["metric.bleu.all", "metric.chrf.all", "metric.exact_match.all", "verdict"]
    case = next(case for case in suites["broken"] if case.get("name") == "validity.leakage")
    failure = case.find("failure")
    assert failure is not None
    assert failure.get("type") == "INVALID"
    assert "<c>" in (failure.text or "")
    for suite in root:
        assert suite.get("tests") == str(len(suite))
        assert suite.get("failures") == str(len(suite.findall("testcase/failure")))


@pytest.mark.parametrize(
    ("words", "require", "code"),
    [
        (("PROMOTE", "REJECT"), "any", 0),
        (("PROMOTE", "REJECT"), "all", 1),
        (("PROMOTE", "PROMOTE"), "all", 0),
        (("REJECT", "INCONCLUSIVE"), "any", 2),
        (("INVALID", "REJECT"), "any", 3),
        (("PROMOTE", "REJECT"), ("a",), 0),
        (("PROMOTE", "REJECT"), ("b",), 1),
        (("PROMOTE", "REJECT"), ("a", "missing"), 3),
    ],
)
def test_require(words: tuple[str, str], require: Any, code: int) -> None:
    assert exit_code(dict(zip("ab", words, strict=True)), require) == code


def test_no_verdict_at_all_is_no_promotion() -> None:
    assert exit_code({}, "any") == exit_code({}, "all") == 3


def test_service_levels_that_were_measured(verdicts: dict[str, Any]) -> None:
    """Advisory levels are skipped when they are not met, critical ones fail; what was not measured is not shown."""
    absent, *_ = verdicts["good"]["service"]["candidate"]
    found = [
        absent | {"level": name, "importance": importance, "outcome": outcome, "value": value, "detail": "why"}
        for name, importance, outcome, value in (
            ("quick", "advisory", "met", 4.25),
            ("cheap", "advisory", "not met", None),
            ("steady", "critical", "not enough", 3.0),
        )
    ]
    verdict = verdicts["good"] | {"service": {"baseline": [], "candidate": [absent, *found]}}
    page = as_markdown({"good": verdict})
    assert "| quick (advisory) | 4.25 | below 5 ms | met |" in page
    assert "| cheap (advisory) | - |" in page
    assert absent["level"] not in page
    (suite,) = ElementTree.fromstring(as_junit({"good": verdict}))
    cases = {case.get("name"): [child.tag for child in case] for case in suite}
    assert (cases["service.quick"], cases["service.cheap"], cases["service.steady"]) == ([], ["skipped"], ["failure"])
    assert cases["service.speed-first"] == ["skipped"]
    assert "quick (advisory)" in "\n".join(verdict_lines(verdict))
    old = {key: value for key, value in verdict.items() if key != "service"}  # written by an earlier version
    assert as_junit({"old": old})
    assert "service level" not in as_markdown({"old": old}) + "\n".join(verdict_lines(old))
