"""The plain ONNX graph of a checkpoint, with its KV cache as inputs and outputs.

Every compiled engine starts here: one export a checkpoint, in float32, from which each recipe is lowered.

    inputs   input_ids, position_ids [batch, sequence]; attention_mask [batch, past + sequence];
             logit_positions [kept]; past_key_values.<layer>.{key,value} [batch, heads, past, head size]
    outputs  logits [batch, kept, vocabulary]; present.<layer>.{key,value} [batch, heads, past + sequence, head size]

The TorchScript exporter is used on purpose: it takes 11 s for a 30-layer model on two cores where the newer
one took minutes, and it names each MatMul after its module, which is how the scales find their places.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import BuildError

OPSET = 18
_WRAPPER = "model_"  # the attribute that holds the model: MatMul names start with it


def export_plain(model: Any, target: Path) -> dict[str, int]:
    """Writes ``model.onnx`` and ``model.onnx.data`` for a Hugging Face causal LM into the folder ``target``.

    Returns the shape of the cache: ``layers``, ``kv_heads``, ``head_size``. Raises BuildError when the
    exporter refuses the model.
    """
    import torch

    shape = _cache_shape(model)
    inputs, outputs, axes = _signature(shape["layers"])
    past = [torch.zeros(2, shape["kv_heads"], 4, shape["head_size"]) for _ in range(2 * shape["layers"])]
    # Odd sizes, all different, so that the tracer cannot mistake one axis for another.
    example = (
        torch.ones(2, 3, dtype=torch.long),
        torch.arange(4, 7).expand(2, 3),
        torch.ones(2, 7, dtype=torch.long),
        torch.tensor([2]),
        *past,
    )
    try:
        with torch.inference_mode(), warnings.catch_warnings():
            # The exporter warns of its own deprecation and of each traced branch; the probe checks the result.
            warnings.simplefilter("ignore")
            torch.onnx.export(
                _wrapped(model),
                example,
                str(target / "model.onnx"),
                input_names=inputs,
                output_names=outputs,
                dynamic_axes=axes,
                opset_version=OPSET,
                dynamo=False,
            )
    except (RuntimeError, TypeError, ValueError, torch.onnx.errors.OnnxExporterError) as error:
        raise BuildError(
            f"{type(model).__name__} does not export to ONNX: {error}",
            "check that the architecture is a decoder-only model that transformers supports",
        ) from error
    _finish(target / "model.onnx")
    return shape


def _cache_shape(model: Any) -> dict[str, int]:
    config = model.config
    heads = config.num_attention_heads
    return {
        "layers": config.num_hidden_layers,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_size": getattr(config, "head_dim", None) or config.hidden_size // heads,
    }


def _signature(layers: int) -> tuple[list[str], list[str], dict[str, dict[int, str]]]:
    cache = [f"{layer}.{part}" for layer in range(layers) for part in ("key", "value")]
    inputs = ["input_ids", "position_ids", "attention_mask", "logit_positions"]
    axes = {
        "input_ids": {0: "batch", 1: "sequence"},
        "position_ids": {0: "batch", 1: "sequence"},
        "attention_mask": {0: "batch", 1: "total"},
        "logit_positions": {0: "kept"},
        "logits": {0: "batch", 1: "kept"},
    }
    axes |= {f"past_key_values.{name}": {0: "batch", 2: "past"} for name in cache}
    axes |= {f"present.{name}": {0: "batch", 2: "total"} for name in cache}
    return (
        inputs + [f"past_key_values.{name}" for name in cache],
        ["logits"] + [f"present.{name}" for name in cache],
        axes,
    )


def _wrapped(model: Any) -> Any:
    import torch
    from transformers.cache_utils import DynamicCache

    class FlatCache(torch.nn.Module):  # type: ignore[misc]
        """The model with its cache as flat tensors, in and out."""

        def __init__(self) -> None:
            super().__init__()
            self.model_ = model

        def forward(
            self, input_ids: Any, position_ids: Any, attention_mask: Any, logit_positions: Any, *past: Any
        ) -> Any:
            result = self.model_(
                input_ids=input_ids,
                position_ids=position_ids,
                attention_mask=attention_mask,
                logits_to_keep=logit_positions,
                past_key_values=DynamicCache(list(zip(past[::2], past[1::2], strict=True))),
                use_cache=True,
            )
            cache = [part for layer in result.past_key_values.layers for part in (layer.keys, layer.values)]
            return (result.logits, *cache)

    return FlatCache().eval()


def _finish(path: Path) -> None:
    """Names MatMuls by module path, stores a tied embedding once, moves weights to a file of their own."""
    import onnx
    from onnx import helper, numpy_helper

    graph_model = onnx.load(str(path))
    graph = graph_model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type in ("MatMul", "Gemm") and node.input[1] in weights:
            node.name = node.name.removeprefix(f"/{_WRAPPER}/").rsplit("/", 1)[0].replace("/", ".")
    head = next((node for node in graph.node if node.output[0] == "logits" and node.op_type == "MatMul"), None)
    embedding = next((name for name in weights if name.endswith("embed_tokens.weight")), None)
    if head is not None and embedding is not None and head.input[1] in weights:
        own = numpy_helper.to_array(weights[head.input[1]])
        if np.array_equal(own.T, numpy_helper.to_array(weights[embedding])):
            graph.initializer.remove(weights[head.input[1]])
            graph.node.insert(0, helper.make_node("Transpose", [embedding], ["lm_head.weight.T"], perm=[1, 0]))
            head.input[1] = "lm_head.weight.T"
    save_with_data(graph_model, path)


def save_with_data(model: Any, path: Path) -> None:
    """Saves an ONNX model with its weights in ``<name>.data`` beside it (one protobuf holds 2 GiB at most)."""
    import onnx

    path.with_name(path.name + ".data").unlink(missing_ok=True)
    onnx.save_model(model, str(path), save_as_external_data=True, location=path.name + ".data", size_threshold=1024)
