"""``enginegate gc``: frees what engines that were never registered occupy."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

EPILOG = """\
Kept are the registered engines, everything that a branch, another tag or the working tree names, and every output
that is no engine. Folders under engines/pulled are yours to remove. On a remote, run it while nobody promotes.

examples:
  enginegate gc                          # what could go from DVC's cache here
  enginegate gc --delete
  enginegate gc --remote store --delete  # from the DVC remote too
"""


def register(subparsers: Any) -> None:
    """Declares the command."""
    parser = subparsers.add_parser(
        "gc",
        help="free what engines that were never registered occupy",
        description="Finds bytes of engines that nothing needs any more. A dry run by default.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--remote", metavar="NAME", help="also from this DVC remote")
    parser.add_argument("--delete", action="store_true", help="delete (default: say what would go)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Collects and prints what goes."""
    from pipeline.registry.gc import collect
    from pipeline.report.text import columns, size

    found = collect(Path.cwd(), remote=args.remote, delete=args.delete)
    if args.json:
        rows = [asdict(garbage) | {"bytes": garbage.size} for garbage in found]
        print(json.dumps({"deleted": args.delete, "stores": rows}, indent=2))
        return 0
    for garbage in found:
        words = "freed" if args.delete else "would be freed"
        print(f"{garbage.store}: {size(garbage.size)} {words}, {len(garbage.objects)} objects")
        if garbage.engines:
            table = [(out.path, out.seen[:12], out.md5[:12]) for out in garbage.engines]
            print("\n".join(columns([("engine", "commit", "object"), *table])))
    if not args.delete and any(garbage.objects for garbage in found):
        print("nothing was deleted: --delete does it")
    return 0
