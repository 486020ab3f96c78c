"""Draws the collected data: one self-contained page, a Markdown summary, JSON. No network, no clock."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from pipeline.files import atomic_file, write_json
from pipeline.report import bench_plots, census, figures, text, words

FOLDER = Path(__file__).parent


def write_report(data: dict[str, Any], folder: Path) -> None:
    """Writes index.html, report.md and report.json, and fleet.csv where a bench gave a fleet."""
    write_json(folder / "report.json", data)
    if data["bench"] and data["bench"]["fleet"]:
        write_fleet(data["bench"]["fleet"]["rows"], folder / "fleet.csv")
    for name, content in (("index.html", page(data)), ("report.md", summary(data))):
        with atomic_file(folder / name) as part:
            part.write_text(content, encoding="utf-8")


def write_fleet(rows: list[dict[str, Any]], path: Path) -> None:
    """The fleet's rows as CSV."""
    with atomic_file(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def page(data: dict[str, Any]) -> str:
    """The HTML page. Every value is escaped; only the plots, which escape for themselves, are not."""
    style = Markup((FOLDER / "style.css").read_text(encoding="utf-8"))
    return _environment().get_template("page.html.j2").render(data, style=style)


def summary(data: dict[str, Any]) -> str:
    """Markdown for a pull request or a GitHub step summary."""
    return _environment().get_template("summary.md.j2").render(data)


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=lambda name: bool(name) and str(name).endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update({"figures": figures, "words": words, "largest": _largest, "pretty": _pretty})
    environment.globals.update({"plots": bench_plots, "highest": _highest, "census": census})
    environment.filters.update(
        {
            "signed": text.signed,
            "number": text.number,
            "interval": text.interval,
            "margin": text.margin,
            "size": text.size,
            "count": _count,
            "seconds": _seconds,
            "short": lambda digest: digest.removeprefix("sha256:")[:12] if digest else text.NONE,
            "metric": words.metric_name,
            "backend": words.backend_name,
            "cell": _cell,
            "left_out": _left_out,
            "length_fit": _length_fit,
        }
    )
    return environment


def _count(value: int) -> str:
    return f"{value:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def _seconds(value: float | None) -> str:
    if value is None:
        return text.NONE
    return f"{value:.0f} s" if value >= 100 else f"{value:.1f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def _cell(value: str) -> str:
    """Text that stays within one cell of a Markdown table and is not read as markup."""
    for character in "\\`*_[]<>|":
        value = value.replace(character, f"\\{character}")
    return " ".join(value.split())


def _left_out(counts: dict[str, int]) -> str:
    """``calib_left_out_duplicate: 7`` and the like as ``7 duplicate (calib)``."""
    found = [(name.split("_left_out_"), count) for name, count in counts.items() if "_left_out_" in name and count]
    return ", ".join(f"{_count(count)} {why.replace('_', ' ')} ({which})" for (which, why), count in found) or "nothing"


def _length_fit(lengths: dict[str, Any]) -> str:
    """How near the calibration set's prompt lengths are to those that it should have."""
    after, before = (lengths["distance"][name] for name in ("after", "before"))
    whose = "evaluation set" if lengths["profile"] == "evaluation" else f"log {lengths['profile']}"
    moved = lengths["moved"]
    return (
        f"On average {after['wasserstein']:.1f} tokens from the {whose}'s lengths (largest gap between the shares "
        f"{100 * after['ks']:.1f} %); a draw without length bands: {before['wasserstein']:.1f} tokens "
        f"({100 * before['ks']:.1f} %)."
        + (f" {_count(moved)} samples stand in for lengths that ran out." if moved else "")
    )


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _largest(rows: list[dict[str, Any]], key: str) -> float:
    return max((row[key] or 0 for row in rows), default=0) or math.inf


def _highest(spikes: list[dict[str, Any]]) -> float:
    """The most requests of a second, so that all arms are drawn on one scale."""
    return float(max(row["asked"] for spike in spikes for row in spike["slices"]))


def template(name: str) -> Template:
    """A template of this folder, for pages of their own."""
    return _environment().get_template(name)
