"""Writes what ModelOpt's unified export holds, without ModelOpt: for tests of structure, not of accuracy.

The layout was taken from exports of ModelOpt 0.47; ``test_families.py`` uses real ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_export(
    folder: Path, model: Any, weights: str, *, smooth: bool = True, cache: bool = False, but: Sequence[str] = ()
) -> None:
    """``weights``: int8 or fp8; ``smooth``: with SmoothQuant; ``but``: layers whose name ends so are left alone."""
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(3)
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name.endswith(("lm_head", *but)):
            continue
        weight = module.weight.detach()
        fp8 = weights == "fp8"
        scale = weight.abs().amax() / 448 if fp8 else weight.abs().amax(1) / 127
        exact = weight / (scale if fp8 else scale[:, None])
        tensors[f"{name}.weight"] = exact.to(torch.float8_e4m3fn) if fp8 else exact.round().to(torch.int8)
        tensors[f"{name}.weight_scale"] = scale
        # Layers that read the same tensor were calibrated on it alike.
        group = name.rsplit(".", 1)[0] + ("o" if name.endswith("o_proj") else "d" if name.endswith("down_proj") else "")
        draw.manual_seed(sum(group.encode()))
        tensors[f"{name}.input_scale"] = torch.rand((), generator=draw) / 100 + 0.01
        if smooth and not fp8:
            tensors[f"{name}.pre_quant_scale"] = torch.rand(weight.shape[1], generator=draw) + 0.5
        if cache and name.endswith("o_proj"):
            for part in "kv":
                scale = torch.tensor(0.01 + 0.001 * len(tensors))
                tensors[f"{name.removesuffix('o_proj')}{part}_proj.{part}_scale"] = scale
    folder.mkdir()
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    said = {"quant_algo": "FP8" if weights == "fp8" else "W8A8", "kv_cache_quant_algo": "FP8" if cache else None}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
