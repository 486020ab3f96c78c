"""vLLM on one and two GPUs: 16-bit, FP8 and INT8; one model sharded over both against one replica on each. And, by the
same client, TensorRT engines behind ``enginegate serve``.

    python -m benchmarks.gpu.vllm_bench h200x2 --vllm vllm --models FOLDER --out FOLDER --limit-s 330
    python -m benchmarks.gpu.vllm_bench h200 ...    (one GPU)
    python -m benchmarks.gpu.vllm_bench h200-engines --models ENGINES ...    (what run86.sh built)
    python -m benchmarks.gpu.vllm_bench dry --vllm .venv-vllm/bin/vllm --models FOLDER --out FOLDER    (on a CPU)
    python -m benchmarks.gpu.vllm_bench table FOLDER/results.json --hourly 4

FOLDER of ``--models`` holds what ``benchmarks.gpu.vllm_models`` wrote. All servers start together and stay up; they are
asked one after another, so that one machine's start pays for all. Each answer is 128 tokens for a prompt of 128. Every
number goes to ``results.json`` as soon as it is known; the last line of the output is that file's name and length.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from pipeline.bench.load import Load, Prompts, sweep
from pipeline.bench.measure import client_state, measure
from pipeline.bench.workers import Workers, client, parts
from pipeline.errors import ServerError
from pipeline.files import read_json, write_json
from pipeline.gate.cost import cost_per_million
from pipeline.gate.service import Good
from pipeline.params import Baseline
from pipeline.records import Item
from pipeline.serving.process import Server, ServerCommand, choose_port, starting
from pipeline.serving.scoring import Forced, score
from pipeline.serving.vllm import vllm_command

PROMPT, NEW = 128, 128
SECONDS = {1: 2.5, 2: 2.5, 8: 2.5, 32: 3.0, 128: 4.5, 256: 6.0}  # by requests in flight
WARM_UP, WARM_UP_S = 32, 2.0
SLOTS = 8  # in flight for one client process: 16 lagged at 500 tokens a second each
START_S = 240  # from the first server's start to the last one's health
GIB = 2**30
# Leave NVLink multicast off: NCCL_NVLS_ENABLE and the like stay as the machine has them.
ENV = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
KEPT = re.compile(  # lines of a server's log that say what it did
    r"Model loading took|KV cache size|Graph capturing finished|torch.compile took|Initial free memory|init engine"
    r"|custom.all.?reduce|Using .*(backend|kernel)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Arm:
    """One ``vllm serve``: a model folder, the GPUs that it may use and further arguments. ``engine``: an engine folder
    instead, served by ``tensorrt86.sh``."""

    name: str
    model: str
    gpus: str = ""
    kv_gib: float = 1.0
    args: tuple[str, ...] = ()
    parallel: int = 1
    engine: bool = False


@dataclass(frozen=True)
class Round:
    """Arms that are asked at the same time (each on GPUs of its own); ``together``: as replicas of one service."""

    name: str
    arms: tuple[str, ...]
    levels: tuple[int, ...]
    together: bool = False


DUMMY = ("--load-format", "dummy", "--cudagraph-capture-sizes", *map(str, (1, 2, 4, 8, 16, 32, 64, 128, 256)))
EAGER = ("--enforce-eager",)
FP8_CACHE = (*EAGER, "--kv-cache-dtype", "fp8", "--dtype", "bfloat16")
ARMS = {
    "h200x2": (
        Arm("7b-fp16", "7b", "0", 34, DUMMY),
        Arm("7b-fp16-b", "7b", "1", 34, DUMMY),
        Arm("7b-fp16-tp2", "7b", "0,1", 17, DUMMY, parallel=2),
        Arm("7b-fp8", "7b-fp8", "1", 18, DUMMY),
        Arm("7b-int8", "7b-int8", "0", 18, DUMMY),
        Arm("demo-fp16", "demo", "0", 2, DUMMY),
        Arm("demo-fp8", "demo-fp8", "1", 2, DUMMY),
        Arm("demo-int8", "demo-int8", "0", 2, DUMMY),
        Arm("tiny-int8", "tiny-int8", "1", 1, EAGER),
        Arm("tiny-fp8", "tiny-fp8", "1", 1, EAGER),
        Arm("tiny-fp8-kv", "tiny-fp8-kv", "1", 1, FP8_CACHE),
    ),
    "h200": (  # FP8 beside FP16, and the cache in FP8 that two GPUs left open
        Arm("7b-fp16", "7b", "0", 6, DUMMY),
        Arm("7b-fp8", "7b-fp8", "0", 6, DUMMY),
        Arm("demo-fp16", "demo", "0", 2, DUMMY),
        Arm("demo-fp8", "demo-fp8", "0", 2, DUMMY),
        Arm("tiny-fp8-kv", "tiny-fp8-kv", "0", 1, FP8_CACHE),
    ),
    "h200-engines": tuple(Arm(f"{name}-tensorrt", name, "0", engine=True) for name in ("i7", "f7", "s8", "s16")),
    "dry": (Arm("tiny-int8-cpu", "tiny-int8-cpu"), Arm("tiny-b", "tiny-int8-cpu"), Arm("broken", "nothing")),
}
MAIN, REST, SMALL = (1, 8, 32, 128, 256), (1, 8, 32, 128), (1, 8, 32)
ROUNDS = {
    "h200x2": (
        Round("7b-fp16", ("7b-fp16",), MAIN),
        Round("7b-fp16-tp2", ("7b-fp16-tp2",), MAIN),
        Round("7b-fp16-x2", ("7b-fp16", "7b-fp16-b"), MAIN, together=True),
        Round("7b-8bit", ("7b-fp8", "7b-int8"), REST),
        Round("demo", ("demo-fp16", "demo-fp8"), REST),
        Round("demo-int8", ("demo-int8",), REST),
    ),
    "h200": tuple(Round(one.name, (one.name,), SMALL) for one in ARMS["h200"] if one.name != "tiny-fp8-kv"),
    "h200-engines": tuple(Round(one.name, (one.name,), SMALL) for one in ARMS["h200-engines"]),
    "dry": (
        Round("tiny", ("tiny-int8-cpu",), (1, 2)),
        Round("tiny-x2", ("tiny-int8-cpu", "tiny-b"), (2,), together=True),
        Round("pair", ("tiny-int8-cpu", "tiny-b", "broken"), (1,)),
    ),
}


class Results:
    """``results.json``, written anew with every number."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = {"servers": {}, "runs": [], "checks": {}, "notes": []}
        self._lock = threading.Lock()

    def add(self, key: str, value: Any, name: str | None = None) -> None:
        """Adds ``value`` to the list, or under ``name`` to the dictionary, of ``key``."""
        with self._lock:
            if name is None:
                self.content[key].append(value)
            else:
                self.content[key][name] = value
            write_json(self.path, self.content)


