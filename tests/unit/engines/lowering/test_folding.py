"""Constant folding: the same results, fewer nodes, and weights are left alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.engines.lowering.folding import LARGEST, fold_constants


def _graph() -> Any:
    """``y = x[:, 1:3] * (2 + 3) @ w``, with axes, bounds and factor computed from constants; ``w`` is large."""
    from onnx import TensorProto, helper, numpy_helper

    def constant(name: str, value: Any) -> Any:
        return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(value)))

    size = LARGEST + 1
    nodes = [
        constant("zero", np.array([0])),
        *(constant(name, np.array(value)) for name, value in (("one", 1), ("three", 3), ("columns", -1))),
        *(
            helper.make_node("Unsqueeze", [name, "zero"], [f"{name}.list"], name=name)
            for name in ("one", "three", "columns")
        ),
        helper.make_node("Slice", ["x", "one.list", "three.list", "columns.list"], ["part"], name="slice"),
        constant("two", np.float32(2)),
        constant("third", np.float32(3)),
        helper.make_node("Add", ["two", "third"], ["five"], name="add"),
        helper.make_node("Mul", ["part", "five"], ["scaled"], name="mul"),
        helper.make_node("Neg", ["w"], ["minus"], name="neg"),
        helper.make_node("MatMul", ["scaled", "minus"], ["y"], name="product"),
    ]
    weights = [numpy_helper.from_array(np.random.default_rng(0).normal(size=(2, size)).astype(np.float32), "w")]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", size])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_what_only_constants_make_is_made_once() -> None:
    import onnx
    import onnxruntime as ort

    model, x = _graph(), np.arange(8, dtype=np.float32).reshape(2, 4)
    before = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    assert fold_constants(model.graph, 17) == 4  # three lists and the sum
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node] == ["Slice", "Mul", "Neg", "MatMul"]
    assert {tensor.name for tensor in model.graph.initializer} == {
        *("w", "one.list", "three.list", "columns.list", "five"),
    }
    np.testing.assert_array_equal(ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0], before)
    assert fold_constants(model.graph, 17) == 0
