"""``enginegate plan``: the number, the table, JSON, the plot and wrong input."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from pipeline.commands import plan
from pipeline.errors import UsageError


def call(*words: str) -> int:
    parser = argparse.ArgumentParser()
    plan.register(parser.add_subparsers())
    args = parser.parse_args(["plan", *words])
    return int(args.run(args))


def test_one_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--margin", "2", "--discordance", "0.05") == 0
    assert capsys.readouterr().out == "773\n"


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    call("--margin", "1", "2", "--discordance", "0.01", "0.05", "0.1")
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["items", "needed", "1", "points", "2", "points"]
    # 6.18 d / margin^2 by hand.
    assert [row.split()[-2:] for row in rows] == [["619", "155"], ["3092", "773"], ["6183", "1546"]]


def test_json_and_the_floor(capsys: pytest.CaptureFixture[str]) -> None:
    call("--json", "--margin", "1", "--discordance", "0.001")
    # 62 by the formula, but with no flip at all 299 are needed to exclude a loss of 1 point.
    assert json.loads(capsys.readouterr().out) == [{"margin": 1.0, "discordance": 0.001, "items": 299}]


def test_plot(tmp_path: Path) -> None:
    call("--plot", str(tmp_path / "new" / "plan.png"))
    assert (tmp_path / "new" / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "words",
    [("--margin", "0"), ("--margin", "100"), ("--discordance", "5"), ("--confidence", "95"), ("--power", "0.1")],
)
def test_wrong_input(words: tuple[str, str]) -> None:
    with pytest.raises(UsageError):
        call(*words)
