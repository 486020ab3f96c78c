"""Layer 4: which service levels an arm keeps under load, from the runs of its bench.

A level has one value in each repeat (on a fresh server each). With three repeats or more, it is met when the one-sided
bound of their mean keeps the limit, and not met when the other bound breaks it; with fewer there is no bound, and all
repeats must agree. Whatever is neither is not enough. A percentile needs ten requests beyond it in each repeat, and a
failed request counts as infinitely slow. A run whose client lagged measures the client: it is invalid, not slow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from typing import Any, Literal

from pipeline.gate.cost import Prices, Run, capacity, cost_per_million, device_name, points
from pipeline.gate.noninferiority import exact
from pipeline.gate.repeats import LEAST, over_repeats
from pipeline.gate.service import LATENCIES, Level, Service, requests_needed

Outcome = Literal["met", "not met", "not enough", "absent", "invalid"]
UNITS = {"error_rate": "%", "cpu_growth": "%", "cost": "per 1M tokens"}
GRAVITY: tuple[Outcome, ...] = ("met", "not enough", "absent", "not met", "invalid")
RUN_BENCH = "set bench.kinds in params.yaml and run `dvc repro`"
AGAIN = "measure again, `dvc repro --force --single-item bench`, then `dvc repro`"


@dataclass(frozen=True)
class Judged:
    """One level of one arm. ``value`` and bounds are in ``unit``; None where there is none, or where it is infinite."""

    level: str
    importance: str
    measure: str
    load: str
    at: str | None
    limit: str
    unit: str
    outcome: Outcome
    value: float | None
    lower: float | None
    upper: float | None
    repeats: int
    requests: int  # of the repeat with the fewest
    point: str | None
    detail: str

    def sentence(self) -> str:
        """``speed-first: met: tpot_ms p90 4.2 ms, below 5 wanted (...)``."""
        what = self.measure if self.at is None else f"{self.measure} p{self.at}"
        value = "" if self.value is None else f" {self.value:.4g}"
        return f"{self.level}: {self.outcome}: {what}{value}, {self.limit} {self.unit} wanted ({self.detail})"

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)


@dataclass(frozen=True)
class _Found:
    """What the runs say about a level: a value for each repeat, or why there is none."""

    values: Sequence[float] = ()
    requests: int = 0
    point: str | None = None
    outcome: Outcome | None = None
    detail: str = ""
    notes: tuple[str, ...] = field(default=())


def judge_levels(
    service: Service,
    bench: Mapping[str, Any] | None,
    prices: Prices,
    confidence: float,
    engine_digest: str | None = None,
) -> tuple[Judged, ...]:
    """Every level of the policy on one arm. ``bench`` is the arm's bench.json, None when it was not benched.

    ``engine_digest`` is that of the engine that is judged: a bench of other bytes is invalid.
    """
    found = []
    for name, level in service.resolved().items():
        # Several points of one kind (rates): the level must hold at each, so the gravest one speaks.
        rows = [
            _judged(name, level, service, one, confidence)
            for one in _find(level, service, bench, prices, engine_digest)
        ]
        found.append(max(rows, key=lambda row: GRAVITY.index(row.outcome)))
    return tuple(found)


def _find(
    level: Level, service: Service, bench: Mapping[str, Any] | None, prices: Prices, digest: str | None
) -> list[_Found]:
    """What there is to judge, point by point; never empty."""
    if bench is None:
        return [_Found(outcome="absent", detail=f"this arm was not benched: {RUN_BENCH}")]
    runs = [run for run in bench["runs"] if run["load"] == level.load]
    if not runs:
        return [_Found(outcome="absent", detail=f"the load `{level.load}` was not run: add it to bench.kinds")]
    if problem := _invalid(runs, service, bench, digest):
        return [_Found(outcome="invalid", detail=f"{problem}: {AGAIN}")]
    if level.measure == "cost":
        return [_cost(bench, service, prices)]
    if level.load == "sweep":
        best = capacity(runs, service.share)
        assert best is not None
        runs = points(runs, "sweep")[best.point]
    return [_measured(level, rows) for rows in points(runs, str(level.load)).values()]


def _invalid(runs: Sequence[Run], service: Service, bench: Mapping[str, Any], digest: str | None) -> str:
    """Why these runs are no evidence; empty when they are."""
    if bench["engine_digest"] != digest:
        return f"the bench is of engine {bench['engine_digest']}, not of {digest}"
    if (counted := _counting(service)) != {key: bench["service"][key] for key in counted}:
        return "service.good or service.share changed after the bench"
    return next((f"{run['point']}: {run['client']['why']}" for run in runs if not run["client"]["valid"]), "")


def _counting(service: Service) -> dict[str, Any]:
    """What a bench counted by, as its bench.json holds it."""
    good = {
        name: None if limit is None else format(limit.normalize(), "f") for name, limit in vars(service.good).items()
    }
    return {"good": good, "share": format(service.share.normalize(), "f")}


def _measured(level: Level, rows: Sequence[Run]) -> _Found:
    """The level's value in each repeat at one point."""
    point, requests = str(rows[0]["point"]), min(int(run["requests"]) for run in rows)
    if level.measure == "cpu_growth":
        growth = [run["server"]["cpu_growth"] for run in rows]
        if None in growth:
            return _Found((), requests, point, "absent", "the server's CPU was not sampled in this load")
        return _Found(growth, requests, point)
    if level.measure == "error_rate":
        counted = min([requests, *(run["spike"]["requests"] for run in rows if run["spike"])])
        percentile = min(max(100 - level.limit, Decimal(50)), Decimal("99.9"))
        values = [max([run["error_rate"], *(run["spike"]["error_rates"] if run["spike"] else ())]) for run in rows]
    else:
        assert level.at is not None
        counted, percentile = requests, level.at
        answers = [run["all_requests"][level.measure] for run in rows]
        # Below the needed count there is no number; above it a missing one lies among failed requests.
        values = [math.inf if one[f"p{level.at}"] is None else one[f"p{level.at}"] for one in answers]
    needed = requests_needed(percentile)
    if counted < needed:
        detail = f"not enough requests: {counted} of the {needed} that p{percentile} needs"
        return _Found((), counted, point, "not enough", detail)
    return _Found(values, counted, point)


