"""``stages/decide.py``, ``stages/enforce.py`` and ``enginegate gate`` over real files in a temporary project."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pipeline.files import read_json, read_jsonl, write_json, write_jsonl
from pipeline.records import Arm, Item, Record, write_answers, write_items

ROOT = Path(__file__).parents[2]
TEXTS = [f"the device number {place} is now connected to the {place % 7} network" for place in range(400)]
RECIPES = {"good": 0, "bad": 80}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project in which recipe ``good`` loses nothing and ``bad`` a fifth of its answers."""
    items = [Item(f"i{place:03d}", text, text, (1, place)) for place, text in enumerate(TEXTS)]
    (tmp_path / "calib_data").mkdir()
    write_items(tmp_path / "calib_data/eval.jsonl", items)
    write_json(tmp_path / "calib_data/card.json", {"leakage": {"overlaps": []}})
    (tmp_path / "params.yaml").write_text("recipes: [good, bad]\n")
    (tmp_path / "policy.yaml").write_text("require: any\n")
    for name in ("baseline", "repeat", "runtime"):
        answers(tmp_path, name, name, 0)
    for name, lost in RECIPES.items():
        answers(tmp_path, name, "candidate", lost)
        manifest = {
            "digest": f"sha256:{name}",
            "recipe": name,
            "platform": {"gpu": None},
            "sources": {"checkpoint": "c"},
        }
        write_json(tmp_path / f"engines/{name}/manifest.json", manifest)
        census = {"quantized": 7, "promised": 7, "skipped": [], "bad": []}
        write_json(tmp_path / f"artifacts/quantized/{name}/census.json", census)
    return tmp_path


def answers(project: Path, name: str, role: str, lost: int) -> None:
    texts = ["one two three four five six" if place < lost else text for place, text in enumerate(TEXTS)]
    candidate = role == "candidate"
    arm = Arm(
        name=name,
        role=role,
        backend="onnxruntime" if role in ("candidate", "runtime") else "vllm",
        dtype="float32",
        engine_digest=f"sha256:{name}" if candidate else None,
        tokenizer_fingerprint="t",
        template_fingerprint="t",
        sampling={"temperature": 0.0, "max_new_tokens": 64, "stop_token_ids": [2]},
        versions={},
        platform={"gpu": None},
        order_seed=int(role == "repeat"),
        recipe=name if candidate else None,
    )
    records = [
        Record(f"i{place:03d}", (1, place), tuple(range(len(text.split()))), text, "stop")
        for place, text in enumerate(texts)
    ]
    write_answers(project / "artifacts/answers" / name, arm, records, [])


def run(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)


def decide_all(project: Path) -> None:
    for name in RECIPES:
        found = run(project, "stages.decide", name)
        assert found.returncode == 0, found.stderr


# The command by itself, so that this test does not depend on the other commands.
GATE = """
import argparse, sys
from pipeline.cli import guarded
from pipeline.commands import gate
parser = argparse.ArgumentParser()
gate.register(parser.add_subparsers())
args = parser.parse_args(sys.argv[1:])
sys.exit(guarded(lambda: args.run(args)))
"""


def gate(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", GATE, "gate", *words]
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)


def test_from_answers_to_exit_codes(project: Path) -> None:
    decide_all(project)
    verdicts = {name: read_json(project / f"artifacts/verdicts/{name}.json") for name in RECIPES}
    assert {name: verdict["verdict"] for name, verdict in verdicts.items()} == {"good": "PROMOTE", "bad": "REJECT"}

    enforced = run(project, "stages.enforce")
    assert enforced.returncode == 0
    assert [line.split(":")[0] for line in enforced.stdout.splitlines()][:2] == ["good", "bad"]

    assert gate(project).returncode == 0
    assert gate(project, "good").returncode == 0
    assert gate(project, "bad").returncode == 1
    assert gate(project, "good", "bad").returncode == 1

    (project / "policy.yaml").write_text("require: all\n")
    assert run(project, "stages.enforce").returncode == 1
    assert gate(project).returncode == 1


