"""From the report's data to its plots: what each of them shows."""

from __future__ import annotations

import re
from typing import Any

from markupsafe import Markup

from pipeline.data.card import BIN
from pipeline.report.plots import Row, forest, histogram, layers
from pipeline.report.text import interval, signed
from pipeline.report.words import PARTS, metric_name

OUTCOMES = {"pass": "ok", "fail": "bad", "inconclusive": "open", "invalid": "void"}
_BLOCK = re.compile(r"\.(\d+)\.(.+)$")


def verdict_plot(recipe: dict[str, Any]) -> Markup | None:
    """Every metric and slice of one recipe against its budget; None when nothing could be measured."""
    rows = []
    for row in recipe["metrics"]:
        margin = row["margin_points"]
        if row["lower"] is None or not margin:
            continue
        name = metric_name(row["name"])
        idle = row["importance"] == "advisory" or recipe["verdict"] == "INVALID"  # decides nothing
        rows.append(
            Row(
                label=name if row["slice"] == "all" else f"{name}, {row['slice']}",
                note=f"{row['importance']}, budget {margin:.2f}",
                value=row["difference"] / margin,
                lower=row["lower"] / margin,
                upper=row["upper"] / margin,
                colour="void" if idle else OUTCOMES[row["outcome"]],
                text=f"{signed(row['difference'])} {interval(row)}",
                title=f"{row['method']}; {row['signature']}",
            )
        )
    return forest(rows) if rows else None


def attribution_plot(recipe: dict[str, Any]) -> Markup | None:
    """Noise, runtime and quantisation of each critical metric against its budget; None without a split."""
    margins = {
        row["name"]: row["margin_points"]
        for row in recipe["metrics"]
        if row["slice"] == "all" and row["importance"] == "critical" and row["margin_points"]
    }
    rows = []
    for name, parts in recipe["attribution"].get("metrics", {}).items():
        for part in PARTS:
            if name in margins and (found := parts.get(part)):
                rows.append(
                    Row(
                        label=PARTS.get(part, part),
                        note=metric_name(name),
                        value=found["difference"] / margins[name],
                        lower=found["lower"] / margins[name],
                        upper=found["upper"] / margins[name],
                        colour="part",
                        text=f"{signed(found['difference'])} {interval(found)}",
                    )
                )
    return forest(rows) if rows else None


def length_plot(card: dict[str, Any]) -> Markup:
    """Token lengths of the calibration samples beside the evaluation prompts."""
    return histogram(card["histogram"], BIN)


def layer_kinds(census: dict[str, Any]) -> list[str]:
    """The kinds of layers in the plots, in the order of their colours."""
    return list(dict.fromkeys(kind for kind, _, _ in _points(census, "weight_amax")))


def layer_plots(census: dict[str, Any]) -> list[Markup]:
    """Weight ranges, and input ranges or SmoothQuant's scales, over the model's depth."""
    titles = {
        "weight_amax": "largest weight (amax)",
        "pre_quant_scale_max": "largest SmoothQuant scale of the input",
    }
    if not any("pre_quant_scale_max" in row for row in census["layers"]):
        titles = {"weight_amax": titles["weight_amax"], "input_amax": "largest input (amax)"}
    found = {title: _points(census, key) for key, title in titles.items()}
    return [layers(points, title) for title, points in found.items() if any(value > 0 for *_, value in points)]


def _points(census: dict[str, Any], key: str) -> list[tuple[str, int, float]]:
    points = []
    for row in census["layers"]:
        if key in row:
            place = _BLOCK.search(row["layer"])
            kind = place.group(2).split(".")[-1] if place else row["layer"]
            points.append((kind, int(place.group(1)) if place else 0, float(row[key])))
    return points
