"""One synthetic run for all tests of the report; tests that change it copy it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.params import Params
from tests.unit.report.synthetic import RECIPES, write_run

PARAMS = Params(recipes=RECIPES)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run. Read only."""
    root = tmp_path_factory.mktemp("run")
    write_run(root, count=400)
    return root


@pytest.fixture
def own_run(run: Path, tmp_path: Path) -> Path:
    """A finished run of the test's own."""
    return Path(shutil.copytree(run, tmp_path / "run"))
