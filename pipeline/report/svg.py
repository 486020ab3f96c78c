"""The marks that plots are made of: strings of SVG with the classes of ``style.css``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup, escape

Scale = Callable[[float], float]


def linear(low: float, high: float, start: float, end: float) -> Scale:
    """Maps low..high to start..end."""
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def svg(width: float, height: float, parts: Sequence[str], name: str) -> Markup:
    """The drawing; ``name`` is what a screen reader says."""
    body = "".join(parts)
    return Markup(f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(name)}">{body}</svg>')


def rect(x: float, y: float, width: float, height: float, style: str, *, title: str = "") -> str:
    """A rectangle."""
    note = f"<title>{escape(title)}</title>" if title else ""
    size = f'width="{max(0.0, width):.1f}" height="{max(0.0, height):.1f}"'
    return f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" {size}>{note}</rect>'


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    """A straight line."""
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def text(x: float, y: float, text: str, style: str, anchor: str = "start") -> str:
    """A text; ``anchor`` is start, middle or end."""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def path(points: Sequence[tuple[float, float]], style: str) -> str:
    """A line through all points."""
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{style}" points="{places}"/>'


def ticks(most: float, count: int = 4) -> list[float]:
    """Round numbers from 0 to at least ``most``, about ``count`` steps."""
    import math

    if most <= 0 or not math.isfinite(most):
        return [0.0, 1.0]
    raw = most / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * (1 - 1e-9))
    return [step * turn for turn in range(math.ceil(most / step - 1e-9) + 1)]
