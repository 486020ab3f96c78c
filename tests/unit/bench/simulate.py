"""Servers that exist as arithmetic alone: so many rows at a time, so long to the first token, so long a token.

A load played against one gives samples whose latencies can be worked out by hand, and a whole bench of plausible
numbers for the report and the gate.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.bench.drive import Driven, Sample
from pipeline.bench.gpus import Gpu
from pipeline.bench.load import Load, Prompts, make_loads
from pipeline.bench.measure import client_state, measure
from pipeline.bench.records import ArmBench, Run
from pipeline.bench.telemetry import Snapshot, cpu_cores, summary
from pipeline.gate.policy import Policy
from pipeline.params import Bench, Rates, Spike, Sweep
from pipeline.records import Item

ITEMS = [Item(f"item-{place}", "s", "r", tuple(range(5, 25 + place % 7))) for place in range(40)]
BENCH = Bench(
    kinds=("sweep", "poisson", "spike"),
    repeats=3,
    new_tokens=16,
    timeout_s=4,
    sweep=Sweep((1, 4, 16), 30),
    poisson=Rates((6,), 40),
    spike=Spike(base=4, peak=40, scale=1, before_s=6, peak_s=5, after_s=15),
)


@dataclass(frozen=True)
class Machine:
    """``rows`` requests at a time; seconds to the first token and for each further one."""

    rows: int
    first_s: float
    token_s: float
    cores: float = 1.5
    start_s: float = 9.0

    def play(self, load: Load, timeout_s: float) -> list[Sample]:
        """What a client would see."""
        return self._open(load, timeout_s) if load.due is not None else self._closed(load)

    def _answer(self, load: Load, place: int, due: float, begin: float, burst: bool = False) -> Sample:
        request = load.requests[place % len(load.requests)]
        tokens = tuple(begin - due + self.first_s + self.token_s * turn for turn in range(request.max_tokens))
        length = len(request.prompt_token_ids)
        return Sample(request.id, length, due, due, due + tokens[-1], tokens, burst=burst)

    def _open(self, load: Load, timeout_s: float) -> list[Sample]:
        free = [0.0] * self.rows
        samples = []
        for place, due in enumerate(load.due or ()):
            begin = max(due, heapq.heappop(free))
            sample = self._answer(load, place, due, begin)
            if sample.end_s - due > timeout_s:
                late = Sample(sample.item, sample.prompt_tokens, due, due, due + timeout_s, (), "timeout", "too late")
                samples.append(late)
                heapq.heappush(free, min(begin, due + timeout_s))  # the client has gone, the row is free
            else:
                samples.append(sample)
                heapq.heappush(free, sample.end_s)
        return samples

    def _closed(self, load: Load) -> list[Sample]:
        slots = [(0.0, slot) for slot in range(load.concurrency)]
        free = [0.0] * self.rows
        seen: set[int] = set()
        samples: list[Sample] = []
        while slots:
            now, slot = heapq.heappop(slots)
            if now >= load.seconds:
                continue
            begin = max(now, heapq.heappop(free))
            sample = self._answer(load, len(samples), now, begin, burst=slot not in seen)
            seen.add(slot)
            samples.append(sample)
            heapq.heappush(free, sample.end_s)
            heapq.heappush(slots, (sample.end_s, slot))
        return samples


def about(
    arm: str, digest: str | None, bench: Bench = BENCH, policy: Policy | None = None, **more: Any
) -> dict[str, Any]:
    """What the stage writes about an arm."""
    baseline = arm == "baseline"
    found = {
        "arm": arm,
        "backend": "vllm" if baseline else "onnxruntime",
        "dtype": "float32" if baseline else "int8 (rest float32)",
        "engine_digest": digest,
        "limits": {"max_tokens": 512} if baseline else {"max_tokens": 512, "max_batch": 16},
        "device": {"gpu": None, "cpu": "x86_64"},
        "cores": 2,
        "settings": asdict(bench),
        "service": (policy or Policy()).plain()["service"],
    }
    return found | more


def benched(
    arm: str, machines: Sequence[Machine], digest: str | None = None, bench: Bench = BENCH, **more: Any
) -> ArmBench:
    """A whole bench: one machine a repeat."""
    found = ArmBench(about(arm, digest, bench, **more))
    for repeat, machine in enumerate(machines):
        for load in make_loads(bench, Prompts(ITEMS, bench.new_tokens, 512), 17, repeat):
            samples = machine.play(load, bench.timeout_s)
            found.runs.append(played(load, samples, machine, repeat=repeat))
    return found


def played(load: Load, samples: list[Sample], machine: Machine, *, repeat: int = 0, lag_s: float = 0.001) -> Run:
    """One run as ``pipeline.bench.run`` makes it."""
    snapshots = [_snapshot(load, samples, machine, at / 2) for at in range(int(2 * load.seconds) + 2)]
    service = Policy().service
    numbers = measure(load, samples, service.good, service.share)
    seen = summary(snapshots, 0.0, load.seconds, sum(len(sample.tokens_s) for sample in samples))
    driven = [Driven(samples, [lag_s] * 100, 0.0006 * len(samples), "asyncio")]
    growth = None
    if load.peak:
        before, during = cpu_cores(snapshots, 0, load.peak[0]), cpu_cores(snapshots, *load.peak)
        assert before and during
        growth = 100 * (during / before - 1)
    server = {
        "start_s": machine.start_s,
        "devices": 1,
        "cpu_cores": seen["cpu_cores"],
        "cpu_growth": growth,
        "rss": seen["rss"],
    }
    plain = {
        **{"load": load.kind, "point": load.point, "weight": load.weight, "repeat": repeat, "seconds": load.seconds},
        **{"requests_planned": None if load.due is None else len(load.due)},
        **numbers,
        "client": client_state(load, driven, 5, len(load.due or ())),
        "server": server | {"died": False},
        "gpu": seen["gpu"],
        "metrics": seen["metrics"],
    }
    return Run(plain, samples, snapshots, 0.0)


def _snapshot(load: Load, samples: Sequence[Sample], machine: Machine, at: float) -> Snapshot:
    peak = 0.2 * max(0.0, min(at, load.peak[1]) - load.peak[0]) if load.peak else 0.0  # a fifth of a core more
    done = [sample for sample in samples if not sample.failure and sample.end_s <= at]
    begun = {id(sample): sample.sent_s + sample.tokens_s[0] - machine.first_s for sample in samples if sample.tokens_s}
    metrics = {
        "running": float(sum(begin <= at < sample.end_s for sample in samples if (begin := begun.get(id(sample))))),
        "waiting": float(sum(sample.due_s <= at < begun.get(id(sample), sample.end_s) for sample in samples)),
        "kv_cache": 0.4,
        "preemptions": 0.0,
        "queue_s": sum(begun[id(sample)] - sample.due_s for sample in done),
        "prefill_s": machine.first_s * len(done),
        "decode_s": sum(sample.tokens_s[-1] - sample.tokens_s[0] for sample in done),
        "finished": float(len(done)),
    }
    return Snapshot(at, machine.cores * at + peak, 900_000_000, None, metrics)


def gpu(at: float) -> tuple[Gpu, ...]:
    """A GPU that draws 500 W."""
    return (Gpu(80.0, 40 * 2**30, 500.0, 500.0 * at),)
