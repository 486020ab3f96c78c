"""The whole run with the real stages, ModelOpt, ONNX Runtime and vLLM, on a tiny model that was really trained.

One project folder is made as a user has it (git, DVC, dvc.yaml, params.yaml, policy.yaml) and reproduced; the
tests then look at what it left, change one thing at a time and look at what runs again. The order matters.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import PROMPT, rows, write_checkpoint, write_rows

ROOT = Path(__file__).parents[2]
VLLM = ROOT / ".venv-vllm/bin/vllm"
ALWAYS = {"platform", "sources", "enforce"}

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not VLLM.exists(), reason="needs .venv-vllm: run make setup-vllm"),
    pytest.mark.timeout(900),
]

PARAMS = f"""
model: {{checkpoint: checkpoint}}
data:
  source: json
  calib_file: calib.jsonl
  eval_file: eval.jsonl
prompt: {{template: plain, user: "{PROMPT}"}}
calib: {{samples: 64, max_tokens: 64, batch_tokens: 512}}
eval: {{samples: 300, max_new_tokens: 16}}
recipes: [int8_sq, int8_mixed]
engine: {{backend: onnxruntime, max_batch: 16, max_tokens: 64}}
baseline:
  vllm: {VLLM}
  env: {{VLLM_CPU_KVCACHE_SPACE: "1"}}
serving: {{replicas: 1}}
bench: {{kinds: []}}
seed: 17
"""


@dataclass
class Project:
    """A user's project folder."""

    folder: Path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = os.environ | {"PATH": path, "PYTHONPATH": str(self.folder)}
        return subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, check=False)

    def repro(self) -> tuple[int, set[str], str]:
        """Exit code, the stages that ran, and everything that was printed."""
        done = self.run("dvc", "repro")
        text = done.stdout + done.stderr
        return done.returncode, set(re.findall(r"Running stage '([^']+)'", text)), text

    def json(self, path: str) -> Any:
        return json.loads((self.folder / path).read_text())

    def lines(self, path: str) -> list[Any]:
        return [json.loads(line) for line in (self.folder / path).read_text().splitlines()]


