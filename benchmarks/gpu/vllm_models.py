"""What ``vllm_bench`` serves: shapes for dummy weights, and tiny true models with what ModelOpt's own gives.

python -m benchmarks.gpu.vllm_models FOLDER --tokenizer artifacts/checkpoint
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
from pathlib import Path
from typing import Any

from pipeline.engines.vllm.int8 import convert, quantization_config

SEVEN_B = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 32000, "tie_word_embeddings": False}  # fmt: skip
DEMO = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "tie_word_embeddings": True}  # fmt: skip
TINY = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 96, "tie_word_embeddings": True,
        "initializer_range": 0.1}  # fmt: skip
COMMON = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
FP8 = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def main() -> None:
    parser = argparse.ArgumentParser(description="Models for vllm_bench.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder whose tokenizer the shapes share")
    args = parser.parse_args()
    for name, shape in (("7b", SEVEN_B), ("demo", DEMO)):
        for suffix, quantization in (("", None), ("-fp8", FP8), ("-int8", quantization_config(["lm_head"]))):
            write_shape(args.folder / f"{name}{suffix}", shape, quantization)
    (args.folder / "tokenizer").mkdir(exist_ok=True)
    for name in TOKENIZER:
        shutil.copy(args.tokenizer / name, args.folder / "tokenizer" / name)
    for name in ("tiny-int8", "tiny-int8-cpu", "tiny-fp8", "tiny-fp8-kv"):
        write_tiny(args.folder / name, name.removeprefix("tiny-"))


def write_shape(folder: Path, shape: dict[str, Any], quantization: dict[str, Any] | None) -> None:
    """A folder with config.json alone, for ``--load-format dummy``."""
    from transformers import LlamaConfig

    config = LlamaConfig(**shape, **COMMON, architectures=["LlamaForCausalLM"], dtype="float16").to_dict()
    folder.mkdir(parents=True, exist_ok=True)
    extra = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config | extra, indent=2))


def write_tiny(folder: Path, kind: str) -> None:
    """A random model quantised by ModelOpt, in the layout that vLLM serves, with ``expected.json``: sequences, and
    their tokens' log-probabilities in ModelOpt's model with fake quantisation and in the original."""
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests import tiny

    torch.manual_seed(1)
    folder.mkdir(parents=True, exist_ok=True)
    original, export = folder / "original", folder / "export"
    LlamaForCausalLM(LlamaConfig(**TINY, **COMMON)).save_pretrained(original)
    model = LlamaForCausalLM.from_pretrained(original, dtype=torch.float32).eval()
    rows = torch.randint(3, 85, (8, 64))
    expected = {"tokens": rows.tolist(), "original": _log_probs(model, rows)}
    config: dict[str, Any] = copy.deepcopy(mtq.INT8_SMOOTHQUANT_CFG if "int8" in kind else mtq.FP8_DEFAULT_CFG)
    if kind == "fp8-kv":
        config["quant_cfg"] += copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])
    mtq.quantize(model, config, lambda quantized: quantized(torch.randint(3, 85, (16, 64))))
    expected["quantized"] = _log_probs(model, rows)
    export_hf_checkpoint(model, export_dir=str(export))
    if "int8" in kind:
        convert(export, original, folder, zero_points="cpu" in kind)
    else:
        for path in export.iterdir():
            shutil.copy(path, folder / path.name)
    tiny.tokenizer().save_pretrained(folder)
    (folder / "expected.json").write_text(json.dumps(expected))
    shutil.rmtree(original)
    shutil.rmtree(export)


def _log_probs(model: Any, rows: Any) -> list[list[float]]:
    """Of each token but the first."""
    import torch

    with torch.inference_mode():
        found = torch.log_softmax(model(rows).logits.double(), dim=-1)
    chosen = found[:, :-1].gather(2, rows[:, 1:, None])
    return [[float(value) for value in row] for row in chosen[:, :, 0]]


if __name__ == "__main__":
    main()
