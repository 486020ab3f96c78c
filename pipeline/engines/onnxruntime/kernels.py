"""Lowers an INT8 Q/DQ graph to ONNX Runtime's integer kernels for CPUs.

ONNX Runtime itself fuses only MatMuls whose activation pair has one reader (60 of 210 in a Llama block
structure), and its signed activations are slow without VNNI. So each pair becomes

    QuantizeLinear (uint8, zero point 128) -> com.microsoft.MatMulIntegerToFloat <- weight (uint8, zero point 128)

which computes the same integers: both zero points only shift them. Unsigned weights as well, because the
uint8 x int8 kernel may saturate its 16-bit sums on CPUs without VNNI.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_ZERO = 128
DOMAIN = "com.microsoft"


def lower_for_cpu(model: Any) -> int:
    """Rewrites a Q/DQ ModelProto in place; returns the number of MatMuls that now run in int8."""
    from onnx import helper, numpy_helper

    graph = model.graph
    producers = {output: node for node in graph.node for output in node.output}
    weights = {tensor.name: tensor for tensor in graph.initializer}
    graph.initializer.append(numpy_helper.from_array(np.array(_ZERO, np.uint8), "zero_point_128"))
    dead: set[str] = set()
    lowered = 0
    for node in graph.node:
        if node.op_type not in ("MatMul", "Gemm"):  # a Gemm of ours adds a bias, which the kernel can too
            continue
        activation, weight = (producers.get(name) for name in node.input[:2])
        if activation is None or weight is None or {activation.op_type, weight.op_type} != {"DequantizeLinear"}:
            continue
        quantize = producers[activation.input[0]]
        quantize.input[2] = "zero_point_128"
        signed = numpy_helper.to_array(weights[weight.input[0]])
        unsigned = (signed.astype(np.int16) + _ZERO).astype(np.uint8)
        weights[weight.input[0]].CopyFrom(numpy_helper.from_array(unsigned, weight.input[0]))
        dead.update((activation.output[0], weight.output[0]))
        scales, bias = [activation.input[1], weight.input[1]], list(node.input[2:])
        node.op_type, node.domain = "MatMulIntegerToFloat", DOMAIN
        del node.input[:], node.attribute[:]
        node.input.extend([quantize.output[0], weight.input[0], *scales, "zero_point_128", "zero_point_128", *bias])
        lowered += 1
    kept = [node for node in graph.node if node.op_type != "DequantizeLinear" or node.output[0] not in dead]
    del graph.node[:]
    graph.node.extend(kept)
    used = {name for node in graph.node for name in node.input}
    initializers = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(initializers)
    if lowered:
        model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return lowered
