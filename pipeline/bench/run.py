"""Benches an arm: for each load a warm-up, then the load with telemetry beside it, then its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from pipeline.bench.drive import Part
from pipeline.bench.gpus import Nvml
from pipeline.bench.load import Load
from pipeline.bench.measure import client_state, measure
from pipeline.bench.records import Run
from pipeline.bench.telemetry import Snapshot, Telemetry, cpu_cores, summary
from pipeline.bench.workers import Workers, parts, workers_for
from pipeline.errors import ServerError
from pipeline.gate.service import Service
from pipeline.params import Bench
from pipeline.serving.info import served_model
from pipeline.serving.process import Server, healthy

WARMUP_SLOTS = 16  # requests in flight in the warm-up of an open loop
SHOWN = {"TTFT": "ttft_ms", "TPOT": "tpot_ms", "end to end": "e2e_ms"}
IDLE_CORES = 0.01  # a server that used less before the spike was idle: growth from nothing is no number


@dataclass(frozen=True)
class Setting:
    """What all runs of a bench share."""

    bench: Bench
    service: Service
    workers: Workers
    nvml: Nvml | None


def bench_arm(
    serve: Callable[[], AbstractContextManager[Server]], loads: Sequence[Load], setting: Setting, repeat: int
) -> Iterator[Run]:
    """The runs of ``loads`` on one fresh server, one after another, and on another one after it has died.

    Raises ServerError when a server does not start, or when its warm-up fails: then nothing can be measured.
    """
    left = list(loads)
    while left:
        with serve() as server:
            model, alive = served_model(server), True
            while left and alive:
                load = left.pop(0).speaking(server.dialect)
                _warm_up(server, model, load, setting)
                run = _run(server, model, load, setting, repeat)
                alive = all(map(healthy, (server, *server.others)))
                run.numbers["server"]["died"] = not alive
                yield run


def _warm_up(server: Server, model: str, load: Load, setting: Setting) -> None:
    bench = setting.bench
    if not bench.warmup:
        return
    slots = min(load.concurrency or WARMUP_SLOTS, bench.warmup)
    part = Part(server.url, model, load.requests, None, slots, bench.timeout_s, bench.timeout_s, count=bench.warmup)
    _, (driven,) = setting.workers.run([part])
    failed = [sample for sample in driven.samples if sample.failure]
    if len(failed) == len(driven.samples):
        raise ServerError(f"every request of the warm-up failed: {failed[0].detail}", "see the server's log")


def _run(server: Server, model: str, load: Load, setting: Setting, repeat: int) -> Run:
    bench = setting.bench
    shares = parts(load, server.urls, model, bench.timeout_s, bench.workers or workers_for(load))
    telemetry = Telemetry(server, setting.nvml)
    with telemetry.sampling(bench.telemetry_s) as snapshots:
        start, driven = setting.workers.run(shares)
    samples = [sample for one in driven for sample in one.samples]
    numbers = measure(load, samples, setting.service.good, setting.service.share)
    end, window_s = start + load.seconds, numbers["window_s"]
    tokens = round(numbers["throughput"]["output_tokens_per_s"] * window_s)
    found = summary(snapshots, end - window_s, end, tokens)
    numbers = {
        "load": load.kind,
        "point": load.point,
        "weight": load.weight,
        "repeat": repeat,
        "seconds": load.seconds,
        "requests_planned": None if load.due is None else len(load.due),
        **numbers,
        "client": client_state(load, driven, bench.max_lag_ms, len(load.due or ())),
        "server": {
            "start_s": server.start_s,
            "devices": sum(one.gpus for one in (server, *server.others)),
            "cpu_cores": found["cpu_cores"],
            "cpu_growth": _growth(load, snapshots, start),
            "rss": found["rss"],
        },
        "gpu": found["gpu"],
        "metrics": found["metrics"],
    }
    return Run(numbers, samples, list(snapshots), start)


def _growth(load: Load, snapshots: Sequence[Snapshot], start: float) -> float | None:
    """The server's CPU in the spike over that before it, as growth in per cent; None without a spike, or unseen."""
    if load.peak is None:
        return None
    begin, end = load.peak
    before = cpu_cores(snapshots, start, start + begin)
    during = cpu_cores(snapshots, start + begin, start + end)
    if before is None or during is None or before < IDLE_CORES:
        return None
    return 100 * (during / before - 1)


def in_turn(arms: Sequence[str], repeat: int) -> list[str]:
    """The arms of a repeat: forwards, then backwards, and so on, so that what drifts (heat, neighbours) strikes all."""
    return list(arms) if repeat % 2 == 0 else list(reversed(arms))


def line(run: Run) -> str:
    """One run in a line for a terminal."""
    numbers = run.numbers
    latency, client = numbers["latency"], numbers["client"]
    medians = ", ".join(
        f"{name} {latency[key]['p50']:.1f} ms" for name, key in SHOWN.items() if latency[key]["p50"] is not None
    )
    words = [
        f"{numbers['point']}: {numbers['throughput']['requests_per_s']:.1f} requests/s",
        f"{numbers['failed']} of {numbers['requests']} failed",
        f"median {medians}" if medians else "not enough requests for a median",
    ]
    return ", ".join(words) + ("" if client["valid"] else f"; INVALID: {client['why']}")
