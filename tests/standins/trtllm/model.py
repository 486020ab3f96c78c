"""The model that a stand-in server answers with: torch, from the tensors of an engine or a checkpoint alone.

It reads both forms on its own (the inverse of what the backend writes), so a wrong conversion gives wrong answers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.standins.trtllm.engine import read_engine


class Quantised(nn.Module):
    """A linear layer as the engine computes it: scaled and rounded input, dequantised weight."""

    def __init__(self, weight: Any, parts: dict[str, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(_dequantised(weight, parts.get("scale")), requires_grad=False)
        self.integer = weight.dtype == torch.int8
        self.prequant = parts.get("prequant")
        self.input_scale = parts.get("input_scale")

    def forward(self, x: Any) -> Any:
        if self.prequant is not None:
            x = x * self.prequant.float()
        if self.input_scale is not None and self.integer:
            x = torch.clamp(torch.round(x / self.input_scale), -128, 127) * self.input_scale
        elif self.input_scale is not None:
            x = torch.clamp(x / self.input_scale, -448, 448).to(torch.float8_e4m3fn).float() * self.input_scale
        return nn.functional.linear(x, self.weight)


def _dequantised(weight: Any, scale: Any) -> Any:
    if scale is None:
        return weight.float()
    if scale.dim() == 2:  # 4 bits: two output channels in a byte, one scale a block of inputs
        codes = weight.view(torch.int8)
        low, high = (codes << 4) >> 4, codes >> 4
        values = torch.stack([low, high], dim=1).reshape(-1, codes.shape[1]).float()
        return values * scale.repeat_interleave(codes.shape[1] // scale.shape[1], dim=1)
    return weight.float() * (scale[:, None] if scale.numel() > 1 else scale)


def load_model(folder: Path) -> Any:
    """The model of an engine folder, or of a Hugging Face folder."""
    if (folder / "rank0.engine").exists():
        head, content = read_engine(folder / "rank0.engine")
        tensors = load(content)
        if head["form"] == "hf":
            return _from_hf(json.loads((folder / "hf_config.json").read_text()), tensors)
        return _from_trtllm(json.loads((folder / "config.json").read_text())["pretrained_config"], tensors)
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return _from_hf(json.loads((folder / "config.json").read_text()), tensors)


def _empty(config: dict[str, Any]) -> Any:
    return LlamaForCausalLM(LlamaConfig(attn_implementation="eager", **config)).float().eval()


def _set(model: Any, name: str, value: Any) -> None:
    parent, _, last = name.rpartition(".")
    module = model.get_submodule(parent)
    module.register_parameter(last, nn.Parameter(value.float(), requires_grad=False))


def _from_hf(config: dict[str, Any], tensors: dict[str, Any]) -> Any:
    """As transformers 4 reads a configuration: rope_theta, and 10000 without it."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    model = _empty({
        **{name: config[name] for name in (*names, "rms_norm_eps", "max_position_embeddings")},
        "num_key_value_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "rope_parameters": {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0)},
        "tie_word_embeddings": False,
    })  # fmt: skip
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    for name, tensor in tensors.items():
        path, _, part = name.rpartition(".")
        if path.endswith("_proj") and part == "weight":
            parts = {
                ours: tensors.get(f"{path}.{theirs}")
                for ours, theirs in (
                    ("scale", "weight_scale"),
                    ("input_scale", "input_scale"),
                    ("prequant", "pre_quant_scale"),
                )
            }
            model.set_submodule(path, Quantised(tensor, parts))
        elif not path.endswith("_proj"):
            _set(model, name, tensor)
    return model


def _from_trtllm(config: dict[str, Any], tensors: dict[str, Any]) -> Any:
    """``qkv`` is cut into its three parts; the activation function takes ``fc`` and multiplies ``gate``."""
    model = _empty({
        **{name: config[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
        **{name: config[name] for name in ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")},
        "rms_norm_eps": config["norm_epsilon"],
        "head_dim": config["head_size"],
        "rope_parameters": {"rope_type": "default", "rope_theta": config.get("rotary_base", 10000.0)},
        "tie_word_embeddings": False,
    })  # fmt: skip
    _set(model, "model.embed_tokens.weight", tensors["transformer.vocab_embedding.weight"])
    _set(model, "model.norm.weight", tensors["transformer.ln_f.weight"])
    _set(model, "lm_head.weight", tensors["lm_head.weight"])
    rows = [config["num_attention_heads"], config["num_key_value_heads"], config["num_key_value_heads"]]
    rows = [count * config["head_size"] for count in rows]
    names = {
        "attention.dense": "self_attn.o_proj",
        "mlp.fc": "mlp.gate_proj",
        "mlp.gate": "mlp.up_proj",
        "mlp.proj": "mlp.down_proj",
    }
    for number in range(config["num_hidden_layers"]):
        source, target = f"transformer.layers.{number}", f"model.layers.{number}"
        _set(model, f"{target}.input_layernorm.weight", tensors[f"{source}.input_layernorm.weight"])
        _set(model, f"{target}.post_attention_layernorm.weight", tensors[f"{source}.post_layernorm.weight"])
        for theirs, ours in names.items():
            model.set_submodule(f"{target}.{ours}", Quantised(*_parts(tensors, f"{source}.{theirs}")))
        weight, parts = _parts(tensors, f"{source}.attention.qkv")
        packed = 2 if parts.get("scale") is not None and parts["scale"].dim() == 2 else 1
        pieces = weight.split([count // packed for count in rows])
        scale = parts.get("scale")
        scales = [scale] * 3 if scale is None or scale.numel() == 1 else scale.split(rows)
        for letter, piece, own in zip("qkv", pieces, scales, strict=True):
            model.set_submodule(f"{target}.self_attn.{letter}_proj", Quantised(piece, parts | {"scale": own}))
    return model


def _parts(tensors: dict[str, Any], path: str) -> tuple[Any, dict[str, Any]]:
    words = {"scale": "weights", "input_scale": "activation", "prequant": "prequant"}
    return tensors[f"{path}.weight"], {
        ours: tensors.get(f"{path}.{word}_scaling_factor") for ours, word in words.items()
    }
