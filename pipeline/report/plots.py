"""The plots, as inline SVG drawn here.

A drawing of a few marks needs no plotting library, and as part of the page it takes the page's fonts and colours
(dark mode and print included), its text can be searched, and it is the same on every machine. Colours are CSS
classes of ``style.css``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from pipeline.report.svg import line as _line
from pipeline.report.svg import linear as _linear
from pipeline.report.svg import rect as _rect
from pipeline.report.svg import svg as _svg
from pipeline.report.svg import text as _text


@dataclass(frozen=True)
class Row:
    """One line of a forest plot. Values are in budgets: 0 is the baseline, -1 a loss of the whole budget."""

    label: str
    note: str
    value: float
    lower: float
    upper: float
    colour: str  # ok, bad, open or void
    text: str
    title: str = ""


def forest(rows: Sequence[Row]) -> Markup:
    """Each row's difference and interval against the budget; the zone within the budget is shaded.

    Every metric has its own budget, so the axis counts budgets: then one line serves all rows.
    """
    width, left, right, row_height, top = 630, 148, 140, 36, 22
    least = max(-6.0, min(-1.5, *(row.lower for row in rows)) - 0.15)
    most = min(4.0, max(0.9, *(row.upper for row in rows)) + 0.15)
    x = _linear(least, most, left, width - right)
    bottom = top + row_height * len(rows)
    close = x(0) - x(-1) < 64  # their names would touch
    parts = [
        _rect(x(least), top, x(-1) - x(least), bottom - top, "zone-bad"),
        _rect(x(-1), top, x(most) - x(-1), bottom - top, "zone-ok"),
        _line(x(0), top, x(0), bottom, "zero"),
        _line(x(-1), top - 4, x(-1), bottom + 4, "budget"),
        _text(x(-1), top - 9, "budget", "tick budget-text", "end" if close else "middle"),
        _text(x(0), top - 9, "baseline", "tick", "start" if close else "middle"),
    ]
    for place, row in enumerate(rows):
        y = top + row_height * (place + 0.5)
        parts += [
            f"<g><title>{escape(row.title)}</title>",
            _text(0, y - 2, row.label, "label"),
            _text(0, y + 12, row.note, "tick"),
        ]
        low, high = (min(max(bound, least), most) for bound in (row.lower, row.upper))
        parts.append(_line(x(low), y, x(high), y, f"interval {row.colour}"))
        for bound, shown in ((row.lower, low), (row.upper, high)):
            if bound == shown:
                parts.append(_line(x(shown), y - 5, x(shown), y + 5, f"interval {row.colour}"))
            else:  # beyond the plot: an arrow head
                tip = -7 if bound < least else 7
                points = f"{x(shown) + tip:.1f},{y:.1f} {x(shown):.1f},{y - 5:.1f} {x(shown):.1f},{y + 5:.1f}"
                parts.append(f'<polygon class="dot {row.colour}" points="{points}"/>')
        if least <= row.value <= most:
            parts.append(f'<circle class="dot {row.colour}" cx="{x(row.value):.1f}" cy="{y:.1f}" r="5"/>')
        parts += [_text(width, y + 4, row.text, "value", "end"), "</g>"]
    for tick in range(math.ceil(least), math.floor(most) + 1):
        name = "0" if tick == 0 else f"{100 * abs(tick)} %"
        parts.append(_text(x(tick), bottom + 17, name, "tick", "middle"))
    parts.append(_text(left, bottom + 34, "\N{LEFTWARDS ARROW} loses, in per cent of the budget", "tick"))
    parts.append(_text(width - right, bottom + 34, "gains \N{RIGHTWARDS ARROW}", "tick", "end"))
    return _svg(width, bottom + 40, parts, "difference to the baseline of each metric against its budget")


def histogram(series: dict[str, dict[str, int]], bin_width: int) -> Markup:
    """Lengths in tokens, each series in per cent of its own items, side by side."""
    width, height, left, bottom = 720, 210, 40, 172
    bars = {name: {int(start): count for start, count in values.items()} for name, values in series.items()}
    longest = max((start for values in bars.values() for start in values), default=0) + bin_width
    step = bin_width * max(1, math.ceil(longest / bin_width / 48))
    shares = {name: _shares(values, step) for name, values in bars.items()}
    tallest = max((share for values in shares.values() for share in values.values()), default=1.0)
    x, y = _linear(0, longest, left, width - 8), _linear(0, tallest, bottom, 14)
    parts = []
    for share in (0.0, tallest / 2, tallest):
        parts += [
            _line(left, y(share), width - 8, y(share), "grid"),
            _text(left - 6, y(share) + 4, f"{share:.0f} %", "tick", "end"),
        ]
    slot = (x(step) - x(0)) / max(1, len(shares))
    for place, (name, values) in enumerate(shares.items()):
        for start, share in sorted(values.items()):
            title = f"{name}: {share:.1f} % have {start} to {start + step - 1} tokens"
            corner = x(start) + place * slot + 0.5
            parts.append(_rect(corner, y(share), slot - 1, bottom - y(share), f"series-{place}", title=title))
    every = max(1, round(longest / step / 10)) * step
    for start in range(0, longest + 1, every):
        parts.append(_text(x(start), bottom + 16, str(start), "tick", "middle"))
    parts.append(_text((left + width) / 2, height - 4, "tokens", "tick", "middle"))
    return _svg(width, height, parts, "token lengths of the calibration and the evaluation set")


def layers(points: Sequence[tuple[str, int, float]], title: str) -> Markup:
    """A dot for each quantised layer: (kind, place, value); the value is on a logarithmic axis."""
    width, height, left, bottom = 500, 190, 48, 156
    kinds = list(dict.fromkeys(kind for kind, _, _ in points))
    values = [value for *_, value in points if value > 0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    last = max(place for _, place, _ in points)
    x, y = _linear(0, max(1, last), left + 8, width - 8), _linear(low, high, bottom, 24)
    parts = [_text(left, 12, title, "label")]
    for power in range(low, high + 1, max(1, (high - low) // 4)):
        parts += [
            _line(left, y(power), width, y(power), "grid"),
            _text(left - 6, y(power) + 4, f"{10.0**power:g}", "tick", "end"),
        ]
    for kind, place, value in points:
        if value > 0:
            spot = f'cx="{x(place):.1f}" cy="{y(math.log10(value)):.1f}" r="3"'
            note = f"<title>{escape(kind)}, block {place}: {value:.4g}</title>"
            parts.append(f'<circle class="kind-{kinds.index(kind) % 8}" {spot}>{note}</circle>')
    for place in range(0, last + 1, max(1, (last + 1) // 10)):
        parts.append(_text(x(place), bottom + 16, str(place), "tick", "middle"))
    parts.append(_text((left + width) / 2, height - 4, "transformer block", "tick", "middle"))
    return _svg(width, height, parts, title)


def _shares(values: dict[int, int], step: int) -> dict[int, float]:
    total, merged = sum(values.values()) or 1, dict[int, float]()
    for start, count in values.items():
        merged[start // step * step] = merged.get(start // step * step, 0.0) + 100 * count / total
    return merged
