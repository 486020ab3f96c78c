"""Tiny random models quantised by the real ModelOpt, as folders: checkpoint and unified export."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.quantize.batches import Samples
from pipeline.quantize.calibrate import quantize_model
from pipeline.quantize.recipes import Recipe

SMOOTH = Recipe(description="smooth", weights="int8", activations="int8", algorithm="smoothquant")
PLAIN = Recipe(description="plain", weights="int8", activations="int8", algorithm="max")
VOCABULARY = 64


@dataclass(frozen=True)
class Quantized:
    """``checkpoint`` is the original, ``export`` what ModelOpt wrote, ``logits`` what its own model with fake
    quantisation gave on the first two samples (``[position, vocabulary]``)."""

    checkpoint: Path
    export: Path
    logits: Any


def samples() -> list[list[int]]:
    """Calibration sequences."""
    import torch

    draw = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCABULARY, (length,), generator=draw).tolist() for length in (8, 40, 17, 40, 5)]


def quantized(folder: Path, recipe: Recipe, kind: str = "Llama", shard: str = "5GB", **changes: Any) -> Quantized:
    """A two-layer model of this family with 4 heads; ``changes`` go into its config."""
    import torch
    import transformers
    from modelopt.torch.export import export_hf_checkpoint

    torch.manual_seed(3)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
    config = getattr(transformers, f"{kind}Config")(**settings | changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():  # what training does: norms that are not 1, channels that stick out, biases that are not 0
        for name, value in model.named_parameters():
            if "norm" in name:
                value.copy_(torch.rand_like(value) + 0.5)
                value[::7] *= 8
            if name.endswith("bias"):
                value.copy_(0.3 * torch.randn_like(value))
    model.save_pretrained(folder / "checkpoint")
    model = type(model).from_pretrained(folder / "checkpoint", dtype=torch.float32).eval()  # the export wants a dtype
    quantize_model(model, recipe, Samples(samples()), 256)
    with torch.inference_mode():
        logits = torch.cat([model(torch.tensor([ids])).logits[0] for ids in samples()[:2]])
    export_hf_checkpoint(model, export_dir=str(folder / "export"), max_shard_size=shard)
    return Quantized(folder / "checkpoint", folder / "export", logits)
