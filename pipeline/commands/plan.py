"""``enginegate plan``: how many evaluation items a margin needs, before any GPU time is spent."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

MARGINS = (0.5, 1.0, 2.0, 3.0)
DISCORDANCES = (0.01, 0.02, 0.05, 0.1, 0.2)
EPILOG = """\
A margin is in points (per cent of items); the discordance is the fraction of items on which two engines
differ in being right. Measure it with a few items, or take 0.05 for a mild and 0.15 for a hard quantisation.

example:
  enginegate plan --margin 2 --discordance 0.05      (773 items)
  enginegate plan --plot plan.png                    (the whole table, as a picture)
"""


def register(subparsers: Any) -> None:
    """Declares the command."""
    parser = subparsers.add_parser(
        "plan",
        help="how many evaluation items a margin needs",
        description="Items needed to show that an engine without loss stays within its margin.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--margin", type=float, nargs="+", default=MARGINS, metavar="POINTS")
    parser.add_argument("--discordance", type=float, nargs="+", default=DISCORDANCES, metavar="FRACTION")
    parser.add_argument("--confidence", type=float, default=0.95, help="of the one-sided bound (default 0.95)")
    parser.add_argument("--power", type=float, default=0.8, help="chance to pass without loss (default 0.8)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG or SVG")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the table, or the one number that was asked for."""
    from pipeline.errors import UsageError
    from pipeline.gate.plan import items_needed, items_to_see

    if not all(0 < margin < 100 for margin in args.margin):
        raise UsageError("--margin: points between 0 and 100", "2 allows two items in a hundred to be lost")
    if not all(0 < share <= 1 for share in args.discordance):
        raise UsageError("--discordance: a fraction of at most 1", "0.05 is five items in a hundred")
    if not (0.5 < args.confidence < 1 and 0.5 <= args.power < 1):
        raise UsageError("--confidence, --power: between 0.5 and 1", "usual are 0.95 and 0.8")
    rows = [
        {
            "margin": margin,
            "discordance": share,
            # Fewer items than items_to_see cannot certify the margin even when nothing at all changes.
            "items": max(
                items_needed(share, margin / 100, args.confidence, args.power),
                items_to_see(margin / 100, args.confidence),
            ),
        }
        for share in args.discordance
        for margin in args.margin
    ]
    if args.json:
        print(json.dumps(rows))
    elif len(rows) == 1:
        print(rows[0]["items"])
    else:
        _print_table(args.margin, args.discordance, rows)
    if args.plot:
        _plot(args.plot, args.margin, rows)
    return 0


def _print_table(margins: tuple[float, ...], shares: tuple[float, ...], rows: list[dict[str, Any]]) -> None:
    print("items needed   " + "".join(f"{f'{margin:g} points':>12}" for margin in margins))
    for place, share in enumerate(shares):
        cells = rows[place * len(margins) : (place + 1) * len(margins)]
        print(f"{100 * share:>7.3g} % differ" + "".join(f"{cell['items']:>12}" for cell in cells))


def _plot(path: Path, margins: tuple[float, ...], rows: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from pipeline.files import storage_errors

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for margin in margins:
        line = [row for row in rows if row["margin"] == margin]
        shares = [100 * row["discordance"] for row in line]
        axes.plot(shares, [row["items"] for row in line], marker="o", label=f"{margin:g} points")
    axes.set(xscale="log", yscale="log", xlabel="items that differ (%)", ylabel="items needed")
    axes.legend(title="margin")
    axes.grid(visible=True, which="both", alpha=0.3)
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    plt.close(figure)
