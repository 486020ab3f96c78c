"""Stand-in for ``trtllm-build``: the documented flags, checks, silent rewrites, log lines and files."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

from pipeline.engines.tensorrt_llm.documented import BUILD_FLAGS, PLUGIN_FIELDS
from tests.standins.trtllm import fault, settings
from tests.standins.trtllm.engine import write_engine

PARTS = {
    "W8A8_SQ_PER_CHANNEL": ("weights_scaling_factor", "activation_scaling_factor", "prequant_scaling_factor"),
    "FP8": ("weights_scaling_factor", "activation_scaling_factor"),
    "W4A16_AWQ": ("weights_scaling_factor", "prequant_scaling_factor"),
}
DEFAULTS = {"max_batch_size": 2048, "max_input_len": 1024, "max_num_tokens": 8192, "max_beam_width": 1}


def main() -> None:
    args = _parser().parse_args()
    broken = fault()
    _log("TensorRT-LLM version: " + settings()["version"])
    if broken == "build-killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if broken == "build-hangs":
        time.sleep(600)
    if broken == "build-gpu-memory":
        _log("[MemUsageChange] Init builder kernel library: CPU +1000, GPU +8")
        print("[TRT] [E] [defaultAllocator.cpp::allocate::31] Error Code 1: Cuda Runtime (out of memory)")
        print("[TRT] [W] Requested amount of GPU memory (42949672960 bytes) could not be allocated.")
        sys.exit("RuntimeError: Engine building failed, please check error log.")
    folder = Path(args.checkpoint_dir)
    config = json.loads((folder / "config.json").read_text())  # a Hugging Face folder fails on the next lines
    world = config["mapping"]["world_size"]
    _refuse_sm(config["quantization"])
    ranks = [folder / f"rank{rank}.safetensors" for rank in range(world)]
    for rank in ranks:
        _check_tensors(_shapes(rank), config)
    built = _rewritten(vars(args), config)
    _log("Total time of building Unnamed Network 0: 00:00:31")
    Path(args.output_timing_cache).write_bytes(b"timing cache of this build")
    _log(f"Timing cache serialized to {args.output_timing_cache}")
    _log("Build phase peak memory: 10421.96 MB, children: 6296.07 MB")
    kept = {name: value for name, value in config.items() if name != "producer"}
    write_engine(Path(args.output_dir), kept, built, [rank.read_bytes() for rank in ranks], form="trtllm")
    _log("Total time of building all engines: 00:00:34")


def _log(text: str) -> None:
    print(f"[04/29/2026-11:04:09] [TRT-LLM] [I] {text}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trtllm-build", allow_abbrev=False)
    for flag, takes in BUILD_FLAGS.items():
        if flag in settings()["without"].get("trtllm-build", []):
            continue
        if takes == "flag":
            parser.add_argument(flag, action="store_true")
        elif takes == "int":
            parser.add_argument(flag, type=int, default=DEFAULTS.get(flag.removeprefix("--")))
        else:
            parser.add_argument(flag, choices=takes.split("|") if "|" in takes else None)
    parser.set_defaults(output_timing_cache="model.cache", output_dir="engine_outputs", workers=1)
    return parser


def _refuse_sm(quantization: dict[str, Any]) -> None:
    sm = int(settings()["sm"].replace(".", ""))
    if 100 <= sm < 120 and quantization["quant_algo"] == "W8A8_SQ_PER_CHANNEL":
        raise RuntimeError("SmoothQuant is not supported on SM>=100.")
    if 100 <= sm < 120 and "INT8" in (quantization["kv_cache_quant_algo"], quantization["quant_algo"]):
        raise RuntimeError("INT8/INT4 quantization is not supported on SM>=100.")


def _shapes(file: Path) -> dict[str, list[int]]:
    """Names and shapes from a safetensors header."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def _check_tensors(given: dict[str, list[int]], config: dict[str, Any]) -> None:
    """As PretrainedModel.load: a tensor that is missing ends the build, one of a wrong shape too."""
    tp, hidden, head = config["mapping"]["tp_size"], config["hidden_size"], config["head_size"]
    heads, kv_heads = config["num_attention_heads"] // tp, config["num_key_value_heads"] // tp
    inner = config["intermediate_size"] // tp
    vocabulary = -(-config["vocab_size"] // tp)
    wanted: dict[str, list[int] | None] = {
        "transformer.vocab_embedding.weight": [vocabulary, hidden],
        "transformer.ln_f.weight": [hidden],
        "lm_head.weight": [vocabulary, hidden],
    }
    linears = {
        "attention.qkv": ((heads + 2 * kv_heads) * head, hidden),
        "attention.dense": (hidden, heads * head),
        "mlp.fc": (inner, hidden),
        "mlp.gate": (inner, hidden),
        "mlp.proj": (hidden, inner),
    }
    algo, cache = config["quantization"]["quant_algo"], config["quantization"]["kv_cache_quant_algo"]
    excluded = config["quantization"].get("exclude_modules", [])
    for number in range(config["num_hidden_layers"]):
        layer = f"transformer.layers.{number}"
        wanted |= {f"{layer}.input_layernorm.weight": [hidden], f"{layer}.post_layernorm.weight": [hidden]}
        if cache:
            wanted[f"{layer}.attention.kv_cache_scaling_factor"] = [1]
        for name, (rows, columns) in linears.items():
            path = f"{layer}.{name}"
            quantised = algo is not None and path not in excluded
            packed = quantised and algo == "W4A16_AWQ"
            wanted[f"{path}.weight"] = [rows // 2 if packed else rows, columns]
            if config["architecture"] == "Qwen2ForCausalLM" and name == "attention.qkv":
                wanted[f"{path}.bias"] = [rows]
            shapes = {
                "weights_scaling_factor": {"W8A8_SQ_PER_CHANNEL": [rows], "FP8": [1]}.get(algo or ""),
                "activation_scaling_factor": [1],
                "prequant_scaling_factor": [columns],
            }
            wanted |= {f"{path}.{part}": shapes[part] for part in PARTS.get(algo or "", ()) if quantised}
    missing = wanted.keys() - given.keys()
    if missing:
        raise RuntimeError(f"Required but not provided tensors:{missing}")
    if extra := given.keys() - wanted.keys():
        print(f"[TRT-LLM] [W] Provided but not required tensors: {extra}")
    for name, shape in wanted.items():
        if shape is not None and given[name] != shape:
            raise RuntimeError(f"Encounter error '{given[name]} is not {shape}' for parameter '{name}'")


def _rewritten(args: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The build configuration that the engine records: some of what was asked for is rewritten without a word."""
    algo, cache = config["quantization"]["quant_algo"], config["quantization"]["kv_cache_quant_algo"]
    sm = int(settings()["sm"].replace(".", ""))
    plugins: dict[str, Any] = {}
    for name in PLUGIN_FIELDS:
        value = args.get(name)
        if isinstance(value, str) and re.fullmatch("enable|disable", value):
            value = value == "enable" if name not in ("gemm_plugin",) else None
        plugins[name] = config["dtype"] if value == "auto" else value
    fp8 = algo in ("FP8", "W4A8_AWQ", "NVFP4") and sm >= 89
    if not fp8:
        plugins["use_fp8_context_fmha"] = False
    if plugins["use_paged_context_fmha"]:
        plugins["use_fp8_context_fmha"] = fp8 and cache == "FP8"
    if cache == "INT8" or (cache == "FP8" and algo != "FP8"):
        plugins["use_paged_context_fmha"] = False
    if plugins["nccl_plugin"] is None and config["mapping"]["world_size"] > 1:
        plugins["nccl_plugin"] = config["dtype"]
    sizes = {name: args[name] for name in ("max_batch_size", "max_num_tokens", "max_beam_width", "max_seq_len")}
    sizes["max_seq_len"] = sizes["max_seq_len"] or config["max_position_embeddings"]
    sizes["max_input_len"] = sizes["max_seq_len"]  # ignored with remove_input_padding and context_fmha
    sizes["max_num_tokens"] = min(sizes["max_num_tokens"], sizes["max_seq_len"] * sizes["max_batch_size"])
    return {**sizes, "opt_num_tokens": args["opt_num_tokens"] or sizes["max_batch_size"], "plugin_config": plugins}


if __name__ == "__main__":
    main()