def _cost(bench: Mapping[str, Any], service: Service, prices: Prices) -> _Found:
    best = capacity(bench["runs"], service.share)
    assert best is not None
    requests = min(int(run["requests"]) for run in points(bench["runs"], "sweep")[best.point])
    needed = requests_needed(Decimal(50))  # a rate is a mean, not a tail
    hourly = prices.of(bench)
    if hourly is None:
        name = device_name(bench)
        return _Found((), requests, best.point, "absent", f"no price for `{name}`: add it to prices.yaml")
    if requests < needed:
        detail = f"not enough requests: {requests} of {needed}"
        return _Found((), requests, best.point, "not enough", detail)
    tokens = best.tokens_per_s(prices.basis) if best.holds else [0.0] * len(best.requests_per_s)
    note = f"{prices.basis} tokens, {prices.currency} {hourly} an hour, {prices.utilisation} % used"
    if not best.holds:
        note = f"no point of the sweep keeps {service.share} % of its requests good; {note}"
    values = [cost_per_million(hourly, one, prices.utilisation) for one in tokens]
    return _Found(values, requests, best.point, notes=(note,))


def _judged(name: str, level: Level, service: Service, found: _Found, confidence: float) -> Judged:
    outcome, detail, lower, upper, value = found.outcome, found.detail, None, None, None
    if outcome is None:
        spread = over_repeats(found.values, confidence)
        lower, upper = spread.lower, spread.upper
        value = spread.mean if math.isfinite(spread.mean) else None
        outcome, why = _against(level, found.values, lower, upper)
        if level.importance == "critical" and spread.repeats < service.repeats:
            outcome = "not enough"
            why = f"a critical level needs {service.repeats} repeats (bench.repeats), this bench has {spread.repeats}"
        detail = "; ".join(filter(None, (why, *found.notes)))
    assert level.measure is not None and level.load is not None
    return Judged(
        level=name,
        importance=level.importance,
        measure=level.measure,
        load=level.load,
        at=None if level.at is None else str(level.at),
        limit=f"{'below' if level.below is not None else 'at most'} {level.limit:f}",
        unit="ms" if level.measure in LATENCIES else UNITS[level.measure],
        outcome=outcome,
        value=value,
        lower=lower,
        upper=upper,
        repeats=len(found.values),
        requests=found.requests,
        point=found.point,
        detail=detail,
    )


def _against(level: Level, values: Sequence[float], lower: float | None, upper: float | None) -> tuple[Outcome, str]:
    """The outcome of one value a repeat against the limit, and what stands behind it."""
    shown = ", ".join("infinite" if math.isinf(value) else f"{value:.4g}" for value in values)
    if lower is not None and upper is not None:
        bounds = f"{len(values)} repeats, bounds {lower:.4g} to {upper:.4g}"
        if level.keeps(exact(upper)):
            return "met", bounds
        return (
            ("not enough", f"{bounds}: neither shown nor refuted") if level.keeps(exact(lower)) else ("not met", bounds)
        )
    note = f"{shown} in {len(values)} repeat{'s' if len(values) > 1 else ''}"
    note += f": no interval below {LEAST} repeats" if len(values) < LEAST else ""
    kept = [math.isfinite(value) and level.keeps(exact(value)) for value in values]
    if all(kept):
        return "met", note
    return ("not enough", f"{note}; the repeats disagree") if any(kept) else ("not met", note)
