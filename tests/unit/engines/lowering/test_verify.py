"""The verifier finds each way in which a Q/DQ graph can be wrong; reader and writer refuse what they must."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from pipeline.engines.lowering.export import export_plain
from pipeline.engines.lowering.qdq import insert_qdq
from pipeline.engines.lowering.quantized import QuantizedCheckpoint
from pipeline.engines.lowering.verify import Structure, verify
from pipeline.errors import BuildError
from pipeline.quantize.recipes import load_recipe
from tests.families import make_model
from tests.unit.engines.lowering.exports import write_export

UP = "model.layers.1.mlp.up_proj"
WHY = "ModelOpt leaves *down_proj* alone"
KEY = "model.layers.0.self_attn.k_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    export_plain(make_model("llama"), folder)
    return folder


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, model = tmp_path_factory.mktemp("exports"), make_model("llama")
    write_export(root / "int8", model, "int8")
    write_export(root / "mixed", model, "int8", but=("down_proj",))
    write_export(root / "fp8", model, "fp8", cache=True)
    return {path.name: path for path in root.iterdir()}


def lowered(plain: Path, export: Path, **options: Any) -> Any:
    model = onnx.load(str(plain / "model.onnx"), load_external_data=False)
    with QuantizedCheckpoint(export) as checkpoint:
        insert_qdq(model, checkpoint, **options)
    return model


@pytest.mark.parametrize(
    ("export", "recipe", "expected"),
    [
        ("int8", "int8_sq", Structure(14, 1, 0)),
        ("mixed", "int8_mixed", Structure(12, 3, 0)),
        ("fp8", "fp8", Structure(14, 1, 4)),
    ],
)
def test_a_right_graph(plain: Path, exports: dict[str, Path], export: str, recipe: str, expected: Structure) -> None:
    model = lowered(plain, exports[export])
    assert verify(model, plain, exports[export], load_recipe(recipe)) == expected


def node(model: Any, output: str) -> Any:
    return next(one for one in model.graph.node if output in one.output)


def tensor(model: Any, name: str) -> Any:
    return next(one for one in model.graph.initializer if one.name == name)


def set_tensor(model: Any, name: str, value: np.ndarray) -> None:
    tensor(model, name).CopyFrom(numpy_helper.from_array(value, name))


def unquantised_weight(model: Any) -> None:
    linear = next(one for one in model.graph.node if one.name == UP)
    weight = numpy_helper.to_array(tensor(model, f"{UP}.weight_q")).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "float"))
    linear.input[1] = "float"


def unquantised_input(model: Any) -> None:
    linear = next(one for one in model.graph.node if one.name == UP)
    linear.input[0] = node(model, node(model, linear.input[0]).input[0]).input[0]


def swapped_scales(model: Any) -> None:
    a, b = f"{UP}.weight_scale", "model.layers.1.mlp.gate_proj.weight_scale"
    one, other = (numpy_helper.to_array(tensor(model, name)).copy() for name in (a, b))
    set_tensor(model, a, other)
    set_tensor(model, b, one)


def wrong_input_scale(model: Any) -> None:
    name = node(model, next(one for one in model.graph.node if one.name == UP).input[0]).input[1]
    set_tensor(model, name, numpy_helper.to_array(tensor(model, name)) * np.float32(1.01))


def turned_weight(model: Any) -> None:
    name = "model.layers.0.self_attn.q_proj.weight_q"
    set_tensor(model, name, np.ascontiguousarray(numpy_helper.to_array(tensor(model, name)).T))


def one_changed_weight(model: Any) -> None:
    value = numpy_helper.to_array(tensor(model, f"{UP}.weight_q")).copy()
    value[3, 5] ^= 1
    set_tensor(model, f"{UP}.weight_q", value)


def shifted_zero(model: Any) -> None:
    zero = numpy_helper.to_array(tensor(model, f"{UP}.weight_zero")).copy()
    zero[0] = 1
    set_tensor(model, f"{UP}.weight_zero", zero)


def smoothing_after_rounding(model: Any) -> None:
    quantize = next(one for one in model.graph.node if one.op_type == "QuantizeLinear")
    quantize.input[0] = node(model, quantize.input[0]).input[0]


def other_axis(model: Any) -> None:
    node(model, f"{KEY}.weight_dq").attribute[0].i = 0


def stray_pair(model: Any) -> None:
    scale, zero = f"{UP}.weight_scale", f"{UP}.weight_zero"
    model.graph.node.append(helper.make_node("QuantizeLinear", ["logits", scale, zero], ["stray"], axis=2))


def quantised_head(model: Any) -> None:
    head = next(one for one in model.graph.node if one.name == "lm_head")
    other = next(one for one in model.graph.node if one.name == UP)
    head.input[0] = other.input[0]


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (unquantised_weight, UP),
        (unquantised_input, UP),
        (swapped_scales, "weight_scale is not the export's"),
        (wrong_input_scale, "input_scale is not the export's"),
        (turned_weight, "q_proj: its weight is not that of the export"),
        (one_changed_weight, f"{UP}: its weight is not that of the export"),
        (shifted_zero, "a zero point other than 0"),
        (smoothing_after_rounding, "SmoothQuant's scale is missing"),
        (other_axis, "do not lie along the outputs"),
        (stray_pair, "stray: a pair that belongs to no layer"),
        (quantised_head, "lm_head"),
    ],
)
def test_damage_is_found(plain: Path, exports: dict[str, Path], damage: Callable[[Any], None], named: str) -> None:
    model = lowered(plain, exports["int8"])
    damage(model)
    with pytest.raises(BuildError) as caught:
        verify(model, plain, exports["int8"], load_recipe("int8_sq"))
    assert named in caught.value.message


def test_a_recipe_that_the_export_does_not_follow(plain: Path, exports: dict[str, Path], tmp_path: Path) -> None:
    model, recipe = lowered(plain, exports["int8"]), load_recipe("int8_sq")
    for other in (load_recipe("int8_mixed"), replace(recipe, include=("*self_attn*",))):
        with pytest.raises(BuildError, match=r"mlp.*the recipe leaves it out, the export holds it in 8 bit"):
            verify(model, plain, exports["int8"], other)
    mixed = lowered(plain, exports["mixed"])
    with pytest.raises(BuildError, match=r"layers.0.mlp.down_proj: the recipe names it, the export holds it in high"):
        verify(mixed, plain, exports["mixed"], recipe)
    # What the recipe does not speak of is ModelOpt's choice, which the census beside the export knows.
    folder = tmp_path / "quantized" / "checkpoint"
    shutil.copytree(exports["mixed"], folder)
    skipped = [{"layer": f"model.layers.{layer}.mlp.down_proj", "why": WHY} for layer in (0, 1)]
    (folder.parent / "census.json").write_text(json.dumps({"skipped": skipped}))
    assert verify(mixed, plain, folder, recipe).quantized == 12
    skipped[1]["why"] = "it was never called"
    (folder.parent / "census.json").write_text(json.dumps({"skipped": skipped}))
    with pytest.raises(BuildError, match=r"layers.1.mlp.down_proj: the recipe names it"):
        verify(mixed, plain, folder, recipe)


def test_a_wrong_cache_is_found(plain: Path, exports: dict[str, Path]) -> None:
    recipe = load_recipe("fp8")
    model = lowered(plain, exports["fp8"])
    late = node(model, "present.0.key")  # attention goes around the rounding
    for one in model.graph.node:
        for place, name in enumerate(one.input):
            if name == "present.0.key.dq":
                one.input[place] = late.input[0]
    with pytest.raises(BuildError, match=r"present.0.key: attention sees it before it is quantised"):
        verify(model, plain, exports["fp8"], recipe)
    model = lowered(plain, exports["fp8"])
    value = next(one for one in model.graph.input if one.name == "past_key_values.1.value")
    value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    with pytest.raises(BuildError, match=r"past_key_values.1.value: it is float32, not FP8"):
        verify(model, plain, exports["fp8"], recipe)


def test_the_order_and_sharing_of_pairs(plain: Path, exports: dict[str, Path]) -> None:
    """q, k and v read one tensor with one scale, gate and up another: they share a pair."""
    model = lowered(plain, exports["int8"])
    assert sum(one.op_type == "QuantizeLinear" for one in model.graph.node) == 2 * 4
    assert model.opset_import[0].version == 18  # float32 scales of INT8 need nothing newer


def edit(export: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    from safetensors.torch import load_file, save_file

    tensors = load_file(export / "model.safetensors")
    change(tensors)
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    if (export / "hf_quant_config.json").exists():
        (target / "hf_quant_config.json").write_text((export / "hf_quant_config.json").read_text())
    return target


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop(f"{UP}.input_scale"), f"{UP}.input_scale: missing"),
        (
            lambda tensors: tensors[f"{UP}.weight_scale"].fill_(float("nan")),
            "weight_scale: zero, negative or not finite",
        ),
        (lambda tensors: tensors[f"{UP}.input_scale"].zero_(), "input_scale: zero, negative"),
        (lambda tensors: tensors.update({f"{UP}.weight": tensors[f"{UP}.weight"].int()}), "weights are stored as I32"),
        (
            lambda tensors: tensors.update({f"{UP}.weight_scale": tensors[f"{UP}.weight_scale"][:5].clone()}),
            "5 values for 128 outputs",
        ),
    ],
)
def test_a_broken_export_is_refused(
    exports: dict[str, Path], tmp_path: Path, change: Callable[[dict[str, Any]], None], named: str
) -> None:
    with pytest.raises(BuildError) as caught:
        QuantizedCheckpoint(edit(exports["int8"], tmp_path / "edited", change))
    assert named in caught.value.message


def test_a_cache_without_scales_is_refused(exports: dict[str, Path], tmp_path: Path) -> None:
    """The score of such an engine collapses: the scales would silently be 1."""

    def drop(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(("k_scale", "v_scale"))]:
            del tensors[name]

    def drop_one(tensors: dict[str, Any]) -> None:
        del tensors[f"{KEY}.k_scale"]

    with pytest.raises(BuildError, match="a layer has a scale for its keys or its values only"):
        QuantizedCheckpoint(edit(exports["fp8"], tmp_path / "one", drop_one))
    folder = edit(exports["fp8"], tmp_path / "edited", drop)
    assert json.loads((folder / "hf_quant_config.json").read_text())["quantization"]["kv_cache_quant_algo"] == "FP8"
    with pytest.raises(BuildError, match="KV cache is quantised according to one file, not to the other"):
        QuantizedCheckpoint(folder)


def test_scales_that_float16_cannot_hold_are_refused(plain: Path, exports: dict[str, Path], tmp_path: Path) -> None:
    def tiny(tensors: dict[str, Any]) -> None:
        tensors[f"{UP}.input_scale"].fill_(1e-6)

    folder = edit(exports["int8"], tmp_path / "edited", tiny)
    lowered(plain, folder)
    with pytest.raises(BuildError, match=f"{UP}.input_scale: float16 cannot hold it"):
        lowered(plain, folder, scales=np.float16)


def test_a_weight_of_another_shape_is_refused(plain: Path, exports: dict[str, Path], tmp_path: Path) -> None:
    def cut(tensors: dict[str, Any]) -> None:
        tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"][:, :-1].clone()

    with pytest.raises(BuildError, match=f"{UP}: .*another weight in the graph"):
        lowered(plain, edit(exports["int8"], tmp_path / "edited", cut))
