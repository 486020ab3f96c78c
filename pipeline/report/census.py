"""The census of a recipe in words, rows and one plot for the page. An older census, with less in it, shows less."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from markupsafe import Markup

from pipeline.report.plots import layers

Rows = list[dict[str, Any]]


def layer_rows(census: dict[str, Any]) -> Rows:
    """Each quantised layer: the largest weight and input, its pre-scale, its largest channel in medians."""
    keys = ("weight_amax", "input_amax", "pre_quant_scale_max", "channel_ratio")
    return [{"layer": row["layer"]} | {key: _figure(row.get(key)) for key in keys} for row in census["layers"]]


def left_out(census: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Why layers stayed in high precision, and which, the most first."""
    found: dict[str, list[str]] = defaultdict(list)
    for row in census["skipped"]:
        if isinstance(row, dict):
            found[row["why"]].append(row["layer"])
        else:
            found["left out"].append(row)
    return sorted(found.items(), key=lambda entry: (-len(entry[1]), entry[0]))


def outliers(census: dict[str, Any]) -> Rows:
    """Layers far from others of their kind, the farthest first."""
    return [row | {"times": f"{row['times']:.0f}"} for row in census.get("outliers", [])]


def conduct(census: dict[str, Any]) -> str:
    """How the calibration went, in a sentence."""
    how = census.get("calibration")
    if not how:
        return ""
    said = f"{how['samples']} samples, {how['tokens']} tokens in {how['batches']} batches of at most {how['budget']}"
    said += (
        ", packed without padding" if how["batching"] == "packed" else f", samples of one length each ({how['why']})"
    )
    said += f"; {census.get('processes', 1)} process(es) on {census.get('device', 'an unknown device')}"
    if how["out_of_memory"]:
        said += (
            f"; out of memory {len(how['out_of_memory'])} time(s), down to {how['out_of_memory'][-1]['budget']} tokens"
        )
    return said + "."


def kv_plot(census: dict[str, Any]) -> Markup | None:
    """The ranges of keys and values over the depth; None without a quantised KV cache."""
    rows = census.get("kv") or []
    points = [
        (kind, place, float(row[f"{kind}_amax"]))
        for place, row in enumerate(rows)
        for kind in ("k", "v")
        if row.get(f"{kind}_amax")
    ]
    return layers(points, "largest key (k) and value (v)") if points else None


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
