"""``enginegate gate``: verdicts as an exit code, JUnit XML and a GitHub step summary."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

VERDICTS = Path("artifacts/verdicts")
EPILOG = """\
exit codes: 0 PROMOTE, 1 REJECT, 2 INCONCLUSIVE, 3 INVALID; of several recipes the gravest counts.
Without names, the recipes of params.yaml are judged together by `require` of policy.yaml.

example:
  enginegate gate int8_mixed --junit gate.xml --summary "$GITHUB_STEP_SUMMARY"
"""


def register(subparsers: Any) -> None:
    """Declares the command."""
    parser = subparsers.add_parser(
        "gate",
        help="exit 0 only if the verdicts allow promotion",
        description="Turns the verdicts that `dvc repro` wrote into an exit code, for CI.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="these recipes, all of which must be promoted")
    parser.add_argument("--json", action="store_true", help="print the verdicts as one JSON object")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML: one test a check and metric")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="append Markdown, as $GITHUB_STEP_SUMMARY wants")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Reads the verdicts, writes what was asked for, returns the exit code."""
    from pipeline.files import atomic_file, read_json, storage_errors
    from pipeline.gate.enforcement import exit_code
    from pipeline.gate.policy import load_policy
    from pipeline.gate.rendering import as_junit, as_lines, as_markdown
    from pipeline.params import load_params

    recipes = args.recipes or load_params().recipes
    require = "all" if args.recipes else load_policy().require
    verdicts = {recipe: read_json(VERDICTS / f"{recipe}.json") for recipe in recipes}
    code = exit_code({recipe: verdict["verdict"] for recipe, verdict in verdicts.items()}, require)
    if args.json:
        print(json.dumps({"exit_code": code, "verdicts": verdicts}, indent=2, ensure_ascii=False))
    else:
        print("\n".join(line for verdict in verdicts.values() for line in as_lines(verdict)))
    if args.junit:
        with atomic_file(args.junit) as part:
            part.write_bytes(as_junit(verdicts))
    if args.summary:
        with storage_errors(args.summary), args.summary.open("a", encoding="utf-8") as file:
            file.write(as_markdown(verdicts))
    return code
