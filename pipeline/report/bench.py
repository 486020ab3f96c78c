"""The bench part of the report's data: latencies over repeats, levels, cost, fleet, recommendation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from pipeline.bench.fleet import PRICES_FILE, One, PriceFile, Shape, fleet_rows, load_prices, nodes_needed, one_server
from pipeline.bench.fleet import wanted_rate as wanted_rate_of
from pipeline.bench.recommend import recommend
from pipeline.bench.records import FILE, FOLDER, read_bench
from pipeline.files import read_json
from pipeline.gate.cost import capacity, cost_per_million, points
from pipeline.gate.repeats import over_repeats

BASELINE = "baseline"
KINDS = ("sweep", "constant", "poisson", "spike", "replay")
TWO_SIDED = 0.975  # of each bound of a 95 % interval
LATENCY = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")


def bench_data(root: Path, verdicts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Everything about the bench of the run in ``root``; None when nothing was benched."""
    if not (root / FOLDER / FILE).exists():
        return None
    names = read_json(root / FOLDER / FILE)["arms"]
    arms = {name: bench for name in names if (bench := read_bench(root, name)) is not None}
    if not arms:
        return None
    file = load_prices(root / PRICES_FILE)
    share = Decimal(next(iter(arms.values()))["service"]["share"])
    return {
        "arms": [_arm(name, bench) for name, bench in arms.items()],
        "settings": next(iter(arms.values()))["settings"],
        "service": next(iter(arms.values()))["service"],
        "latency": list(_latency(arms)),
        "sweep": {name: _sweep(bench) for name, bench in arms.items()},
        "spikes": [spike for name, bench in arms.items() if (spike := _spike(name, bench)) is not None],
        "levels": _levels(verdicts, [name for name in arms if name != BASELINE]),
        "cost": [_cost(name, bench, share, file) for name, bench in arms.items()],
        "prices": _prices(file),
        "fleet": _fleet(root, arms, share, file),
        "recommendations": [
            recommend(name, verdict["verdict"], arms.get(BASELINE), arms[name], share=share, prices=file.prices).plain()
            for name, verdict in verdicts.items()
            if name in arms
        ],
    }


