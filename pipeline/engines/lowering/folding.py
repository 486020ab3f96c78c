"""Small constant arithmetic in a graph is done once, here.

The exporter leaves what it computed axes and sizes from in the graph. TensorRT 8.6 wants a Slice's axes as a constant,
and other libraries take shorter graphs in less time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST = 1024  # elements of what is read and made: sizes and axes, never weights
_NEVER = {"Constant", "DequantizeLinear", "QuantizeLinear"}


def fold_constants(graph: Any, opset: int) -> int:
    """Replaces nodes that read only small constants by initializers; returns how many nodes that were."""
    from onnx import numpy_helper

    known = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if _small(tensor)}
    made: dict[str, NDArray[Any]] = {}
    nodes, folded = [], 0
    for node in graph.node:
        if node.op_type == "Constant":
            value = node.attribute[0].t
            if node.attribute[0].name == "value" and _small(value):
                known[node.output[0]] = numpy_helper.to_array(value)
        elif node.op_type not in _NEVER and node.input and all(name in known for name in node.input if name):
            outputs = _run(node, known, opset)
            if all(np.size(value) <= LARGEST for value in outputs.values()):
                known |= outputs
                made |= outputs
                folded += 1
                continue
        nodes.append(node)
    read = {name for node in nodes for name in node.input} | {value.name for value in graph.output}
    del graph.node[:]
    graph.node.extend(node for node in nodes if node.op_type != "Constant" or node.output[0] in read)
    graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in made.items() if name in read
    )
    return folded


def _small(tensor: Any) -> bool:
    return int(np.prod(tensor.dims)) <= LARGEST and tensor.data_location != tensor.EXTERNAL


def _run(node: Any, known: dict[str, NDArray[Any]], opset: int) -> dict[str, NDArray[Any]]:
    """The outputs of one node, from ONNX's own reference implementation."""
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    names = [name for name in dict.fromkeys(node.input) if name]
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(known[name].dtype), known[name].shape)
        for name in names
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output]
    graph = helper.make_graph([node], "one", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    values = ReferenceEvaluator(model).run(None, {name: known[name] for name in names})
    return dict(zip(node.output, values, strict=True))
