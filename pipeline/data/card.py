"""The data card: where both sets come from, how many were asked and used, how long they are, what overlaps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from pipeline.data.leakage import RULE
from pipeline.data.promptlog import PromptLog
from pipeline.data.sampling import Sampled
from pipeline.params import Params

BIN = 8  # tokens a histogram bar


def data_card(
    params: Params,
    source: dict[str, Any],
    licence: str | None,
    sampled: Sampled,
    *,
    digests: dict[str, str],
    calib_log: PromptLog | None = None,
    complete: dict[str, bool],
) -> dict[str, Any]:
    """The card as JSON. Histograms map a bar's first length in tokens to its count.

    ``source`` is what ``pipeline.sources`` resolved. ``digests`` are those of the files ``calib.jsonl`` and
    ``eval.jsonl``. ``complete`` says of each set whether all of its source was read.
    """
    prompts = [one.prompt_tokens for one in sampled.calibration]
    whole = [len(one.token_ids) for one in sampled.calibration]
    items = [len(item.prompt_token_ids) for item in sampled.evaluation]
    card: dict[str, Any] = {
        "source": source,
        "revision": params.data.revision,
        "licence": licence,
        "seed": params.seed,
        "counts": sampled.counts,
        "complete": complete,
        "tokens": {"calibration": sum(whole), "evaluation": sum(items)},
        "histogram": {"calibration": _histogram(prompts), "evaluation": _histogram(items)},
        "histogram_with_answers": {"calibration": _histogram(whole)},
        "lengths": _lengths(params, sampled),
        "leakage": {
            "overlaps": sorted(sampled.overlaps),
            "matches": sampled.overlaps,
            "rule": RULE,
            "boilerplate_ngrams": sampled.boilerplate,
        },
        "digests": digests,
    }
    if calib_log is not None:
        card["log"] = {
            "lines": calib_log.lines,
            "unusable_lines": dict(sorted(calib_log.bad.items())),
            "unusable_requests": dict(sorted(sampled.drawn.unusable.items())),
            "first_unusable": [*calib_log.first_bad, *sampled.drawn.first_unusable][:3],
        }
    if params.data.redact:
        card["redaction"] = {
            "redactors": source.get("redact", {}),
            "changed": sampled.counts["calib_redacted"],
            "dropped": sampled.counts["calib_left_out_redacted"],
        }
    return card


def _lengths(params: Params, sampled: Sampled) -> dict[str, Any]:
    """The length profile: whose it is, how near the calibration set came, and each band's quota and use."""
    strata, drawn = sampled.strata, sampled.drawn
    total = sum(strata.counts) if strata else 0
    bands = zip(strata.edges, strata.edges[1:], strata.counts, drawn.wanted, drawn.used, strict=False) if strata else ()
    return {
        "profile": "evaluation" if params.data.profile_log is None else params.data.profile_log,
        "profile_prompts": len(sampled.profile),
        "distance": sampled.distances(),
        "moved": drawn.moved,
        "bands": [
            {"from": low + 1, "to": high, "share": round(count / total, 6), "wanted": wanted, "used": used}
            for low, high, count, wanted, used in bands
        ],
    }


def _histogram(lengths: Iterable[int]) -> dict[str, int]:
    bars = Counter(length // BIN * BIN for length in lengths)
    return {str(bar): bars[bar] for bar in sorted(bars)}
