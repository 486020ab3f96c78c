"""Matrix products as convolutions with kernels of 1 x 1: TensorRT chooses among other kernels for them.

A product of ``[.., inputs]`` with ``[inputs, outputs]`` is a convolution over an image of one place for each row. The
images are the rows, so no value moves: ``[rows, inputs, 1, 1]``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pipeline.engines.lowering.weights import Store
from pipeline.engines.tensorrt.fusion import Graph


def as_convolutions(model: Any, folder: Path, store: Store) -> int:
    """Turns every product of a decoder layer with a weight into a convolution; returns how many.

    For a quantised layer the rows become images before the pair that quantises its input, which nothing else may read:
    join the products of one input first.
    """
    from onnx import helper

    graph = Graph(model, folder, store)
    nodes = [node for node in model.graph.node if node.op_type == "MatMul" and "_proj" in node.name]
    shared = {node.input[0] for node in nodes if sum(other.input[0] == node.input[0] for other in nodes) > 1}
    if shared:
        raise ValueError(f"{len(shared)} inputs are read by several products: join them first")
    bounds = [graph.add(f"convolve.{what}", np.array([value], np.int64)) for what, value in (("from", 0), ("to", 2))]
    for node in nodes:
        name, rows, columns = node.name, graph.rows(node.input[1]), graph.columns(node.input[1])
        images = graph.add(f"{name}.images", np.array([-1, rows, 1, 1], np.int64))
        width = graph.add(f"{name}.width", np.array([columns], np.int64))
        weight = graph.as_kernel(node.input[1], node)
        first = graph.first_of_pair(node.input[0])
        source = (first or node).input[0]
        turned = helper.make_node("Reshape", [source, images], [f"{name}.pixels"], name=f"{name}.pixels")
        shape = [
            helper.make_node("Shape", [source], [f"{name}.shape"], name=f"{name}.shape"),
            helper.make_node("Slice", [f"{name}.shape", *bounds], [f"{name}.rows"], name=f"{name}.rows"),
            helper.make_node("Concat", [f"{name}.rows", width], [f"{name}.flat"], name=f"{name}.flat", axis=0),
        ]
        before = []
        if first is None:
            pixels, before = f"{name}.pixels", [turned]
        else:
            first.input[0], pixels = f"{name}.pixels", node.input[0]
            graph.insert_before(first, [turned])
        product = helper.make_node("Conv", [pixels, weight], [f"{name}.sums"], name=name, kernel_shape=[1, 1])
        back = helper.make_node("Reshape", [f"{name}.sums", f"{name}.flat"], [node.output[0]], name=f"{name}.back")
        graph.replace([node], [*shape, *before, product, back])
    graph.finish()
    return len(nodes)
