"""The gate's bootstrap against sacrebleu's own paired bootstrap, on the same segments.

``python -m benchmarks.gate [--segments 1000 10000] [--resamples 2000]``

Both start from the same statistics of the same segments, draw the same number of resamples and give an interval for the
difference of two systems. Compared are the CPU time of the bootstrap on one core (the step that differs), the point
scores (must be identical), the standard error of the difference (must agree within resampling error) and the peak
memory. The time to turn texts into statistics, which both spend in sacrebleu, is printed too. The last line is one
JSON object with the ratios. Exit code 1 when a promise of issue 3 is not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # sacrebleu's loop uses one core too

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from pipeline.evaluate.base import Floats, Metric
from pipeline.evaluate.bleu import Bleu
from pipeline.evaluate.chrf import Chrf
from pipeline.gate import bootstrap
from pipeline.records import Item

SEED = 12345
WANTED = 20  # times faster
WORDS = [
    f"{head}{tail}" for head in ("ta", "ri", "mo", "sel", "dan", "ko") for tail in ("na", "lo", "pi", "ren", "stu")
]


def corpus(count: int) -> tuple[list[str], list[str], list[str]]:
    """References and the answers of two systems, the second a little worse."""
    source = random.Random(SEED)
    references = [" ".join(source.choices(WORDS, k=source.randint(6, 25))) + "." for _ in range(count)]

    def answered(errors: float) -> list[str]:
        return [
            " ".join(source.choice(WORDS) if source.random() < errors else word for word in text.split())
            for text in references
        ]

    return references, answered(0.25), answered(0.27)


def sacrebleu_draws(metric: Any, first: Floats, second: Floats, resamples: int) -> Floats:
    """The loop of ``sacrebleu.significance._paired_bs_test`` (2.5, 2.6): draw, sum, score one by one."""
    generator = np.random.default_rng(SEED)
    drawn = generator.choice(len(first), size=(resamples, len(first)), replace=True)
    one, other = first.astype("float32"), second.astype("float32")
    scores = [
        np.array([metric._compute_score_from_stats(rows.sum(0)).score for rows in statistics[drawn]])
        for statistics in (one, other)
    ]
    return np.asarray(scores[1] - scores[0])


def timed(action: Callable[[], Floats], repeats: int) -> tuple[float, Floats]:
    """The shortest of ``repeats`` CPU times in seconds, and the result."""
    best, result = float("inf"), np.zeros(0)
    for _ in range(repeats):
        start = time.process_time()
        result = action()
        best = min(best, time.process_time() - start)
    return best, result


def peak_mib(action: Callable[[], Floats]) -> float:
    """Peak memory of Python and NumPy while ``action`` runs."""
    tracemalloc.start()
    action()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 2**20


def compare(name: str, mine: Metric, theirs: Any, count: int, resamples: int) -> dict[str, Any]:
    """One metric on one corpus size."""
    references, first_texts, second_texts = corpus(count)
    items = [Item(str(place), "", text, ()) for place, text in enumerate(references)]
    start = time.process_time()
    first, second = mine.statistics(first_texts, items), mine.statistics(second_texts, items)
    extraction = time.process_time() - start
    scores = [float(mine.score(rows.sum(axis=0))) for rows in (first, second)]
    official = [theirs.corpus_score(texts, [references]).score for texts in (first_texts, second_texts)]

    def ours() -> Floats:
        return bootstrap.paired_differences(first, second, mine.score, resamples, SEED)

    fast, draws = timed(ours, repeats=9)
    slow, their_draws = timed(lambda: sacrebleu_draws(theirs, first, second, resamples), repeats=2)
    row = {
        "metric": name,
        "segments": count,
        "resamples": resamples,
        "ours_s": round(fast, 4),
        "sacrebleu_s": round(slow, 4),
        "speedup": round(slow / fast, 1),
        "extraction_s": round(extraction, 4),
        "speedup_with_extraction": round((extraction + slow) / (extraction + fast), 1),
        "score_error": max(abs(one - other) for one, other in zip(scores, official, strict=True)),
        "standard_error_ratio": round(float(draws.std() / their_draws.std()), 4),
        "lower_difference_in_se": round(
            float(abs(np.quantile(draws, 0.05) - np.quantile(their_draws, 0.05)) / draws.std()), 4
        ),
        "ours_mib": round(peak_mib(ours), 1),
        "ours_mib_at_4x_resamples": round(
            peak_mib(lambda: bootstrap.paired_differences(first, second, mine.score, 4 * resamples, SEED)), 1
        ),
    }
    print(row, flush=True)
    return row


def kept(row: dict[str, Any]) -> bool:
    """Whether a row keeps the promises: speed, equal scores and intervals, flat memory."""
    return bool(
        row["speedup"] >= WANTED
        and row["score_error"] < 1e-9
        and abs(row["standard_error_ratio"] - 1) < 0.1
        and row["lower_difference_in_se"] < 0.2
        and row["ours_mib_at_4x_resamples"] < 1.5 * row["ours_mib"] + 8  # the draws themselves are kept
    )


def main() -> int:
    """Runs every comparison; prints the ratios as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--segments", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--resamples", type=int, default=2000)
    args = parser.parse_args()
    rows = [
        compare(name, mine, theirs, count, args.resamples)
        for count in args.segments
        for name, mine, theirs in (("bleu", Bleu(), BLEU(force=True)), ("chrf", Chrf(), CHRF()))
    ]
    good = all(map(kept, rows))
    ratios = {f"{row['metric']}_{row['segments']}": row["speedup"] for row in rows}
    print(json.dumps({"benchmark": "gate", "kept": good, "speedup": ratios, "rows": rows}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
