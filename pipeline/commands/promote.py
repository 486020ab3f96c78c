"""``enginegate promote``: registers engines with a PROMOTE verdict as versions in your git repository."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

EPILOG = """\
Every byte is hashed again before a tag is written, and `dvc.lock` must be committed and the engine pushed. The
same engine is registered once: a second call says so and exits with 0.

example, after `dvc repro`:
  git add dvc.lock && git commit -m "New engine" && dvc push
  enginegate promote int8_mixed
  git push origin --tags
"""


def register(subparsers: Any) -> None:
    """Declares the command."""
    parser = subparsers.add_parser(
        "promote",
        help="register promoted engines as versions (GTO tags)",
        description="Checks engines/promoted/ from the bytes up and registers each engine as a version of an artifact.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="only these (default: all that are promoted)")
    parser.add_argument("--name", help="artifact name (default: <project>-<recipe>, in lower case)")
    parser.add_argument("--version", metavar="vX.Y.Z", help="version (default: the next patch version)")
    parser.add_argument("--dry-run", action="store_true", help="check everything, write no tag")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Promotes and prints what was done and what comes next."""
    from dataclasses import asdict

    from pipeline.registry.promote import promote

    done, warnings = promote(
        Path.cwd(), tuple(args.recipes), name=args.name, version=args.version, dry_run=args.dry_run
    )
    if args.json:
        rows = [asdict(row) | {"tag": row.tag} for row in done]
        print(json.dumps({"promotions": rows, "warnings": warnings}, indent=2, ensure_ascii=False))
        return 0
    words = {"registered": "registered as", "already": "already registered as", "would": "would be registered as"}
    for row in done:
        print(f"{row.recipe}: {words[row.action]} {row.version} ({row.tag} on {row.commit[:12]}, {row.digest[:19]})")
    for warning in warnings:
        print(f"warning: {warning}")
    if fresh := [row.tag for row in done if row.action == "registered"]:
        print(f"next: git push origin {' '.join(fresh)}")
    return 0
