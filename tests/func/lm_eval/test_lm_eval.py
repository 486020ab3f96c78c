"""The real harness against our server on the tiny model. Expected answers are torch's, so the model itself scores 100.

The other model gives the opposite logits, so it loses everything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main
from pipeline.engines import BuildInputs
from pipeline.engines.lowering.export import export_plain
from pipeline.engines.onnxruntime import compile_engine
from pipeline.engines.onnxruntime.executor import OrtExecutor
from pipeline.params import Engine
from tests import tiny
from tests.func.serving.test_answer import served

HARNESS = Path(__file__).parents[3] / ".venv-lm-eval/bin/lm_eval"
CHOICES = ("a3", "b7", "b21")
pytestmark = [
    pytest.mark.lm_eval,
    pytest.mark.skipif(not HARNESS.exists(), reason="no .venv-lm-eval: make setup-lm-eval"),
]


def row(model: Any, words: Any, source: str) -> dict[str, Any]:
    """One document with the answers that torch computes."""
    import torch

    ids = torch.tensor([words(source)["input_ids"]])
    with torch.no_grad():
        after = model(ids).logits[0, -1]
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    answer = words.decode(whole[0], skip_special_tokens=True).removeprefix(source).split("translate")[0]
    scores = [after[words.convert_tokens_to_ids(word)].item() for word in CHOICES]
    return {"prompt": source, "answer": answer, "choices": CHOICES, "likeliest": scores.index(max(scores))}


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, str]]:
    """A folder with tasks, rows and tokenizer; the server of the model that gave the answers; another model's."""
    folder = tmp_path_factory.mktemp("lm_eval")
    words = tiny.tokenizer()
    with ExitStack() as stack:
        found = []
        for name in ("one", "other"):
            model = tiny.write_checkpoint(folder / "checkpoint")
            if name == "other":
                model.model.norm.weight.data.neg_()
            (folder / name / "plain").mkdir(parents=True)
            export_plain(model, folder / name / "plain")
            compile_engine(BuildInputs(folder, folder / name / "plain", None, None, Engine(), {}), folder / name)
            if name == "one":
                tiny.write_rows(folder / "rows.jsonl", [row(model, words, one["source"]) for one in tiny.rows(60, 4)])
            executor = OrtExecutor(folder / name, max_batch=8, max_tokens=64, threads=1)
            found.append(stack.enter_context(served(executor)))
        (folder / "tasks").mkdir()
        for path in Path(__file__).parent.glob("*.yaml"):
            (folder / "tasks" / path.name).write_text(path.read_text().replace("FOLDER", str(folder)))
        yield folder, found[0], found[1]


@pytest.mark.parametrize(("task", "metric"), [("words", "exact_match"), ("likeliest", "acc")])
def test_the_model_passes_against_itself_and_another_one_is_rejected(
    task: str,
    metric: str,
    urls: tuple[Path, str, str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder, one, other = urls
    monkeypatch.chdir(folder)
    common = ["--metric", metric, "--margin", "10", "--include-path", "tasks", "--tokenizer", "checkpoint"]
    common += ["--lm-eval", str(HARNESS), "--json"]
    code = main(["lm-eval", task, "--baseline", one, "--candidate", one, *common])
    found = json.loads(capfd.readouterr().out)
    assert (code, found["verdict"]) == (0, "PROMOTE")
    assert (found["row"]["baseline"], found["row"]["candidate"], found["row"]["n"]) == (100, 100, 60)

    logs = f"artifacts/lm_eval/{task}/baseline"  # the baseline is not asked again
    code = main(["lm-eval", task, "--baseline", logs, "--candidate", other, *common])
    found = json.loads(capfd.readouterr().out)
    assert (code, found["verdict"]) == (1, "REJECT")
    assert (found["row"]["baseline"], found["row"]["candidate"]) == (100, 0)


def test_a_task_that_does_not_exist_leaves_no_logs(
    urls: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, one, _ = urls
    monkeypatch.chdir(folder)
    words = ["--baseline", one, "--candidate", one, "--metric", "acc", "--tokenizer", "checkpoint"]
    assert main(["lm-eval", "no_such_task", *words, "--lm-eval", str(HARNESS)]) == 69
    assert "lm_eval ended with exit code" in capfd.readouterr().err
    assert not Path("artifacts/lm_eval/no_such_task/baseline").exists()