def main() -> None:
    parser = argparse.ArgumentParser(description="vLLM on one and two GPUs.")
    parser.add_argument("plan", choices=[*ARMS, "table"])
    parser.add_argument("results", nargs="?", type=Path, help="for `table`")
    parser.add_argument("--vllm", default="vllm", help="the program")
    parser.add_argument("--models", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs (default: that of --out)")
    parser.add_argument("--go", type=Path, help="start the servers, but measure only when this file is there")
    parser.add_argument("--limit-s", type=float, default=300, help="all must have ended by then")
    parser.add_argument("--hourly", type=Decimal, default=Decimal("4.00"), help="price of one GPU's hour")
    args = parser.parse_args()
    if args.plan == "table":
        print(table(read_json(args.results), args.hourly))
        return
    results = Results(args.out / "results.json")
    logs = args.logs or args.out
    try:
        run(args.plan, args.vllm, args.models, logs, results, time.monotonic() + args.limit_s, args.go)
    finally:
        print(json.dumps({"results": str(results.path), "runs": len(results.content["runs"])}), flush=True)


def run(  # noqa: PLR0917
    plan: str, vllm: str, models: Path, logs: Path, results: Results, deadline: float, go: Path | None = None
) -> None:
    """Starts every server, checks those with true weights, then asks the rounds, and again while there is time."""
    begin = time.monotonic()
    with ExitStack() as stack:
        clients = [stack.enter_context(client()) for _ in range(max(len(one.arms) for one in ROUNDS[plan]))]
        waits = {}
        for arm in ARMS[plan]:
            command = _command(arm, vllm, models, logs, gpu=plan != "dry")
            waits[arm.name] = stack.enter_context(starting(command, logs / f"{arm.name}.log", START_S))
        servers: dict[str, Server] = {}
        # All within one limit: a server that hangs must not take the others' time.
        pool = ThreadPoolExecutor(len(waits))
        started = {name: pool.submit(wait) for name, wait in waits.items()}
        for name, future in started.items():
            error = None
            try:
                servers[name] = future.result(timeout=max(0.1, begin + START_S - time.monotonic()))
            except (ServerError, TimeoutError) as failed:
                error = f"{type(failed).__name__}: {failed}"
            _note_server(name, error, logs / f"{name}.log", time.monotonic() - begin, results)
        while go is not None and not go.exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        for name, server in servers.items():
            if (models / name / "expected.json").exists():
                try:
                    results.add("checks", check(server, read_json(models / name / "expected.json")), name)
                except ServerError as failed:
                    results.add("checks", {"error": str(failed)[-500:]}, name)
        print(json.dumps(results.content["checks"]), flush=True)
        for repeat in range(10):
            for one in ROUNDS[plan]:
                if deadline - time.monotonic() < sum(SECONDS.get(level, 3) + 3 for level in one.levels) + 10:
                    results.add("notes", f"no time for {one.name}, pass {repeat}")
                    leave(plan, results)
                    return
                ask(clients, one, {name: servers[name] for name in one.arms if name in servers}, results, repeat)
            if plan == "dry":
                return


def _note_server(name: str, error: str | None, log: Path, seconds: float, results: Results) -> None:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line[-220:] for line in lines if KEPT.search(line)][:30]
    found: dict[str, Any] = {"seconds": round(seconds, 1), "error": error, "log": said}
    if error:
        found["end"] = [line[-300:] for line in lines[-60:]]
    results.add("servers", found, name)
    print(f"{seconds:6.1f} s {name}: {error or 'ready'}"[:300], flush=True)


