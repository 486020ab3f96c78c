"""The plain ONNX graph of a checkpoint, with its KV cache as inputs and outputs.

Every engine of ONNX Runtime starts here: one export a checkpoint, from which each recipe is lowered.

    inputs   input_ids, position_ids [batch, sequence]; attention_mask [batch, past + sequence];
             logit_positions [kept]; past_key_values.<layer>.{key,value} [batch, heads, past, head size]
    outputs  logits [batch, kept, vocabulary]; present.<layer>.{key,value} [batch, heads, past + sequence, head size]
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.engines.lowering.trace import Signature, trace

OPSET = 18


def export_plain(model: Any, target: Path, opset: int = OPSET) -> dict[str, int]:
    """Writes ``model.onnx`` and ``model.onnx.data`` for a Hugging Face causal LM into the folder ``target``.

    Returns the shape of the cache. Raises BuildError when the architecture does not export.
    """
    shape = cache_shape(model)
    trace(model, _cached(model), _signature(model, shape), target, opset)
    return shape


def cache_shape(model: Any) -> dict[str, int]:
    """``layers``, ``kv_heads`` and ``head_size`` of a model's cache."""
    config = model.config
    heads = config.num_attention_heads
    return {
        "layers": config.num_hidden_layers,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_size": getattr(config, "head_dim", None) or config.hidden_size // heads,
    }


def _signature(model: Any, shape: dict[str, int]) -> Signature:
    import torch

    cache = [f"{layer}.{part}" for layer in range(shape["layers"]) for part in ("key", "value")]
    inputs = {
        "input_ids": torch.ones(2, 3, dtype=torch.long),
        "position_ids": torch.arange(4, 7).expand(2, 3),
        "attention_mask": torch.ones(2, 7, dtype=torch.long),
        "logit_positions": torch.tensor([2]),
    }
    past = torch.zeros(2, shape["kv_heads"], 4, shape["head_size"], dtype=model.dtype)
    inputs |= {f"past_key_values.{name}": past.clone() for name in cache}
    axes = {
        "input_ids": {0: "batch", 1: "sequence"},
        "position_ids": {0: "batch", 1: "sequence"},
        "attention_mask": {0: "batch", 1: "total"},
        "logit_positions": {0: "kept"},
        "logits": {0: "batch", 1: "kept"},
    }
    axes |= {f"past_key_values.{name}": {0: "batch", 2: "past"} for name in cache}
    axes |= {f"present.{name}": {0: "batch", 2: "total"} for name in cache}
    return Signature(inputs, ["logits"] + [f"present.{name}" for name in cache], axes)


def _cached(model: Any) -> Callable[..., tuple[Any, ...]]:
    """The model with its cache as flat tensors, in and out."""
    from transformers.cache_utils import DynamicCache

    def forward(
        input_ids: Any, position_ids: Any, attention_mask: Any, logit_positions: Any, *past: Any
    ) -> tuple[Any, ...]:
        result = model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            logits_to_keep=logit_positions,
            past_key_values=DynamicCache(list(zip(past[::2], past[1::2], strict=True))),
            use_cache=True,
        )
        cache = [part for layer in result.past_key_values.layers for part in (layer.keys, layer.values)]
        return (result.logits, *cache)

    return forward
