"""vLLM on one and two GPUs: 16-bit, FP8 and INT8; one model sharded over both against one replica on each.

    python -m benchmarks.gpu.vllm_bench h200x2 --vllm vllm --models FOLDER --out FOLDER --limit-s 330
    python -m benchmarks.gpu.vllm_bench dry --vllm .venv-vllm/bin/vllm --models FOLDER --out FOLDER    (on a CPU)
    python -m benchmarks.gpu.vllm_bench table FOLDER/results.json --hourly 3.50

FOLDER of ``--models`` holds what ``benchmarks.gpu.vllm_models`` wrote. All servers start together and stay up; they are
asked one after another, so that one machine's start pays for all. Each answer is 128 tokens for a prompt of 128. Every
number goes to ``results.json`` as soon as it is known; the last line of the output is that file's name and length.
"""

from __future__ import annotations

import argparse
import json
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

from pipeline.bench.load import Prompts, sweep
from pipeline.bench.measure import client_state, measure
from pipeline.bench.workers import Workers, client, parts
from pipeline.errors import ServerError
from pipeline.files import read_json, write_json
from pipeline.gate.cost import cost_per_million
from pipeline.gate.service import Good
from pipeline.params import Baseline
from pipeline.records import Item
from pipeline.serving.process import Server, choose_port, starting
from pipeline.serving.scoring import Forced, score
from pipeline.serving.vllm import vllm_command

