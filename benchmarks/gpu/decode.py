"""Runs the repository's TensorRT executor on engines of ``benchmarks.gpu.engines`` and measures its steps.

    python -m benchmarks.gpu.decode ENGINE_DIR --batches 1 8 32 [--prompt 128] [--answer 128] [--tokens reference.json]

Needs the TensorRT bindings, NumPy and cuda-python. ``--tokens``: prompts with the tokens that torch gives (see
``benchmarks.gpu.greedy``); the engine's tokens are compared with them up to the first difference. ``--profile``: times
of each layer (IProfiler), outside of the CUDA graph. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.engines.tensorrt.executor import TensorRTExecutor
from pipeline.engines.tensorrt.plan import read_description


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--no-graphs", action="store_true", help="queue each step anew instead of replaying a graph")
    parser.add_argument("--tokens", type=Path)
    parser.add_argument("--profile", type=int, default=0, metavar="BATCH")
    parser.add_argument("--once", action="store_true", help="three steps and no more, to be watched by ncu")
    args = parser.parse_args()
    limits = read_description(args.engine).limits
    began = time.monotonic()
    executor = TensorRTExecutor(args.engine, **limits, graphs=not args.no_graphs)
    result: dict[str, Any] = {"engine": args.engine.name, "load_s": round(time.monotonic() - began, 1)}
    if args.once:
        greedy(executor, [[5]], 4)
        return
    if args.tokens:
        result["tokens"] = compare(executor, json.loads(args.tokens.read_text()))
        print(json.dumps(result), flush=True)
    result["step_ms"] = {}
    for batch in args.batches:
        result["step_ms"][batch] = steps(executor, batch, args.prompt, args.answer)
        print(json.dumps(result), flush=True)
    if args.profile:
        result["profile"] = profile(executor, args.profile)
    print(json.dumps(result))


def steps(executor: TensorRTExecutor, batch: int, prompt: int, answer: int) -> dict[str, float]:
    """Milliseconds of a step of ``batch`` rows after ``prompt`` tokens: over ``answer`` steps, and the median one.

    The prompts are read by forced steps, all rows at once, so that every engine can: it is the steps that are timed.
    """
    random = np.random.default_rng(7)
    ids = random.integers(3, executor.vocab_size, (prompt, batch))
    state, _ = executor.prefill([[int(token)] for token in ids[0]])
    for place in range(1, prompt):
        logits = executor.decode(state, ids[place])
    tokens = logits.argmax(axis=-1)
    for _ in range(8):
        tokens = executor.decode_greedy(state, tokens)
    times = [time.perf_counter()]
    for _ in range(answer - 8):
        tokens = executor.decode_greedy(state, tokens)
        times.append(time.perf_counter())
    executor.keep(state, np.zeros(0, np.int64))
    taken = np.diff(times) * 1e3
    return {"mean": round(float(taken.mean()), 4), "median": round(float(np.median(taken)), 4)}


def compare(executor: TensorRTExecutor, reference: list[dict[str, Any]]) -> dict[str, Any]:
    """Greedy tokens, one prompt at a time and all at once, against torch's, up to the first difference.

    ``gap``: how far apart torch's two likeliest logits are where the first difference is; a small one is a near-tie.
    """
    found: dict[str, Any] = {}
    for way, size in (("alone", 1), ("together", min(len(reference), executor.max_batch))):
        equal = total = whole = 0
        gaps = []
        for first in range(0, len(reference), size):
            rows = reference[first : first + size]
            answers = greedy(executor, [row["prompt"] for row in rows], len(rows[0]["tokens"]))
            for row, answer in zip(rows, answers, strict=True):
                same = [a == b for a, b in zip(answer, row["tokens"], strict=True)]
                place = same.index(False) if False in same else len(same)
                equal, total, whole = equal + place, total + len(same), whole + (place == len(same))
                if place < len(same):
                    gaps.append({"at": place, "gap": round(row["gaps"][place], 4)})
        found[way] = {"prompts": len(reference), "whole": whole, "tokens_before": equal, "of": total, "first": gaps}
    return found


def greedy(executor: TensorRTExecutor, prompts: list[list[int]], count: int) -> list[list[int]]:
    state, logits = executor.prefill(prompts)
    tokens = logits.argmax(axis=-1)
    answers = [[int(token)] for token in tokens]
    for _ in range(count - 1):
        tokens = executor.decode_greedy(state, tokens)
        for answer, token in zip(answers, tokens.tolist(), strict=True):
            answer.append(token)
    executor.keep(state, np.zeros(0, np.int64))
    return answers


def profile(executor: TensorRTExecutor, batch: int, runs: int = 20) -> list[dict[str, Any]]:
    """Mean microseconds of each layer of a step, in order, with what the inspector says of its kernel."""
    import tensorrt as trt

    decoder = executor._decoder

    class Times(trt.IProfiler):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.times: dict[str, list[float]] = {}

        def report_layer_time(self, name: str, ms: float) -> None:
            self.times.setdefault(name, []).append(ms * 1e3)

    context = decoder._engine.create_execution_context()
    place = decoder._step_profiles(batch)[0]
    context.set_optimization_profile_async(place, decoder._device.stream)
    decoder._bind(context, (batch, 1), batch, (decoder.capacity, 0), ("step_ids", "step_lengths", "step_slots"))
    times = Times()
    context.profiler = times
    for _ in range(runs):
        context.execute_async_v3(decoder._device.stream)
        decoder.logits(1)
    inspector = decoder._engine.create_engine_inspector()
    inspector.execution_context = context
    layers = json.loads(inspector.get_engine_information(trt.LayerInformationFormat.JSON))["Layers"]
    kernels = {
        layer["Name"]: f"{layer.get('LayerType')} {layer.get('TacticName', '')}"
        for layer in layers
        if isinstance(layer, dict)
    }
    return [
        {"layer": name, "us": round(float(np.median(taken)), 2), "kernel": kernels.get(name, "")}
        for name, taken in times.times.items()
    ]


if __name__ == "__main__":
    main()
