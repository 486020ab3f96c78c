"""Where the time of an arm's requests goes, and what is likely to cost it. Pure: from a bench.json to findings.

Each finding names the load, the numbers that speak for it, and what to try. A cause is likely, never proven: two loads
that differ in nothing but the suspect prove it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.gate.cost import points

Run = Mapping[str, Any]
KINDS = ("sweep", "constant", "poisson", "spike", "replay")
KV_FULL = 0.95  # share of the KV cache
WAITED = 0.1  # share of a request's time in the queue from which a limit of the batch is felt
QUEUE_SHARE = 0.5  # of a request's time
STALL_RATIO = 4.0  # p99 of the inter-token time over its median
GPU_IDLE = 60.0  # per cent utilisation below which a GPU waits for something
ONE_CORE = 0.9  # cores: one thread of a server is busy
DRIFT = 1.5  # first seconds over last seconds
LIMIT_WORDS = ("exceed", "profile", "max_model_len", "limit", "too long", "maximum")


@dataclass(frozen=True)
class Shares:
    """Mean milliseconds of a request at one point of load, and their parts. Parts are None where nothing tells them.

    ``queue``, ``prefill`` and ``decode`` are the server's own; ``rest`` is what the client saw beyond them: sending,
    HTTP, the client itself.
    """

    point: str
    requests: int
    e2e_ms: float | None
    ttft_ms: float | None
    queue_ms: float | None
    prefill_ms: float | None
    decode_ms: float | None
    rest_ms: float | None


@dataclass(frozen=True)
class Cause:
    """One likely cause."""

    name: str
    point: str
    evidence: str
    advice: str


@dataclass(frozen=True)
class Diagnosis:
    """One arm's page as data."""

    arm: str
    backend: str
    shares: tuple[Shares, ...]
    causes: tuple[Cause, ...]
    slowest: tuple[dict[str, Any], ...]  # with their point
    failures: tuple[dict[str, Any], ...]
    layers: tuple[dict[str, Any], ...]  # name, precision and milliseconds of a step, longest first

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)


def diagnose(bench: Mapping[str, Any], layers: Sequence[Mapping[str, Any]] = ()) -> Diagnosis:
    """The diagnosis of one arm. ``layers`` are the engine's per-layer times (``name``, ``precision`` and ``ms`` of a
    step), where they were measured."""
    runs: Sequence[Run] = bench["runs"]
    grouped = [rows for kind in KINDS for rows in points(runs, kind).values()]
    causes = [cause for rows in grouped for cause in _causes(rows, bench)]
    slowest = [row | {"point": run["point"], "repeat": run["repeat"]} for run in runs for row in run["slowest"]]
    slowest.sort(key=lambda row: row["end_s"] - row["due_s"], reverse=True)
    return Diagnosis(
        arm=str(bench["arm"]),
        backend=str(bench["backend"]),
        shares=tuple(map(_shares, grouped)),
        causes=tuple(causes),
        slowest=tuple(slowest[:10]),
        failures=tuple(
            {"point": run["point"], "kind": kind, "count": count, "examples": run["failure_details"].get(kind, [])}
            for run in runs
            for kind, count in run["failures"].items()
        ),
        layers=tuple(sorted(map(dict, layers), key=lambda row: float(row["ms"]), reverse=True)),
    )


def _shares(rows: Sequence[Run]) -> Shares:
    means = {name: _mean([run["latency"][name]["mean"] for run in rows]) for name in ("e2e_ms", "ttft_ms")}
    parts = {name: _server_ms(rows, name) for name in ("queue_s", "prefill_s", "decode_s")}
    known = [value for value in parts.values() if value is not None]
    whole = means["e2e_ms"]
    return Shares(
        point=str(rows[0]["point"]),
        requests=sum(run["requests"] for run in rows),
        e2e_ms=whole,
        ttft_ms=means["ttft_ms"],
        queue_ms=parts["queue_s"],
        prefill_ms=parts["prefill_s"],
        decode_ms=parts["decode_s"],
        # Both sides count a little differently (the server also requests that failed for the client): never below 0.
        rest_ms=max(0.0, whole - sum(known)) if whole is not None and len(known) == len(parts) else None,
    )


def _server_ms(rows: Sequence[Run], name: str) -> float | None:
    """Mean milliseconds of one part for each request that the server finished."""
    metrics = [run["metrics"] for run in rows if run["metrics"]]
    finished = sum(one.get("finished", 0.0) for one in metrics)
    if not finished or any(name not in one for one in metrics):
        return None
    return float(1000 * sum(one[name] for one in metrics) / finished)


def _causes(rows: Sequence[Run], bench: Mapping[str, Any]) -> Iterator[Cause]:
    """Everything that speaks at one point of load, the gravest first."""
    point = str(rows[0]["point"])
    for find in (_died, _client, _refused, _preempted, _cache_full, _batch_limit, _queue, _cpu, _stalls, _warming):
        if (found := find(rows, bench)) is not None:
            name, evidence, advice = found
            yield Cause(name, point, evidence, advice)


Finding = tuple[str, str, str] | None


def _died(rows: Sequence[Run], _bench: Mapping[str, Any]) -> Finding:
    dead = sum(run["server"]["died"] for run in rows)
    if not dead:
        return None
    return (
        "the server died",
        f"it no longer answered its health check after {dead} of {len(rows)} runs",
        "see the end of its log in logs/; out of memory is the usual reason: lower the batch or the KV cache",
    )


def _client(rows: Sequence[Run], _bench: Mapping[str, Any]) -> Finding:
    lagged = [run["client"]["why"] for run in rows if not run["client"]["valid"]]
    if not lagged:
        return None
    return "the client lagged", lagged[0], "these numbers measure the client: give it a core, or raise bench.workers"


