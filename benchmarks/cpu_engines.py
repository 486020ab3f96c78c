"""Tokens a second of ONNX Runtime engines against vLLM on the CPU, for one model at batch 1 and 8.

    python -m benchmarks.cpu_engines --fp32 engines/runtime --int8 engines/int8_sq \\
        --checkpoint artifacts/checkpoint --vllm .venv-vllm/bin/python

Every program answers the same random prompts greedily, all of a batch at once, to the same length, in rounds that take
turns; a figure is the median over the rounds of output tokens by seconds, prompt reading included. vLLM computes in
float32, without its prefix cache and, as the pipeline starts it on a CPU, without compilation. The last line is one
JSON object; the ratios in it are of this run only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.engines import load_executor
from pipeline.engines.scheduler import Executor

Round = Callable[[list[list[int]], int], float]  # prompts, answer length -> seconds

# Runs in vLLM's own environment: a line of JSON in (prompts, answer length), a line of JSON out (seconds).
VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
out, sys.stdout = sys.stdout, sys.stderr
llm = LLM(model=sys.argv[1], dtype="float32", max_model_len=int(sys.argv[2]),
          enable_prefix_caching=False, enforce_eager=True)
print("ready", file=out, flush=True)
for line in sys.stdin:
    prompts, count = json.loads(line)
    options = SamplingParams(temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], options, use_tqdm=False)
    taken = time.perf_counter() - began
    assert all(len(answer.outputs[0].token_ids) == count for answer in answers)
    print(json.dumps(taken), file=out, flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fp32", type=Path, required=True, help="engine folder without quantisation")
    parser.add_argument("--int8", type=Path, required=True, help="engine folder of an INT8 recipe")
    parser.add_argument("--checkpoint", type=Path, required=True, help="the checkpoint that both were built from")
    parser.add_argument("--vllm", type=Path, help="the Python of vLLM's environment; without it vLLM is left out")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    programs: dict[str, Round] = {"onnxruntime int8": engine(args.int8), "onnxruntime float32": engine(args.fp32)}
    vocabulary = load_executor(args.fp32).vocab_size
    server = None
    if args.vllm:
        server = start_vllm(args.vllm, args.checkpoint, args.prompt + args.answer)
        programs["vllm float32"] = vllm(server)
    try:
        result = measure(programs, vocabulary, args)
    finally:
        if server is not None and server.stdin is not None:
            server.stdin.close()
            server.wait(timeout=60)
    print(json.dumps(result))


def measure(programs: dict[str, Round], vocabulary: int, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second by batch and program, and how much faster INT8 is than each of the others."""
    random = np.random.default_rng(17)
    rates: dict[int, dict[str, float]] = {}
    for batch in args.batches:
        seen: dict[str, list[float]] = {name: [] for name in programs}
        for turn in range(args.rounds + 1):
            prompts = random.integers(3, vocabulary, (batch, args.prompt)).tolist()
            for name, run in programs.items():
                taken = run(prompts, args.answer)
                if turn:  # the first round warms up
                    seen[name].append(batch * args.answer / taken)
        rates[batch] = {name: round(statistics.median(values), 1) for name, values in seen.items()}
        for name, values in seen.items():
            spread = f"{min(values):.1f} to {max(values):.1f}"
            print(f"batch {batch}  {name:20}  {rates[batch][name]:8.1f} tokens/s  ({spread})")
    first = next(iter(programs))
    ratios = {
        batch: {name: round(row[first] / rate, 2) for name, rate in row.items() if name != first}
        for batch, row in rates.items()
    }
    setup = {"prompt": args.prompt, "answer": args.answer, "rounds": args.rounds, "cores": len(os.sched_getaffinity(0))}
    return {"tokens_per_s": rates, "int8_faster_than": ratios, **setup}


def engine(folder: Path) -> Round:
    """Rounds of an engine of ours, by its executor: without HTTP, as vLLM below."""
    executor: Executor = load_executor(folder)

    def run(prompts: list[list[int]], count: int) -> float:
        began = time.perf_counter()
        state, logits = executor.prefill(prompts)
        for _ in range(count - 1):
            logits = executor.decode(state, logits.argmax(axis=-1))
        logits.argmax(axis=-1)
        return time.perf_counter() - began

    return run


def start_vllm(python: Path, checkpoint: Path, tokens: int) -> subprocess.Popen[str]:
    """vLLM with the model loaded, waiting for rounds."""
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"} | os.environ
    server = subprocess.Popen(
        [python, "-c", VLLM, checkpoint, str(tokens)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    if _line(server) != "ready":
        raise SystemExit("vLLM did not start: see its messages above")
    return server


def vllm(server: subprocess.Popen[str]) -> Round:
    """Rounds of a started vLLM."""

    def run(prompts: list[list[int]], count: int) -> float:
        assert server.stdin is not None
        server.stdin.write(json.dumps([prompts, count]) + "\n")
        server.stdin.flush()
        return float(_line(server))

    return run


def _line(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    line = server.stdout.readline()
    if not line:
        raise SystemExit(f"vLLM ended with code {server.wait()}: see its messages above")
    return line.strip()


if __name__ == "__main__":
    sys.exit(main())
