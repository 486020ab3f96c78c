"""Where SmoothQuant's ``pre_quant_scale`` can go: into the weights right before the layer.

A smoothed layer computes ``Q(x * s) @ W`` with one factor a channel of its input. vLLM's INT8 layers have no such
factor, so ``s`` moves into whatever makes ``x``, which changes no result:

    q, k, v of input_layernorm            s goes into that norm's weight
    gate, up of post_attention_layernorm  the same
    down of silu(gate) * up               s goes into the rows of up
    o of the mixed rows of v              s goes into the rows of v

Heads that share a row of v (grouped-query attention) must share its factor too. They get the least of theirs, so
no input grows past the range it was calibrated for, and o's weights, which carry ``1 / s``, are quantised again from
the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.errors import BuildError

if TYPE_CHECKING:
    from torch import Tensor

# Families whose blocks are as above, by config.json's model_type.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
NORMED = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


@dataclass(frozen=True)
class Folding:
    """What to multiply: a norm's ``weights`` ``[n]`` and the ``rows`` (output channels, ``[out]``) of linear layers,
    by module path. ``shared``: the new input factors ``[in]`` of layers that must be quantised again."""

    weights: dict[str, Tensor]
    rows: dict[str, Tensor]
    shared: dict[str, Tensor]


def plan_folding(scales: Mapping[str, Tensor], config: Mapping[str, Any]) -> Folding:
    """The folding for ``scales``: module path -> ``pre_quant_scale``, all of them. ``config``: ``config.json``.

    Raises BuildError for a layout that is not known, and for layers that read one input through different factors.
    """
    if scales and config.get("model_type") not in FAMILIES:
        raise BuildError(
            f"SmoothQuant's factors cannot be folded into a model of type {config.get('model_type')!r} "
            f"(known: {', '.join(FAMILIES)})",
            "take a recipe without SmoothQuant (int8_max), or engine.backend onnxruntime or tensorrt",
        )
    folding = Folding({}, {}, {})
    left = dict(scales)
    for block in sorted({name.rsplit(".", 2)[0] for name in scales}):
        for norm, readers in NORMED.items():
            paths = [f"{block}.{reader}" for reader in readers]
            if any(path in left for path in paths):
                folding.weights[f"{block}.{norm}"] = _common(left, paths)
        if f"{block}.mlp.down_proj" in left:
            folding.rows[f"{block}.mlp.up_proj"] = left.pop(f"{block}.mlp.down_proj")
        if f"{block}.self_attn.o_proj" in left:
            path = f"{block}.self_attn.o_proj"
            factors = left.pop(path)
            rows, shared = share_heads(factors, config)
            folding.rows[f"{block}.self_attn.v_proj"] = rows
            if not bool((shared == factors).all()):
                folding.shared[path] = shared
    if left:
        raise BuildError(
            f"{min(left)}: its SmoothQuant factors have nowhere to go", "leave the layer out in the recipe"
        )
    return folding


def share_heads(factors: Tensor, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The factors ``[heads * size]`` of o's input as those of v's rows ``[kv heads * size]`` and, spread again over
    the heads that read them, of o's input."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    grouped = factors.reshape(kv_heads, heads // kv_heads, -1)
    rows = grouped.amin(dim=1, keepdim=True)
    return rows.reshape(-1), rows.expand_as(grouped).reshape(-1)


def _common(left: dict[str, Tensor], paths: list[str]) -> Tensor:
    """The one factor of layers that read one input; takes them out of ``left``."""
    import torch

    found = [left.pop(path, None) for path in paths]
    first = next(factors for factors in found if factors is not None)
    if not all(factors is not None and torch.equal(factors, first) for factors in found):
        raise BuildError(
            f"{', '.join(paths)} read one input, but not all through the same SmoothQuant factors",
            "quantise all of them or none: correct the recipe's `exclude`",
        )
    return first
