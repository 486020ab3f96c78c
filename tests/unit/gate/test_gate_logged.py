"""Scores that another tool logged: paired or INVALID, and judged by the gate's statistics."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.evaluate.lm_eval import ItemScore
from pipeline.files import read_jsonl, write_jsonl
from pipeline.gate.logged import Judged, judge
from pipeline.gate.policy import MetricRule, Policy

LOG = Path(__file__).parents[1] / "evaluate/lm_eval_log"


def scores(*runs: tuple[float, int]) -> list[ItemScore]:
    """``(score, items)`` in turn."""
    values = [score for score, count in runs for _ in range(count)]
    return [ItemScore(f"task/{place}", ("d", "p", str(place)), value) for place, value in enumerate(values)]


def judged(one: list[ItemScore], other: list[ItemScore], margin: str = "2", higher: bool = True) -> Judged:
    return judge("acc", one, other, MetricRule(Decimal(margin)), Policy(), higher_is_better=higher)


BASELINE = scores((1, 690), (1, 10), (0, 8), (0, 292))
CANDIDATE = scores((1, 690), (0, 10), (1, 8), (0, 292))


def test_the_worked_example_of_the_docs() -> None:
    found = judged(BASELINE, CANDIDATE)
    assert found.verdict == "PROMOTE"
    assert found.row is not None
    assert (found.row.baseline, found.row.candidate) == (pytest.approx(70.0), pytest.approx(69.8))
    assert (round(found.row.lower or 0, 2), round(found.row.upper or 0, 2)) == (-0.92, 0.52)


def test_the_order_of_a_log_does_not_matter() -> None:
    assert judged(BASELINE[::-1], CANDIDATE) == judged(BASELINE, CANDIDATE)


@pytest.mark.parametrize(("lost", "gained", "n", "verdict"), [(200, 80, 2000, "REJECT"), (20, 8, 200, "INCONCLUSIVE")])
def test_a_loss_proven_and_not(lost: int, gained: int, n: int, verdict: str) -> None:
    rest = (1.0, n - lost - gained)
    found = judged(scores(rest, (1, lost), (0, gained)), scores(rest, (0, lost), (1, gained)))
    assert found.verdict == verdict


def test_fractions_get_the_bootstrap_and_less_may_be_better() -> None:
    one, other = scores((0.5, 200), (0.25, 200)), scores((0.75, 200), (0.25, 200))
    found = judged(one, other)
    assert found.row is not None
    assert found.row.method.startswith("paired bootstrap")
    assert found.row.difference == pytest.approx(12.5)
    assert found.verdict == "PROMOTE"
    assert judged(one, other, higher=False).verdict == "REJECT"


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        ([], [], "no items"),
        (scores((1, 3)), [*scores((1, 3)), scores((1, 1))[0]], "an item twice"),
        (scores((1, 3)), scores((1, 4)), "1 items were asked of one arm alone: task/3"),
        (scores((1, 2)), [ItemScore(f"task/{n}", ("d", "q", str(n)), 1) for n in (0, 1)], "2 items differ"),
    ],
)
def test_logs_that_cannot_be_paired(one: list[ItemScore], other: list[ItemScore], reason: str) -> None:
    found = judged(one, other)
    assert found.verdict == "INVALID"
    assert reason in found.reason
    assert found.row is None


@pytest.mark.parametrize(("margin", "change", "code"), [("50", {}, 0), ("2", {}, 2), ("2", {"prompt_hash": "x"}, 3)])
def test_the_command_on_logs_of_earlier_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    margin: str,
    change: dict[str, str],
    code: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = next(LOG.glob("samples_*"))
    write_jsonl(tmp_path / "other" / path.name, [row | change for row in read_jsonl(path)])
    words = ["--baseline", str(LOG), "--candidate", "other", "--metric", "acc", "--margin", margin]
    assert main(["lm-eval", "choice", *words]) == code
    printed = capsys.readouterr().out
    assert printed.startswith(f"choice: {('PROMOTE', 'REJECT', 'INCONCLUSIVE', 'INVALID')[code]}\n")
    assert ("12 items, baseline 8.33, candidate 8.33" in printed) == (code != 3)


@pytest.mark.parametrize("margin", ["0", "-1", "100", "two", "nan"])
def test_a_wrong_margin(margin: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["lm-eval", "choice", "--candidate", "x", "--metric", "acc", f"--margin={margin}"])
    assert stopped.value.code == 64
