"""What the arms took to answer. Not a benchmark: one pass, whatever load the evaluation happened to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.records import Timing


def speed(timings: Sequence[Timing], wall_s: float) -> dict[str, Any]:
    """Wall time, output tokens a second, median and 95th percentile of the time of a request."""
    import numpy as np

    tokens = sum(timing.output_tokens for timing in timings)
    totals = [timing.total_s for timing in timings]
    firsts = [timing.first_token_s for timing in timings if timing.first_token_s is not None]
    return {
        "wall_s": wall_s,
        "output_tokens": tokens,
        "tokens_per_s": tokens / wall_s if wall_s > 0 else None,
        "median_s": float(np.median(totals)) if totals else None,
        "p95_s": float(np.quantile(totals, 0.95)) if totals else None,
        "median_first_token_s": float(np.median(firsts)) if firsts else None,
    }
