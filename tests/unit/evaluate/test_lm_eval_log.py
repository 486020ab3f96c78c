"""Reading the harness's log. ``lm_eval_log`` was written by lm-eval 0.4.13 asking our server; of its results file
only the keys that are read, and the harness's own mean, were kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import InputError, ServerError, UsageError
from pipeline.evaluate.lm_eval import Harness, higher_is_better, read_scores, run_task

LOG = Path(__file__).parent / "lm_eval_log"
STAMP = "2026-11-30T21-23-44.202725"


def write(folder: Path, task: str, rows: list[dict[str, Any]]) -> None:
    hashes = {"doc_hash": "d", "prompt_hash": "p", "target_hash": "t"}
    lines = [json.dumps({"doc_id": place, "filter": "none", **hashes, **row}) for place, row in enumerate(rows)]
    (folder / f"samples_{task}_{STAMP}.jsonl").write_text("".join(line + "\n" for line in lines))


def test_a_recorded_log() -> None:
    scores = read_scores(LOG, "acc")
    mean = json.loads((LOG / f"results_{STAMP}.json").read_text())["results"]["choice"]["acc,none"]
    assert [score.id for score in scores] == [f"choice/{place}" for place in range(12)]
    assert sum(score.score for score in scores) / 12 == pytest.approx(mean)
    assert scores[0].hashes[0] == "0aa90099bd9fb1c55c05f0dc3fdbff129f75c2b97ae480ac13fcf1191cd2d5e8"
    assert len(set(scores[0].hashes)) == 3
    assert higher_is_better(LOG, "acc")


def test_subtasks_are_read_together(tmp_path: Path) -> None:
    write(tmp_path, "group_one", [{"metrics": ["f1"], "f1": 0.25}])
    write(tmp_path, "group_two", [{"metrics": ["f1"], "f1": 1}, {"metrics": ["f1"], "f1": 0}])
    found = {score.id: score.score for score in read_scores(tmp_path, "f1")}
    assert found == {"group_one/0": 0.25, "group_two/0": 1, "group_two/1": 0}


def test_a_filter_must_be_chosen_where_there_are_several(tmp_path: Path) -> None:
    rows = [{"doc_id": 0, "filter": name, "metrics": ["acc"], "acc": right} for name, right in (("a", 1), ("b", 0))]
    write(tmp_path, "task", rows)
    with pytest.raises(UsageError, match="--filter a or b"):
        read_scores(tmp_path, "acc")
    with pytest.raises(UsageError, match="--filter a or b"):
        read_scores(tmp_path, "acc", "c")
    assert [score.score for score in read_scores(tmp_path, "acc", "b")] == [0]


@pytest.mark.parametrize("value", [["a reference", "an answer"], 1.5, -0.1, float("nan"), None])
def test_what_is_no_score_of_an_item(tmp_path: Path, value: Any) -> None:
    write(tmp_path, "task", [{"metrics": ["bleu"], "bleu": value}])
    with pytest.raises(InputError, match="task/0: bleu is .*no number between 0 and 1"):
        read_scores(tmp_path, "bleu")


def test_logs_or_metrics_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no samples"):
        read_scores(tmp_path, "acc")
    with pytest.raises(UsageError, match="no metric 'f1'\n.*it has: acc"):
        read_scores(LOG, "f1")


def test_subtasks_that_disagree_about_the_direction(tmp_path: Path) -> None:
    directions = {"higher_is_better": {"one": {"acc": True}, "two": {"acc": False}}}
    (tmp_path / "results_1.json").write_text(json.dumps(directions))
    with pytest.raises(InputError, match="disagree"):
        higher_is_better(tmp_path, "acc")


def test_the_harness_is_not_installed(tmp_path: Path) -> None:
    harness = Harness("task", tmp_path, binary=tmp_path / "lm_eval")
    with pytest.raises(ServerError, match="not installed there\n.*make setup-lm-eval"):
        run_task(harness, "http://127.0.0.1:9", "toy", 64, tmp_path / "out")


def test_the_command_line_of_the_harness(tmp_path: Path) -> None:
    """A stand-in that notes its arguments and writes where the harness writes: a folder of the model's name."""
    binary = tmp_path / "lm_eval"
    binary.write_text(
        '#!/bin/sh\nwhile [ "$1" != --output_path ]; do echo "$1" >> "$0.seen"; shift; done\n'
        'mkdir "$2/toy"; echo "$no_proxy" > "$2/toy/results_1.json"\n'
    )
    binary.chmod(0o755)
    harness = Harness("task", tmp_path / "words", tmp_path, limit=3, binary=binary, extra=("--seed", "1"))
    run_task(harness, "http://host:8000", "toy", 64, tmp_path / "out")
    assert (tmp_path / "out/results_1.json").read_text().startswith("host")
    assert (tmp_path / "lm_eval.seen").read_text().split() == [
        *("run", "--model", "local-completions", "--model_args"),
        f"model=toy,base_url=http://host:8000/v1/completions,tokenizer={tmp_path}/words,"
        "num_concurrent=16,max_length=64,max_retries=1",
        *("--tasks", "task"),
    ]
    binary.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(ServerError, match="exit code 1"):
        run_task(harness, "http://host:8000", "toy", 64, tmp_path / "out")
    assert (tmp_path / "out/results_1.json").exists()  # logs of an earlier run stay whole
    shutil.rmtree(tmp_path / "out")
