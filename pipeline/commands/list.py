"""``enginegate list``: the registered engines, their versions and stages."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pipeline.commands._registry import add_offline

EPILOG = """\
`*` is a version that was withdrawn (gto deprecate NAME VERSION --push). Exit code 65 when a version cannot be read.

examples:
  enginegate list
  enginegate list shop-int8_mixed --json | jq '.[] | select(.stages | index("production"))'
"""


def register(subparsers: Any) -> None:
    """Declares the command."""
    parser = subparsers.add_parser(
        "list",
        help="registered engines, versions and stages",
        description="Lists what is registered, newest version first, after fetching the git remote's tags.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", help="only this artifact or family")
    add_offline(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Fetches tags and prints a table."""
    from pipeline.errors import IntegrityError
    from pipeline.registry.git import fetch_tags, git_remote, require_full_clone
    from pipeline.registry.listing import list_versions
    from pipeline.report.text import columns, interval, signed

    root = Path.cwd()
    require_full_clone(root)
    if (remote := git_remote(root)) and not args.offline:
        fetch_tags(root, remote)
    rows = list_versions(root, args.name)
    code = IntegrityError.exit_code if any(row.broken for row in rows) else 0
    if args.json:
        print(json.dumps([vars(row) for row in rows], indent=2, ensure_ascii=False))
        return code
    if not rows:
        print("nothing is registered" + (f" as {args.name}" if args.name else ""))
        return code
    table = [("artifact", "version", "stages", "runs on", "engine", "critical metrics")]
    for row in rows:
        metrics = "; ".join(
            f"{one['name']}{'' if one['slice'] == 'all' else ' on ' + one['slice']} "
            f"{signed(one['difference'])} {interval(one)}"
            for one in row.metrics
        )
        version = row.version + ("" if row.active else "*")
        table.append(
            (row.artifact, version, ", ".join(row.stages), row.runs_on, row.digest[7:19], row.broken or metrics)
        )
    print("\n".join(columns(table, indent="")))
    return code
