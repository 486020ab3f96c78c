"""The policy: strict keys with file and line, exact margins, a digest of what decides."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.gate.policy import MetricRule, Policy, Slice, load_policy

ROOT = Path(__file__).parents[3]


def load(tmp_path: Path, text: str) -> Policy:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    return load_policy(path)


def test_the_repositorys_policy_is_the_default() -> None:
    assert load_policy(ROOT / "policy.yaml") == Policy()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("metrics:\n  bleu: {margin: 2, margins: 3}\n", r":2: metrics\.bleu\.margins: unknown key"),
        ("metrics:\n  bleu: {margin: 0}\n", r":2: metrics\.bleu\.margin: must be more than 0"),
        ("metrics:\n  bleu: {margin: yes}\n", r":2: metrics\.bleu\.margin: "),
        ("metrics:\n  bleu: {margin: .nan}\n", r":2: metrics\.bleu\.margin: "),
        ("metrics:\n  blue: {margin: 2}\n", r":2: metrics\.blue: no such metric"),
        ("metrics:\n  bleu:\n    margin: 2\n    options: {tokenise: zh}\n", r"metrics\.bleu\.tokenise: unknown option"),
        ("metrics:\n  bleu: {margin: 2, importance: supporting}\n", r"metrics: at least one metric must be critical"),
        ("confidence: 1.0\n", r":1: confidence: must be at least 0\.8"),
        ("looks: 3\n", r":1: looks: must be 1 or 2"),
        ("resamples: 100\n", r":1: resamples: must be between"),
        ("resamples: 2000\nresamples: 3000\n", r":2: resamples: this key stands twice"),
        ("slices:\n  long: {}\n", r":2: slices\.long\.tag: name a tag"),
        ("slices:\n  all: {tag: x}\n", r"slices\.all: this name"),
        ("slices:\n  odd: {min_words: 5, max_words: 4}\n", r":2: slices\.odd\.min_words: is more than"),
        ("fidelity:\n  length_ratio: {most: 0.5}\n", r":2: fidelity\.length_ratio\.most: must be at least 1"),
        ("health: {empty: 101}\n", r":1: health\.empty: must be between"),
        ("require: some\n", r":1: require"),
        ("require: []\n", r":1: require: must be any, all"),
    ],
)
def test_mistakes_name_file_line_and_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"policy\.yaml" + (message if message.startswith(":") else ".*" + message)):
        load(tmp_path, text)


def test_margins_stay_the_decimals_that_were_written(tmp_path: Path) -> None:
    policy = load(tmp_path, "metrics:\n  exact_match: {margin: 0.1}\n  bleu: {margin: 1e-2}\n")
    assert policy.metrics["exact_match"].margin == Decimal("0.1")
    assert policy.metrics["bleu"].margin == Decimal("0.01")
    assert policy.plain()["metrics"]["exact_match"]["margin"] == "0.1"


def test_the_digest_covers_what_decides() -> None:
    one = Policy()
    assert one.digest() == Policy(require="all", require_signature=True).digest()
    assert one.digest() == Policy(metrics=dict(reversed(one.metrics.items()))).digest()
    assert one.digest() != Policy(seed=1).digest()
    assert one.digest() != Policy(metrics={**one.metrics, "chrf": MetricRule(Decimal("1.1"))}).digest()
    assert one.digest() == Policy(metrics={**one.metrics, "chrf": MetricRule(Decimal("1.0"))}).digest()


def test_points() -> None:
    assert MetricRule(Decimal(2), "relative").points(Decimal(43)) == Decimal("0.86")
    assert MetricRule(Decimal(2)).points(Decimal(0)) == 2
    with pytest.raises(ValueError, match="baseline of 0"):
        MetricRule(Decimal(2), "relative").points(Decimal(0))


def test_a_second_look_splits_the_error() -> None:
    assert Policy().confidence_of_a_look == 0.95
    assert Policy(looks=2).confidence_of_a_look == 0.975


def test_slices() -> None:
    assert Slice(min_words=2, max_words=3).holds("one two", ())
    assert not Slice(min_words=2, max_words=3).holds("one two three four", ())
    assert Slice(tag="ui").holds("x", ("ui", "b"))
    assert not Slice(tag="ui", min_words=2).holds("x", ("ui",))
