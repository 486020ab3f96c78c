from __future__ import annotations

import pytest

from pipeline.report.text import MINUS, NONE, columns, margin, number, signed, size
from pipeline.report.words import headline, sentence


@pytest.mark.parametrize(
    ("value", "text"), [(0.514, "+0.51"), (-0.516, f"{MINUS}0.52"), (-0.001, "0.00"), (0.0, "0.00"), (None, NONE)]
)
def test_signed(value: float | None, text: str) -> None:
    assert signed(value) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (999_951, "1.0 MB")]
)
def test_size(count: int, text: str) -> None:
    assert size(count) == text


def test_margin() -> None:
    row = {"margin_points": 0.862, "margin": "2", "margin_kind": "relative"}
    assert margin(row) == "0.86 (2 % of the baseline)"
    assert margin(row | {"margin_points": None, "margin_kind": "absolute"}) == number(None)


def test_columns_align() -> None:
    assert columns([("name", "value"), ("a", "+1.00")]) == ["  name  value", "  a     +1.00"]
    assert columns([("name", "n", "x"), ("a", "640", "pass")]) == ["  name    n  x", "  a     640  pass"]


def test_headline() -> None:
    assert headline({"a": "INVALID"}) == "a is not judged."
    assert headline({str(n): "PROMOTE" for n in range(5)}) == "5 of 5 engines are promoted: 0, 1, 2, 3, 4."


def test_sentence_counts() -> None:
    verdict = {"verdict": "INCONCLUSIVE", "validity": [], "metrics": [{"importance": "critical", "needs_n": 1546}]}
    assert "at least 1 546 items" in sentence(verdict)
    verdict = {"verdict": "INVALID", "validity": [{"ok": False}, {"ok": True}], "metrics": []}
    assert sentence(verdict) == "The evaluation is no evidence: 1 check fails."
