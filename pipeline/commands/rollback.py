"""``enginegate rollback``: moves a stage back to an earlier version."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pipeline.commands._registry import add_remote

EPILOG = """\
The stage goes to the version that it held before, or to the one that --to names (forwards too: so a version goes from
staging to production). Nothing is deleted: each move is a tag, and `enginegate show NAME#STAGE` lists them. The
version's bytes must still be in the DVC remote.

examples:
  enginegate rollback shop-int8_mixed#production
  enginegate rollback shop-int8_mixed#production --to v0.0.3
"""


def register(subparsers: Any) -> None:
    """Declares the command."""
    parser = subparsers.add_parser(
        "rollback",
        help="move a stage back to an earlier version",
        description="Moves a stage to a version that is registered already, at once for everybody.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stage", metavar="NAME#STAGE", help="the stage to move")
    parser.add_argument("--to", metavar="vX.Y.Z", help="version (default: what the stage held before)")
    add_remote(parser)
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Moves the stage and prints from where to where."""
    from pipeline.registry.rollback import rollback

    moved = rollback(Path.cwd(), args.stage, to=args.to, remote=args.remote, dry_run=args.dry_run)
    if args.json:
        print(json.dumps(vars(moved) | {"dry_run": args.dry_run}, indent=2, ensure_ascii=False))
        return 0
    words = "would move" if args.dry_run else "moved"
    print(f"{moved.artifact}#{moved.stage}: {words} from {moved.before or 'nothing'} to {moved.after} ({moved.tag})")
    return 0
