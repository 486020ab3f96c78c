"""TensorRT before strong typing (8.6): which types it may choose where.

Such a library takes float32 graphs and picks narrower kernels where flags allow them. So the graph stays in float32,
with float16 at its ends, and the arithmetic of norms is held in float32: float16 overflows in their squares.
"""

from __future__ import annotations

from typing import Any

from pipeline.engines.tensorrt.library import Library

_NORM = ("Pow", "ReduceMean", "Sqrt", "Div", "Add", "Mul")


def set_precisions(library: Library, network: Any, config: Any, *, half: bool) -> None:
    """Flags for what the network holds; ``half``: float16 kernels, and float16 cache and logits."""
    trt = library.trt
    layers = [network.get_layer(place) for place in range(network.num_layers)]
    if any(layer.type == trt.LayerType.QUANTIZE for layer in layers):
        config.set_flag(trt.BuilderFlag.INT8)
    if not half:
        return
    config.set_flag(trt.BuilderFlag.FP16)
    config.set_flag(trt.BuilderFlag.PREFER_PRECISION_CONSTRAINTS)
    ends = [network.get_input(place) for place in range(network.num_inputs)]
    ends += [network.get_output(place) for place in range(network.num_outputs)]
    for tensor in ends:
        if tensor.dtype == trt.DataType.FLOAT:
            tensor.dtype = trt.DataType.HALF
    for layer in layers:
        output = layer.get_output(0)
        if _of_a_norm(layer.name) and output.dtype == trt.DataType.FLOAT and not output.is_shape_tensor:
            layer.precision = trt.DataType.FLOAT
            layer.set_output_type(0, trt.DataType.FLOAT)


def _of_a_norm(name: str) -> bool:
    """Whether a layer is arithmetic of a norm: ``/model/layers.0/input_layernorm/Pow``."""
    module, _, operator = name.rpartition("/")
    return module.lower().rstrip("_0123456789").endswith("norm") and operator.rstrip("_0123456789") in _NORM
