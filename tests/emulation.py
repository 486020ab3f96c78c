"""A model folder with 8-bit layers in plain torch: the reference for what a backend makes of a quantised export.

Written from the meaning of the tensors, not from any backend's code: a quantised layer computes

    y = round(clip(x * pre_quant_scale / input_scale)) * input_scale  @  (weight * weight_scale)^T
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_tensors(folder: Path) -> dict[str, Any]:
    """Every tensor of a folder of safetensors."""
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def emulate(folder: Path, tensors: dict[str, Any] | None = None) -> Any:
    """The model in float64, its quantised layers with fake quantisation. ``tensors`` replace those of the folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    class Quantized(torch.nn.Module):
        def __init__(self, path: str, tensors: dict[str, Any]) -> None:
            super().__init__()
            self.weight = tensors[f"{path}.weight"].double() * tensors[f"{path}.weight_scale"].double().reshape(-1, 1)
            self.input_scale = tensors[f"{path}.input_scale"].double().reshape(())
            self.pre_quant_scale = tensors.get(f"{path}.pre_quant_scale", torch.ones(())).double()
            self.bias = tensors.get(f"{path}.bias")
            self.integers: Any = None  # those of the last input, for tests to look at

        def forward(self, x: Any) -> Any:
            self.integers = torch.round(x * self.pre_quant_scale / self.input_scale).clamp(-128, 127)
            bias = None if self.bias is None else self.bias.double()
            return torch.nn.functional.linear(self.integers * self.input_scale, self.weight, bias)

    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager").double()
    tensors = read_tensors(folder) if tensors is None else tensors
    quantized = [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]
    plain = {name: value.double() for name, value in tensors.items() if name.rpartition(".")[0] not in quantized}
    missing, unexpected = model.load_state_dict(plain, strict=False)
    assert not unexpected
    assert {name.rpartition(".")[0] for name in missing} <= {*quantized, "lm_head"}
    model.tie_weights()
    for path in quantized:
        model.set_submodule(path, Quantized(path, tensors))
    return model.eval()