PROMPT, NEW = 128, 128
SECONDS = {1: 3, 8: 3, 32: 4, 128: 5, 256: 8}
WARM_UP = 32  # in flight
SLOTS = 16  # in flight for one client process
START_S = 240
GIB = 2**30
# Leave NVLink multicast off: NCCL_NVLS_ENABLE and the like stay as the machine has them.
ENV = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
KEPT = re.compile(  # lines of a server's log that say what it did
    r"Model loading took|KV cache size|Graph capturing finished|torch.compile took|Initial free memory|Maximum concurrency"
    r"|init engine|custom.all.?reduce|quantization|Using .*(backend|kernel)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Arm:
    """One ``vllm serve``: a model folder, the GPUs that it may use and further arguments."""

    name: str
    model: str
    gpus: str = ""
    kv_gib: float = 1.0
    args: tuple[str, ...] = ()
    parallel: int = 1


@dataclass(frozen=True)
class Round:
    """Arms that are asked at the same time (each on GPUs of its own); ``together``: as replicas of one service."""

    name: str
    arms: tuple[str, ...]
    levels: tuple[int, ...]
    together: bool = False


DUMMY = ("--load-format", "dummy", "--cudagraph-capture-sizes", *map(str, (1, 2, 4, 8, 16, 32, 64, 128, 256)))
EAGER = ("--enforce-eager",)
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
        Arm("tiny-fp8-kv", "tiny-fp8-kv", "1", 1, (*EAGER, "--kv-cache-dtype", "fp8")),
    ),
    "dry": (Arm("tiny-int8", "tiny-int8"), Arm("tiny-b", "tiny-int8"), Arm("broken", "nothing")),
}
MAIN, REST = (1, 8, 32, 128, 256), (1, 8, 32, 128)
ROUNDS = {
    "h200x2": (
        Round("7b-fp16", ("7b-fp16",), MAIN),
        Round("7b-fp16-tp2", ("7b-fp16-tp2",), MAIN),
        Round("7b-fp16-x2", ("7b-fp16", "7b-fp16-b"), MAIN, together=True),
        Round("7b-8bit", ("7b-fp8", "7b-int8"), REST),
        Round("demo", ("demo-fp16", "demo-fp8"), REST),
        Round("demo-int8", ("demo-int8",), REST),
    ),
    "dry": (
        Round("tiny", ("tiny-int8",), (1, 2)),
        Round("tiny-x2", ("tiny-int8", "tiny-b"), (2,), together=True),
        Round("pair", ("tiny-int8", "tiny-b", "broken"), (1,)),
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
    parser.add_argument("--limit-s", type=float, default=300, help="all must have ended by then")
    parser.add_argument("--hourly", type=Decimal, default=Decimal("3.50"), help="price of one GPU's hour")
    args = parser.parse_args()
    if args.plan == "table":
        print(table(read_json(args.results), args.hourly))
        return
    results = Results(args.out / "results.json")
    run(args.plan, args.vllm, args.models, results, time.monotonic() + args.limit_s)
    print(json.dumps({"results": str(results.path), "runs": len(results.content["runs"])}))


def run(plan: str, vllm: str, models: Path, results: Results, deadline: float) -> None:
    """Starts every server, checks those with true weights, then asks the rounds, and again while there is time."""
    begin, out = time.monotonic(), results.path.parent
    with ExitStack() as stack:
        waits = {}
        for arm in ARMS[plan]:
            command = _command(arm, vllm, models, out, gpu=plan != "dry")
            waits[arm.name] = stack.enter_context(starting(command, out / f"{arm.name}.log", START_S))
        servers: dict[str, Server] = {}
        for arm in ARMS[plan]:
            found = {"ready_s": None, "error": None}
            try:
                servers[arm.name] = waits[arm.name]()
                found["ready_s"] = round(time.monotonic() - begin, 1)
            except ServerError as error:
                found["error"] = str(error)[-2000:]
            lines = (out / f"{arm.name}.log").read_text(encoding="utf-8", errors="replace").splitlines()
            results.add("servers", found | {"log": [line[-220:] for line in lines if KEPT.search(line)][:30]}, arm.name)
            print(f"{time.monotonic() - begin:6.1f} s {arm.name}: {found['error'] or 'ready'}"[:300], flush=True)
        for name, server in servers.items():
            if (models / name / "expected.json").exists():
                results.add("checks", check(server, read_json(models / name / "expected.json")), name)
        for repeat in range(10):
            for one in ROUNDS[plan]:
                if deadline - time.monotonic() < sum(SECONDS.get(level, 3) + 3 for level in one.levels) + 10:
                    results.add("notes", f"no time for {one.name}, pass {repeat}")
                    return
                ask(one, {name: servers[name] for name in one.arms if name in servers}, results, repeat)
            if plan == "dry":
                return


def ask(one: Round, servers: dict[str, Server], results: Results, repeat: int) -> None:
    """All levels of a round; arms that are not replicas are asked at the same time by clients of their own."""
    if one.together:
        if len(servers) == len(one.arms):
            _levels(one, one.name, [server.url for server in servers.values()], results, repeat)
        return
    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        jobs = [pool.submit(_levels, one, name, [server.url], results, repeat) for name, server in servers.items()]
        for job in jobs:
            job.result()


def _levels(one: Round, name: str, urls: list[str], results: Results, repeat: int) -> None:
    prompts = Prompts(_items(), NEW, PROMPT + NEW)
    beside = [] if one.together else [other for other in one.arms if other != name]
    with client() as workers:
        _measure(workers, prompts, WARM_UP, urls, repeat)
        for level in one.levels:
            numbers = _measure(workers, prompts, level, urls, repeat)
            row = {"arm": name, "servers": len(urls), "beside": beside, "concurrency": level, "pass": repeat, **numbers}
            results.add("runs", row)
            print(
                f"{name:14} c={level:<4} pass {repeat} TTFT {row['ttft_ms']['mean'] or 0:8.1f} ms  TPOT "
                f"{row['tpot_ms']['mean'] or 0:6.2f} ms  {row['output_tokens_per_s']:8.0f} tok/s  n={row['requests']} "
                f"failed {row['failed']} client {'ok' if row['client']['valid'] else row['client']['why']}",
                flush=True,
            )


def _measure(workers: Workers, prompts: Prompts, level: int, urls: list[str], repeat: int) -> dict[str, Any]:
    """One closed loop; its start burst is kept out, as `enginegate`'s bench does."""
    load = sweep(prompts, level, SECONDS.get(level, 3), seed=repeat)
    shares = parts(load, urls, "model", 60, min(level, max(len(urls), level // SLOTS)))
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
    for (name, level), found in rows.items():
        gpus = 2 if name.endswith(("-tp2", "-x2")) else 1
        ttft, tpot = (sum(row[key]["mean"] for row in found) / len(found) for key in ("ttft_ms", "tpot_ms"))
        rate = sum(row["output_tokens_per_s"] for row in found) / len(found)
        cost = cost_per_million(hourly * gpus, rate, Decimal(100))
        lines.append(f"| {name} | {gpus} | {level} | {ttft:.1f} | {tpot:.2f} | {rate:,.0f} | {cost:.3f} |")
    return "\n".join(lines)


def _command(arm: Arm, vllm: str, models: Path, out: Path, *, gpu: bool) -> Any:
    visible = {"CUDA_VISIBLE_DEVICES": arm.gpus} if gpu else {"VLLM_CPU_KVCACHE_SPACE": "1"}
    own = {"VLLM_CACHE_ROOT": str(out.absolute().parent / f"cache-{arm.name}")}  # equal arms would write one cache
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


def _items() -> list[Item]:
    draw = random.Random(0)
    return [
        Item(f"prompt {place}", "", "", tuple(draw.randrange(3, 80) for _ in range(PROMPT))) for place in range(512)
    ]


if __name__ == "__main__":
    sys.exit(main())
