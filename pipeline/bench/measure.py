"""From the samples of one load to its numbers. Pure: no clock, no I/O.

- TTFT, end-to-end: from the time when the request was due, so that a queue in front of the server counts.
- TPOT = (last token - first token) / (tokens - 1): it leaves TTFT out.
- Inter-token: from one arrival of tokens to the next; tokens that come together arrive once.
- Failed requests are in every count of requests and in no latency; in ``all_requests`` they are infinitely slow.
- A percentile without ten requests beyond it is None: not enough requests.
- A closed loop begins with a burst (all slots at once): it counts from when the last request of that burst was
  answered. Warm-up requests never come here.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.bench.drive import Driven, Sample
from pipeline.bench.load import SLICE_S, Load
from pipeline.gate.service import LATENCIES, PERCENTILES, Good, requests_needed

Floats = NDArray[np.float64]
SLOWEST = 10  # requests kept with their timeline
KINDS_SHOWN = 3  # examples of failures kept of each kind


@dataclass(frozen=True)
class Times:
    """One sound answer's latencies in milliseconds. ``tpot_ms`` is None for a single token."""

    ttft_ms: float
    tpot_ms: float | None
    e2e_ms: float
    gaps_ms: Floats

    @classmethod
    def of(cls, sample: Sample) -> Times:
        """The latencies of a sample that did not fail."""
        late = sample.sent_s - sample.due_s
        tokens = np.asarray(sample.tokens_s)
        gaps = np.diff(tokens)
        return cls(
            ttft_ms=1000 * (late + float(tokens[0])),
            tpot_ms=1000 * float(tokens[-1] - tokens[0]) / (len(tokens) - 1) if len(tokens) > 1 else None,
            e2e_ms=1000 * (sample.end_s - sample.due_s),
            gaps_ms=1000 * gaps[gaps > 0],
        )

    def is_good(self, good: Good) -> bool:
        """Whether the answer keeps every limit."""
        return all(
            limit is None or (value := getattr(self, name)) is None or value <= limit
            for name, limit in vars(good).items()
        )


def measure(load: Load, samples: Sequence[Sample], good: Good, share: Decimal) -> dict[str, Any]:
    """The numbers of one load as JSON data; docs/bench.md lists them. Rates are per second of the measured window."""
    begin, kept = _kept(load, samples)
    window_s = max(load.seconds - begin, 0.0)
    times = {id(sample): Times.of(sample) for sample in samples if not sample.failure}
    sound = [times[id(sample)] for sample in kept if not sample.failure]
    is_good = {key: one.is_good(good) for key, one in times.items()}
    failures = Counter(sample.failure for sample in kept if sample.failure)
    finished = [sample for sample in samples if not sample.failure and begin < sample.end_s <= load.seconds]
    good_share = _per_cent(sum(is_good[id(sample)] for sample in kept if not sample.failure), len(kept))
    slices = _slices(load, kept, times, is_good)
    return {
        "window_s": window_s,
        "requests": len(kept),
        "failed": sum(failures.values()),
        "failures": dict(sorted(failures.items())),
        "failure_details": _details(kept),
        "error_rate": _per_cent(sum(failures.values()), len(kept)),
        "latency": {
            **{name: distribution(_values(sound, name), len(sound)) for name in LATENCIES},
            "itl_ms": distribution(np.concatenate([one.gaps_ms for one in sound] or [np.zeros(0)]), len(sound)),
        },
        "all_requests": {name: _with_failures(_values(sound, name), sum(failures.values())) for name in LATENCIES},
        "throughput": _rates(finished, samples, begin, load.seconds, window_s),
        "good": {"share": good_share, **_good_rates([s for s in finished if is_good[id(s)]], window_s)},
        "slices": slices,
        "spike": _spike(load, kept, slices, share) if load.peak else None,
        "slowest": _slowest(kept, times),
    }


def distribution(values: Floats, requests: int) -> dict[str, Any]:
    """Count, mean and percentiles of ``values``, which come from so many requests."""
    return {
        "n": len(values),
        "mean": float(values.mean()) if len(values) else None,
        **{
            f"p{at}": float(np.percentile(values, float(at)))
            if len(values) and requests >= requests_needed(at)
            else None
            for at in PERCENTILES
        },
    }


def _values(times: Sequence[Times], name: str) -> Floats:
    return np.asarray([value for one in times if (value := getattr(one, name)) is not None], dtype=np.float64)


def _with_failures(values: Floats, failed: int) -> dict[str, Any]:
    """Percentiles over all requests; None where there are too few, or where the percentile lies among failed ones
    (the count tells which)."""
    count = len(values) + failed
    ordered = np.sort(values)
    found: dict[str, Any] = {"n": count}
    for at in PERCENTILES:
        place = (count - 1) * float(at) / 100  # as numpy's linear percentile
        enough = count >= requests_needed(at) and math.ceil(place) < len(ordered)
        found[f"p{at}"] = float(np.interp(place, range(len(ordered)), ordered)) if enough else None
    return found


def _kept(load: Load, samples: Sequence[Sample]) -> tuple[float, list[Sample]]:
    """When counting begins, and the requests that count."""
    if load.due is not None:
        return 0.0, list(samples)
    begin = max((sample.end_s for sample in samples if sample.burst), default=0.0)
    return begin, [sample for sample in samples if not sample.burst and begin <= sample.sent_s < load.seconds]