def make_project(folder: Path, params: str) -> Project:
    """A project as a user has it, with a checkpoint that was really trained."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("pipeline", "stages", "recipes"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("dvc.yaml", "policy.yaml", "prices.yaml", ".dvcignore", ".gitignore"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "params.yaml").write_text(params)
    write_checkpoint(folder / "checkpoint", steps=160)
    write_rows(folder / "calib.jsonl", rows(100, seed=1))
    write_rows(folder / "eval.jsonl", rows(400, seed=2, first_id=1000))
    made = Project(folder)
    for command in (["git", "init", "-q"], ["dvc", "init", "-q"], ["dvc", "config", "core.analytics", "false"]):
        assert made.run(*command).returncode == 0
    return made


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return make_project(tmp_path_factory.mktemp("project"), PARAMS)


def test_the_whole_run(project: Project) -> None:
    code, ran, text = project.repro()
    assert (project.folder / "report/index.html").exists(), text
    assert {"quantize@int8_sq", "build@int8_mixed", "answer_baseline", "decide@int8_sq", "enforce"} <= ran
    verdicts = {name: project.json(f"artifacts/verdicts/{name}.json") for name in ("int8_sq", "int8_mixed")}
    for name, verdict in verdicts.items():
        manifest = project.json(f"engines/{name}/manifest.json")
        assert verdict["engine_digest"] == manifest["digest"]
        assert verdict["policy_digest"] == project.json(f"artifacts/answers/{name}/arm.json")["extra"]["policy_digest"]
        assert verdict["verdict"] in {"PROMOTE", "REJECT", "INCONCLUSIVE"}, verdict["reasons"]
        delta = verdict["fidelity"]["delta_nll"]  # every arm scored 200 references
        assert -0.5 < delta["lower"] <= delta["value"] <= delta["upper"] < 0.5
        promoted = project.folder / "engines/promoted" / name / "manifest.json"
        assert promoted.exists() == (verdict["verdict"] == "PROMOTE")
        census = project.json(f"artifacts/quantized/{name}/census.json")
        assert manifest["build"]["int8_matmuls"] == census["promised"] == {"int8_sq": 14, "int8_mixed": 12}[name]
    # policy.yaml asks for any.
    assert code == (0 if any(verdict["verdict"] == "PROMOTE" for verdict in verdicts.values()) else 255), text


def test_the_records_are_paired_and_repeatable(project: Project) -> None:
    arms = {}
    for arm in ("baseline", "repeat", "runtime", "int8_sq"):
        lines = (project.folder / f"artifacts/answers/{arm}/records.jsonl").read_text().splitlines()
        arms[arm] = {row["id"]: row for row in map(json.loads, lines)}
        assert len(arms[arm]) == 300
    for arm in arms.values():
        assert {key: row["prompt_token_ids"] for key, row in arm.items()} == {
            key: row["prompt_token_ids"] for key, row in arms["baseline"].items()
        }
    same = sum(
        arms["runtime"][key]["output_token_ids"] == row["output_token_ids"] for key, row in arms["baseline"].items()
    )
    assert same >= 295  # two runtimes, one model, float32: only near-ties may differ
    references = {row["id"]: row["target"] for row in rows(400, seed=2, first_id=1000)}
    right = sum(row["text"] == references[key] for key, row in arms["baseline"].items())
    assert right > 150  # the model has something to lose


def test_a_second_run_does_nothing(project: Project) -> None:
    _, ran, text = project.repro()
    assert ran == ALWAYS, text


def test_changing_one_recipe_runs_only_what_hangs_on_it(project: Project) -> None:
    recipe = project.folder / "recipes/int8_mixed.yaml"
    recipe.write_text(
        recipe.read_text().replace('["*mlp.down_proj"]', '["*mlp.down_proj", "*layers.0.self_attn.o_proj"]')
    )
    _, ran, text = project.repro()
    own = {f"{stage}@int8_mixed" for stage in ("quantize", "build", "answer", "decide")}
    assert ran == ALWAYS | own | {"bench", "promoted", "report"}, text
    assert project.json("engines/int8_mixed/manifest.json")["build"]["int8_matmuls"] == 11


def test_a_change_of_the_policy_asks_the_candidates_again(project: Project) -> None:
    policy = project.folder / "policy.yaml"
    policy.write_text(policy.read_text().replace("resamples: 2000", "resamples: 2500"))
    _, ran, text = project.repro()
    again = {f"{stage}@{recipe}" for stage in ("answer", "decide") for recipe in ("int8_sq", "int8_mixed")}
    assert ran == ALWAYS | again | {"promoted", "report"}, text
    for recipe in ("int8_sq", "int8_mixed"):
        findings = {row["check"]: row for row in project.json(f"artifacts/verdicts/{recipe}.json")["validity"]}
        assert findings["policy_fixed"]["ok"]


def test_the_gate_command_gives_the_verdict_as_exit_code(project: Project) -> None:
    for name in ("int8_sq", "int8_mixed"):
        verdict = project.json(f"artifacts/verdicts/{name}.json")["verdict"]
        expected = {"PROMOTE": 0, "REJECT": 1, "INCONCLUSIVE": 2, "INVALID": 3}[verdict]
        assert project.run("enginegate", "gate", name).returncode == expected


def test_a_bad_checkpoint_stops_the_run_with_the_reason_and_keeps_what_was_there(project: Project) -> None:
    from safetensors.torch import load_file, save_file

    weights = project.folder / "checkpoint/model.safetensors"
    good = weights.read_bytes()
    tensors = load_file(weights)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, weights, metadata={"format": "pt"})
    code, _, text = project.repro()
    assert code != 0
    assert "model.norm.weight: 1 of 128 values are NaN or infinite" in text
    assert "next: the fine-tune diverged" in text
    assert "Traceback" not in text
    assert (project.folder / "report/index.html").exists()
    weights.write_bytes(good)
    code, ran, text = project.repro()
    assert code == 0, text
    assert "quantize@int8_sq" not in ran, "the checkpoint is the same again: nothing behind it may run"
