"""Joined and cut products compute what the graph computed before, plain and quantised (ONNX Runtime runs both)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.engines.tensorrt.fusion import fuse_parallel, split_inputs

HIDDEN, INNER = 12, 20


def _graph(form: str) -> Any:
    """gate and up read x, down reads their product. With Q/DQ: one pair for x, one for the product, and weights that
    are stored in INT8, or in float and quantised in the graph."""
    from onnx import TensorProto, helper, numpy_helper

    random, quantized = np.random.default_rng(3), form != "plain"
    nodes, weights = [], []

    def constant(name: str, value: Any) -> str:
        weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def pair(source: str, scale: float) -> str:
        if not quantized:
            return source
        words = [constant(f"{source}.scale", np.float32(scale)), constant(f"{source}.zero", np.int8(0))]
        nodes.append(helper.make_node("QuantizeLinear", [source, *words], [f"{source}.q"], name=f"{source}.q"))
        nodes.append(
            helper.make_node("DequantizeLinear", [f"{source}.q", *words], [f"{source}.dq"], name=f"{source}.dq")
        )
        return f"{source}.dq"

    def product(name: str, source: str, rows: int, columns: int) -> str:
        if quantized:
            stored = [
                constant(f"{name}.w", random.integers(-127, 128, (rows, columns)).astype(np.int8)),
                constant(f"{name}.s", random.uniform(0.001, 0.01, columns).astype(np.float32)),
                constant(f"{name}.z", np.zeros(columns, np.int8)),
            ]
            if form == "float":
                int8, scales = numpy_helper.to_array(weights[-3]), numpy_helper.to_array(weights[-2])
                stored[0] = constant(f"{name}.f", int8 * scales)
                nodes.append(helper.make_node("QuantizeLinear", stored, [f"{name}.wq"], name=f"{name}.wq", axis=1))
                stored[0] = f"{name}.wq"
            nodes.append(helper.make_node("DequantizeLinear", stored, [f"{name}.wdq"], name=f"{name}.wdq", axis=1))
            weight = f"{name}.wdq"
        else:
            weight = constant(f"{name}.w", random.normal(size=(rows, columns)).astype(np.float32))
        nodes.append(helper.make_node("MatMul", [source, weight], [f"{name}.out"], name=name))
        return f"{name}.out"

    x = pair("x", 0.02)
    gate, up = product("mlp.gate", x, HIDDEN, INNER), product("mlp.up", x, HIDDEN, INNER)
    nodes.append(helper.make_node("Mul", [gate, up], ["inner"], name="mul"))
    down = product("mlp.down", pair("inner", 0.05), INNER, HIDDEN)
    nodes.append(helper.make_node("Add", [down, "x"], ["y"], name="add"))
    shape = ["batch", "new", HIDDEN]
    graph = helper.make_graph(
        nodes,
        "block",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _run(model: Any, x: np.ndarray) -> np.ndarray:
    import onnx
    import onnxruntime as ort

    onnx.checker.check_model(model, full_check=True)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return np.asarray(ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})[0])


@pytest.mark.parametrize("form", ["plain", "int8", "float"])
def test_parallel_products_become_one(form: str) -> None:
    x = np.random.default_rng(1).normal(size=(2, 3, HIDDEN)).astype(np.float32)
    model = _graph(form)
    before = _run(model, x)
    assert fuse_parallel(model, Path()) == 1
    names = [node.name for node in model.graph.node if node.op_type == "MatMul"]
    assert names == ["mlp.gate+up", "mlp.down"]
    assert not any(tensor.name.startswith(("mlp.gate.", "mlp.up.")) for tensor in model.graph.initializer)
    np.testing.assert_array_equal(_run(model, x), before)


@pytest.mark.parametrize("form", ["plain", "int8", "float"])
def test_a_product_is_cut_along_its_inputs(form: str) -> None:
    x = np.random.default_rng(2).normal(size=(2, 3, HIDDEN)).astype(np.float32)
    model = _graph(form)
    before = _run(model, x)
    assert split_inputs(model, Path(), ["mlp.down"], 4) == 1
    np.testing.assert_allclose(_run(model, x), before, rtol=1e-5, atol=1e-5)
    weight = next(tensor for tensor in model.graph.initializer if tensor.name == "mlp.down.cut.weight")
    assert list(weight.dims) == [4, INNER // 4, HIDDEN]
    quantizers = sum(node.op_type == "QuantizeLinear" for node in model.graph.node)
    assert quantizers == {"plain": 0, "int8": 2, "float": 5}[form]


def test_products_over_different_inputs_stay_apart() -> None:
    model = _graph("plain")
    model.graph.node[1].input[0] = "inner2"
    from onnx import helper

    model.graph.node.insert(0, helper.make_node("Neg", ["x"], ["inner2"], name="neg"))
    assert fuse_parallel(model, Path()) == 0
    assert [node.name for node in model.graph.node if node.op_type == "MatMul"] == ["mlp.gate", "mlp.up", "mlp.down"]


def test_a_joined_decoder_gives_the_same_logits_and_compiles(tmp_path: Path) -> None:
    """The whole graph: plain in ONNX Runtime, in INT8 by TensorRT for RTX, which needs no GPU to compile."""
    import onnx

    from pipeline.engines.lowering.qdq import insert_qdq
    from pipeline.engines.lowering.quantized import QuantizedCheckpoint
    from pipeline.engines.lowering.weights import WeightFile
    from pipeline.engines.tensorrt.graph import DecoderShape, export_decoder
    from tests.families import make_model
    from tests.unit.engines.lowering.exports import write_export
    from tests.unit.engines.tensorrt.test_graph import CAPACITY, Runner

    model = make_model("qwen2")  # with biases, which stay behind the parts
    folders = {name: tmp_path / name for name in ("plain", "joined", "int8")}
    for folder in folders.values():
        folder.mkdir()
    fields = export_decoder(model, folders["plain"], capacity=CAPACITY)
    write_export(tmp_path / "export", model, "int8")
    for name, layers in (("joined", 0), ("int8", 14)):
        graph = onnx.load(str(folders["plain"] / "model.onnx"), load_external_data=False)
        with WeightFile(tmp_path / f"{name}.onnx") as file, QuantizedCheckpoint(tmp_path / "export") as checkpoint:
            if layers:
                assert insert_qdq(graph, checkpoint, file.add, np.float32).layers == layers
            file.save(graph, folders["plain"])
        graph = onnx.load(str(tmp_path / f"{name}.onnx"), load_external_data=False)
        with WeightFile(folders[name] / "model.onnx") as file:
            assert fuse_parallel(graph, tmp_path, file.add) == 4
            file.save(graph, tmp_path)
        onnx.checker.check_model(str(folders[name] / "model.onnx"))
    logits = [
        Runner(folders[name], DecoderShape(**fields), rows=2).read([[5, 6, 7], [8]]) for name in ("plain", "joined")
    ]
    np.testing.assert_allclose(logits[1], logits[0], rtol=1e-4, atol=1e-4)

    pytest.importorskip(
        "tensorrt_rtx_bindings", reason="needs TensorRT for RTX: pip install 'enginegate[tensorrt-rtx]'"
    )
    from pipeline.engines.tensorrt.builder import Settings, build_plan
    from pipeline.engines.tensorrt.library import load_library

    settings = Settings(max_batch=2, max_tokens=CAPACITY, sm=("89",), progress=False)
    graph_file = folders["int8"] / "model.onnx"
    built = build_plan(load_library("tensorrt_rtx"), graph_file, tmp_path, fields, settings)
    assert built.description.layers["quantize int8"] == 8


def test_joined_fp8_weights_keep_their_scales_and_compile(tmp_path: Path) -> None:
    """FP8 has one scale a weight: side by side it becomes one for each of the columns."""
    import onnx

    from pipeline.engines.lowering.export import export_plain
    from pipeline.engines.lowering.qdq import insert_qdq
    from pipeline.engines.lowering.quantized import QuantizedCheckpoint
    from pipeline.engines.lowering.weights import save_graph
    from pipeline.engines.tensorrt.builder import Settings, build_plan
    from pipeline.engines.tensorrt.library import load_library
    from tests.families import make_model, onnx_logits
    from tests.unit.engines.lowering.exports import write_export

    pytest.importorskip("tensorrt_rtx_bindings")
    model, tokens = make_model("llama"), list(range(5, 15))
    folders = {name: tmp_path / name for name in ("plain", "apart", "joined")}
    for folder in folders.values():
        folder.mkdir()
    export_plain(model, folders["plain"])
    write_export(tmp_path / "export", model, "fp8")
    graph = onnx.load(str(folders["plain"] / "model.onnx"), load_external_data=False)
    with QuantizedCheckpoint(tmp_path / "export") as checkpoint:
        insert_qdq(graph, checkpoint)
    save_graph(graph, folders["apart"] / "model.onnx", folders["plain"])
    graph = onnx.load(str(folders["apart"] / "model.onnx"), load_external_data=False)
    assert fuse_parallel(graph, folders["apart"]) == 2 * 2
    save_graph(graph, folders["joined"] / "model.onnx", folders["apart"])
    np.testing.assert_array_equal(onnx_logits(folders["joined"], tokens, 3), onnx_logits(folders["apart"], tokens, 3))
    settings = Settings(max_batch=1, max_tokens=32, sm=("89",), progress=False)
    build_plan(load_library("tensorrt_rtx"), folders["joined"] / "model.onnx", tmp_path, {}, settings)
    assert (tmp_path / "model.plan").stat().st_size > 100_000
