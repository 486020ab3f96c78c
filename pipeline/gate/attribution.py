"""Layer 3: where a loss comes from.

Arms: baseline, its repeat, the engine without quantisation (runtime), the candidate. Noise = repeat - baseline,
runtime error = runtime - baseline, quantisation error = candidate - runtime. If the runtime alone eats the
budget, no calibration will win it back, and the verdict says so.
"""

from __future__ import annotations

from typing import Any

from pipeline.gate.noninferiority import Bounds, Comparison


def part(found: Bounds) -> dict[str, float]:
    """The difference of one pair of arms as JSON data, in points."""
    return {"difference": found.gain, "lower": found.lower, "upper": found.upper}


def explain(comparison: Comparison, parts: dict[str, dict[str, float]]) -> str:
    """One sentence about one metric: what the runtime costs, what quantisation costs."""
    name, margin = comparison.name, comparison.margin_points
    if "runtime" not in parts or margin is None:
        return f"{name}: the engine without quantisation did not answer, so the loss cannot be split"
    runtime, quantization = parts["runtime"]["difference"], parts["quantization"]["difference"]
    split = f"{name}: runtime {runtime:+.2f}, quantisation {quantization:+.2f} points"
    if runtime <= -margin:
        return f"{split}; the runtime alone eats the budget of {margin:.3g}: look at the runtime, not at calibration"
    if comparison.outcome in ("fail", "inconclusive") and quantization < runtime:
        return f"{split}; the loss is mostly quantisation: a gentler recipe or more calibration data"
    return split


def attribution(parts: dict[str, dict[str, dict[str, float]]], text: list[str]) -> dict[str, Any]:
    """Parts by metric, and the sentences."""
    return {"metrics": parts, "text": text}
