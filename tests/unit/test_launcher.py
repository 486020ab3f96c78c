"""Command lines behind a launcher, and stages that start themselves again behind it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pipeline.config import load_typed
from pipeline.errors import ConfigError
from pipeline.launcher import launched, relaunched
from pipeline.params import Params
from pipeline.serving.process import ServerCommand
from pipeline.serving.replicas import placed


def test_a_launcher_that_wants_the_numbers() -> None:
    params = Params(launcher="docker run --gpus '\"device={gpus}\"' image")
    commands = [ServerCommand("toy", ("serve",), 8000 + place, gpus=2) for place in range(2)]
    assert [command.argv[3] for command in placed(commands, params, gpu=True)] == ['"device=0,1"', '"device=2,3"']
    assert launched(["calibrate"], params) == ("docker", "run", "--gpus", '"device=all"', "image", "calibrate")


def test_no_launcher_changes_nothing() -> None:
    assert launched(["a", "b"], Params(), {"X": "1"}) == ("a", "b")
    assert not relaunched("no.such.module", params=Params())


def test_a_launcher_with_an_open_quote(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("launcher: srun 'x\n")
    with pytest.raises(ConfigError, match="launcher"):
        load_typed(tmp_path / "params.yaml", Params)


@pytest.fixture
def params(tmp_path: Path) -> Params:
    """A stand-in launcher: notes its command line and runs it in an environment that is not ours."""
    script = tmp_path / "launch"
    script.write_text(f'#!/bin/sh\necho "$@" >> \'{tmp_path}/launches\'\nshift\nexec env -i "$@"\n')
    script.chmod(0o755)
    return Params(launcher=f"{script} --node")


def test_a_stage_starts_itself_behind_the_launcher(
    tmp_path: Path, params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy.py").write_text(
        "import os, pathlib, sys\n"
        "pathlib.Path('seen').write_text(' '.join(sys.argv[1:]) + os.environ['ENGINEGATE_LAUNCHED'])\n"
        "sys.exit(int(sys.argv[2]))\n"
    )
    monkeypatch.chdir(tmp_path)
    assert relaunched("toy", "int8_sq", "0", params=params)
    assert (tmp_path / "seen").read_text() == "int8_sq 01"
    words = f"--node env ENGINEGATE_LAUNCHED=1 {sys.executable} -m toy int8_sq 0\n"
    assert (tmp_path / "launches").read_text() == words
    with pytest.raises(SystemExit) as raised:
        relaunched("toy", "int8_sq", "70", params=params)
    assert raised.value.code == 70


def test_what_was_launched_is_not_launched_again(params: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINEGATE_LAUNCHED", "1")
    assert not relaunched("no.such.module", params=params)
