"""lm-evaluation-harness: asks a server any of its tasks, and reads its log as one score an item.

The harness lives in an environment of its own (``make setup-lm-eval``) and asks through its OpenAI-completions model,
with token ids: ``generate_until`` tasks decode greedily, ``loglikelihood`` and ``multiple_choice`` tasks score prompts.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipeline.errors import InputError, ServerError, UsageError
from pipeline.files import atomic_folder, read_json, read_jsonl

BINARY = Path(".venv-lm-eval/bin/lm_eval")
_SAMPLES = re.compile(r"samples_(.+)_\d{4}-\d\d-\d\dT[\d.-]+\.jsonl")
_HASHES = ("doc_hash", "prompt_hash", "target_hash")


@dataclass(frozen=True)
class Harness:
    """What is run: a task of the harness, or of the YAML files in ``include_path``. ``extra`` goes to ``lm_eval``."""

    task: str
    tokenizer: Path
    include_path: Path | None = None
    limit: int | None = None
    concurrency: int = 16
    binary: Path = BINARY
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class ItemScore:
    """One item's score, and the harness's hashes of its document, prompt and target: what must be equal to pair it."""

    id: str
    hashes: tuple[str, ...]
    score: float


def run_task(harness: Harness, url: str, model: str, max_tokens: int, folder: Path) -> None:
    """Asks the server at ``url`` and leaves the harness's results and samples in ``folder``, whole or absent.

    Raises ServerError when the harness is not installed or ends with an error; what it printed was shown.
    """
    if not os.access(harness.binary, os.X_OK):
        raise ServerError(f"{harness.binary}: lm-evaluation-harness is not installed there", "run `make setup-lm-eval`")
    options = {
        "model": model,
        "base_url": f"{url}/v1/completions",
        "tokenizer": harness.tokenizer,
        "num_concurrent": harness.concurrency,
        "max_length": max_tokens,
        "max_retries": 1,  # a failure must fail, not be asked again until it fits
    }
    with atomic_folder(folder) as part:
        argv = [
            *(str(harness.binary.absolute()), "run", "--model", "local-completions"),
            *("--model_args", ",".join(f"{key}={value}" for key, value in options.items())),
            *("--tasks", harness.task, "--output_path", str(part.absolute()), "--log_samples"),
            *(("--include_path", str(harness.include_path.absolute())) if harness.include_path else ()),
            *(("--limit", str(harness.limit)) if harness.limit is not None else ()),
            *harness.extra,
        ]
        done = subprocess.run(argv, env=_environment(url), stdout=sys.stderr, check=False)
        if done.returncode != 0:
            raise ServerError(f"lm_eval ended with exit code {done.returncode}", "its last lines, above, say why")
        for found in list(part.glob("*/*")):  # it makes a folder of the model's name
            shutil.move(found, part / found.name)


def _environment(url: str) -> dict[str, str]:
    """Ours, without a proxy between the harness and the server."""
    hosts = ",".join(filter(None, (urlsplit(url).hostname, os.environ.get("no_proxy"))))
    return {**os.environ, "no_proxy": hosts, "NO_PROXY": hosts, "TOKENIZERS_PARALLELISM": "false"}


def read_scores(folder: Path, metric: str, filter_name: str | None = None) -> list[ItemScore]:
    """The score of each item, of all subtasks of a group together, as the logs in ``folder`` have them.

    Raises InputError without logs, UsageError when the logs hold no such metric, or by several filters and none is
    named, and InputError for a metric that is no number an item between 0 and 1 (BLEU or perplexity are scores of
    the whole set in the harness).
    """
    rows = {
        match[1]: read_jsonl(path) for path in sorted(folder.glob("samples_*")) if (match := _SAMPLES.match(path.name))
    }
    if not any(rows.values()):
        raise InputError(f"{folder}: no samples", "did the harness run with --log_samples?")
    known = sorted({name for logs in rows.values() for row in logs for name in row["metrics"]})
    if metric not in known:
        raise UsageError(f"the task has no metric {metric!r}", f"it has: {', '.join(known)}")
    chosen = [(task, row) for task, logs in rows.items() for row in logs if metric in row["metrics"]]
    filters = sorted({row["filter"] for _, row in chosen})
    if filter_name not in filters and not (filter_name is None and len(filters) == 1):
        raise UsageError("choose one of the task's filters", f"--filter {' or '.join(filters)}")
    return [_item(task, row, metric) for task, row in chosen if row["filter"] == (filter_name or filters[0])]


def _item(task: str, row: Mapping[str, Any], metric: str) -> ItemScore:
    name, value = f"{task}/{row['doc_id']}", row[metric]
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InputError(
            f"{name}: {metric} is {str(value)[:60]}, no number between 0 and 1",
            "choose a metric that scores each item (acc, exact_match, f1), or evaluate corpus scores with the pipeline",
        )
    return ItemScore(name, tuple(str(row[key]) for key in _HASHES), float(value))


def higher_is_better(folder: Path, metric: str) -> bool:
    """Whether more of ``metric`` is better, as the task says; true when it does not."""
    found = [
        bool(names[metric])
        for path in folder.glob("results_*.json")
        for names in read_json(path).get("higher_is_better", {}).values()
        if names.get(metric) is not None
    ]
    if len(set(found)) > 1:
        raise InputError(f"{folder}: subtasks disagree whether more {metric} is better", "judge them one by one")
    return found[0] if found else True
