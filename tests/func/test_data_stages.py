"""The stages ``sources``, ``checkpoint`` and ``calib_data`` over real files in a temporary project."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import guarded
from pipeline.files import digest_file, digest_tree, read_json, read_jsonl
from tests.tiny import rows, write_checkpoint, write_rows

HOOK = """
def scrub(text):
    return None if "a0 a0" in text else text.replace("a39", "a38")
"""


def _run(stage: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """A stage in this process (starting one takes seconds): its exit code and what it printed."""
    main = importlib.import_module(f"stages.{stage}").main
    code = guarded(lambda: main() or 0)
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def _chat(row: dict[str, Any]) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": row["source"]}]}
    answer = {"choices": [{"message": {"role": "assistant", "content": row["target"]}}]}
    return {"request": body, "response": answer}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Calibration on two months of a prompt log with a hook, evaluation from a file; three of the log's lines leak."""
    write_checkpoint(tmp_path / "checkpoint")
    evaluation = rows(80, seed=2, first_id=1000)
    write_rows(tmp_path / "eval.jsonl", evaluation)
    (tmp_path / "logs").mkdir()
    traffic = [_chat(row) for row in [*rows(150, seed=1), *evaluation[:3]]]
    write_rows(tmp_path / "logs/01.jsonl", traffic[:70])
    write_rows(tmp_path / "logs/02.jsonl", traffic[70:])
    with (tmp_path / "logs/02.jsonl").open("a") as file:
        file.write("{cut off\n")
    (tmp_path / "privacy.py").write_text(HOOK)
    (tmp_path / "params.yaml").write_text(
        """
model: {checkpoint: checkpoint}
data: {source: json, eval_file: eval.jsonl, calib_log: "logs/*.jsonl", redact: [digits, "privacy:scrub"]}
prompt: {template: chat, user: "{source}"}
calib: {samples: 100, strata: 4, max_tokens: 64, batch_tokens: 64}
eval: {samples: 80, max_new_tokens: 16}
engine: {max_tokens: 64}
"""
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # as `python -m` has the project's folder
    monkeypatch.delitem(sys.modules, "privacy", raising=False)
    return tmp_path


def test_from_a_prompt_log_to_the_card(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for stage in ("sources", "checkpoint", "calib_data"):
        code, text = _run(stage, capsys)
        assert code == 0, text
    assert "100 calibration samples, 80 evaluation items, as asked" in text
    card = read_json(project / "calib_data/card.json")
    samples = read_jsonl(project / "calib_data/calib.jsonl")
    assert len(samples) == card["counts"]["calib_used"] == 100
    assert card["counts"]["calib_rows"] == 153
    assert card["counts"]["calib_left_out_overlap"] >= 1
    assert card["leakage"]["overlaps"] == []
    assert card["log"]["unusable_lines"] == {"not JSON": 1}
    assert card["log"]["first_unusable"] == ["logs/02.jsonl:84: not JSON"]
    assert card["source"]["redact"]["privacy:scrub"] == digest_file(project / "privacy.py")
    assert card["redaction"]["changed"] > 0
    assert not any("a39" in row["source"] or "a0 a0" in row["source"] for row in samples)
    assert card["digests"] == {
        "calibration": digest_file(project / "calib_data/calib.jsonl"),
        "evaluation": digest_file(project / "calib_data/eval.jsonl"),
    }
    before = digest_tree(project / "calib_data")
    assert _run("calib_data", capsys)[0] == 0
    assert digest_tree(project / "calib_data") == before


def test_a_log_with_too_many_bad_lines_ends_the_stage_with_the_line(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (project / "logs/01.jsonl").open("a") as file:
        file.write("\n".join(["{}"] * 5) + "\n")
    assert [_run(stage, capsys)[0] for stage in ("sources", "checkpoint")] == [0, 0]
    code, text = _run("calib_data", capsys)
    assert code == 65, text
    assert "error: data: 6 of 159 lines of the prompt log are unusable" in text
    assert "logs/01.jsonl:71: neither messages nor prompt" in text
    assert "next: repair the log, or allow more" in text
    assert "Traceback" not in text
    assert not (project / "calib_data").exists()


def test_a_bad_checkpoint_ends_the_stage_with_the_tensor(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file, save_file

    weights = project / "checkpoint/model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"][3] = float("inf")
    save_file(tensors, weights, metadata={"format": "pt"})
    assert _run("sources", capsys)[0] == 0
    code, text = _run("checkpoint", capsys)
    assert code == 65, text
    assert "model.norm.weight: 1 of 128 values are NaN or infinite" in text
    assert "Traceback" not in text
    assert not (project / "artifacts/checkpoint.json").exists()


def test_warnings_are_printed_and_recorded(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """faults.md, row "FP16 overflow": a BF16 checkpoint that FP16 cannot hold is never taken silently."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = project / "checkpoint/model.safetensors"
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(weights).items()}
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e6
    save_file(tensors, weights, metadata={"format": "pt"})
    assert _run("sources", capsys)[0] == 0
    code, text = _run("checkpoint", capsys)
    assert code == 0, text
    report = json.loads((project / "artifacts/checkpoint.json").read_text())
    assert report["fp16_overflow"] == ["model.layers.0.mlp.up_proj.weight"]
    assert f"warning: {report['warnings'][0]}" in text