def number(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean and 95 % interval of one number over repeats; nothing where a repeat has none (not enough requests)."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return {"value": None, "lower": None, "upper": None, "repeats": len(values)}
    found = over_repeats(known, TWO_SIDED)
    return {"value": found.mean, "lower": found.lower, "upper": found.upper, "repeats": found.repeats}


def _arm(name: str, bench: Mapping[str, Any]) -> dict[str, Any]:
    runs = bench["runs"]
    gpu = [run["gpu"] for run in runs if run["gpu"]]
    return {
        "name": name,
        "backend": bench["backend"],
        "dtype": bench["dtype"],
        "engine_digest": bench["engine_digest"],
        "devices": bench["devices"],
        "start_s": _over_loads(runs, "start_s"),
        "cpu_cores": _over_loads(runs, "cpu_cores"),
        "cores": bench["cores"],
        "rss": max((run["server"]["rss"] for run in runs if run["server"]["rss"]), default=None),
        "gpu": {
            "memory": max((one["memory"] for one in gpu if one["memory"] is not None), default=None),
            **{
                name: _mean([one[name] for one in gpu if one[name] is not None])
                for name in ("utilisation", "power_w", "energy_per_token_j")
            },
        }
        if gpu
        else None,
        "died": sum(run["server"]["died"] for run in runs),
        "invalid": [f"{run['point']}: {run['client']['why']}" for run in runs if not run["client"]["valid"]],
        "client": {
            "loop_lag_ms": max(run["client"]["loop_lag_ms"] for run in runs),
            "sent_late_ms": max(run["client"]["sent_late_ms"] for run in runs),
        },
    }


def _over_loads(runs: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """A number of the server: the mean over the loads of each repeat, then over the repeats."""
    repeats: dict[int, list[float | None]] = {}
    for run in runs:
        repeats.setdefault(run["repeat"], []).append(run["server"][name])
    return number([_mean([v for v in values if v is not None]) for values in repeats.values()])


def _latency(arms: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for each point of load and arm, arms side by side."""
    found: dict[tuple[str, str], dict[str, list[Any]]] = {}
    for name, bench in arms.items():
        for kind in KINDS:
            for point, runs in points(bench["runs"], kind).items():
                found.setdefault((kind, point), {})[name] = runs
    for (kind, point), by_arm in found.items():
        for name, runs in by_arm.items():
            yield {
                "load": kind,
                "point": point,
                "arm": name,
                "repeats": len(runs),
                "valid": all(run["client"]["valid"] for run in runs),
                "requests": sum(run["requests"] for run in runs),
                "failed": sum(run["failed"] for run in runs),
                "failures": _added(run["failures"] for run in runs),
                "requests_per_s": number([run["throughput"]["requests_per_s"] for run in runs]),
                "output_tokens_per_s": number([run["throughput"]["output_tokens_per_s"] for run in runs]),
                "good_share": number([run["good"]["share"] for run in runs]),
                "good_per_s": number([run["good"]["requests_per_s"] for run in runs]),
                **{
                    measure: {
                        key: number([run["latency"][measure][key] for run in runs])
                        for key in ("mean", "p50", "p90", "p95", "p99", "p99.9")
                    }
                    for measure in LATENCY
                },
            }


def _sweep(bench: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The points of the sweep for the plots; medians where there are enough requests."""
    rows = []
    for runs in points(bench["runs"], "sweep").values():
        rows.append(
            {
                "concurrency": runs[0]["weight"],
                "output_tokens_per_s": _mean([run["throughput"]["output_tokens_per_s"] for run in runs]),
                **{
                    name: number([run["latency"][name]["p50"] for run in runs])["value"]
                    for name in ("ttft_ms", "tpot_ms")
                },
            }
        )
    return rows


def _spike(name: str, bench: Mapping[str, Any]) -> dict[str, Any] | None:
    """The spike second by second (first repeat), and its numbers over the repeats."""
    runs = [run for run in bench["runs"] if run["spike"]]
    if not runs:
        return None
    recovered = [run["spike"]["recovery_s"] for run in runs]
    return {
        "arm": name,
        "point": runs[0]["point"],
        "peak": [runs[0]["spike"]["begin_s"], runs[0]["spike"]["end_s"]],
        "slices": runs[0]["slices"],
        "peak_errors": number([run["spike"]["error_rates"][0] for run in runs]),
        "window_errors": number([run["spike"]["error_rates"][1] for run in runs]),
        "worst_second": max(run["spike"]["worst_second"] for run in runs),
        "recovery_s": None if None in recovered else _mean(recovered),
        "cpu_growth": number([run["server"]["cpu_growth"] for run in runs]),
        "failures": _added(run["failures"] for run in runs),
        "valid": all(run["client"]["valid"] for run in runs),
    }


def _levels(verdicts: Mapping[str, Mapping[str, Any]], benched: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each level, a cell for each arm."""
    chosen = {name: verdicts[name]["service"] for name in benched if name in verdicts}
    if not chosen:
        return []
    first = next(iter(chosen.values()))
    rows = []
    for place, level in enumerate(first["baseline"]):
        cells = {BASELINE: level} | {name: service["candidate"][place] for name, service in chosen.items()}
        keys = ("level", "importance", "measure", "load", "at", "limit", "unit")
        rows.append({**{key: level[key] for key in keys}, "arms": cells})
    return rows


def _cost(name: str, bench: Mapping[str, Any], share: Decimal, file: PriceFile) -> dict[str, Any]:
    """What one server carries and what a million tokens cost on it."""
    best, hourly = capacity(bench["runs"], share), file.prices.of(bench)
    row: dict[str, Any] = {"arm": name, "hourly": None if hourly is None else float(hourly), "point": None}
    if best is None:
        return row | {"holds": False, "share": None, "requests_per_s": None, "tokens_per_s": None, "cost": None}
    tokens = best.tokens_per_s(file.prices.basis)
    costs = [cost_per_million(hourly, rate, file.prices.utilisation) for rate in tokens] if hourly is not None else []
    return row | {
        "point": best.point,
        "holds": best.holds,
        "share": best.share,
        "requests_per_s": number(best.requests_per_s),
        "tokens_per_s": number(tokens),
        "cost": number(costs) if best.holds and costs and all(map(math.isfinite, costs)) else None,
    }


def _prices(file: PriceFile) -> dict[str, Any]:
    prices = file.prices
    return {"currency": prices.currency, "basis": prices.basis, "utilisation": float(prices.utilisation)}


def _fleet(root: Path, arms: Mapping[str, Mapping[str, Any]], share: Decimal, file: PriceFile) -> dict[str, Any] | None:
    """Servers and cost for the wanted rate; None when no arm keeps the service level."""
    servers = {name: one for name, bench in arms.items() if (one := one_server(bench, share, file.prices)) is not None}
    wanted = wanted_rate_of(file.fleet, servers.get(BASELINE), list(servers.values()))
    if wanted is None:
        return None
    shape = _shape(root)
    rows = [row for one in servers.values() for row in fleet_rows(one, wanted, file.fleet, shape)]
    return {
        "wanted": wanted,
        "headroom": file.fleet.headroom,
        "network": {key: float(value) for key, value in vars(file.fleet.network).items()},
        "balance": file.fleet.balance,
        "needed": [_needed(one, wanted, file) for one in servers.values()],
        "rows": [row.plain() for row in rows],
    }


def _needed(one: One, wanted: float, file: PriceFile) -> dict[str, Any]:
    nodes = nodes_needed(one, wanted, file.fleet)
    return {
        "arm": one.arm,
        "nodes": nodes,
        "cost_per_hour": None if one.hourly is None else float(one.hourly) * nodes,
    }


def _shape(root: Path) -> Shape | None:
    """Layers and width of the checkpoint, for the model of sharding."""
    config = root / "artifacts/checkpoint/config.json"
    if not config.exists():
        return None
    content = read_json(config)
    content = content.get("text_config", content)
    found = content.get("num_hidden_layers"), content.get("hidden_size")
    return Shape(*found) if all(isinstance(value, int) for value in found) else None


def _added(counts: Any) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in counts:
        for name, count in one.items():
            total[name] = total.get(name, 0) + count
    return dict(sorted(total.items()))


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