def _rates(
    finished: Sequence[Sample], samples: Sequence[Sample], begin: float, end: float, window_s: float
) -> dict[str, float]:
    """Requests that finished and tokens that came within the window."""
    tokens = 0
    for sample in samples:
        arrived = np.asarray(sample.tokens_s) + sample.sent_s
        tokens += int(np.count_nonzero((arrived > begin) & (arrived <= end)))
    return {
        "requests_per_s": _rate(len(finished), window_s),
        "output_tokens_per_s": _rate(tokens, window_s),
        "input_tokens_per_s": _rate(sum(sample.prompt_tokens for sample in finished), window_s),
    }


def _good_rates(finished: Sequence[Sample], window_s: float) -> dict[str, float]:
    return {
        "requests_per_s": _rate(len(finished), window_s),
        "output_tokens_per_s": _rate(sum(len(sample.tokens_s) for sample in finished), window_s),
        "input_tokens_per_s": _rate(sum(sample.prompt_tokens for sample in finished), window_s),
    }


def _slices(
    load: Load, kept: Sequence[Sample], times: dict[int, Times], is_good: dict[int, bool]
) -> list[dict[str, Any]]:
    """One row a second, by the second in which requests were due."""
    rows: list[list[Sample]] = [[] for _ in range(math.ceil(load.seconds / SLICE_S))]
    for sample in kept:
        rows[min(int(sample.due_s / SLICE_S), len(rows) - 1)].append(sample)
    ended = Counter(int(sample.end_s / SLICE_S) for sample in kept if not sample.failure)
    found = []
    for second, row in enumerate(rows):
        sound = [sample for sample in row if not sample.failure]
        found.append(
            {
                "second": second,
                "asked": len(row),
                "failed": len(row) - len(sound),
                "good": sum(is_good[id(sample)] for sample in sound),
                "finished": ended[second],
                "ttft_ms": statistics.median(times[id(sample)].ttft_ms for sample in sound) if sound else None,
            }
        )
    return found


def _spike(load: Load, kept: Sequence[Sample], slices: Sequence[dict[str, Any]], share: Decimal) -> dict[str, Any]:
    """Errors in the spike and over the window, the worst second, and the time to recover."""
    assert load.peak is not None
    begin, end = load.peak
    within = [sample for sample in kept if begin <= sample.due_s < end]
    failed = sum(bool(sample.failure) for sample in within)
    asked = [row for row in slices if row["asked"]]
    return {
        "begin_s": begin,
        "end_s": end,
        "requests": len(within),
        "error_rates": [_per_cent(failed, len(within)), _per_cent(sum(bool(s.failure) for s in kept), len(kept))],
        "worst_second": max((_per_cent(row["failed"], row["asked"]) for row in asked), default=0.0),
        "recovery_s": recovery(asked, end, float(share)),
    }


def recovery(slices: Sequence[dict[str, Any]], end: float, share: float) -> float | None:
    """Seconds from the end of the spike to the first second from which on every second with requests has its share
    of good ones. None when the last such second has not, or none comes after the spike."""
    after = [row for row in slices if row["second"] * SLICE_S >= end]
    back = None
    for row in reversed(after):
        if _per_cent(row["good"], row["asked"]) < share:
            break
        back = row["second"] * SLICE_S
    return None if back is None else back - end


def _slowest(kept: Sequence[Sample], times: dict[int, Times]) -> list[dict[str, Any]]:
    """The requests that took longest, with the times of their tokens (seconds from the start of the load)."""
    order = sorted((s for s in kept if not s.failure), key=lambda s: times[id(s)].e2e_ms, reverse=True)[:SLOWEST]
    return [
        {
            "item": sample.item,
            "prompt_tokens": sample.prompt_tokens,
            "due_s": sample.due_s,
            "sent_s": sample.sent_s,
            "end_s": sample.end_s,
            "tokens_s": [round(sample.sent_s + at, 6) for at in sample.tokens_s],
        }
        for sample in order
    ]


def _details(kept: Sequence[Sample]) -> dict[str, list[str]]:
    """A few messages of each kind of failure."""
    found: dict[str, list[str]] = {}
    for sample in kept:
        if sample.failure and len(rows := found.setdefault(sample.failure, [])) < KINDS_SHOWN:
            rows.append(sample.detail)
    return dict(sorted(found.items()))


def client_state(load: Load, driven: Sequence[Driven], max_lag_ms: float, max_requests: int) -> dict[str, Any]:
    """Whether the client kept up: 99th percentiles of how late requests were sent and how late its loops woke up."""
    samples = [sample for one in driven for sample in one.samples]
    late = [sample.sent_s - sample.due_s for sample in samples] if load.due is not None else []
    lags = {
        "sent_late_ms": 1000 * float(np.percentile(late, 99)) if late else 0.0,
        # The worst process: one that stalls spoils its own requests.
        "loop_lag_ms": max(
            (1000 * float(np.percentile(one.loop_lags, 99)) for one in driven if one.loop_lags), default=0.0
        ),
    }
    why = "; ".join(
        f"{what} (99th percentile {lags[name]:.1f} ms, at most {max_lag_ms:g} ms): the client was short of CPU"
        for name, what in (("sent_late_ms", "requests were sent late"), ("loop_lag_ms", "the client's loop lagged"))
        if lags[name] > max_lag_ms
    )
    if load.due is not None and len(samples) != max_requests:
        why = f"{len(samples)} of {max_requests} requests were sent"
    return {
        "valid": not why,
        "why": why,
        **lags,
        "processes": len(driven),
        "loop": driven[0].loop,
        "nice": max(one.nice for one in driven),
        "cpu_ms_per_request": 1000 * sum(one.cpu_s for one in driven) / len(samples) if samples else None,
    }


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _per_cent(count: int, total: int) -> float:
    return 100 * count / total if total else 0.0
