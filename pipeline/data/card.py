"""The data card: where both sets come from, how many were asked and used, how long they are, what overlaps."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pipeline.data.sampling import Sampled
from pipeline.files import digest_json
from pipeline.params import Data

BIN = 8  # tokens a histogram bar


def data_card(data: Data, source: dict[str, Any], licence: str | None, sampled: Sampled) -> dict[str, Any]:
    """The card as JSON. Histograms map a bar's first length in tokens to its count."""
    lengths = {
        "calibration": [len(row["token_ids"]) for row in sampled.calibration],
        "evaluation": [len(item.prompt_token_ids) for item in sampled.evaluation],
    }
    return {
        "source": source,
        "revision": data.revision,
        "licence": licence,
        "counts": sampled.counts,
        "tokens": {name: sum(values) for name, values in lengths.items()},
        "histogram": {name: _histogram(values) for name, values in lengths.items()},
        "leakage": {"overlaps": sorted(sampled.overlaps), "matches": sampled.overlaps},
        "digests": {
            "calibration": digest_json(sampled.calibration),
            "evaluation": digest_json(
                [[item.id, item.prompt_token_ids, item.reference] for item in sampled.evaluation]
            ),
        },
    }


def _histogram(lengths: list[int]) -> dict[str, int]:
    bars = Counter(length // BIN * BIN for length in lengths)
    return {str(bar): bars[bar] for bar in sorted(bars)}
