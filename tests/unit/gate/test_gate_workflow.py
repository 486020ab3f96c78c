"""The reusable workflow: callable, whole history, gate after the run, evidence kept whatever the verdict."""

from __future__ import annotations

import re
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
