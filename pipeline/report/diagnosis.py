"""The page of ``enginegate diagnose``: one arm, where its time goes, its slowest requests, likely causes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from pipeline.bench.diagnose import Diagnosis
from pipeline.report import bench_plots
from pipeline.report.render import FOLDER, template

PARTS = ("queue", "prefill", "decode", "rest")


def diagnosis_page(found: Diagnosis, traces: Sequence[str] = ()) -> str:
    """The HTML page. ``traces`` say where the server's own profiler or traces went."""
    style = Markup((FOLDER / "style.css").read_text(encoding="utf-8"))
    page = template("diagnosis.html.j2")
    return page.render(found.plain(), style=style, plots=bench_plots, parts=PARTS, split=_bars, traces=list(traces))


def lines(found: Diagnosis) -> list[str]:
    """The diagnosis for a terminal."""
    text = [f"{found.arm} ({found.backend})"]
    for share in found.shares:
        if share.e2e_ms is None:
            text.append(f"  {share.point}: no sound answer among {share.requests} requests")
            continue
        parts = {name: getattr(share, f"{name}_ms") for name in PARTS}
        if None in parts.values():
            split = f"first token after {share.ttft_ms:.0f} ms (the server tells no parts)"
        else:
            split = ", ".join(f"{name} {value:.0f}" for name, value in parts.items())
        text.append(f"  {share.point}: {share.e2e_ms:.0f} ms a request: {split}")
    text += [f"  {cause.point}: {cause.name}: {cause.evidence}; {cause.advice}" for cause in found.causes]
    return text if found.causes else [*text, "  no likely cause stands out"]


def write_page(found: Diagnosis, folder: Path, traces: Sequence[str] = ()) -> Path:
    """Writes ``ARM.html``; returns its path."""
    from pipeline.files import atomic_file

    path = folder / f"{found.arm}.html"
    with atomic_file(path) as part:
        part.write_text(diagnosis_page(found, traces), encoding="utf-8")
    return path


def _bars(share: dict[str, Any]) -> list[tuple[str, float]]:
    """The parts of a request's time in per cent of the whole."""
    whole = sum(share[f"{name}_ms"] for name in PARTS)
    return [(name, 100 * share[f"{name}_ms"] / whole) for name in PARTS] if whole else []