def test_reports_for_ci(project: Path) -> None:
    decide_all(project)
    (project / "summary.md").write_text("before\n")
    found = gate(project, "--json", "--junit", "out/gate.xml", "--summary", "summary.md")
    printed = json.loads(found.stdout)
    assert printed["exit_code"] == 0
    assert printed["verdicts"]["bad"]["verdict"] == "REJECT"
    suites = ElementTree.parse(project / "out/gate.xml").getroot()
    assert [suite.get("name") for suite in suites] == ["good", "bad"]
    summary = (project / "summary.md").read_text()
    assert summary.startswith("before\n")
    assert "### bad: REJECT" in summary


def test_the_ledger_grows_only_with_new_engines(project: Path) -> None:
    decide_all(project)
    decide_all(project)
    assert len(read_jsonl(project / "ledger/attempts.jsonl")) == 2
    arm = asdict(read_arm_of(project, "good"))
    write_json(project / "artifacts/answers/good/arm.json", arm | {"engine_digest": "sha256:again"})
    manifest = read_json(project / "engines/good/manifest.json")
    write_json(project / "engines/good/manifest.json", manifest | {"digest": "sha256:again"})
    decide_all(project)
    assert len(read_jsonl(project / "ledger/attempts.jsonl")) == 3
    verdict = read_json(project / "artifacts/verdicts/good.json")
    assert any("attempt 2" in reason for reason in verdict["reasons"])


def test_evidence_of_an_invalid_run_is_kept(project: Path) -> None:
    write_json(project / "calib_data/card.json", {"leakage": {"overlaps": ["i007"]}})
    decide_all(project)
    verdict = read_json(project / "artifacts/verdicts/good.json")
    assert verdict["verdict"] == "INVALID"
    assert run(project, "stages.enforce").returncode == 3
    assert gate(project, "good").returncode == 3


def test_too_few_items_are_inconclusive(project: Path) -> None:
    keep = {f"i{place:03d}" for place in range(20)}
    for path in [project / "calib_data/eval.jsonl", *project.glob("artifacts/answers/*/records.jsonl")]:
        rows = [line for line in path.read_text().splitlines() if json.loads(line)["id"] in keep]
        path.write_text("\n".join(rows) + "\n")
    found = run(project, "stages.decide", "good")
    assert found.returncode == 0
    assert "needs" in found.stdout or "takes" in found.stdout
    assert gate(project, "good").returncode == 2


@pytest.mark.parametrize("words", [(), ("unknown",), ("good", "bad")])
def test_a_wrong_recipe_is_a_usage_error(project: Path, words: tuple[str, ...]) -> None:
    found = run(project, "stages.decide", *words)
    assert found.returncode == 64
    assert "Traceback" not in found.stderr


def test_a_verdict_that_is_not_there_is_named(project: Path) -> None:
    found = gate(project, "good")
    assert found.returncode == 65
    assert "artifacts/verdicts/good.json: no such file" in found.stderr
    assert "dvc repro" in found.stderr


def read_arm_of(project: Path, name: str) -> Any:
    return Arm(**read_json(project / f"artifacts/answers/{name}/arm.json"))


def test_scored_references_give_delta_nll_when_all_arms_have_them(project: Path) -> None:
    """Ten items of two tokens; the candidate loses 0.2 nats on one token of each: 0.1 a token, in every resample."""
    folder = project / "artifacts/answers"
    for name in ("baseline", "repeat", "runtime"):
        write_jsonl(folder / name / "scores.jsonl", [{"id": f"i{n:03d}", "log_probs": [-1, -2]} for n in range(10)])
    assert delta_nll(project) is None
    write_jsonl(folder / "good/scores.jsonl", [{"id": f"i{n:03d}", "log_probs": [-1, -2.2]} for n in range(10)])
    assert delta_nll(project) == pytest.approx({"value": 0.1, "lower": 0.1, "upper": 0.1})
    write_jsonl(folder / "good/scores.jsonl", [{"id": "i000", "log_probs": [-1, -2]}])
    assert run(project, "stages.decide", "good").returncode == 0
    assert read_json(project / "artifacts/verdicts/good.json")["verdict"] == "INVALID"


def delta_nll(project: Path) -> Any:
    found = run(project, "stages.decide", "good")
    assert found.returncode == 0, found.stderr
    return read_json(project / "artifacts/verdicts/good.json")["fidelity"]["delta_nll"]
