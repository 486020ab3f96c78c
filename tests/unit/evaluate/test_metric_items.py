"""Metrics of single items, against worked examples of their papers and hand calculations."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.evaluate.base import MeanMetric
from pipeline.evaluate.choice import Choice
from pipeline.evaluate.exact_match import ExactMatch
from pipeline.evaluate.json_valid import JsonValid
from pipeline.evaluate.placeholders import Placeholders
from pipeline.evaluate.registry import METRICS
from pipeline.evaluate.rouge_l import RougeL
from pipeline.evaluate.token_f1 import TokenF1
from pipeline.records import Item


def value(metric: MeanMetric, answer: str, reference: str, source: str = "") -> float:
    return metric.value(answer, Item("i", source, reference, (1,)))


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        # Lin 2004, section 3: the LCS of the first pair is 3 words, of the second 2, of 4 each.
        ("police kill the gunman", "police killed the gunman", 3 / 4),
        ("the gunman kill police", "police killed the gunman", 2 / 4),
        ("", "police", 0.0),
        ("", "", 1.0),
        ("a b c d", "a c", 2 * 2 / 6),
    ],
)
def test_rouge_l(answer: str, reference: str, expected: float) -> None:
    assert value(RougeL(), answer, reference) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("in Paris, France", "Paris", 2 * (1 / 3) * 1 / (1 / 3 + 1)),
        ("Paris", "paris!", 1.0),
        ("a a b", "a b b", 2 * 2 / 6),
        ("", "Paris", 0.0),
        ("", "", 1.0),
        ("CAFE\u0301", "café", 1.0),
    ],
)
def test_token_f1(answer: str, reference: str, expected: float) -> None:
    assert value(TokenF1(), answer, reference) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "reference", "strict", "loose"),
    [
        ("Sí.", "Sí.", 1, 1),
        (" Si\u0301. \n", "Sí.", 1, 1),
        ("sí", "Sí.", 0, 1),
        ("no", "Sí.", 0, 0),
    ],
)
def test_exact_match(answer: str, reference: str, strict: int, loose: int) -> None:
    assert value(ExactMatch(), answer, reference) == strict
    assert value(ExactMatch(ignore_case_and_punctuation=True), answer, reference) == loose


@pytest.mark.parametrize(
    ("metric", "answer", "reference", "expected"),
    [
        (Choice(), "A or B? The answer is C.", "C", 1),
        (Choice(take="first"), "A or B? The answer is C.", "C", 0),
        (Choice(), "I do not know", "C", 0),
        (Choice(pattern=r"#### (-?\d+)"), "so 6 * 7 = 42\n#### 42", "work\n#### 42", 1),
        (Choice(pattern=r"-?\d+"), "it is 41", "42", 0),
        (Choice(pattern=r"yes|no"), "no", "Yes", 0),
    ],
)
def test_choice(metric: Choice, answer: str, reference: str, expected: int) -> None:
    assert value(metric, answer, reference) == expected


@pytest.mark.parametrize(
    ("answer", "valid", "same"),
    [
        ('{"a": 1, "b": []}', 1, 1),
        ('{"a": 1}', 1, 0),
        ("[1, 2]", 1, 0),
        ('{"a": NaN, "b": 1}', 0, 0),
        ("{'a': 1, 'b': 2}", 0, 0),
        ('Sure: {"a": 1, "b": 2}', 0, 0),
        ("[" * 100_000, 0, 0),
    ],
)
def test_json(answer: str, valid: int, same: int) -> None:
    assert value(JsonValid(), answer, '{"b": 2, "a": 0}') == valid
    assert value(JsonValid(same_keys=True), answer, '{"b": 2, "a": 0}') == same


@pytest.mark.parametrize(
    ("source", "answer", "expected"),
    [
        ("Hello {name}", "Hola {name}", 1),
        ("Hello {name}", "Hola {nombre}", 0),
        ("%d of %d", "%d de %d", 1),
        ("%d of %d", "%d de", 0),
        ("<b>Bold</b> text", "texto <b>en negrita</b>", 1),
        ("<b>Bold</b> text", "texto en negrita", 0),
        ("100 % sure", "100 % seguro", 1),
        ("none", "{extra}", 0),
    ],
)
def test_placeholders(source: str, answer: str, expected: int) -> None:
    assert value(Placeholders(), answer, "", source) == expected


def test_scores_are_percentages_of_sums() -> None:
    metric = ExactMatch()
    rows = metric.statistics(["a", "b", "c"], [Item(name, "", "a", (1,)) for name in "xyz"])
    assert rows.tolist() == [[1, 1], [0, 1], [0, 1]]
    assert float(metric.score(rows.sum(axis=0))) == pytest.approx(100 / 3)
    assert metric.undefined(rows.sum(axis=0)) is None
    assert metric.undefined(np.zeros(2)) == "no items"


def test_every_metric_is_in_the_table_by_its_own_name() -> None:
    assert len(METRICS) == 9
    assert all(kind.name == name for name, kind in METRICS.items())
    assert all(kind().signature() for kind in METRICS.values())
