"""The reusable workflow: callable, whole history, gate after the run, evidence kept whatever the verdict."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

FILE = Path(__file__).parents[3] / ".github" / "workflows" / "engine-gate.yml"


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    content: dict[str, Any] = YAML(typ="safe").load(FILE.read_text())
    return content


def step(workflow: dict[str, Any], part: str) -> dict[str, Any]:
    steps = workflow["jobs"]["gate"]["steps"]
    return next(row for row in steps if part in row.get("name", "") + row.get("uses", ""))


def test_it_can_be_called(workflow: dict[str, Any]) -> None:
    assert "workflow_call" in workflow["on"]
    used = set(re.findall(r"inputs\.([\w-]+)", FILE.read_text()))
    assert used == set(workflow["on"]["workflow_call"]["inputs"])


def test_the_clone_is_not_shallow(workflow: dict[str, Any]) -> None:
    assert step(workflow, "actions/checkout")["with"]["fetch-depth"] == 0


def test_the_gate_gives_the_exit_code_and_the_evidence_stays(workflow: dict[str, Any]) -> None:
    names = [row.get("name") for row in workflow["jobs"]["gate"]["steps"]]
    assert names.index("Gate") > names.index("Calibrate, build, evaluate, decide")
    assert 'exit "$code"' in step(workflow, "Gate")["run"]
    for later in ("Gate", "Keep the report"):
        assert step(workflow, later)["if"] == "${{ !cancelled() }}"
    assert "report/" in step(workflow, "Keep the report")["with"]["path"]


def test_inputs_reach_the_shell_only_as_variables(workflow: dict[str, Any]) -> None:
    for row in workflow["jobs"]["gate"]["steps"]:
        assert "${{" not in row.get("run", "")


def test_only_a_run_that_passed_is_promoted(workflow: dict[str, Any]) -> None:
    """`if` without a status function runs after success alone; the key is a file of this step, and goes with it."""
    names = [row.get("name") for row in workflow["jobs"]["gate"]["steps"]]
    promotion = step(workflow, "Promote")
    assert names[-1] == "Promote" and names.index("Gate") < names.index("Share the results")
    assert promotion["if"] == "${{ inputs.promote == true }}"
    assert workflow["on"]["workflow_call"]["inputs"]["promote"]["default"] is False
    assert workflow["on"]["workflow_call"]["secrets"]["signing-key"]["required"] is False
    assert "enginegate promote" in promotion["run"]
    assert "trap 'rm -f" in promotion["run"]


def test_the_promote_step_runs(workflow: dict[str, Any], tmp_path: Path) -> None:
    """The step's own script, with a stand-in that prints what `enginegate` is called with and the key that it finds."""
    stand_in = tmp_path / ".venv/bin/enginegate"
    stand_in.parent.mkdir(parents=True)
    stand_in.write_text('#!/bin/bash\necho "$@"\nfor last; do :; done\n[[ $last != *.pem ]] || cat "$last"\n')
    stand_in.chmod(0o755)
    for name in ("dvc.lock", "ledger"):
        (tmp_path / name).write_text("x")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    script = step(workflow, "Promote")["run"]
    given = {"GITHUB_RUN_ID": "7", "RUNNER_TEMP": str(tmp_path), "RECIPES": "a b", "REMOTE": "store", "STAGE": ""}

    def run(**more: str) -> str:
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", script],
            cwd=tmp_path,
            env=os.environ | given | {"SIGNING_KEY": ""} | more,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    assert run() == "promote a b --remote store\n"
    key = str(tmp_path / "signing-key.pem")
    assert run(STAGE="staging", RECIPES="", SIGNING_KEY="SECRET") == (
        f"promote --remote store --stage staging --sign-key {key}\nSECRET\n"
    )
    assert not Path(key).exists()
    log = subprocess.run(["git", "log", "--format=%s"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert log == "Engines of run 7\n"  # once: the second call found nothing new
