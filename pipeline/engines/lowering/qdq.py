"""Explicit quantisation: the exported scales become QuantizeLinear and DequantizeLinear pairs in the plain graph.

The result is standard ONNX: for each linear layer that the quantised checkpoint holds in 8 bit,

    x -> [Mul pre_quant_scale] -> QuantizeLinear -> DequantizeLinear -> MatMul <- DequantizeLinear <- weight (8 bit)

Layers that share an input and its scales (q, k and v) share its pair. With FP8 keys and values the cache's inputs and
outputs are FP8 too: dequantised where they are read, quantised where they are written, and attention sees the new
keys and values as the cache will hold them.

Scales are of the graph's type (``scales`` says otherwise: TensorRT 8.6 takes float32 only); a scale that this type
cannot hold is refused. ``verify.py`` reads the result anew.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.engines.lowering.quantized import Layer, QuantizedCheckpoint
from pipeline.engines.lowering.weights import Store, in_memory
from pipeline.errors import BuildError

QDQ_OPSET = 21  # of pairs in float16 or FP8; INT8 with float32 scales is older
SCALE_LOSS = 2e-3  # of a layer's largest weight scale: what float16 may change in any of them


@dataclass
class Inserted:
    """What ``insert_qdq`` did: linear layers and cache tensors."""

    layers: int
    cache: int


def insert_qdq(
    model: Any,
    checkpoint: QuantizedCheckpoint,
    store: Store = in_memory,
    scales: type[np.generic] | None = None,
    *,
    float_weights: bool = False,
) -> Inserted:
    """Rewrites ``model``, an ONNX ModelProto from ``lowering.trace``, in place; ``store`` takes the new weights.

    ``scales`` None: of the graph's own type. ``float_weights``: the graph holds the weights' values, and quantises them
    itself (TensorRT 8.6 takes no 8-bit constants). Raises BuildError when a layer of the export has no MatMul in the
    graph, or has a scale that the type of the scales cannot hold.
    """
    graph = model.graph
    linears = {node.name: node for node in graph.node if node.op_type in ("MatMul", "Gemm")}
    if missing := sorted(set(checkpoint.layers) - set(linears)):
        raise BuildError(
            f"{len(missing)} quantised layers have no MatMul in the graph, first {missing[0]}",
            "export the graph and the scales from the same checkpoint",
        )
    writer = _Writer(graph, store, np.dtype(scales or _float_type(graph)), float_weights)
    replaced = set()
    for name, node in linears.items():  # in the order of the graph: a pair stands before its first reader
        if name in checkpoint.layers:
            replaced.add(node.input[1])
            _quantize_linear(writer, node, checkpoint.layers[name], checkpoint.weight(name))
    for (layer, part), scale in sorted(checkpoint.cache.items()):
        _quantize_cache(writer, layer, part, scale)
    writer.finish(replaced)
    if (
        checkpoint.cache
        or writer.scales != np.float32
        or any(one.dtype != "int8" for one in checkpoint.layers.values())
    ):
        set_opset(model, QDQ_OPSET)
    return Inserted(len(checkpoint.layers), len(checkpoint.cache))


def _quantize_linear(writer: _Writer, node: Any, layer: Layer, weight: NDArray[Any]) -> None:
    source = node.input[0]
    smooth = layer.pre_quant_scale
    key = (source, layer.dtype, layer.input_scale, b"" if smooth is None else smooth.tobytes())
    if key not in writer.pairs:
        before = writer.before(node.output[0])
        if smooth is not None:
            constant = writer.scale(f"{node.name}.pre_quant_scale", smooth, each=True)
            source = writer.node(before, "Mul", [source, constant], f"{node.name}.smoothed")
        scale = writer.scale(f"{node.name}.input_scale", np.array(layer.input_scale))
        writer.pairs[key] = writer.pair(before, source, scale, layer.dtype, f"{node.name}.input")
    turned = node.op_type == "Gemm" and _gemm_is_turned(node)
    if list(weight.shape) != writer.shapes[node.input[1]][:: 1 if turned else -1]:
        raise BuildError(
            f"{node.name}: {list(weight.shape)} outputs and inputs in the export, another weight in the graph",
            "export the graph and the scales from the same checkpoint",
        )
    scale = writer.scale(f"{node.name}.weight_scale", layer.weight_scale)
    zero = writer.zero(layer.dtype, f"{node.name}.weight_zero", layer.weight_scale.shape)
    axis = {"axis": 1} if layer.weight_scale.ndim else {}
    before = writer.before(node.output[0])
    if writer.float_weights:
        value = weight.T.astype(np.float32) * layer.weight_scale
        stored = writer.constant(f"{node.name}.weight_f", value)
        stored = writer.node(before, "QuantizeLinear", [stored, scale, zero], f"{node.name}.weight_q", **axis)
    else:
        stored = writer.constant(f"{node.name}.weight_q", weight.T)
    dequantized = writer.node(before, "DequantizeLinear", [stored, scale, zero], f"{node.name}.weight_dq", **axis)
    node.input[0], node.input[1] = writer.pairs[key], dequantized


def _gemm_is_turned(node: Any) -> bool:
    """Whether the weight was ``[out, in]``; afterwards the node takes ``[in, out]``, as a MatMul does."""
    settings = {attribute.name: attribute for attribute in node.attribute}
    turned = "transB" in settings and settings["transB"].i == 1
    if turned:
        settings["transB"].i = 0
    if ("transA" in settings and settings["transA"].i) or ("alpha" in settings and settings["alpha"].f != 1):
        raise BuildError(f"{node.name}: a Gemm with a factor or a turned input", "exclude this layer in the recipe")
    return turned


def _quantize_cache(writer: _Writer, layer: int, part: str, value: float) -> None:
    from onnx import TensorProto

    graph, fp8 = writer.graph, "float8_e4m3fn"
    read = _cache_value(graph.input, layer, part)
    written = _cache_value(graph.output, layer, part)
    scale = writer.scale(f"{read.name}.scale", np.array(value))
    zero = writer.zero(fp8, f"{read.name}.zero")
    read_dq = writer.node(writer.first, "DequantizeLinear", [read.name, scale, zero], f"{read.name}.dq")
    writer.redirect(read.name, read_dq, but=read_dq)
    # The producer's tensor gets a name of its own, because an output of the graph keeps its name.
    plain = f"{written.name}.plain"
    producer = next(node for node in graph.node if written.name in node.output)
    producer.output[list(producer.output).index(written.name)] = plain
    writer.redirect(written.name, plain)
    after = writer.after(producer.output[0])
    writer.node(after, "QuantizeLinear", [plain, scale, zero], written.name)
    seen = writer.node(after, "DequantizeLinear", [written.name, scale, zero], f"{written.name}.dq")
    writer.redirect(plain, seen, but=written.name)
    for value_info in (read, written):
        value_info.type.tensor_type.elem_type = TensorProto.FLOAT8E4M3FN


def _cache_value(values: Any, layer: int, part: str) -> Any:
    for value in values:
        if (found := cache_place(value.name)) and found == (layer, part):
            return value
    raise BuildError(f"the graph has no cache for the {part}s of layer {layer}", "export graph and scales together")


def cache_place(name: str) -> tuple[int, str] | None:
    """Decoder layer and part of a cache tensor: (3, "key") for ``past_key_values.3.key`` and ``new_keys.3``."""
    found = re.fullmatch(r"(?:past_key_values|present)\.(\d+)\.(key|value)", name)
    if found:
        return int(found[1]), found[2]
    found = re.fullmatch(r"(?:past|new)_(key|value)s\.(\d+)", name)
    return (int(found[2]), found[1]) if found else None


@dataclass
class _Writer:
    """Adds constants and nodes to a graph; ``finish`` puts the nodes into their places."""

    graph: Any
    store: Store
    scales: np.dtype[Any]
    float_weights: bool
    pairs: dict[tuple[str, str, float, bytes], str] = field(default_factory=dict)
    first: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shapes = {tensor.name: list(tensor.dims) for tensor in self.graph.initializer}
        self._before: dict[str, list[Any]] = {}  # an output -> nodes before the one that makes it
        self._after: dict[str, list[Any]] = {}
        self._readers: dict[str, list[Any]] = {}
        for node in self.graph.node:
            self._note(node)

    def _note(self, node: Any) -> None:
        for name in set(node.input):
            self._readers.setdefault(name, []).append(node)

    def before(self, output: str) -> list[Any]:
        """The nodes that go right before the one with this output."""
        return self._before.setdefault(output, [])

    def after(self, output: str) -> list[Any]:
        """The nodes that go right after the one with this output."""
        return self._after.setdefault(output, [])

    def constant(self, name: str, value: NDArray[Any]) -> str:
        """A weight."""
        self.graph.initializer.append(self.store(name, value))
        return name

    def scale(self, name: str, value: NDArray[Any], each: bool = False) -> str:
        """A scale, in the type of the scales. What that loses is measured by the largest value, or ``each`` by its own.

        A weight channel of tiny values matters little beside the others; a smoothed input channel is like any other.
        """
        exact = value.astype(np.float64)
        stored = np.maximum(exact, np.finfo(self.scales).smallest_subnormal).astype(self.scales)
        lost = (np.abs(stored.astype(np.float64) - exact) / (exact if each else exact.max())).max()
        if not lost <= SCALE_LOSS:
            raise BuildError(
                f"{name}: {self.scales} cannot hold it ({lost:.2g} of the largest is lost)",
                "set engine.tensorrt.dtype to float32, or exclude the layer in the recipe",
            )
        return self.constant(name, stored)

    def zero(self, dtype: str, name: str, shape: tuple[int, ...] = ()) -> str:
        """The zero point 0, a scalar or one a channel; it also says the 8-bit type."""
        import ml_dtypes

        kind = ml_dtypes.float8_e4m3fn if dtype == "float8_e4m3fn" else np.int8
        return self.constant(name, np.zeros(shape, kind))

    def pair(self, place: list[Any], source: str, scale: str, dtype: str, name: str) -> str:
        """Quantises and dequantises ``source``; returns the result's name."""
        zero = self.zero(dtype, f"{name}_zero")
        quantized = self.node(place, "QuantizeLinear", [source, scale, zero], f"{name}_q")
        return self.node(place, "DequantizeLinear", [quantized, scale, zero], f"{name}_dq")

    def node(self, place: list[Any], kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """A node in ``place``, which makes ``output``."""
        from onnx import helper

        place.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        self._note(place[-1])
        return output

    def redirect(self, old: str, new: str, but: str | None = None) -> None:
        """Every reader of ``old``, but the node that makes ``but``, reads ``new``."""
        kept = []
        for node in self._readers.pop(old, []):
            if but is not None and but in node.output:
                kept.append(node)
                continue
            for place, name in enumerate(node.input):
                if name == old:
                    node.input[place] = new
            self._readers.setdefault(new, []).append(node)
        self._readers[old] = kept

    def finish(self, replaced: set[str]) -> None:
        """Puts all nodes into the graph, and drops the weights in ``replaced`` that nothing reads any more."""
        nodes = list(self.first)
        for node in self.graph.node:
            nodes += self._before.get(node.output[0], [])
            nodes.append(node)
            nodes += self._after.get(node.output[0], [])
        read = {name for node in nodes for name in node.input}
        weights = [tensor for tensor in self.graph.initializer if tensor.name in read or tensor.name not in replaced]
        del self.graph.node[:], self.graph.initializer[:]
        self.graph.node.extend(nodes)
        self.graph.initializer.extend(weights)


def set_opset(model: Any, version: int) -> None:
    """Declares a newer opset: from 18 to 21 the operators of our graphs only took more types."""
    own = next(opset for opset in model.opset_import if opset.domain in ("", "ai.onnx"))
    if own.version < 18:
        raise BuildError(f"a graph of opset {own.version} cannot be read as one of {version}", "export it again")
    own.version = max(own.version, version)
    model.ir_version = max(model.ir_version, 10)


def check_untouched(model: Any, folder: Path, checkpoint: QuantizedCheckpoint) -> None:
    """Raises BuildError when the export changed a norm that the graph, in ``folder``, takes from the checkpoint.

    Some export formats fold scales into normalisation weights; the graph would then apply them twice.
    """
    from onnx import numpy_helper

    plain = {tensor.name: tensor for tensor in model.graph.initializer}
    for name, value in checkpoint.rest():
        if "norm" in name and name in plain:
            own = numpy_helper.to_array(plain[name], str(folder)).astype(np.float32)
            if not np.allclose(own, value, rtol=1e-2, atol=1e-6):
                raise BuildError(f"{name}: the quantised export changed this tensor", "export without folding")


def _float_type(graph: Any) -> Any:
    """The NumPy type of the graph's floats: that of its logits."""
    from onnx import helper

    output = next(value for value in graph.output if value.name == "logits")
    return helper.tensor_dtype_to_np_dtype(output.type.tensor_type.elem_type)
