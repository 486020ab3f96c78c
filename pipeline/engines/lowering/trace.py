"""Traces a torch model into an ONNX graph whose weights are written one by one.

The TorchScript exporter is used on purpose: it takes 11 s for a 30-layer model on two cores where the newer one took
minutes. It is asked for the graph only. The weights go in as arguments, because the exporter would copy parameters
more than once; so an export needs little memory beside the model itself, and weights keep their names.
"""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pipeline.engines.lowering.folding import fold_constants
from pipeline.engines.lowering.parameters import Parameters, as_numpy
from pipeline.engines.lowering.weights import WeightFile
from pipeline.errors import BuildError

Forward = Callable[..., tuple[Any, ...]]
_SHOWN = 300  # characters of the exporter's complaint


@dataclass(frozen=True)
class Signature:
    """A graph's inputs (name -> example tensor), outputs, and the names of the dynamic dimensions of both.

    Examples must differ in every dynamic size, so that the tracer cannot mistake one axis for another.
    """

    inputs: dict[str, Any]
    outputs: list[str]
    axes: dict[str, dict[int, str]]


def trace(model: Any, forward: Forward, signature: Signature, target: Path, opset: int) -> None:
    """Writes ``model.onnx`` and ``model.onnx.data`` of ``forward``, a function that calls ``model``, into ``target``.

    MatMuls and Gemms over weights are named after their modules in ``model``, weights as in its checkpoint. Raises
    BuildError for a model that does not export.
    """
    import onnx

    weights = Parameters(model)
    with tempfile.TemporaryDirectory(dir=target) as folder, weights.taken_out():
        path = Path(folder) / "graph.onnx"
        try:
            _export(_wrapper(model, forward, len(signature.inputs), weights), weights.values, signature, path, opset)
        except _refused_by_exporter() as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise _refusal(model, first[:_SHOWN]) from error
        traced = onnx.load(str(path))
    found = {value.name for value in traced.graph.input}
    if ignored := [name for name in signature.inputs if name not in found]:
        raise _refusal(model, f"its graph does not read {', '.join(ignored[:3])}")
    _name_linears(traced.graph, weights.values)
    fold_constants(traced.graph, opset)
    with WeightFile(target / "model.onnx") as file:
        _store(traced.graph, weights.values, file)
        file.save(traced, target)


def _wrapper(model: Any, forward: Forward, inputs: int, weights: Parameters) -> Any:
    """A torch module that takes the graph's inputs and then the weights as arguments."""
    import torch

    class Wrapper(torch.nn.Module):  # type: ignore[misc]
        """Holds ``model`` under that name: the names of nodes begin with it."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *arguments: Any) -> tuple[Any, ...]:
            weights.put(arguments[inputs:])
            return forward(*arguments[:inputs])

    return Wrapper().eval()


def _export(wrapper: Any, weights: Mapping[str, Any], signature: Signature, path: Path, opset: int) -> None:
    import torch

    # The exporter prints its whole graph before it raises, and no public switch keeps it from that.
    quiet = patch.object(torch._C, "_jit_onnx_log", lambda *_words: None, create=True)
    with torch.inference_mode(), warnings.catch_warnings(), quiet:
        # It also warns of its own deprecation and of each traced branch; the probe checks the result.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            wrapper,
            (*signature.inputs.values(), *weights.values()),
            str(path),
            input_names=[*signature.inputs, *weights],
            output_names=signature.outputs,
            dynamic_axes=signature.axes,
            opset_version=opset,
            dynamo=False,
            do_constant_folding=False,
        )


def _refused_by_exporter() -> tuple[type[Exception], ...]:
    """What the exporter and a model raise while they are traced, when the one cannot express the other."""
    import torch

    plain = (AssertionError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
    return (*plain, torch.onnx.errors.OnnxExporterError)


def _refusal(model: Any, reason: str) -> BuildError:
    return BuildError(
        f"{type(model).__name__} does not export to ONNX: {reason}",
        "docs/tensorrt.md lists the architectures that do; the others need a backend without ONNX, such as vllm",
    )


def _name_linears(graph: Any, weights: Mapping[str, Any]) -> None:
    """Gives each MatMul and Gemm over a weight the path of its module.

    The exporter names a node after the modules that were called, which leaves out one whose child is called directly;
    the weight's name has the whole path, but a tied weight has that of another module.
    """
    producers = {output: node for node in graph.node for output in node.output}
    for node in graph.node:
        if node.op_type not in ("MatMul", "Gemm"):
            continue
        before = producers.get(node.input[1])
        weight = before.input[0] if before is not None and before.op_type == "Transpose" else node.input[1]
        if weight in weights:
            called = node.name.removeprefix("/model/").rsplit("/", 1)[0].replace("/", ".")
            owner = weight.removesuffix(".weight")
            node.name = owner if f".{owner}".endswith(f".{called}") else called


def _store(graph: Any, weights: Mapping[str, Any], file: WeightFile) -> None:
    """Writes the weights that the graph reads; one that is only read transposed is stored that way round."""
    readers = Counter(name for node in graph.node for name in node.input)
    turned = {
        node.input[0]: node
        for node in graph.node
        if node.op_type == "Transpose" and node.input[0] in weights and readers[node.input[0]] == 1
    }
    for name in [value.name for value in graph.input if value.name in weights]:
        array = as_numpy(weights[name])
        if transpose := turned.get(name):
            array = array.transpose(transpose.attribute[0].ints)
        graph.initializer.append(file.add(f"{name}.T" if name in turned else name, array))
    renamed = {transpose.output[0]: f"{name}.T" for name, transpose in turned.items()}
    nodes = [node for node in graph.node if node.op_type != "Transpose" or node.output[0] not in renamed]
    for node in nodes:
        for place, name in enumerate(node.input):
            node.input[place] = renamed.get(name, name)
    inputs = [value for value in graph.input if value.name not in weights]
    del graph.node[:], graph.input[:]
    graph.node.extend(nodes)
    graph.input.extend(inputs)