def _refused(rows: Sequence[Run], _bench: Mapping[str, Any]) -> Finding:
    refused = [
        text
        for run in rows
        for text in run["failure_details"].get("HTTP 400", ())
        if any(word in text.lower() for word in LIMIT_WORDS)
    ]
    if not refused:
        return None
    return (
        "profile limit",
        f"requests were refused because of a limit: {refused[0]}",
        "build the engine for longer prompts (engine.max_tokens), or send shorter ones",
    )


def _preempted(rows: Sequence[Run], _bench: Mapping[str, Any]) -> Finding:
    count = _sum(rows, "preemptions")
    if not count:
        return None
    full = _highest(rows, "kv_cache")
    cache = f", the KV cache was {100 * full:.0f} % full" if full is not None else ""
    return (
        "preemption",
        f"{count:.0f} requests lost their KV cache and were computed again{cache}",
        "give the KV cache more memory, use an 8-bit KV cache, or allow fewer requests at a time",
    )


def _cache_full(rows: Sequence[Run], _bench: Mapping[str, Any]) -> Finding:
    full = _highest(rows, "kv_cache")
    if full is None or full < KV_FULL:
        return None
    return (
        "KV cache full",
        f"the KV cache was {100 * full:.0f} % full at its highest",
        "new requests wait until others end: more memory for the cache, or more servers",
    )


def _batch_limit(rows: Sequence[Run], bench: Mapping[str, Any]) -> Finding:
    running, waiting, full = (_highest(rows, name) for name in ("running", "waiting", "kv_cache"))
    limit = bench["limits"].get("max_batch")
    shares = _shares(rows)
    if not waiting or running is None:
        return None
    if shares.queue_ms is not None and shares.e2e_ms and shares.queue_ms < WAITED * shares.e2e_ms:
        return None  # a request that came between two steps waits for the next one: that is no limit
    at_limit = running >= limit if limit else (full is not None and full < KV_FULL)
    if not at_limit:
        return None
    named = f"the engine's max_batch of {limit}" if limit else f"{running:.0f}, with room in the KV cache"
    return (
        "batch limit",
        f"{waiting:.0f} requests waited while {running:.0f} ran: {named}",
        "raise engine.max_batch (vLLM: --max-num-seqs), if a larger batch still keeps the time per token",
    )


def _queue(rows: Sequence[Run], _bench: Mapping[str, Any]) -> Finding:
    shares = _shares(rows)
    if shares.queue_ms is None or not shares.e2e_ms or shares.queue_ms < QUEUE_SHARE * shares.e2e_ms:
        return None
    return (
        "overload",
        f"a request waits {shares.queue_ms:.0f} of its {shares.e2e_ms:.0f} ms in the queue",
        "this load is more than one server carries: see the fleet view for how many do",
    )


def _cpu(rows: Sequence[Run], bench: Mapping[str, Any]) -> Finding:
    cores = _mean([run["server"]["cpu_cores"] for run in rows])
    if cores is None:
        return None
    gpus = [run["gpu"]["utilisation"] for run in rows if run["gpu"] and run["gpu"]["utilisation"] is not None]
    if gpus:
        if statistics.fmean(gpus) >= GPU_IDLE or cores < ONE_CORE:
            return None
        return (
            "CPU-bound server",
            f"the GPU was used {statistics.fmean(gpus):.0f} % while the server's processes used {cores:.1f} cores",
            "tokenizer, scheduler or HTTP hold the GPU up: send token ids, more API processes, faster cores",
        )
    if bench["device"].get("gpu") is not None or cores < ONE_CORE * bench["cores"]:
        return None
    return (
        "all cores busy",
        f"the server used {cores:.1f} of {bench['cores']} cores",
        "the CPU is the device here: more cores, or a smaller precision",
    )


def _stalls(rows: Sequence[Run], _bench: Mapping[str, Any]) -> Finding:
    pairs = [(run["latency"]["itl_ms"]["p50"], run["latency"]["itl_ms"]["p99"]) for run in rows]
    ratios = [high / low for low, high in pairs if low and high]
    if len(ratios) < len(rows) or statistics.fmean(ratios) < STALL_RATIO:
        return None
    return (
        "stalls between tokens",
        f"the 99th percentile of the time between tokens is {statistics.fmean(ratios):.1f} times its median",
        "prompts of others are read between: smaller prefill chunks (vLLM: --max-num-batched-tokens)",
    )


def _warming(rows: Sequence[Run], _bench: Mapping[str, Any]) -> Finding:
    """Steady loads whose first quarter is slower than their last."""
    if rows[0]["load"] in ("spike", "replay"):
        return None
    ratios = []
    for run in rows:
        seen = [row["ttft_ms"] for row in run["slices"] if row["ttft_ms"] is not None]
        quarter = len(seen) // 4
        if quarter:
            ratios.append(statistics.median(seen[:quarter]) / statistics.median(seen[-quarter:]))
    if len(ratios) < len(rows) or min(ratios) < DRIFT:
        return None
    return (
        "still warming up",
        f"TTFT in the first quarter of the run is {statistics.fmean(ratios):.1f} times that of the last",
        "raise bench.warmup: the server still compiles or fills caches while it is measured",
    )


def _sum(rows: Sequence[Run], name: str) -> float:
    return float(sum((run["metrics"] or {}).get(name, 0.0) for run in rows))


def _highest(rows: Sequence[Run], name: str) -> float | None:
    return max((run["metrics"][name] for run in rows if run["metrics"] and name in run["metrics"]), default=None)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None
