"""Explicit quantisation: the exported scales become QuantizeLinear and DequantizeLinear pairs in the plain graph.

The result is standard ONNX: for each linear layer that the quantised checkpoint holds in 8 bit,

    x -> [Mul pre_quant_scale] -> QuantizeLinear -> DequantizeLinear -> MatMul <- DequantizeLinear <- weight (int8)

Layers that share an input and its scale (q, k and v) share its pair. Weight scales are per output channel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import BuildError


@dataclass(frozen=True)
class QuantizedLinear:
    """One layer of the export: int8 ``weight [out, in]``, ``weight_scale [out]``, ``input_scale`` and, with
    SmoothQuant, ``pre_quant_scale [in]``."""

    weight: NDArray[np.int8]
    weight_scale: NDArray[np.float32]
    input_scale: float
    pre_quant_scale: NDArray[np.float32] | None


def read_quantized(checkpoint: Path) -> tuple[dict[str, QuantizedLinear], dict[str, NDArray[Any]]]:
    """Module path -> quantised layer, and name -> every other float tensor of a unified HF export."""
    from safetensors import safe_open

    tensors: dict[str, Any] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="np") as shard:
            tensors |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    suffixes = (".weight_scale", ".input_scale", ".pre_quant_scale")
    layers = {}
    for name in tensors:
        if name.endswith(".weight_scale"):
            module = name.removesuffix(".weight_scale")
            weight = tensors[f"{module}.weight"]
            if weight.dtype != np.int8:
                raise BuildError(f"{module}: weights are {weight.dtype}, not int8", "choose an int8 recipe")
            layers[module] = QuantizedLinear(
                weight,
                np.broadcast_to(tensors[name].astype(np.float32).reshape(-1), (weight.shape[0],)),
                float(tensors[f"{module}.input_scale"].reshape(-1)[0]),
                tensors.get(f"{module}.pre_quant_scale"),
            )
    rest = {
        name: value
        for name, value in tensors.items()
        if not name.endswith(suffixes) and name.removesuffix(".weight") not in layers
    }
    return layers, rest


def insert_qdq(model: Any, layers: Mapping[str, QuantizedLinear]) -> int:
    """Rewrites ``model`` (an ONNX ModelProto from ``lowering.export``) in place; returns the layers quantised.

    Raises BuildError when a layer of the export has no MatMul in the graph.
    """
    from onnx import helper, numpy_helper

    graph = model.graph
    matmuls = {node.name: node for node in graph.node if node.op_type == "MatMul"}
    missing = sorted(set(layers) - set(matmuls))
    if missing:
        raise BuildError(
            f"{len(missing)} quantised layers have no MatMul in the graph, first {missing[0]}",
            "export the graph and the scales from the same checkpoint",
        )
    added: dict[str, list[Any]] = {}  # node name -> nodes that go right before it
    pairs: dict[tuple[str, float, bytes], str] = {}
    replaced = set()

    def constant(name: str, value: NDArray[Any]) -> str:
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    for name, node in matmuls.items():  # in the order of the graph: a pair stands before its first reader
        if name not in layers:
            continue
        layer = layers[name]
        before = added.setdefault(name, [])
        scales = layer.pre_quant_scale
        key = (node.input[0], layer.input_scale, b"" if scales is None else scales.tobytes())
        if key not in pairs:
            source = node.input[0]
            if scales is not None:
                smooth = constant(f"{name}.pre_quant_scale", scales.astype(np.float32))
                before.append(helper.make_node("Mul", [source, smooth], [f"{name}.smoothed"]))
                source = f"{name}.smoothed"
            scale = constant(f"{name}.input_scale", np.array(layer.input_scale, np.float32))
            zero = constant(f"{name}.input_zero", np.array(0, np.int8))
            before.append(helper.make_node("QuantizeLinear", [source, scale, zero], [f"{name}.input_q"]))
            before.append(helper.make_node("DequantizeLinear", [f"{name}.input_q", scale, zero], [f"{name}.input_dq"]))
            pairs[key] = f"{name}.input_dq"
        weight = constant(f"{name}.weight_q", layer.weight.T)
        scale = constant(f"{name}.weight_scale", layer.weight_scale)
        zero = constant(f"{name}.weight_zero", np.zeros(layer.weight.shape[0], np.int8))
        dequantize = helper.make_node("DequantizeLinear", [weight, scale, zero], [f"{name}.weight_dq"], axis=1)
        before.append(dequantize)
        replaced.add(node.input[1])
        node.input[0], node.input[1] = pairs[key], f"{name}.weight_dq"
    _insert_before(graph, added)
    _drop_initializers(graph, replaced)
    return len(layers)


def check_untouched(model: Any, rest: Mapping[str, NDArray[Any]]) -> None:
    """Raises BuildError when the export changed a tensor that the graph takes from the original checkpoint.

    Some export formats fold scales into normalisation weights; the graph would then apply them twice.
    """
    from onnx import numpy_helper

    plain = {tensor.name: tensor for tensor in model.graph.initializer}
    for name, value in rest.items():
        tensor = next((plain[key] for key in (name, f"model_.{name}") if key in plain), None)
        if tensor is None or "norm" not in name:
            continue
        if not np.allclose(numpy_helper.to_array(tensor), value.astype(np.float32), rtol=1e-2, atol=1e-6):
            raise BuildError(f"{name}: the quantised export changed this tensor", "export in float32 without folding")


def _insert_before(graph: Any, added: Mapping[str, list[Any]]) -> None:
    nodes = []
    for node in graph.node:
        nodes += added.get(node.name, [])
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _drop_initializers(graph: Any, names: set[str]) -> None:
    kept = [tensor for tensor in graph.initializer if tensor.name not in names]
    del graph.initializer[:]
    graph.initializer.extend(kept)
