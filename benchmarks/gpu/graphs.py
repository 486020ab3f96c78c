"""Makes the decoder graphs of the GPU benchmark (needs torch, transformers and onnx; a GPU makes it quick).

    python -m benchmarks.gpu.graphs TARGET --model llama-7b --precision int8 --layers 32
    python -m benchmarks.gpu.graphs TARGET --model CHECKPOINT --precision int8 --scales scales.safetensors

``llama-7b`` has the shape of a Llama-7B and random weights, each layer's its own: every large matrix is another part
of one file of random numbers. ``--scales`` are those of a quantised checkpoint; its weights are made anew from them.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.convolve import as_convolutions
from pipeline.engines.lowering.qdq import insert_qdq
from pipeline.engines.lowering.quantized import Layer
from pipeline.engines.lowering.weights import WeightFile
from pipeline.engines.tensorrt.fusion import fuse_parallel, split_inputs
from pipeline.engines.tensorrt.graph import export_decoder

LLAMA_7B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
}
RANDOM = "random.data"  # the numbers that all large weights are parts of
RANDOM_VALUES = 2**27
SPREAD = 0.02  # standard deviation of the weights
STRIDE = 4096 * 64  # values from one weight's beginning in the file to the next one's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--model", default="llama-7b")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--precision", choices=("fp16", "int8"), required=True)
    parser.add_argument("--scales", type=Path)
    parser.add_argument("--capacity", type=int, default=256, help="places of a cache buffer")
    parser.add_argument("--join", action="store_true", help="one product for q, k and v, and for gate and up")
    parser.add_argument(
        "--cut", nargs="+", default=[], metavar="ENDING:PARTS", help="products to cut along their inputs: o_proj:4"
    )
    parser.add_argument("--convolve", action="store_true", help="products as convolutions with kernels of 1 x 1")
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32", help="TensorRT 8.6 takes float32")
    args = parser.parse_args()
    args.target.mkdir(parents=True, exist_ok=True)
    make(args)


def make(args: argparse.Namespace) -> None:
    """Writes ``model.onnx``, its data, ``cache.json`` and ``capacity.json`` into ``args.target``."""
    import onnx
    import torch

    made_up = args.model == "llama-7b"
    dtype = getattr(torch, args.dtype)
    model = random_llama(args.layers, dtype) if made_up else load(args.model, dtype)
    # The weights of a real model are copied into one file beside the final graph. Those of a made-up one are parts of
    # a file that is much smaller than they are together, so its graph stays where it is traced.
    plain = args.target if made_up else args.target / "plain"
    plain.mkdir(exist_ok=True)
    cache = export_decoder(model, plain, capacity=args.capacity)
    (args.target / "cache.json").write_text(json.dumps(cache))
    (args.target / "capacity.json").write_text(str(args.capacity))
    graph = onnx.load(str(plain / "model.onnx"), load_external_data=False)
    with WeightFile(args.target / ("more.onnx" if made_up else "model.onnx")) as file:
        store = Numbers(args.target).store(file.add) if made_up else file.add
        if made_up:
            unshare(graph, store, np.dtype(args.dtype).type)
        if args.precision == "int8":
            layers: Any = RandomLayers(graph) if made_up else Scaled(args.scales, model)
            insert_qdq(graph, layers, store, float_weights=args.dtype == "float32")
        if not made_up:
            file.save(graph, plain)
    if made_up:
        onnx.save(graph, str(args.target / "model.onnx"))
    if args.join or args.cut or args.convolve:
        change(args)


def change(args: argparse.Namespace) -> None:
    """Joins and cuts products of the graph in ``args.target``."""
    import onnx

    path = args.target / "model.onnx"
    graph = onnx.load(str(path), load_external_data=False)
    with WeightFile(args.target / "changed.onnx") as file:
        store = Numbers(args.target).store(file.add) if args.model == "llama-7b" else file.add
        if args.join:
            print("joined", fuse_parallel(graph, args.target, store))
        for ending, _, parts in (one.partition(":") for one in args.cut):
            names = [node.name for node in graph.graph.node if node.name.endswith(ending)]
            print("cut", ending, split_inputs(graph, args.target, names, int(parts), store))
        if args.convolve:
            print("convolutions", as_convolutions(graph, args.target, store))
        if args.model != "llama-7b":
            file.save(graph, args.target)
    if args.model == "llama-7b":
        onnx.save(graph, str(path))
    else:
        (args.target / "changed.onnx").replace(path)


def load(folder: str, dtype: Any) -> Any:
    """A checkpoint in ``dtype``."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def random_llama(layers: int, dtype: Any) -> Any:
    """A Llama whose layers share one layer's weights: only the graph is taken from it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **LLAMA_7B)).to(dtype).eval()
    first = model.model.layers[0]
    shared = {id(one): one for one in (model.config, *first.parameters())}
    stack = [first]
    for place in range(1, layers):
        stack.append(copy.deepcopy(first, dict(shared)))
        stack[-1].self_attn.layer_idx = place
    model.config.num_hidden_layers = layers
    model.model.layers = torch.nn.ModuleList(stack)
    return model


def unshare(model: Any, store: Any, kind: Any) -> None:
    """Gives every product of a decoder layer a weight of its own."""
    graph = model.graph
    sizes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    makers = {output: node for node in graph.node for output in node.output}
    for node in graph.node:
        if node.op_type == "MatMul" and node.name.endswith("_proj"):
            turned = makers.get(node.input[1])
            rows, columns = sizes[node.input[1]] if turned is None else reversed(sizes[turned.input[0]])
            name = f"{node.name}.own"
            graph.initializer.append(store(name, np.broadcast_to(kind(0), (rows, columns))))
            node.input[1] = name
    read = {name for node in graph.node for name in node.input}
    nodes = [node for node in graph.node if node.op_type != "Transpose" or node.output[0] in read]
    read = {name for node in nodes for name in node.input}
    weights = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(weights)


class Numbers:
    """Random numbers in a file for each type; a large weight is a part of it that begins at a place of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._used = 0

    def store(self, small: Any) -> Any:
        """A ``Store`` that takes only the shape of a large matrix; ``small`` is the one for the rest."""

        def add(name: str, value: Any) -> Any:
            if value.ndim < 2 or value.size < 2**20 or "embed" in name or "lm_head" in name:
                return small(name, value)
            return self._pointer(name, value)

        return add

    def _pointer(self, name: str, value: Any) -> Any:
        from onnx import TensorProto, helper

        kind = np.dtype(value.dtype)
        path = self._folder / f"{kind.name}.{RANDOM}"
        common = self._folder.parent / path.name  # one for all graphs beside each other
        if not common.exists():
            self._write(common, kind)
        if not path.exists():
            shutil.copyfile(common, path)  # onnx refuses links
        start = self._used % (RANDOM_VALUES - value.size)
        self._used += STRIDE
        code = helper.np_dtype_to_tensor_dtype(kind)
        tensor = TensorProto(name=name, data_type=code, dims=value.shape, data_location=TensorProto.EXTERNAL)
        place = {"location": path.name, "offset": start * kind.itemsize, "length": value.size * kind.itemsize}
        for key, number in place.items():
            tensor.external_data.add(key=key, value=str(number))
        return tensor

    @staticmethod
    def _write(path: Path, kind: Any) -> None:
        random = np.random.default_rng(1)
        started = path.with_name(f"{path.name}.{os.getpid()}")
        with started.open("wb") as file:
            for _ in range(16):
                values = random.standard_normal(RANDOM_VALUES // 16, np.float32)
                if kind == np.int8:
                    values = np.clip(values * 32, -127, 127).round()
                else:
                    values *= SPREAD
                file.write(values.astype(kind).tobytes())
        started.rename(path)


class RandomLayers:
    """Stands in for a quantised checkpoint: every product of a decoder layer in INT8."""

    def __init__(self, model: Any) -> None:
        sizes = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
        self._sizes = {
            node.name: sizes[node.input[1]]
            for node in model.graph.node
            if node.op_type == "MatMul" and node.name.endswith("_proj")
        }
        self.cache: dict[tuple[int, str], float] = {}
        self.layers = {
            name: Layer(name, "int8", np.full(columns, SPREAD / 32, np.float32), 0.05, None)
            for name, (_, columns) in self._sizes.items()
        }

    def weight(self, name: str) -> Any:
        """Its shape; the values come from ``Numbers``."""
        rows, columns = self._sizes[name]
        return np.broadcast_to(np.int8(0), (columns, rows))


class Scaled:
    """A quantised checkpoint made anew from its scales and the original weights."""

    def __init__(self, scales: Path, model: Any) -> None:
        from safetensors.numpy import load_file

        found = load_file(scales)
        self._weights = model.state_dict()
        self.cache: dict[tuple[int, str], float] = {}
        self.layers = {}
        for key in found:
            name, _, kind = key.rpartition(".")
            if kind == "weight_scale":
                smooth = found.get(f"{name}.pre_quant_scale")
                scale = float(found[f"{name}.input_scale"].reshape(-1)[0])
                self.layers[name] = Layer(name, "int8", found[key].reshape(-1), scale, smooth)

    def weight(self, name: str) -> Any:
        """[out, in], int8: bit for bit what ModelOpt exported (checked on this checkpoint)."""
        layer = self.layers[name]
        weight = self._weights[f"{name}.weight"].float().numpy()
        if layer.pre_quant_scale is not None:
            weight = weight / layer.pre_quant_scale[None]
        return np.clip(np.round(weight / layer.weight_scale[:, None]), -128, 127).astype(np.int8)


if __name__ == "__main__":
    main()
