"""``enginegate lm-eval``: one task of lm-evaluation-harness on two arms, judged as the gate judges."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.evaluate.lm_eval import Harness
    from pipeline.gate.logged import Judged
    from pipeline.serving.process import Server

EPILOG = """\
An ARM is `baseline`, an engine's name (its server is started), the URL of a server, or a folder with logs of an
earlier run. Exit codes are those of `enginegate gate`: 0 PROMOTE, 1 REJECT, 2 INCONCLUSIVE, 3 INVALID.
`make setup-lm-eval` installs the harness.

example:
  enginegate lm-eval arc_easy --candidate int8_mixed --metric acc --margin 1 --extra='--num_fewshot 5'
  enginegate lm-eval my_task --include-path tasks --candidate http://127.0.0.1:8000 --metric exact_match
"""


def register(subparsers: Any) -> None:
    """Declares the command."""
    parser = subparsers.add_parser(
        "lm-eval",
        help="compare two arms on a task of lm-evaluation-harness",
        description="Runs one task of lm-evaluation-harness on two servers and judges the paired item scores.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("task", metavar="TASK")
    parser.add_argument("--baseline", default="baseline", metavar="ARM", help="default: baseline, from params.yaml")
    parser.add_argument("--candidate", required=True, metavar="ARM")
    parser.add_argument("--metric", required=True, help="of the task: acc, exact_match, ...")
    parser.add_argument("--margin", type=_margin, default=Decimal(2), metavar="POINTS", help="may be lost (default 2)")
    parser.add_argument("--filter", metavar="NAME", help="of the task's filters, where it has several")
    parser.add_argument("--include-path", type=Path, metavar="FOLDER", help="task YAML files of your own")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N items alone (at least 1)")
    parser.add_argument("--tokenizer", type=Path, default=Path("artifacts/checkpoint"), metavar="FOLDER")
    parser.add_argument("--lm-eval", type=Path, default=Path(".venv-lm-eval/bin/lm_eval"), metavar="FILE")
    parser.add_argument("--output", type=Path, default=Path("artifacts/lm_eval"), metavar="FOLDER")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--extra", default="", metavar="WORDS", help="more options for lm_eval: --extra='--seed 1'")
    parser.set_defaults(run=run)


def _margin(text: str) -> Decimal:
    try:
        margin = Decimal(text)
    except InvalidOperation as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from error
    if not (margin.is_finite() and 0 < margin < 100):
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 100 points")
    return margin


def run(args: argparse.Namespace) -> int:
    """Runs the task on both arms, prints the verdict, returns its exit code."""
    from pipeline.errors import InputError
    from pipeline.evaluate.lm_eval import Harness, higher_is_better, read_scores
    from pipeline.gate.logged import judge
    from pipeline.gate.policy import POLICY_FILE, MetricRule, Policy, load_policy
    from pipeline.gate.verdict import EXIT_CODES

    policy = load_policy() if POLICY_FILE.exists() else Policy()
    harness = Harness(
        task=args.task,
        tokenizer=args.tokenizer.absolute(),
        include_path=args.include_path,
        limit=args.limit,
        binary=args.lm_eval,
        extra=tuple(shlex.split(args.extra)),
    )
    folders = [
        _logs(arm, harness, args.output / args.task.replace("/", "_") / side)
        for side, arm in (("baseline", args.baseline), ("candidate", args.candidate))
    ]
    baseline, candidate = (read_scores(folder, args.metric, args.filter) for folder in folders)
    directions = {higher_is_better(folder, args.metric) for folder in folders}
    if len(directions) > 1:
        raise InputError("the two logs disagree whether more is better", "run both arms with the same harness")
    rule = MetricRule(args.margin)
    judged = judge(args.metric, baseline, candidate, rule, policy, higher_is_better=directions.pop())
    _print(args, judged)
    return EXIT_CODES[judged.verdict]


def _logs(arm: str, harness: Harness, folder: Path) -> Path:
    """The folder with the arm's logs, after asking its server unless ``arm`` is such a folder."""
    from pipeline.evaluate.lm_eval import run_task
    from pipeline.serving.info import served_limit, served_model

    if any(Path(arm).glob("samples_*.jsonl")):
        return Path(arm)
    with redirect_stdout(sys.stderr), _server(arm) as server:  # stdout is for the verdict
        run_task(harness, server.url, served_model(server), served_limit(server), folder)
    return folder


@contextmanager
def _server(arm: str) -> Iterator[Server]:
    from pipeline.files import read_json
    from pipeline.params import load_params
    from pipeline.serving.arms import serving
    from pipeline.serving.process import running

    if arm.startswith(("http://", "https://")):
        with running(arm, "server") as server:
            yield server
        return
    gpu = read_json(Path("artifacts/platform.json"))["device"].get("gpu") is not None
    with serving(arm, load_params(), gpu) as server:
        yield server


def _print(args: argparse.Namespace, judged: Judged) -> None:
    import json

    row = judged.row
    if args.json:
        plain = {"verdict": judged.verdict, "reason": judged.reason, "row": row.plain() if row else None}
        print(json.dumps(plain, indent=2, ensure_ascii=False))
        return
    print(f"{args.task}: {judged.verdict}\n  {args.metric}: {judged.reason}")
    if row is not None and row.difference is not None:
        print(
            f"  {row.n} items, baseline {row.baseline:.2f}, candidate {row.candidate:.2f}, difference "
            f"{row.difference:+.2f} ({row.lower:+.2f} to {row.upper:+.2f}) points, {row.method}"
        )
