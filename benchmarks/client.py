"""The load client beside ``vllm bench serve`` and AIPerf, against a mock server of known times in another process.

``python -m benchmarks.client [--rate 1500] [--seconds 10] [--tools vllm aiperf]``

1. *Load*: an open loop at ``--rate`` requests/s of 16 chunks. Promise of issue 8: the rate is held, the client's lag
   stays under 5 ms at the 99th percentile, and a request costs at most 1.0 ms of the client's CPU.
2. *Other tools*: the same server at 32 requests in flight: rate, CPU time a request (from two runs of different length,
   so that starting up is not counted) and the median TTFT that each tool reports; the server's is 20 ms.
3. *Agreement*: percentiles of ours and AIPerf's at 8 requests in flight, TTFT spread evenly over 20 to 60 ms.

A tool that is not installed is skipped with a word. The last line is one JSON object; exit code 1 when a promise of the
first part is not kept. ``--aiperf`` names its program: it needs an environment of its own (docs/benchmarks.md).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

from pipeline.bench.load import Load, Prompts, constant, sweep
from pipeline.bench.measure import client_state, measure
from pipeline.bench.telemetry import Processes
from pipeline.bench.workers import Workers, client, parts, workers_for
from pipeline.gate.service import Good
from pipeline.records import Item
from pipeline.serving.process import choose_port
from tests.tiny import tokenizer as tiny_tokenizer

CHUNKS = 16
PROMPT = 30
CPU_MS, LAG_MS = 1.0, 5.0
SLOTS, AGREED_SLOTS = 32, 8
ROOT = Path(__file__).parents[1]
ITEMS = [Item(f"i{place}", "", "", tuple(range(100, 100 + PROMPT))) for place in range(64)]
PROMPTS = Prompts(ITEMS, CHUNKS, 8192)


@contextmanager
def mock(spread_ms: float = 0.0) -> Iterator[str]:
    """The server, in a process of its own; yields its URL."""
    port = choose_port()
    argv = [sys.executable, "-m", "benchmarks.mock_server", "--port", str(port), "--spread-ms", str(spread_ms)]
    process = subprocess.Popen(argv, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1).read()
                break
            except OSError:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def played(workers: Workers, load: Load, url: str) -> dict[str, Any]:
    """One load by our client."""
    start, driven = workers.run(parts(load, url, "mock", 30.0, workers_for(load)))
    del start
    samples = [sample for one in driven for sample in one.samples]
    numbers = measure(load, samples, Good(), Decimal(95))
    state = client_state(load, driven, LAG_MS, len(load.due or ()))
    return {"numbers": numbers, "client": state, "requests": len(samples), "failed": numbers["failed"]}


def our_load(workers: Workers, rate: float, seconds: float) -> dict[str, Any]:
    """Part 1."""
    with mock() as url:
        played(workers, sweep(PROMPTS, SLOTS, 1.0, 1), url)  # warms up both
        found = played(workers, constant(PROMPTS, rate, seconds, 1), url)
    state, rates = found["client"], found["numbers"]["throughput"]
    row = {
        "asked_per_s": rate,
        "finished_per_s": round(rates["requests_per_s"], 1),
        "failed": found["failed"],
        "sent_late_p99_ms": round(state["sent_late_ms"], 2),
        "loop_lag_p99_ms": round(state["loop_lag_ms"], 2),
        "cpu_ms_per_request": round(state["cpu_ms_per_request"], 3),
        "processes": state["processes"],
        "loop": state["loop"],
        "nice": state["nice"],
        "ttft_p50_ms": round(found["numbers"]["latency"]["ttft_ms"]["p50"], 2),
    }
    # What is in flight when the window closes has not finished: the last tenth of a second.
    row["kept"] = bool(
        found["failed"] == 0
        and rates["requests_per_s"] >= rate * (1 - 0.2 / seconds)
        and max(row["sent_late_p99_ms"], row["loop_lag_p99_ms"]) < LAG_MS
        and row["cpu_ms_per_request"] <= CPU_MS
    )
    return row


def our_closed_loop(workers: Workers, seconds: float, slots: int, url: str) -> dict[str, Any]:
    """Rate, CPU and latencies at ``slots`` in flight."""
    found = played(workers, sweep(PROMPTS, slots, seconds, 1), url)
    latency = found["numbers"]["latency"]
    return {
        "requests": found["requests"],
        "requests_per_s": round(found["numbers"]["throughput"]["requests_per_s"], 1),
        "cpu_ms_per_request": round(found["client"]["cpu_ms_per_request"], 3),
        "ttft_p50_ms": round(latency["ttft_ms"]["p50"], 2),
        "percentiles": {name: {key: latency[name][key] for key in ("p50", "p90", "p99")} for name in latency},
    }


def cpu_of(argv: list[str], folder: Path, env: dict[str, str]) -> float:
    """Runs a tool to its end: CPU seconds of all its processes, also of those that it does not wait for."""
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(argv, cwd=folder, env=os.environ | env, stdout=output, stderr=subprocess.STDOUT)
        seen = Processes(process.pid)
        while process.poll() is None:
            used, _ = seen.read()
            time.sleep(0.1)
    if process.returncode != 0:
        raise RuntimeError(f"{argv[0]} ended with {process.returncode}: {(folder / 'output').read_text()[-2000:]}")
    return used


def tokenizer(folder: Path) -> Path:
    """A small tokenizer on disk, which both other tools want."""
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


def vllm_bench(program: Path, url: str, folder: Path, count: int) -> dict[str, Any]:
    """``vllm bench serve`` with ``count`` requests and with four times as many."""
    runs = []
    for requests in (count, 4 * count):
        argv = [str(program), "bench", "serve", "--backend", "openai", "--base-url", url, "--model", "mock"]
        argv += ["--endpoint", "/v1/completions", "--dataset-name", "random", "--random-input-len", str(PROMPT)]
        argv += ["--random-output-len", str(CHUNKS), "--ignore-eos", "--num-prompts", str(requests)]
        argv += ["--max-concurrency", str(SLOTS), "--tokenizer", str(tokenizer(folder)), "--disable-tqdm"]
        argv += ["--save-result", "--result-dir", str(folder), "--result-filename", f"vllm-{requests}.json"]
        cpu_s = cpu_of(argv, folder, {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"})
        runs.append((requests, cpu_s, json.loads((folder / f"vllm-{requests}.json").read_text())))
    result = runs[1][2]
    return {
        "requests_per_s": round(result["request_throughput"], 1),
        "cpu_ms_per_request": _each(runs),
        "ttft_p50_ms": round(result["median_ttft_ms"], 2),
    }


def aiperf(program: Path, url: str, folder: Path, count: int, slots: int = SLOTS) -> dict[str, Any]:
    """AIPerf with ``count`` requests and with four times as many."""
    payload = {"prompt": list(ITEMS[0].prompt_token_ids), "max_tokens": CHUNKS, "ignore_eos": True, "model": "mock"}
    payload |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    runs = []
    for requests in (count, 4 * count):
        trace = folder / f"payloads-{requests}.jsonl"
        trace.write_text("".join(json.dumps({"payload": payload}) + "\n" for _ in range(requests)))
        target = folder / f"aiperf-{requests}"
        argv = [str(program), "profile", "--model", "mock", "--url", url, "--endpoint-type", "completions"]
        argv += ["--streaming", "--tokenizer", str(tokenizer(folder)), "--use-server-token-count", "--ui", "none"]
        argv += ["--export-level", "records", "--input-file", str(trace), "--custom-dataset-type", "mooncake_trace"]
        argv += ["--no-fixed-schedule", "--concurrency", str(slots), "--warmup-request-count", str(slots)]
        argv += ["--request-count", str(requests), "--artifact-dir", str(target)]
        cpu_s = cpu_of(argv, folder, {"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": ""})
        runs.append((requests, cpu_s, json.loads((target / "profile_export_aiperf.json").read_text())))
    result = runs[1][2]
    names = {"ttft_ms": "time_to_first_token", "tpot_ms": "inter_token_latency", "e2e_ms": "request_latency"}
    return {
        "requests_per_s": round(result["request_throughput"]["avg"], 1),
        "cpu_ms_per_request": _each(runs),
        "ttft_p50_ms": round(result["time_to_first_token"]["p50"], 2),
        "percentiles": {
            ours: {key: result[theirs][key] for key in ("p50", "p90", "p99")} for ours, theirs in names.items()
        },
    }


def _each(runs: list[tuple[int, float, Any]]) -> float:
    """CPU milliseconds of one more request."""
    (few, cheap, _), (many, dear, _) = runs
    return round(1000 * (dear - cheap) / (many - few), 3)


def other_tools(args: argparse.Namespace, workers: Workers) -> dict[str, Any]:
    """Part 2, and part 3 where AIPerf is there."""
    programs = {"vllm": args.vllm, "aiperf": args.aiperf}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, mock() as url:
        folder = Path(name)
        found["ours"] = our_closed_loop(workers, args.seconds, SLOTS, url)
        print(f"at {SLOTS} in flight: ours {found['ours']}", flush=True)
        for tool, run in (("vllm", vllm_bench), ("aiperf", aiperf)):
            if tool not in args.tools or not programs[tool].exists():
                print(f"{tool}: skipped ({programs[tool]} is not there, or it was not asked for)", flush=True)
                continue
            found[tool] = run(programs[tool].absolute(), url, folder, args.count)
            print(f"at {SLOTS} in flight: {tool} {found[tool]}", flush=True)
    if "aiperf" in found:
        with tempfile.TemporaryDirectory() as name, mock(spread_ms=40) as url:
            mine = our_closed_loop(workers, args.seconds, AGREED_SLOTS, url)["percentiles"]
            theirs = aiperf(args.aiperf.absolute(), url, Path(name), args.count, AGREED_SLOTS)["percentiles"]
            found["agreement"] = {
                f"{name} {key}": {"ours": round(mine[name][key], 2), "aiperf": round(theirs[name][key], 2)}
                for name in theirs
                for key in theirs[name]
                if mine[name][key] is not None
            }
        print(f"agreement at {AGREED_SLOTS} in flight: {found['agreement']}", flush=True)
    return found


def main() -> int:
    """Runs every part; prints the figures as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=1500)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--count", type=int, default=500, help="requests of the other tools' shorter run")
    parser.add_argument("--tools", nargs="*", default=["vllm", "aiperf"], choices=["vllm", "aiperf"])
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm/bin/vllm")
    parser.add_argument("--aiperf", type=Path, default=ROOT / ".venv-aiperf/bin/aiperf")
    args = parser.parse_args()
    with client() as workers:
        load = our_load(workers, args.rate, args.seconds)
        print(f"load: {load}", flush=True)
        tools = other_tools(args, workers)
    print(json.dumps({"benchmark": "client", "kept": load["kept"], "load": load, "tools": tools}))
    return 0 if load["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
