"""The stage: alone, in two processes that it starts itself, and what it leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import QuantizationError
from pipeline.files import digest_tree, write_json, write_jsonl
from pipeline.quantize.calibrate import SearchMemoryError
from stages import quantize as stage

ROOT = Path(__file__).parents[3]
CALIB = "calib: {samples: 30, max_tokens: 64, batch_tokens: 64"


@pytest.fixture
def project(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    shutil.copytree(tiny_checkpoint, tmp_path / "artifacts/checkpoint")
    write_json(tmp_path / "artifacts/checkpoint.json", {"fingerprints": {"weights": "sha256:tiny"}})
    rows = [
        {"id": str(place), "token_ids": [5 + (place + step) % 80 for step in range(5 + place)]} for place in range(30)
    ]
    write_jsonl(tmp_path / "calib_data/calib.jsonl", rows)
    (tmp_path / "params.yaml").write_text(CALIB + "}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _run(monkeypatch: pytest.MonkeyPatch, recipe: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["quantize", recipe])
    stage.main()
    found: dict[str, Any] = json.loads(Path(f"artifacts/quantized/{recipe}/census.json").read_text())
    return found


def test_two_processes_of_its_own_write_the_files_of_one(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    census = _run(monkeypatch, "fp8_kv")
    assert (census["promised"], census["quantized"], len(census["kv"])) == (14, 14, 2)
    assert (census["samples"], census["processes"]) == (30, 1)
    assert census["calibration"]["batching"] == "packed"
    alone = digest_tree(project / "artifacts/quantized/fp8_kv/checkpoint")
    (project / "params.yaml").write_text(CALIB + ", processes: 2}\n")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "stages.quantize", "fp8_kv"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert digest_tree(project / "artifacts/quantized/fp8_kv/checkpoint") == alone
    again = json.loads((project / "artifacts/quantized/fp8_kv/census.json").read_text())
    assert again == census | {"processes": 2}
    assert list((project / "artifacts/calibration").iterdir()) == []


def test_a_refused_run_writes_nothing_but_its_census(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = stage.take_census
    monkeypatch.setattr(stage, "take_census", lambda *given: real(*given) | {"bad": ["expert 3: never called"]})
    with pytest.raises(QuantizationError, match="first expert 3: never called"):
        _run(monkeypatch, "fp8")
    assert not (project / "artifacts/quantized").exists()
    kept = json.loads((project / "artifacts/calibration/fp8.census.json").read_text())
    assert kept["bad"] == ["expert 3: never called"]
    monkeypatch.setattr(stage, "take_census", real)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.quantize.calibrate._Run._try", lambda *_: pytest.fail("a batch ran again"))
        _run(monkeypatch, "fp8")  # every batch is in the state that the refused run left


def test_a_pattern_that_matches_nothing_ends_it_before_calibration(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """faults.md, "recipe matched nothing"."""
    with (project / "recipes/fp8.yaml").open("a") as file:
        file.write('exclude: ["*experts*"]\n')
    monkeypatch.setattr(stage, "quantize_model", lambda *_, **__: pytest.fail("it went on"))
    with pytest.raises(QuantizationError, match=r"`exclude: \*experts\*` matches no module"):
        _run(monkeypatch, "fp8")


@pytest.mark.usefixtures("project")
def test_awq_without_memory_starts_again_with_half(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = []
    real = stage.quantize_model

    def short(model: Any, recipe: Any, samples: Any, budget: int, **rest: Any) -> Any:
        budgets.append(budget)
        if budget > 40:
            raise SearchMemoryError(budget, "CUDA out of memory")
        return real(model, recipe, samples, budget, **rest)

    monkeypatch.setattr(stage, "quantize_model", short)
    census = _run(monkeypatch, "w4a16_awq")
    assert budgets == [64, 34]  # not below the longest sample
    assert census["calibration"]["budget"] == 34