def leave(plan: str, results: Results) -> None:
    """On a lent machine: ends at once. Stopping ten servers in order takes a minute; their supervisors, which see our
    end, do it without us."""
    if plan != "dry":
        print(json.dumps({"results": str(results.path), "runs": len(results.content["runs"])}), flush=True)
        os._exit(0)


def ask(clients: list[Workers], one: Round, servers: dict[str, Server], results: Results, repeat: int) -> None:
    """All levels of a round; arms that are not replicas are asked at the same time by clients of their own."""
    if one.together:
        if len(servers) == len(one.arms):
            _levels(clients[0], one, one.name, "model", [server.url for server in servers.values()], results, repeat)
        return
    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        jobs = [
            pool.submit(_levels, workers, one, name, _served(name), [server.url], results, repeat)
            for workers, (name, server) in zip(clients, servers.items(), strict=False)
        ]
        for job in jobs:
            job.result()


def _levels(  # noqa: PLR0917
    workers: Workers, one: Round, name: str, model: str, urls: list[str], results: Results, repeat: int
) -> None:
    prompts = Prompts(_items(), NEW, PROMPT + NEW)
    beside = [] if one.together else [other for other in one.arms if other != name]
    _measure(workers, sweep(prompts, WARM_UP, WARM_UP_S, repeat), urls, model)
    for level in one.levels:
        numbers = _measure(workers, sweep(prompts, level, SECONDS[level], repeat), urls, model)
        row = {"arm": name, "servers": len(urls), "beside": beside, "concurrency": level, "pass": repeat, **numbers}
        results.add("runs", row)
        print(
            f"{name:14} c={level:<4} pass {repeat} TTFT {row['ttft_ms']['mean'] or 0:8.1f} ms  TPOT "
            f"{row['tpot_ms']['mean'] or 0:6.2f} ms  {row['output_tokens_per_s']:8.0f} tok/s  n={row['requests']} "
            f"failed {row['failed']} client {'ok' if row['client']['valid'] else row['client']['why']}",
            flush=True,
        )


