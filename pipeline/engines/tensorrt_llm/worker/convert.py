"""Writes the TensorRT-LLM checkpoint of a unified Hugging Face export: the same scales, nothing calibrated again.

What changes is the form. q, k and v become one matrix; FP8 layers that share a matrix, or the fused gate of an MLP,
share a scale; tensors get TensorRT-LLM's names and are cut for tensor parallelism. Names, shapes and dtypes are those
of ModelOpt's ``export_tensorrt_llm_checkpoint``, and a test compares the two tensor by tensor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .config import Family, checkpoint_config, family_of
from .tensors import Folder, Linear, Refused, one_fp8_scale, one_input, read_linear

LARGE_KV_SCALE = 0.5  # where ModelOpt warns that a quantised KV cache may cost accuracy


def convert(
    export: Path,
    original: Path,
    config: dict[str, Any],
    target: Path,
    *,
    quantization: dict[str, Any],
    dtype: str,
    tp: int,
) -> dict[str, Any]:
    """Writes ``config.json`` and ``rank{r}.safetensors`` into ``target``; returns what was done, as JSON.

    ``export`` is the quantised checkpoint, or the original one for an engine without quantisation; ``original`` has
    the weights before quantisation; ``config`` is its config.json with the keys of transformers 4. ``quantization``
    holds ``quant_algo``, ``kv_cache_quant_algo`` and, for INT4, ``group_size``. ``dtype`` is that of everything else.
    Raises Refused for a family, a shape or a format that has no place in such a checkpoint.
    """
    family = family_of(config)
    _refuse_uneven(config, tp)
    from safetensors.torch import save_file

    writer = _Writer(Folder(export), Folder(original), config, dtype, tp)
    ranks = writer.write(family)
    target.mkdir(parents=True, exist_ok=True)
    for rank, tensors in enumerate(ranks):
        save_file(tensors, str(target / f"rank{rank}.safetensors"))
    described = checkpoint_config(
        family, config, quantization=quantization, excluded=writer.excluded, dtype=dtype, tp=tp
    )
    (target / "config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")
    return {"requantised": writer.requantised, "excluded": writer.excluded, "warnings": writer.warnings}


def _refuse_uneven(config: dict[str, Any], tp: int) -> None:
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    for what, count in (
        ("attention heads", heads),
        ("key-value heads", kv_heads),
        ("MLP rows", config["intermediate_size"]),
    ):
        if count % tp:
            raise Refused(f"{count} {what} cannot be cut into {tp} parts", "lower engine.tensorrt_llm.tp")


class _Writer:
    """Collects the tensors of each rank."""

    def __init__(self, export: Folder, original: Folder, config: dict[str, Any], dtype: str, tp: int) -> None:
        import torch

        self.export = export
        self.original = original
        self.config = config
        self.dtype = getattr(torch, dtype)
        self.tp = tp
        self.ranks: list[dict[str, Any]] = [{} for _ in range(tp)]
        self.excluded: list[str] = []
        self.requantised: list[str] = []
        self.warnings: list[str] = []

    def write(self, family: Family) -> list[dict[str, Any]]:
        """Every tensor, by rank."""
        self._embeddings()
        self._everywhere("transformer.ln_f.weight", self.export.get("model.norm.weight"))
        quantised = False
        for number in range(self.config["num_hidden_layers"]):
            quantised |= self._layer(number, family)
        if quantised:
            self.excluded.append("lm_head")
        else:
            self.excluded.clear()
        return self.ranks

    def _layer(self, number: int, family: Family) -> bool:
        """One decoder layer; returns whether any of it is quantised."""
        source, target = f"model.layers.{number}", f"transformer.layers.{number}"
        for ours, theirs in (("input_layernorm", "input_layernorm"), ("post_attention_layernorm", "post_layernorm")):
            self._everywhere(f"{target}.{theirs}.weight", self.export.get(f"{source}.{ours}.weight"))
        attention = [read_linear(self.export, f"{source}.self_attn.{name}_proj") for name in ("q", "k", "v", "o")]
        gate, up, down = (read_linear(self.export, f"{source}.mlp.{name}_proj") for name in ("gate", "up", "down"))
        if (attention[0].bias is not None) != family.qkv_bias or any(
            layer.bias is not None for layer in (attention[3], gate, up, down)
        ):
            raise Refused(
                f"{source}: biases that {family.architecture} of TensorRT-LLM has no place for",
                "use another backend for this checkpoint, or engine.tensorrt_llm.build: llm-api",
            )
        qkv = attention[:3]
        one_input(qkv)
        if qkv[0].kind == "FP8":
            self.requantised += one_fp8_scale(qkv, self.original)
        if "FP8" in (gate.kind, up.kind):  # the fused MLP
            one_input([gate, up])
            self.requantised += one_fp8_scale([gate, up], self.original)
        self._qkv(f"{target}.attention.qkv", qkv)
        self._row(f"{target}.attention.dense", attention[3])
        self._column(f"{target}.mlp.fc", gate)  # TensorRT-LLM's fc is what the activation function takes
        self._column(f"{target}.mlp.gate", up)
        self._row(f"{target}.mlp.proj", down)
        self._kv_scales(f"{target}.attention", f"{source}.self_attn")
        return any(layer.kind for layer in (*attention, gate, up, down))

    def _embeddings(self) -> None:
        """The embedding and the logits head, which is written on its own even when it is the embedding's matrix."""
        import torch

        embedding = self.export.get("model.embed_tokens.weight")
        head = self.export.find("lm_head.weight")
        if self.config.get("tie_word_embeddings", False):
            if head is not None and not torch.equal(head, embedding):
                raise Refused(
                    "lm_head.weight differs from the embedding, but config.json ties them (tie_word_embeddings)",
                    "set tie_word_embeddings to false in the checkpoint: the fine-tune untied them",
                )
            head = embedding.clone()  # a file's tensors may not share memory
        elif head is None:
            raise Refused(
                "no lm_head.weight, and config.json does not tie it to the embedding: TensorRT-LLM silently would",
                "save the checkpoint again, or set tie_word_embeddings to true if they are one matrix",
            )
        for name, matrix in (("transformer.vocab_embedding", embedding), ("lm_head", head)):
            missing = -len(matrix) % self.tp
            padded = torch.nn.functional.pad(matrix, (0, 0, 0, missing))
            self._cut(f"{name}.weight", padded.to(self.dtype), dim=0)

    def _qkv(self, target: str, layers: list[Linear]) -> None:
        """One matrix a rank: its heads of q, then of k, then of v."""
        import torch

        def joined(what: str) -> list[Any]:
            pieces = [getattr(layer, what).chunk(self.tp) for layer in layers]
            return [torch.cat([piece[rank] for piece in pieces]) for rank in range(self.tp)]

        first = layers[0]
        for rank in range(self.tp):
            self.ranks[rank][f"{target}.weight"] = self._plain(joined("weight")[rank])
            if first.bias is not None:
                self.ranks[rank][f"{target}.bias"] = self._plain(joined("bias")[rank])
            if first.scale is not None and first.kind != "FP8":
                self.ranks[rank][f"{target}.weights_scaling_factor"] = joined("scale")[rank]
        if first.kind == "FP8":
            self._everywhere(f"{target}.weights_scaling_factor", first.scale)
        self._input_scales(target, first)

    def _column(self, target: str, layer: Linear) -> None:
        """Cut along the outputs."""
        self._cut(f"{target}.weight", self._plain(layer.weight), dim=0)
        if layer.kind == "FP8":
            self._everywhere(f"{target}.weights_scaling_factor", layer.scale)
        elif layer.scale is not None:
            self._cut(f"{target}.weights_scaling_factor", layer.scale, dim=0)
        self._input_scales(target, layer)

    def _row(self, target: str, layer: Linear) -> None:
        """Cut along the inputs: so are the scales that go with them."""
        self._cut(f"{target}.weight", self._plain(layer.weight), dim=1)
        if layer.scale is not None and layer.kind == "INT4":
            self._cut(f"{target}.weights_scaling_factor", layer.scale, dim=1)
        elif layer.scale is not None:
            self._everywhere(f"{target}.weights_scaling_factor", layer.scale)
        self._input_scales(target, layer, dim=0)

    def _input_scales(self, target: str, layer: Linear, dim: int | None = None) -> None:
        """The scales of what goes in. A layer in high precision is noted as left out."""
        if layer.kind is None:
            self.excluded.append(target)
        if layer.input_scale is not None:
            self._everywhere(f"{target}.activation_scaling_factor", layer.input_scale)
        if layer.prequant is None:
            return
        prequant = layer.prequant.to(self.dtype)
        if dim is None:
            self._everywhere(f"{target}.prequant_scaling_factor", prequant)
        else:
            self._cut(f"{target}.prequant_scaling_factor", prequant, dim)

    def _kv_scales(self, target: str, source: str) -> None:
        """The scales of an FP8 KV cache, raised to at least 1 as ModelOpt's export raises them.

        Below 1 an FP8 number gains no precision but for the smallest values, and loses the room above what
        calibration saw. Engines that know one scale for both read ``kv``.
        """
        import torch

        scales = [self.export.find(f"{source}.{name}_proj.{name}_scale") for name in ("k", "v")]
        found = [scale.float().reshape(1) for scale in scales if scale is not None]
        if not found:
            return
        if len(found) == 1:
            raise Refused(f"{source}: only one of k_scale and v_scale", "export the recipe again: dvc repro")
        k, v = (torch.maximum(scale, torch.ones(1)) for scale in found)
        for name, scale in (("k", k), ("v", v), ("kv", torch.maximum(k, v))):
            self._everywhere(f"{target}.{name}_cache_scaling_factor", scale)
        for name, scale in zip("KV", found, strict=True):
            if float(scale) > LARGE_KV_SCALE:
                reach = float(scale) * torch.finfo(torch.float8_e4m3fn).max
                self.warnings.append(f"{source}: {name} reaches {reach:.0f}: an FP8 KV cache may cost accuracy")

    def _plain(self, tensor: Any) -> Any:
        """High precision in the engine's dtype; packed 4-bit values under the dtype that the format has for them."""
        import torch

        if tensor.dtype == torch.uint8:
            return tensor.view(torch.int8)
        return tensor if tensor.dtype in (torch.int8, torch.float8_e4m3fn) else tensor.to(self.dtype)

    def _everywhere(self, name: str, tensor: Any) -> None:
        import torch

        kept = tensor if name.endswith("_scaling_factor") and tensor.dtype == torch.float32 else tensor.to(self.dtype)
        for rank in self.ranks:
            rank[name] = kept.contiguous()

    def _cut(self, name: str, tensor: Any, dim: int) -> None:
        for rank, piece in zip(self.ranks, tensor.chunk(self.tp, dim=dim), strict=True):
            rank[name] = piece.contiguous()
