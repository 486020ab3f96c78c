"""``engine.backend: tensorrt_llm`` from intake to promotion, with stand-ins for TensorRT-LLM's programs.

Everything else is real: DVC, ModelOpt, the worker, vLLM as the baseline, the gate. The stand-in server computes its
answers from the tensors of the engine that ``trtllm-build`` was given, so the gate judges the checkpoint that we wrote.
"""

from __future__ import annotations

import re

import pytest

from tests.e2e.test_repro import ROOT, VLLM, Project, make_project
from tests.standins.trtllm import install
from tests.tiny import PROMPT

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not VLLM.exists(), reason="needs .venv-vllm: run make setup-vllm"),
    pytest.mark.timeout(900),
]

PARAMS = """
model: {{checkpoint: checkpoint}}
data:
  source: json
  calib_file: calib.jsonl
  eval_file: eval.jsonl
prompt: {{template: plain, user: "{prompt}"}}
calib: {{samples: 64, max_tokens: 64, batch_tokens: 512}}
eval: {{samples: 200, max_new_tokens: 16, scored: 0}}
recipes: [fp8]
engine:
  backend: tensorrt_llm
  max_batch: 16
  max_tokens: 64
  tensorrt_llm: {{python: {python}}}
baseline:
  vllm: {vllm}
  env: {{VLLM_CPU_KVCACHE_SPACE: "1"}}
serving: {{replicas: 1}}
bench: {{kinds: []}}
seed: 17
"""

# 200 items certify no margin of one point; docs/gate.md has the numbers.
MARGINS = {"bleu": 10, "chrf": 4, "exact_match": 8}


def policy() -> str:
    """The project's policy with these margins."""
    text = (ROOT / "policy.yaml").read_text()
    for metric, margin in MARGINS.items():
        text, found = re.subn(rf"(?s)(\b{metric}:.*?margin: )[\d.]+", rf"\g<1>{margin}", text, count=1)
        assert found
    return text


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("trtllm")
    python = install(folder / "runtime")
    made = make_project(folder, PARAMS.format(prompt=PROMPT, python=python, vllm=VLLM))
    (folder / "policy.yaml").write_text(policy())
    return made


def test_from_intake_to_promotion(project: Project) -> None:
    done = project.run("dvc", "repro", "promoted")
    assert done.returncode == 0, done.stdout + done.stderr
    manifest = project.json("engines/fp8/manifest.json")
    assert manifest["backend"] == "tensorrt_llm"
    assert manifest["build"]["profile"] == "engine"
    verdict = project.json("artifacts/verdicts/fp8.json")
    assert verdict["verdict"] == "PROMOTE", verdict["reasons"]
    assert verdict["engine_digest"] == manifest["digest"]
    promoted = project.json("engines/promoted/fp8/manifest.json")
    assert promoted["digest"] == manifest["digest"]
    arms = {name: project.json(f"artifacts/answers/{name}/arm.json") for name in ("baseline", "runtime", "fp8")}
    assert arms["fp8"]["versions"]["tensorrt_llm"] == "1.2.1"
    assert arms["runtime"]["platform"]["tensorrt"] == "10.14.1.48"
    # Both arms ran one model through two programs.
    runtime, baseline = (
        {row["id"]: row for row in project.lines(f"artifacts/answers/{arm}/records.jsonl")}
        for arm in ("runtime", "baseline")
    )
    same = sum(runtime[key]["output_token_ids"] == row["output_token_ids"] for key, row in baseline.items())
    assert same >= 190, "float16 weights against float32: only near-ties may differ"


def test_nothing_is_built_twice(project: Project) -> None:
    """The platform is looked up anew, TensorRT-LLM's environment with it, and is equal on an equal machine."""
    done = project.run("dvc", "repro", "build@fp8", "build_runtime")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Running stage 'platform'" in done.stdout
    assert "Running stage 'build" not in done.stdout


def test_the_commands(project: Project) -> None:
    shown = project.run("enginegate", "show", "fp8").stdout
    assert "tensorrt_llm 1.2.1" in shown
    assert "engine/rank0.engine" in shown
    doctor = project.run("enginegate", "doctor")
    assert doctor.returncode == 0, doctor.stdout
    assert "tensorrt_llm  yes  1.2.1" in doctor.stdout
    assert "profile engine: trtllm-build, trtllm-serve" in doctor.stdout
    assert "sees NVIDIA H100 80GB HBM3 (SM 90, 80 GiB)" in doctor.stdout
    assert project.run("enginegate", "gate", "fp8").returncode == 0


def test_a_later_line_without_engines_is_refused_before_calibration(project: Project) -> None:
    """INT8 there: `dvc repro` ends in the stage `platform`, with the way out."""
    install(project.folder / "runtime", profile="pytorch", versions={"tensorrt_llm": "1.3.0"})
    params = project.folder / "params.yaml"
    params.write_text(params.read_text().replace("recipes: [fp8]", "recipes: [int8_mixed]"))
    done = project.run("dvc", "repro", "promoted")
    text = done.stdout + done.stderr
    assert done.returncode != 0
    assert "PyTorch backend runs no INT8" in text
    assert "next: use the recipe fp8" in text
    assert "Running stage 'quantize" not in text
