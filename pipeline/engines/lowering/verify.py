"""Reads a Q/DQ graph anew and compares it with the recipe and the export: nothing of ``qdq.py`` is used.

For every MatMul and Gemm over a weight: those that the recipe names, and that the export holds in 8 bit, are fed by a
DequantizeLinear on both sides; no other one is. Each 8-bit weight is the export's, each scale is the export's as near
as its type allows, the smoothing comes before the rounding, and no pair is left over. With FP8 keys and values every
cache tensor is FP8, quantised and dequantised with its own scale.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import BuildError

if TYPE_CHECKING:
    from pipeline.quantize.recipes import Recipe

_EIGHT_BIT = {"int8": "I8", "float8_e4m3fn": "F8_E4M3"}
_SEEN_THROUGH = ("DequantizeLinear", "QuantizeLinear", "Transpose")
_WIDTH = {"float32": 2**-22, "float16": 2**-10, "bfloat16": 2**-7}  # relative rounding of a scale, generously


@dataclass(frozen=True)
class Structure:
    """What was found: quantised and plain linear layers, quantised cache tensors."""

    quantized: int
    plain: int
    cache: int


def verify(model: Any, folder: Path, export: Path, recipe: Recipe | None) -> Structure:
    """Checks the graph ``model``, whose weights may lie in ``folder``, against the quantised checkpoint ``export``.

    Raises BuildError that names the first layer which is not as it should be. ``recipe`` None: the export alone says
    which layers are quantised.
    """
    graph = _Graph(model, folder)
    tensors = _Tensors(export)
    exported = {name.removesuffix(".weight_scale") for name in tensors.names() if name.endswith(".weight_scale")}
    linears = {node.name: node for node in graph.linears()}
    if lost := sorted(exported - set(linears)):
        raise _wrong(lost[0], "the export holds it in 8 bit, and the graph has no such layer")
    left_alone = _left_alone(export)
    used: set[str] = set()
    for name, node in linears.items():
        sides = [graph.maker(node.input[place], "DequantizeLinear") is not None for place in (0, 1)]
        if recipe is not None and (wrong := _against(recipe, name, name in exported, left_alone)):
            raise _wrong(name, wrong)
        if sides != [name in exported] * 2:
            raise _wrong(name, f"quantised on its input and weight: {sides}, in the export: {name in exported}")
        if name in exported:
            used |= _check_linear(graph, node, name, tensors)
    cache = [name for name in tensors.names() if name.endswith((".k_scale", ".v_scale"))]
    for name in cache:
        used |= _check_cache(graph, name, float(tensors.value(name).reshape(-1)[0]))
    pairs = {node.output[0] for node in graph.nodes if node.op_type in ("QuantizeLinear", "DequantizeLinear")}
    if stray := sorted(pairs - used):
        raise _wrong(stray[0], "a pair that belongs to no layer")
    return Structure(len(exported), len(linears) - len(exported), len(cache))


def _against(recipe: Recipe, name: str, quantized: bool, left_alone: Sequence[str]) -> str | None:
    """Why the export does not do with this layer what the recipe says; None when it does.

    The recipe's own patterns count, and for what it does not speak of (the logits head, routers) the census.
    """
    said = not any(fnmatchcase(name, pattern) for pattern in recipe.exclude)
    said = said and (not recipe.include or any(fnmatchcase(name, pattern) for pattern in recipe.include))
    if quantized and not said:
        return "the recipe leaves it out, the export holds it in 8 bit"
    if said and not quantized and name not in left_alone:
        return "the recipe names it, the export holds it in high precision"
    return None


def _left_alone(export: Path) -> list[str]:
    """The layers that ModelOpt keeps in high precision whatever the recipe says, by the census beside the export."""
    path = export.parent / "census.json"
    skipped = json.loads(path.read_text())["skipped"] if path.exists() else []
    return ["lm_head", *(row["layer"] for row in skipped if row["why"].startswith("ModelOpt leaves"))]


def _check_linear(graph: _Graph, node: Any, name: str, tensors: _Tensors) -> set[str]:
    """One quantised layer; returns the outputs of its pairs."""
    read, weight = (graph.maker(node.input[place], "DequantizeLinear") for place in (0, 1))
    write = graph.maker(read.input[0], "QuantizeLinear")
    if write is None or list(write.input[1:]) != list(read.input[1:]):
        raise _wrong(name, "its input is dequantised otherwise than it was quantised")
    stored = graph.eight_bit(weight)
    expected = tensors.value(f"{name}.weight")
    kind = str(stored.dtype)
    if _EIGHT_BIT.get(kind) != tensors.kind(f"{name}.weight"):
        raise _wrong(name, f"its weight is stored as {kind}")
    if stored.shape != expected.T.shape or not np.array_equal(stored.view(np.uint8), expected.T.view(np.uint8)):
        raise _wrong(name, "its weight is not that of the export")
    for pair in (write, weight):
        if graph.constant(pair.input[2]).astype(np.float32).any() or str(graph.constant(pair.input[2]).dtype) != kind:
            raise _wrong(name, "a zero point other than 0, or of another type than the weight")
    _check_scale(graph, name, write.input[1], tensors.value(f"{name}.input_scale"))
    if graph.constant(weight.input[1]).ndim and graph.axis(weight) != 1:
        raise _wrong(name, "its weight's scales do not lie along the outputs")
    _check_scale(graph, name, weight.input[1], tensors.value(f"{name}.weight_scale"))
    smooth = graph.maker(write.input[0], "Mul")
    if f"{name}.pre_quant_scale" in tensors.names():
        if smooth is None or not graph.is_constant(smooth.input[1]):
            raise _wrong(name, "SmoothQuant's scale is missing before its input is quantised")
        _check_scale(graph, name, smooth.input[1], tensors.value(f"{name}.pre_quant_scale"))
    elif smooth is not None and smooth.output[0].endswith(".smoothed"):
        raise _wrong(name, "a smoothing that the export does not have")
    return {read.output[0], write.output[0], weight.output[0], weight.input[0]}


def _check_cache(graph: _Graph, name: str, scale: float) -> set[str]:
    """One cache tensor by the name of its scale, ``...layers.3.self_attn.k_proj.k_scale``."""
    layer = next(part for part in name.split(".") if part.isdecimal())
    part = "key" if name.endswith("k_scale") else "value"
    inputs = [
        value for value in graph.inputs if value.name in (f"past_key_values.{layer}.{part}", f"past_{part}s.{layer}")
    ]
    outputs = [value for value in graph.outputs if value.name in (f"present.{layer}.{part}", f"new_{part}s.{layer}")]
    if len(inputs) != 1 or len(outputs) != 1:
        raise _wrong(name, "the graph has no such cache")
    (read,), (written,) = inputs, outputs
    for value in (read, written):
        if graph.kind(value) != "float8_e4m3fn":
            raise _wrong(value.name, f"it is {graph.kind(value)}, not FP8")
    quantize = graph.maker(written.name, "QuantizeLinear")
    if quantize is None:
        raise _wrong(written.name, "it is written without being quantised")
    if {node.op_type for node in graph.readers(quantize.input[0])} != {"QuantizeLinear"}:
        raise _wrong(written.name, "attention sees it before it is quantised")
    readers = [*graph.readers(read.name), *graph.readers(written.name)]
    if not readers or {node.op_type for node in readers} != {"DequantizeLinear"}:
        raise _wrong(read.name, "it is read without being dequantised")
    for node in (quantize, *readers):
        _check_scale(graph, name, node.input[1], np.array([scale], np.float32))
    return {node.output[0] for node in (quantize, *readers)}


def _check_scale(graph: _Graph, name: str, constant: str, expected: Any) -> None:
    stored, expected = graph.constant(constant), expected.astype(np.float64).reshape(-1)
    width = _WIDTH.get(str(stored.dtype))
    if width is None:
        raise _wrong(name, f"{constant} is {stored.dtype}")
    if stored.size != expected.size:
        raise _wrong(name, f"{constant} holds {stored.size} values, the export {expected.size}")
    apart = np.abs(stored.astype(np.float64).reshape(-1) - expected)
    # Values below the type's normal range are rounded in steps of its smallest one.
    if (apart > expected * width + 2.0**-24 * (str(stored.dtype) == "float16") + 1e-44).any():
        raise _wrong(name, f"{constant} is not the export's")


def _wrong(name: str, why: str) -> BuildError:
    return BuildError(f"{name}: {why}", "the Q/DQ graph is wrong: report this with the recipe and the architecture")


class _Graph:
    """Look-ups in an ONNX graph."""

    def __init__(self, model: Any, folder: Path) -> None:
        self.nodes = list(model.graph.node)
        self.inputs, self.outputs = list(model.graph.input), list(model.graph.output)
        self._folder = folder
        self._weights = {tensor.name: tensor for tensor in model.graph.initializer}
        self._makers = {output: node for node in self.nodes for output in node.output}
        self._readers: dict[str, list[Any]] = {}
        for node in self.nodes:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)

    def linears(self) -> Iterator[Any]:
        """MatMuls and Gemms over a weight, seen through quantisation and Transpose."""
        for node in self.nodes:
            if node.op_type in ("MatMul", "Gemm"):
                source = node.input[1]
                while (maker := self._makers.get(source)) is not None and maker.op_type in _SEEN_THROUGH:
                    source = maker.input[0]
                if source in self._weights:
                    yield node

    def maker(self, name: str, kind: str) -> Any:
        """The node that makes ``name`` if it is of this kind, else None."""
        node = self._makers.get(name)
        return node if node is not None and node.op_type == kind else None

    def readers(self, name: str) -> list[Any]:
        """The nodes that read ``name``."""
        return self._readers.get(name, [])

    def is_constant(self, name: str) -> bool:
        """Whether it is a weight."""
        return name in self._weights

    def constant(self, name: str) -> Any:
        """The value of a weight."""
        from onnx import numpy_helper

        if name not in self._weights:
            raise _wrong(name, "it is no constant")
        return numpy_helper.to_array(self._weights[name], str(self._folder))

    def eight_bit(self, dequantize: Any) -> Any:
        """What a DequantizeLinear of a weight reads: a constant, or INT8 that the graph makes of one."""
        quantize = self.maker(dequantize.input[0], "QuantizeLinear")
        if quantize is None:
            return self.constant(dequantize.input[0])
        if list(quantize.input[1:]) != list(dequantize.input[1:]) or self.axis(quantize) != self.axis(dequantize):
            raise _wrong(dequantize.output[0], "it is dequantised otherwise than it was quantised")
        exact = self.constant(quantize.input[0]).astype(np.float64) / self.constant(quantize.input[1])
        return np.clip(np.rint(exact), -128, 127).astype(np.int8)  # as ONNX defines it, rounding half to even

    @staticmethod
    def axis(node: Any) -> int | None:
        """The node's axis, None without one."""
        return next((attribute.i for attribute in node.attribute if attribute.name == "axis"), None)

    @staticmethod
    def kind(value: Any) -> str:
        """The type of an input or output, by NumPy's name."""
        from onnx import helper

        return str(np.dtype(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)))


class _Tensors:
    """A safetensors checkpoint read from its bytes: an 8-byte length, a JSON header, the tensors.

    Format: https://github.com/huggingface/safetensors#format
    """

    _TYPES: Mapping[str, str] = {"F32": "float32", "F16": "float16", "I8": "int8", "F8_E4M3": "uint8"}

    def __init__(self, folder: Path) -> None:
        self._places: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
            header.pop("__metadata__", None)
            self._places |= {name: (path, 8 + size, place) for name, place in header.items()}

    def names(self) -> Mapping[str, Any]:
        """All tensors, as the keys of a mapping."""
        return self._places

    def kind(self, name: str) -> str:
        """The format's name of a tensor's type."""
        return str(self._places[name][2]["dtype"])

    def value(self, name: str) -> Any:
        """A tensor; FP8 as its bytes, bfloat16 as float32."""
        if name not in self._places:
            raise _wrong(name, "it is missing in the export")
        path, base, place = self._places[name]
        start, end = place["data_offsets"]
        raw = np.fromfile(path, np.uint8, end - start, offset=base + start)
        if place["dtype"] == "BF16":
            values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = raw.view(self._TYPES[place["dtype"]])
        return values.reshape(place["shape"])
