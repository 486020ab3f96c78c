"""Fewer and wider matrix products, with the same results: what reads one weight matrix at a time is slow at batch 1.

A matrix-vector product keeps a large GPU busy only when there are enough output columns to share out. Layers that read
the same input (q, k and v; gate and up) become one product over the weights side by side. A layer with few outputs and
many inputs can be cut along its inputs: the parts are one batched product, whose results are added.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.engines.lowering.weights import Store, in_memory


def fuse_parallel(model: Any, folder: Path, store: Store = in_memory) -> int:
    """Joins MatMuls over weights that read one input; ``folder`` holds the graph's data. Returns the joined products.

    Works on plain and on quantised graphs: the weights' scales, one for each output, are put side by side as well.
    """
    from onnx import helper

    graph = Graph(model, folder, store)
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for node in model.graph.node:
        if node.op_type == "MatMul" and (kind := graph.kind(node.input[1])):
            groups.setdefault((node.input[0], *kind), []).append(node)
    groups = {key: nodes for key, nodes in groups.items() if len(nodes) > 1}
    for nodes in groups.values():
        name = _joint_name(nodes)
        columns = [graph.columns(node.input[1]) for node in nodes]
        weight = graph.side_by_side([node.input[1] for node in nodes], name, nodes[0])
        sizes = graph.add(f"{name}.columns", np.array(columns, np.int64))
        outputs = [node.output[0] for node in nodes]
        product = helper.make_node("MatMul", [nodes[0].input[0], weight], [f"{name}.joined"], name=name)
        split = helper.make_node("Split", [f"{name}.joined", sizes], outputs, name=f"{name}.split", axis=-1)
        graph.replace(nodes, [product, split])
    graph.finish()
    return len(groups)


def split_inputs(model: Any, folder: Path, names: Iterable[str], parts: int, store: Store = in_memory) -> int:
    """Cuts the MatMuls called ``names`` into ``parts`` along their inputs; returns how many.

    For a quantised layer the cut is made before the pair that quantises its input, which nothing else may read.
    """
    graph = Graph(model, folder, store)
    wanted = set(names)
    nodes = [node for node in model.graph.node if node.op_type == "MatMul" and node.name in wanted]
    for node in nodes:
        _split_one(graph, node, parts)
    graph.finish()
    return len(nodes)


def _split_one(graph: Graph, node: Any, parts: int) -> None:
    from onnx import helper

    name, size, columns = node.name, graph.rows(node.input[1]) // parts, graph.columns(node.input[1])
    apart = graph.add(f"{name}.apart", np.array([0, -1, parts, size], np.int64))
    shape = graph.add(f"{name}.together", np.array([0, -1, columns], np.int64))
    axis = graph.add(f"{name}.parts", np.array([1], np.int64))
    first = graph.first_of_pair(node.input[0])  # the node to cut before: the quantiser, or the product itself
    source = (first or node).input[0]
    cut = [
        helper.make_node("Reshape", [source, apart], [f"{name}.cut"], name=f"{name}.cut"),
        helper.make_node("Transpose", [f"{name}.cut"], [f"{name}.pieces"], name=f"{name}.pieces", perm=[0, 2, 1, 3]),
    ]
    weight = graph.cut_rows(node.input[1], parts, node)
    if first is None:
        left = f"{name}.pieces"
    else:
        first.input[0], left = f"{name}.pieces", node.input[0]
        graph.insert_before(first, cut)
        cut = []
    outputs = node.output[0]
    product = helper.make_node("MatMul", [left, weight], [f"{name}.products"], name=name)
    total = helper.make_node("ReduceSum", [f"{name}.products", axis], [f"{name}.sum"], name=f"{name}.sum", keepdims=0)
    back = helper.make_node("Reshape", [f"{name}.sum", shape], [outputs], name=f"{name}.back")
    graph.replace([node], [*cut, product, total, back])


@dataclass(frozen=True)
class _Weight:
    """What a MatMul multiplies with: the names of its values and, for a quantised one, of scales and zero points.

    ``quantized`` says that the graph holds float values and quantises them itself.
    """

    parts: tuple[str, ...]
    quantized: bool


class Graph:
    """A graph with its weight matrices, plain or quantised with one scale a column."""

    def __init__(self, model: Any, folder: Path, store: Store) -> None:
        self._graph = model.graph
        self._folder = str(folder)
        self._store = store
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self._makers = {output: node for node in model.graph.node for output in node.output}
        self._before: dict[str, list[Any]] = {}  # name of an output -> nodes right before the one that makes it
        self._instead: dict[str, list[Any]] = {}

    def kind(self, name: str) -> tuple[int, bool, int] | None:
        """What weights must have in common to be joined: their type and form; None when it is no weight matrix."""
        weight = self._weight(name)
        tensor = self._tensors.get(weight.parts[0])
        if tensor is None or len(tensor.dims) != 2:
            return None
        return (len(weight.parts), weight.quantized, tensor.data_type)

    def rows(self, name: str) -> int:
        """The inputs of a product with this weight."""
        return int(self._tensors[self._weight(name).parts[0]].dims[0])

    def columns(self, name: str) -> int:
        """Its outputs."""
        return int(self._tensors[self._weight(name).parts[0]].dims[1])

    def first_of_pair(self, name: str) -> Any | None:
        """The QuantizeLinear of the pair that makes ``name``; None for an input that is not quantised."""
        maker = self._makers.get(name)
        if maker is None or maker.op_type != "DequantizeLinear":
            return None
        return self._makers[maker.input[0]]

    def side_by_side(self, names: list[str], joint: str, at: Any) -> str:
        """One weight from several; returns its name."""
        weights = [self._weight(name) for name in names]
        widths = [self.columns(name) for name in names]
        values = []
        for part in zip(*(weight.parts for weight in weights), strict=True):
            arrays = [self._array(name) for name in part]
            # FP8 has one scale a weight: side by side each of its columns needs it.
            arrays = [
                np.broadcast_to(one, (width,)) if one.ndim == 0 else one
                for one, width in zip(arrays, widths, strict=True)
            ]
            values.append(np.concatenate(arrays, axis=-1))
        return self._new_weight(f"{joint}.joined", values, weights[0].quantized, at)

    def cut_rows(self, name: str, parts: int, at: Any) -> str:
        """The weight as ``parts`` matrices of its rows; returns its name."""
        weight = self._weight(name)
        values, *scales = (self._array(part) for part in weight.parts)
        cut = values.reshape(parts, values.shape[0] // parts, values.shape[1])
        return self._new_weight(f"{at.name}.cut", [cut, *scales], weight.quantized, at)

    def as_kernel(self, name: str, at: Any) -> str:
        """The weight as the kernel of a convolution, ``[outputs, inputs, 1, 1]``; returns its name."""
        weight = self._weight(name)
        values, *scales = (self._array(part) for part in weight.parts)
        return self._new_weight(
            f"{at.name}.kernel", [values.T[:, :, None, None], *scales], weight.quantized, at, axis=0
        )

    def _new_weight(self, name: str, values: list[NDArray[Any]], quantized: bool, at: Any, axis: int = -1) -> str:
        from onnx import helper

        names = [f"{name}.{what}" for what in ("weight", "weight_scale", "weight_zero")]
        stored = [self.add(one, value) for one, value in zip(names, values, strict=False)]
        for kind in ("QuantizeLinear", "DequantizeLinear") if quantized else ("DequantizeLinear",):
            if len(stored) > 1:
                output = f"{name}.weight_{'q' if kind.startswith('Q') else 'dq'}"
                node = helper.make_node(kind, stored, [output], name=output, axis=axis % values[0].ndim)
                self.insert_before(at, [node])
                stored[0] = output
        return stored[0]

    def _weight(self, name: str) -> _Weight:
        maker = self._makers.get(name)
        if maker is None or maker.op_type != "DequantizeLinear":
            return _Weight((name,), False)
        stored, *scales = maker.input
        before = self._makers.get(stored)
        if before is not None and before.op_type == "QuantizeLinear":
            return _Weight((before.input[0], *scales), True)
        return _Weight((stored, *scales), False)

    def _array(self, name: str) -> NDArray[Any]:
        from onnx import numpy_helper

        return np.asarray(numpy_helper.to_array(self._tensors[name], self._folder))

    def add(self, name: str, value: NDArray[Any]) -> str:
        """A new constant."""
        self._graph.initializer.append(self._store(name, value))
        return name

    def insert_before(self, node: Any, nodes: list[Any]) -> None:
        self._before.setdefault(node.output[0], []).extend(nodes)

    def replace(self, old: list[Any], new: list[Any]) -> None:
        """``new`` stand where the first of ``old`` stood."""
        self._instead[old[0].output[0]] = new
        for node in old[1:]:
            self._instead[node.output[0]] = []

    def finish(self) -> None:
        """Puts the nodes into their places, and drops what nothing reads any more."""
        nodes = []
        for node in self._graph.node:
            nodes += self._before.get(node.output[0], [])
            nodes += self._instead.get(node.output[0], [node])
        outputs = {value.name for value in self._graph.output}
        while True:
            read = {name for node in nodes for name in node.input} | outputs
            kept = [node for node in nodes if read.intersection(node.output)]
            if len(kept) == len(nodes):
                break
            nodes = kept
        weights = [tensor for tensor in self._graph.initializer if tensor.name in read]
        del self._graph.node[:], self._graph.initializer[:]
        self._graph.node.extend(nodes)
        self._graph.initializer.extend(weights)


def _joint_name(nodes: list[Any]) -> str:
    """``model.layers.0.self_attn.q_proj+k_proj+v_proj``."""
    first, *rest = [node.name for node in nodes]
    return "+".join([first, *(name.rpartition(".")[2] for name in rest)])
