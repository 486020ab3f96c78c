"""``enginegate diff``: what is different between two engines."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

EPILOG = """\
An engine is a folder, or a registered version. The recipes' texts are compared when both are registered.

examples:
  enginegate diff shop-int8_mixed@v0.0.1 shop-int8_mixed@v0.0.2
  enginegate diff shop-int8_mixed#production engines/int8_mixed --json | jq .metrics
"""


def register(subparsers: Any) -> None:
    """Declares the command."""
    parser = subparsers.add_parser(
        "diff",
        help="what is different between two engines",
        description="Compares recipes, metrics, build flags, sources, platforms and files of two engines.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("one", metavar="A", help="a folder or NAME[@vX.Y.Z|#STAGE]")
    parser.add_argument("other", metavar="B", help="a folder or NAME[@vX.Y.Z|#STAGE]")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compares and prints; equal engines are no error, and neither are different ones."""
    from pipeline.registry.compare import compare, read_side

    found = compare(read_side(Path.cwd(), args.one), read_side(Path.cwd(), args.other))
    print(json.dumps(found, indent=2, ensure_ascii=False) if args.json else "\n".join(lines(found)))
    return 0


def lines(found: dict[str, Any]) -> list[str]:
    """The differences for a terminal: each section that has any, then the metrics side by side."""
    from pipeline.report.text import columns, interval, number, signed

    text = [f"A {found['sides'][0]}", f"B {found['sides'][1]}"]
    sections = {"engine": found["identity"]} | found["sections"] | {"files": found["files"], "policy": found["policy"]}
    for name, rows in sections.items():
        if rows:
            pairs = [(key, _brief(pair[0]), _brief(pair[1])) for key, pair in rows.items()]
            text += ["", name, *columns([("", "A", "B"), *pairs])]
    if found["recipe"]:
        text += ["", "recipe", *(f"  {line}" for line in found["recipe"])]
    if found["metrics"]:
        head = ("metric", "slice", "A", "interval", "n", "B", "interval", "n")
        table = []
        for row in found["metrics"]:
            cells = [
                (number(None), number(None), number(None))
                if side is None
                else (signed(side["difference"]), interval(side), str(side["n"]))
                for side in row["sides"]
            ]
            table.append((row["name"], row["slice"], *cells[0], *cells[1]))
        text += ["", "metrics (difference to the FP16 baseline, points)", *columns([head, *table])]
    if len(text) == 2:
        text.append("no difference")
    return text


def _brief(value: Any) -> str:
    from pipeline.report.text import NONE

    if value is None:
        return NONE
    return value[:19] if isinstance(value, str) and value.startswith("sha256:") else str(value)
