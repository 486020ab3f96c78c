"""Export and Q/DQ of a checkpoint: seconds, and memory as a multiple of the weights.

    python -m benchmarks.export CHECKPOINT [--dtype float16] [--quantized artifacts/quantized/int8_sq/checkpoint]

Memory is what the process has of its own (pages of files that are only mapped are not counted), looked at every 10 ms.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float16")
    parser.add_argument("--quantized", type=Path, help="a quantised export of the same checkpoint, to lower it too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(args, Path(folder))))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run of each step."""
    import onnx
    import torch
    from transformers import AutoModelForCausalLM

    from pipeline.engines.lowering.export import export_plain
    from pipeline.engines.lowering.qdq import insert_qdq
    from pipeline.engines.lowering.quantized import QuantizedCheckpoint
    from pipeline.engines.lowering.verify import verify
    from pipeline.engines.lowering.weights import WeightFile

    plain, lowered = folder / "plain", folder / "lowered"
    for path in (plain, lowered):
        path.mkdir()
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=dtype, attn_implementation="eager").eval()
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    found: dict[str, Any] = {"weights_mib": round(weights / _MIB), "dtype": args.dtype}
    with watched("export", weights, found):
        export_plain(model, plain)
    del model
    if args.quantized is not None:
        with watched("qdq", weights, found):
            graph = onnx.load(str(plain / "model.onnx"), load_external_data=False)
            with QuantizedCheckpoint(args.quantized) as checkpoint, WeightFile(lowered / "model.onnx") as file:
                insert_qdq(graph, checkpoint, file.add)
                file.save(graph, plain)
        with watched("verify", weights, found):
            graph = onnx.load(str(lowered / "model.onnx"), load_external_data=False)
            verify(graph, lowered, args.quantized, None)
    return found


@contextmanager
def watched(step: str, weights: int, found: dict[str, Any]) -> Iterator[None]:
    """Adds ``STEP_s`` and ``STEP_memory``, the memory added at the peak as a multiple of the weights."""
    import psutil

    process, ended = psutil.Process(), threading.Event()

    def own() -> int:
        return int(process.memory_info().rss - process.memory_info().shared)

    before, peak = own(), [0]

    def watch() -> None:
        while not ended.wait(0.01):
            peak[0] = max(peak[0], own())

    thread = threading.Thread(target=watch)
    thread.start()
    begin = time.perf_counter()
    try:
        yield
    finally:
        found[f"{step}_s"] = round(time.perf_counter() - begin, 1)
        ended.set()
        thread.join()
        found[f"{step}_memory"] = round((peak[0] - before) / weights, 2)


if __name__ == "__main__":
    main()
