"""Builds an engine from a graph of ``benchmarks.gpu.graphs`` (needs the TensorRT bindings and NumPy only).

python -m benchmarks.gpu.engines GRAPH_DIR ENGINE_DIR --batches 1 8 32 [--prompt 64] [--level 2]
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.engines.tensorrt.graph import DecoderShape
from pipeline.engines.tensorrt.plan import Binding, Description

WORKSPACE = 8 * 2**30
NORM = ("Pow", "ReduceMean", "Sqrt", "Div", "Add", "Mul", "Cast")  # float16 overflows in a norm's squares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph", type=Path)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a pass over prompts; 0: prompts go by steps")
    parser.add_argument("--level", type=int, default=2, help="builder optimisation level")
    parser.add_argument("--cache", type=Path, nargs="*", default=[], help="timing caches to read; the first is written")
    parser.add_argument("--free-norms", action="store_true", help="norms in any precision: a lower bound of the time")
    parser.add_argument("--obey", action="store_true", help="fail where a norm has no float32 kernel")
    args = parser.parse_args()
    args.engine.mkdir(parents=True, exist_ok=True)
    print(json.dumps(build(args)), flush=True)


def build(args: argparse.Namespace) -> dict[str, Any]:
    """Writes ``model.plan`` and ``engine.json``; returns seconds and sizes."""
    import tensorrt as trt

    began = time.monotonic()
    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    ready = time.monotonic()
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(args.graph / "model.onnx")):
        raise SystemExit("\n".join(str(parser.get_error(place)) for place in range(parser.num_errors)))
    parsed = time.monotonic()
    shape = DecoderShape(**json.loads((args.graph / "cache.json").read_text()))
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, WORKSPACE)
    config.set_flag(trt.BuilderFlag.FP16)
    quantized = any(network.get_layer(place).type == trt.LayerType.QUANTIZE for place in range(network.num_layers))
    if quantized:
        config.set_flag(trt.BuilderFlag.INT8)
    constraint = "OBEY_PRECISION_CONSTRAINTS" if args.obey else "PREFER_PRECISION_CONSTRAINTS"
    config.set_flag(getattr(trt.BuilderFlag, constraint))
    config.set_preview_feature(trt.PreviewFeature.PROFILE_SHARING_0806, True)
    # Neither cuBLAS nor cuDNN: TensorRT's own kernels only, as newer versions have it.
    sources = (trt.TacticSource.EDGE_MASK_CONVOLUTIONS, trt.TacticSource.JIT_CONVOLUTIONS)
    config.set_tactic_sources(sum(1 << int(source) for source in sources))
    config.builder_optimization_level = args.level
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    cache = config.create_timing_cache(b"")
    for path in args.cache:
        if path.exists():
            cache.combine(config.create_timing_cache(path.read_bytes()), True)
    config.set_timing_cache(cache, False)
    half_io(network, trt)
    held = 0 if args.free_norms else keep_norms(network, trt)
    profiles = make_profiles(shape, args.batches, args.prompt, json_capacity(args.graph))
    for one in profiles:
        profile = builder.create_optimization_profile()
        for name, sizes in one["shapes"].items():
            profile.set_shape(name, *sizes)
        config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise SystemExit("TensorRT built nothing: see its log above")
    built = time.monotonic()
    (args.engine / "model.plan").write_bytes(plan)
    if args.cache:
        args.cache[0].write_bytes(cache.serialize())
    bindings = describe_bindings(network, trt)
    limits = {"max_batch": max(args.batches), "max_tokens": json_capacity(args.graph)}
    description = Description("tensorrt", trt.__version__, [], profiles, bindings, asdict(shape), limits)
    (args.engine / "engine.json").write_text(json.dumps(asdict(description)))
    shutil.copy(args.graph / "cache.json", args.engine / "cache.json")
    return {
        "engine": args.engine.name,
        "init_s": round(ready - began, 1),
        "parse_s": round(parsed - ready, 1),
        "build_s": round(built - parsed, 1),
        "plan_MB": round(plan.nbytes / 1e6),
        "norm_layers": held,
        "int8": quantized,
    }


def json_capacity(graph: Path) -> int:
    """The largest capacity that the graph was made for."""
    return int(json.loads((graph / "capacity.json").read_text()))


def half_io(network: Any, trt: Any) -> None:
    """Cache and logits in float16, whatever the graph's type is."""
    tensors = [network.get_input(place) for place in range(network.num_inputs)]
    tensors += [network.get_output(place) for place in range(network.num_outputs)]
    for tensor in tensors:
        if tensor.dtype == trt.float32:
            tensor.dtype = trt.float16


def keep_norms(network: Any, trt: Any) -> int:
    """Holds the norms' arithmetic in float32; returns how many layers that is."""
    held = 0
    for place in range(network.num_layers):
        layer = network.get_layer(place)
        parts = layer.name.split("/")
        if len(parts) > 2 and parts[-2].endswith("norm") and parts[-1].rstrip("_0123456789") in NORM[:-1]:
            if layer.get_output(0).is_shape_tensor or layer.get_output(0).dtype != trt.float32:
                continue
            layer.precision = trt.float32
            layer.set_output_type(0, trt.float32)
            held += 1
    return held


def make_profiles(shape: DecoderShape, batches: list[int], prompt: int, capacity: int) -> list[dict[str, Any]]:
    """One profile for each batch size, steps only, and one for prompts when ``prompt`` is not 0."""

    def one(name: str, batch: list[int], new: list[int], kept: list[int], places: list[int]) -> dict[str, Any]:
        axes = list(zip(batch, new, kept, places, strict=True))
        shapes: dict[str, Any] = {
            "input_ids": [[b, n] for b, n, _, _ in axes],
            "past_lengths": [[b] for b, _, _, _ in axes],
            "logit_rows": [[k] for _, _, k, _ in axes],
        }
        past = [[b, shape.kv_heads, c, shape.head_size] for b, _, _, c in axes]
        shapes |= dict.fromkeys(shape.past, past)
        return {"name": name, "batch": batch, "shapes": shapes}

    found = [one(f"decode_{size}", [size] * 3, [1] * 3, [size] * 3, [capacity] * 3) for size in batches]
    if prompt:
        found.append(one("prefill", [1, 1, 1], [1, prompt, prompt], [1, 1, prompt], [1, capacity, capacity]))
    return found


def describe_bindings(network: Any, trt: Any) -> list[Binding]:
    """Names, types and shapes of the network's inputs and outputs."""
    kinds = {trt.float32: "float32", trt.float16: "float16", trt.int32: "int32"}
    inputs = [(network.get_input(place), True) for place in range(network.num_inputs)]
    outputs = [(network.get_output(place), False) for place in range(network.num_outputs)]
    return [Binding(t.name, is_input, kinds[t.dtype], list(t.shape)) for t, is_input in inputs + outputs]


if __name__ == "__main__":
    main()
