"""The plots of the bench section: what is sent against what comes back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

from pipeline.report.svg import line, linear, path, rect, svg, text, ticks

Points = Sequence[tuple[float, float]]
COLOURS = 4  # classes arm-0 to arm-3; more arms begin again


def curves(
    series: Mapping[str, Points], title: str, x_name: str, *, dashed: frozenset[str] = frozenset(), evenly: bool = False
) -> Markup:
    """One line a name. Names of ``dashed`` are drawn dashed, in the colour of the name before them. ``evenly`` sets the
    x values at equal distances, as suits 1, 4, 16, 64."""
    width, height, left, bottom, top = 500, 230, 56, 180, 26
    xs = sorted({x for points in series.values() for x, _ in points})
    marks = ticks(max((y for points in series.values() for _, y in points), default=0.0))
    # x value -> place on the axis
    spots = {x: float(place) for place, x in enumerate(xs)} if evenly else {x: x for x in xs}
    named = spots if evenly else {mark: mark for mark in ticks(max(xs, default=1.0), 6)}
    x = linear(min(named.values(), default=0.0), max(named.values(), default=1.0), left + 12, width - 14)
    y = linear(0.0, marks[-1], bottom, top)
    parts = [text(left, 12, title, "label")]
    for mark in marks:
        parts += [line(left, y(mark), width, y(mark), "grid"), text(left - 6, y(mark) + 4, f"{mark:g}", "tick", "end")]
    for mark, place in named.items():
        parts.append(text(x(place), bottom + 16, f"{mark:g}", "tick", "middle"))
    parts.append(text((left + width) / 2, bottom + 34, x_name, "tick", "middle"))
    colour = -1
    for name, points in series.items():
        colour += name not in dashed
        drawn = [(x(spots[at]), y(value)) for at, value in points]
        parts.append(path(drawn, f"curve arm-{colour % COLOURS}" + (" dashed" if name in dashed else "")))
        for (at, value), (cx, cy) in zip(points, drawn, strict=True):
            note = f"<title>{escape(name)}: {value:.4g} at {at:g}</title>"
            parts.append(
                f'<circle class="spot arm-{colour % COLOURS}" cx="{cx:.1f}" cy="{cy:.1f}" r="3">{note}</circle>'
            )
    return svg(width, height, parts, title)


def seconds(
    slices: Sequence[Mapping[str, float]], most: float, title: str, peak: tuple[float, float] | None = None
) -> Markup:
    """Requests by the second in which they were due: good ones, slow ones, failed ones, stacked."""
    width, height, left, bottom, top = 500, 190, 46, 150, 26
    marks = ticks(most, 3)
    x = linear(0.0, max(len(slices), 1), left, width - 4)
    y = linear(0.0, marks[-1], bottom, top)
    parts = [text(left, 12, title, "label")]
    if peak is not None:
        parts.append(rect(x(peak[0]), top, x(peak[1]) - x(peak[0]), bottom - top, "zone-spike", title="the spike"))
    for mark in marks:
        parts += [line(left, y(mark), width, y(mark), "grid"), text(left - 6, y(mark) + 4, f"{mark:g}", "tick", "end")]
    for place, row in enumerate(slices):
        good, failed = row["good"], row["failed"]
        slow = row["asked"] - good - failed
        below = 0.0
        note = f"second {place}: {good:g} good, {slow:g} slow, {failed:g} failed"
        for count, style in ((good, "good"), (slow, "slow"), (failed, "failed")):
            if count:
                high = y(below + count)
                parts.append(rect(x(place) + 0.5, high, x(1) - x(0) - 1, y(below) - high, style, title=note))
                below += count
    every = max(1, math.ceil(len(slices) / 10))
    for place in range(0, len(slices) + 1, every):
        parts.append(text(x(place), bottom + 16, str(place), "tick", "middle"))
    parts.append(text((left + width) / 2, bottom + 34, "second", "tick", "middle"))
    return svg(width, height, parts, title)


def timeline(rows: Sequence[Mapping[str, object]], title: str) -> Markup:
    """Slow requests, one a line: waiting until the first token, then a tick for each arrival of tokens."""
    width, left, row_height, top = 720, 150, 20, 26
    spans = [_span(row) for row in rows]
    longest = max((end for *_, end in spans), default=1.0)
    marks = ticks(longest)
    x = linear(0.0, marks[-1], left, width - 8)
    bottom = top + row_height * len(rows)
    parts = [text(0, 12, title, "label")]
    for mark in marks:
        parts += [
            line(x(mark), top - 4, x(mark), bottom, "grid"),
            text(x(mark), bottom + 15, f"{mark:g}", "tick", "middle"),
        ]
    for place, (row, (sent, arrivals, end)) in enumerate(zip(rows, spans, strict=True)):
        y = top + row_height * place
        parts.append(text(0, y + 13, str(row["item"])[-22:], "tick"))
        parts.append(rect(x(0), y + 5, x(sent) - x(0), 9, "failed", title=f"sent {sent:.3f} s late"))
        first = arrivals[0] if arrivals else end
        parts.append(rect(x(sent), y + 5, x(first) - x(sent), 9, "slow", title=f"first token after {first:.3f} s"))
        parts.append(rect(x(first), y + 5, x(end) - x(first), 9, "good", title=f"done after {end:.3f} s"))
        parts += [line(x(at), y + 4, x(at), y + 15, "arrival") for at in arrivals]
    parts.append(text((left + width) / 2, bottom + 32, "seconds from when the request was due", "tick", "middle"))
    return svg(width, bottom + 38, parts, title)


def _span(row: Mapping[str, object]) -> tuple[float, list[float], float]:
    """Sent, arrivals of tokens and end, in seconds from when the request was due."""
    due, sent, end = (float(str(row[name])) for name in ("due_s", "sent_s", "end_s"))
    tokens = row["tokens_s"]
    assert isinstance(tokens, list)
    return sent - due, [at - due for at in dict.fromkeys(tokens)], end - due


def sweep_plots(sweep: Mapping[str, Sequence[Mapping[str, float | None]]]) -> list[Markup]:
    """Throughput, TTFT and TPOT over the requests in flight; a median without enough requests has no mark."""
    titles = {
        "output_tokens_per_s": "output tokens a second",
        "ttft_ms": "median TTFT, ms",
        "tpot_ms": "median TPOT, ms",
    }
    plots = []
    for key, title in titles.items():
        series = {name: _known(rows, "concurrency", key) for name, rows in sweep.items()}
        if any(series.values()):
            plots.append(curves(series, title, "requests in flight", evenly=True))
    return plots


def fleet_plots(rows: Sequence[Mapping[str, Any]], arms: Sequence[str], currency: str) -> list[Markup]:
    """Capacity over nodes, and the price of a rate; sharded fleets dashed."""
    capacity: dict[str, Points] = {}
    price: dict[str, Points] = {}
    dashed = set()
    for arm in arms:
        for strategy in ("replicated", "sharded"):
            chosen = [row for row in rows if row["arm"] == arm and row["strategy"] == strategy]
            if not chosen:
                continue
            name = f"{arm}, {strategy}"
            dashed |= {name} if strategy == "sharded" else set()
            capacity[name] = _known(chosen, "nodes", "capacity")
            price[name] = _known(chosen, "capacity", "cost_per_hour")
    plots = [curves(capacity, "good requests a second", "nodes", dashed=frozenset(dashed))]
    if any(price.values()):
        plots.append(curves(price, f"{currency} an hour", "good requests a second", dashed=frozenset(dashed)))
    return plots


def _known(rows: Sequence[Mapping[str, Any]], x: str, y: str) -> list[tuple[float, float]]:
    return [(float(row[x]), float(row[y])) for row in rows if row[y] is not None]