def _measure(workers: Workers, load: Load, urls: list[str], model: str) -> dict[str, Any]:
    """One closed loop; its start burst is kept out, as `enginegate`'s bench does."""
    shares = parts(load, urls, model, 60, max(len(urls), load.concurrency // SLOTS))
    _, driven = workers.run(shares)
    numbers = measure(load, [sample for one in driven for sample in one.samples], Good(), Decimal(99))
    return {
        **{key: numbers[key] for key in ("window_s", "requests", "failed", "failure_details")},
        **{key: numbers["latency"][key] for key in ("ttft_ms", "tpot_ms", "e2e_ms")},
        "output_tokens_per_s": numbers["throughput"]["output_tokens_per_s"],
        "client": client_state(load, driven, 5.0, 0),
    }


def check(server: Server, expected: dict[str, Any]) -> dict[str, float]:
    """How far this server's log-probabilities are from those of ModelOpt's own model, and from the original's."""
    forced = [
        Forced(f"sequence {place}", tuple(row[:1]), tuple(row[1:])) for place, row in enumerate(expected["tokens"])
    ]
    found = score(forced, server.url, "model", concurrency=4, order_seed=0)
    rows = list(zip([one.log_probs for one in found], expected["quantized"], expected["original"], strict=True))
    count = sum(len(row[0]) for row in rows)

    def distance(place: int) -> float:
        return sum(abs(a - b) for row in rows for a, b in zip(row[0], row[place], strict=True)) / count

    return {"tokens": count, "to_modelopt": distance(1), "to_original": distance(2)}


def table(content: dict[str, Any], hourly: Decimal) -> str:
    """The runs as a Markdown table: mean over passes, cost of a million output tokens on a fully used server."""
    rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in content["runs"]:
        rows.setdefault((row["arm"], row["concurrency"]), []).append(row)
    lines = ["| arm | GPUs | in flight | TTFT ms | TPOT ms | tokens/s | USD per 1M |", "|---|--:|--:|--:|--:|--:|--:|"]
    for (name, level), group in rows.items():
        gpus = 2 if name.endswith(("-tp2", "-x2")) else 1
        found = [row for row in group if row["requests"] and not row["failed"] and row["client"]["valid"]]
        if not found:
            lines.append(f"| {name} | {gpus} | {level} | no valid run | | | |")
            continue
        ttft, tpot = (sum(row[key]["mean"] for row in found) / len(found) for key in ("ttft_ms", "tpot_ms"))
        rate = sum(row["output_tokens_per_s"] for row in found) / len(found)
        cost = cost_per_million(hourly * gpus, rate, Decimal(100))
        lines.append(f"| {name} | {gpus} | {level} | {ttft:.1f} | {tpot:.2f} | {rate:,.0f} | {cost:.3f} |")
    return "\n".join(lines)


def _command(arm: Arm, vllm: str, models: Path, logs: Path, *, gpu: bool) -> Any:
    if arm.engine:
        port, script = choose_port(), Path(__file__).with_name("tensorrt86.sh")
        words = ("serve", str((models / arm.model).absolute()), "--port", str(port))
        return ServerCommand(arm.name, ("bash", str(script), *words), port)
    visible = {"CUDA_VISIBLE_DEVICES": arm.gpus} if gpu else {"VLLM_CPU_KVCACHE_SPACE": "1"}
    own = {"VLLM_CACHE_ROOT": str(logs.absolute() / f"cache-{arm.name}")}  # equal arms would write one cache
    folder = models / arm.model
    words = () if (folder / "tokenizer.json").exists() else ("--tokenizer", str((models / "tokenizer").absolute()))
    memory = ("--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(int(arm.kv_gib * GIB)))
    baseline = Baseline(
        vllm=vllm,
        tensor_parallel_size=arm.parallel,
        extra_args=("--max-num-seqs", "256", *words, *(memory if gpu else ()), *arm.args),
        env=ENV | visible | own,
    )
    return vllm_command(
        baseline, folder, name=arm.name, model="model", port=choose_port(), max_tokens=PROMPT + NEW, gpu=gpu
    )


def _served(name: str) -> str:
    """The name by which an arm's server knows its model: for an engine that of its folder."""
    return next((arm.model for arms in ARMS.values() for arm in arms if arm.name == name and arm.engine), "model")


def _items() -> list[Item]:
    draw = random.Random(0)
    return [
        Item(f"prompt {place}", "", "", tuple(draw.randrange(3, 80) for _ in range(PROMPT))) for place in range(512)
    ]


if __name__ == "__main__":
    sys.exit(main())
