"""ModelOpt's INT8 export, rewritten in the layout that vLLM reads: compressed-tensors, ``int-quantized``, W8A8.

vLLM refuses the export as it is (quant_algo ``W8A8_SQ_PER_CHANNEL``). What changes: SmoothQuant's factors are folded
away (``folding``), ``weight_scale`` becomes ``[out, 1]`` and ``input_scale`` ``[1]``, and ``config.json`` says what is
quantised how. Weights keep their integers, but those of o_proj under grouped-query attention.

Layout: compressed-tensors 0.17, https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.engines.vllm.folding import Folding, plan_folding
from pipeline.errors import BuildError
from pipeline.files import read_json, write_json

if TYPE_CHECKING:
    from torch import Tensor

# vLLM multiplies these as one matrix, with one input scale, so all of one group are quantised or none.
MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
LEVELS = 127
FLOAT16_MAX = 65504.0


def convert(export: Path, original: Path, target: Path, *, zero_points: bool = False) -> int:
    """Writes ``export`` (ModelOpt's unified folder) into ``target`` for vLLM; returns the number of INT8 layers.

    ``original`` is the checkpoint that was quantised. One shard at a time is in memory. ``zero_points`` writes a zero
    point of 0 for each input, which is the same model: for vLLM on a CPU, whose kernel for symmetric inputs on AMX
    ignores the calibrated scale and takes one from each token. Raises BuildError for what vLLM could not serve, or
    would serve as another model.
    """
    import torch
    from safetensors.torch import save_file

    config = read_json(export / "config.json")
    with ExitStack() as stack:
        tensors, unquantized = _Tensors(export, stack), _Tensors(original, stack)
        layers = sorted(name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale"))
        _check_layers(tensors, layers)
        scales = {layer: tensors[f"{layer}.pre_quant_scale"].float() for layer in layers
                  if f"{layer}.pre_quant_scale" in tensors}  # fmt: skip
        folding = plan_folding(scales, config)
        inputs = _input_scales(tensors, layers)
        places: dict[str, str] = {}
        for shard, names in tensors.shards.items():
            rewritten = {
                name: _rewrite(name, tensors, unquantized, folding, inputs)
                for name in names
                if not name.endswith(".pre_quant_scale")
            }
            if zero_points:
                scaled = [name for name in rewritten if name.endswith(".input_scale")]
                names_of_zeros = [name.replace(".input_scale", ".input_zero_point") for name in scaled]
                rewritten |= {name: torch.zeros(1, dtype=torch.int8) for name in names_of_zeros}
            save_file(rewritten, target / shard, {"format": "pt"})
            places |= dict.fromkeys(rewritten, shard)
        ignore = sorted(_linear_paths(tensors) - set(layers))
    if len(tensors.shards) > 1:
        write_json(target / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})
    write_json(target / "config.json", config | {"quantization_config": quantization_config(ignore, zero_points)})
    return len(layers)


def quantization_config(ignore: list[str], zero_points: bool = False) -> dict[str, Any]:
    """``config.json``'s entry: INT8 weights with one scale a channel, INT8 activations with one fixed scale."""
    common = {"num_bits": 8, "type": "int", "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": common | {"strategy": "channel", "symmetric": True},
        "input_activations": common | {"strategy": "tensor", "symmetric": not zero_points},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
        "ignore": ignore,
    }


class _Tensors(Mapping[str, Any]):
    """The tensors of a folder of safetensors, each read when it is asked for. ``shards``: file name -> tensor names."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        from safetensors import safe_open

        files = {path.name: stack.enter_context(safe_open(path, "pt")) for path in sorted(folder.glob("*.safetensors"))}
        self.shards: dict[str, list[str]] = {name: sorted(file.keys()) for name, file in files.items()}
        self._files = {name: files[shard] for shard, names in self.shards.items() for name in names}

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Any:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _check_layers(tensors: _Tensors, layers: list[str]) -> None:
    import torch

    if not layers:
        raise BuildError("the export has no quantised layer", "see the recipe's census.json")
    for layer in layers:
        if tensors[f"{layer}.weight"].dtype != torch.int8:
            raise BuildError(
                f"{layer}: weights are {tensors[f'{layer}.weight'].dtype}, not int8", "take an int8 recipe"
            )
        for group in _groups(layer):
            missing = [name for name in group if name not in layers and f"{name}.weight" in tensors]
            if missing:
                raise BuildError(
                    f"{layer} is quantised but {missing[0]} is not: vLLM runs {', '.join(group)} as one layer",
                    "quantise all of them or none: correct the recipe's `exclude`",
                )


def _groups(layer: str) -> Iterable[list[str]]:
    """The layers that vLLM merges with this one, itself included."""
    parent, _, name = layer.rpartition(".")
    return [[f"{parent}.{member}" for member in group] for group in MERGED if name in group]


def _input_scales(tensors: _Tensors, layers: list[str]) -> dict[str, Tensor]:
    """One scale ``[1]`` for each layer; of merged layers vLLM keeps one, so all get the largest."""
    own = {layer: tensors[f"{layer}.input_scale"].float().reshape(1) for layer in layers}
    merged = {layer: [own[name] for group in _groups(layer) for name in group if name in own] for layer in layers}
    return {layer: max([own[layer], *others], key=float).clone() for layer, others in merged.items()}


def _rewrite(
    name: str, tensors: _Tensors, original: _Tensors, folding: Folding, inputs: Mapping[str, Tensor]
) -> Tensor:
    """The tensor of this name as vLLM gets it; what is multiplied is multiplied in float32."""
    path, _, kind = name.rpartition(".")
    value = tensors[name]
    if kind == "input_scale":
        return inputs[path]
    if path in folding.shared and kind in ("weight", "weight_scale"):
        weight, scale = _quantized_again(path, tensors, original, folding.shared[path])
        return weight if kind == "weight" else scale
    if kind == "weight_scale":
        scale = value.float().reshape(-1, 1).expand(tensors[f"{path}.weight"].shape[0], 1)
        rows = folding.rows.get(path)
        return (scale if rows is None else scale * rows.reshape(-1, 1)).contiguous()
    factors = folding.weights.get(path, folding.rows.get(path))
    if factors is None or (kind == "weight" and f"{path}.weight_scale" in tensors):
        return value  # integers keep their value: their scale carries the rows' factors
    if value.dim() == 2:  # [out, in]; norms and biases are vectors, kept in float32: a cast would round them twice
        return _finite(name, (value.float() * factors.reshape(-1, 1))).to(value.dtype)
    return _finite(name, value.float() * factors)


def _finite(name: str, value: Tensor) -> Tensor:
    largest = float(value.abs().max())
    if not largest <= FLOAT16_MAX:
        raise BuildError(
            f"{name}: with SmoothQuant's factors folded in it reaches {largest:.3g}, too much for float16",
            "lower the recipe's `alpha`, or take a recipe without SmoothQuant (int8_max)",
        )
    return value


def _quantized_again(path: str, tensors: _Tensors, original: _Tensors, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and scales ``[out, 1]`` of a layer whose input comes multiplied by other ``factors`` ``[in]``."""
    import torch

    weight = original[f"{path}.weight"].float()
    scale = tensors[f"{path}.weight_scale"].float().reshape(-1, 1)
    smoothed = weight / tensors[f"{path}.pre_quant_scale"].float()
    # Rounding moved each weight by half a step; a calibration in half precision by a little more.
    if not bool((smoothed - tensors[f"{path}.weight"].float() * scale).abs().le(scale).all()):
        raise BuildError(f"{path}: the export is not of this checkpoint", "run `dvc repro` from the stage quantize on")
    smoothed = weight / factors
    scale = (smoothed.abs().amax(dim=1, keepdim=True) / LEVELS).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.round(smoothed / scale).to(torch.int8), scale


def _linear_paths(tensors: _Tensors) -> set[str]:
    """Paths of modules with a matrix for a weight: what compressed-tensors must be told to leave alone."""
    matrices = {name for name in tensors if name.endswith(".weight") and tensors[name].dim() == 2}
    return {name.removesuffix(".weight") for name in matrices} | {"lm_head"}
