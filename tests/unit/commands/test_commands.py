"""The commands show, doctor, recipes and promote as a user calls them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.registry.promoted import promote_engine
from tests.light import check_help
from tests.unit.report.synthetic import write_run

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    write_run(root, count=400)
    shutil.copytree(ROOT / "recipes", root / "recipes")
    promote_engine(
        "int8_mixed",
        root / "artifacts/verdicts/int8_mixed.json",
        root / "engines/int8_mixed",
        root / "engines/promoted",
    )
    return root


@pytest.fixture
def inside(run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (run / "params.yaml").write_text("recipes: [int8_mixed]\nbaseline:\n  vllm: nowhere/vllm\n", encoding="utf-8")
    monkeypatch.chdir(run)
    return run


@pytest.mark.parametrize("command", ["doctor", "fit", "promote", "recipes", "show"])
def test_help_is_light_and_has_an_example(command: str) -> None:
    check_help(command)


def test_show_a_recipe(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "int8_sq"]) == 0
    out = capsys.readouterr().out
    assert "engine int8_sq" in out
    assert "same top token 97.9%" in out
    assert "int8_sq: REJECT" in out
    assert "bleu (critical)" in out
    verdict = json.loads((inside / "artifacts/verdicts/int8_sq.json").read_text(encoding="utf-8"))
    assert f"{verdict['metrics'][0]['baseline']:.2f}" in out
    assert verdict["reasons"][0] in out


@pytest.mark.usefixtures("inside")
def test_show_a_promoted_recipe_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "int8_mixed"]) == 0
    out = capsys.readouterr().out
    assert out.count("engine int8_mixed") == 1
    assert "promoted: PROMOTE, attempt 1" in out
    assert "int8_mixed: PROMOTE" in out


@pytest.mark.usefixtures("inside")
def test_show_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "engines/promoted/int8_mixed", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gate"]["verdict"] == "PROMOTE"
    assert main(["show", "artifacts/verdicts/int8_sq.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "REJECT"
    assert main(["show", "int8_mixed", "--json"]) == 0
    assert [row.get("recipe") for row in json.loads(capsys.readouterr().out)] == ["int8_mixed", "int8_mixed"]


@pytest.mark.usefixtures("inside")
def test_show_what_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "int4"]) == 64
    assert "int8_mixed, int8_sq, runtime" in capsys.readouterr().err
    assert main(["show", "calib_data/card.json"]) == 65
    assert "neither a manifest nor a verdict" in capsys.readouterr().err


@pytest.mark.usefixtures("inside")
def test_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert "* int8_mixed: INT8 SmoothQuant with down_proj left in high precision" in out
    assert "left out: *lm_head, *mlp.down_proj" in out
    assert "fp8 weights, fp8 activations, fp8 KV cache; max" in out
    assert "int4 weights, 16-bit activations, 16-bit KV cache; awq, the first 256 calibration samples" in out
    assert "runs on: tensorrt, tensorrt_llm, vllm; GPUs from SM 89" in out
    assert main(["recipes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["int8_mixed"]["used"]
    assert found["fp8"]["backends"] == ["tensorrt", "tensorrt_llm", "vllm"]


@pytest.mark.usefixtures("inside")
def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 69
    out = capsys.readouterr().out
    assert "nowhere/vllm is not there" in out
    assert "->" in out
    assert "Missing for params.yaml as it is: vllm." in out
    assert main(["doctor", "--json"]) == 69
    found = json.loads(capsys.readouterr().out)
    assert found["missing"] == ["vllm"]
    assert found["device"]["cpu"]
    assert found["disk_free_gib"] > 0
    assert found["tools"]["dvc"]
