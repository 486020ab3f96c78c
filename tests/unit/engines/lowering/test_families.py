"""Every architecture from torch to ONNX and to Q/DQ: logits against torch and ModelOpt's own fake quantisation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from pipeline.engines.lowering.export import export_plain
from pipeline.engines.lowering.qdq import check_untouched, insert_qdq
from pipeline.engines.lowering.quantized import QuantizedCheckpoint
from pipeline.engines.lowering.verify import Structure, verify
from pipeline.engines.lowering.weights import WeightFile
from pipeline.errors import BuildError
from pipeline.quantize.batches import Samples
from pipeline.quantize.calibrate import quantize_model
from pipeline.quantize.recipes import Recipe, load_recipe
from tests.families import FAMILIES, make_model, onnx_logits, torch_logits

TOKENS = [7, 91, 23, 5, 64, 18, 40, 77, 9, 33, 50, 12, 88, 61]
LAST = 6  # the prompt pass gives the first of these, cached steps the others
SAMPLES = Samples([[(start * 7 + step * 5) % 90 + 5 for step in range(12)] for start in range(8)])
LINEARS = {"phi": 12, "phi3": 8, "gpt2": 8}


def lower(plain: Path, export: Path, target: Path, recipe: Recipe | None) -> Structure:
    """Q/DQ into ``target``, and what the verifier finds there."""
    target.mkdir()
    model = onnx.load(str(plain / "model.onnx"), load_external_data=False)
    with QuantizedCheckpoint(export) as checkpoint, WeightFile(target / "model.onnx") as weights:
        check_untouched(model, plain, checkpoint)
        insert_qdq(model, checkpoint, weights.add)
        weights.save(model, plain)
    onnx.checker.check_model(str(target / "model.onnx"))
    return verify(onnx.load(str(target / "model.onnx"), load_external_data=False), target, export, recipe)


def apart(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, as a share of the largest value."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_graph_and_int8_graph(family: str, tmp_path: Path) -> None:
    from modelopt.torch.export import export_hf_checkpoint

    model = make_model(family)
    exact = torch_logits(model, TOKENS, LAST)
    (tmp_path / "plain").mkdir()
    export_plain(model, tmp_path / "plain")
    assert apart(onnx_logits(tmp_path / "plain", TOKENS, LAST), exact) < 1e-5
    np.testing.assert_array_equal(torch_logits(model, TOKENS, LAST), exact)  # the export left the model as it was

    recipe = load_recipe("int8_sq")
    quantize_model(model, recipe, SAMPLES, 96)
    expected = torch_logits(model, TOKENS, LAST)
    export_hf_checkpoint(model, export_dir=str(tmp_path / "export"))
    structure = lower(tmp_path / "plain", tmp_path / "export", tmp_path / "qdq", recipe)
    assert structure == Structure(quantized=LINEARS.get(family, 14), plain=1, cache=0)
    found = onnx_logits(tmp_path / "qdq", TOKENS, LAST)
    # One activation on the edge between two integers may fall to the other side; quantisation itself costs far more.
    assert apart(found, expected) < 0.2 * apart(expected, exact)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_fp8_with_fp8_keys_and_values(family: str, tmp_path: Path) -> None:
    from modelopt.torch.export import export_hf_checkpoint

    model = make_model(family)
    exact = torch_logits(model, TOKENS, LAST)
    (tmp_path / "plain").mkdir()
    export_plain(model, tmp_path / "plain")
    recipe = load_recipe("fp8_kv")
    quantize_model(model, recipe, SAMPLES, 96)
    expected = torch_logits(model, TOKENS, LAST)
    export_hf_checkpoint(model, export_dir=str(tmp_path / "export"))
    structure = lower(tmp_path / "plain", tmp_path / "export", tmp_path / "qdq", recipe)
    assert structure == Structure(quantized=LINEARS.get(family, 14), plain=1, cache=4)
    found = onnx_logits(tmp_path / "qdq", TOKENS, LAST)
    assert apart(found, expected) < 0.2 * apart(expected, exact)


def test_half_precision_graph(tmp_path: Path) -> None:
    """The scales of a float16 graph are float16, as strongly typed TensorRT wants them."""
    from modelopt.torch.export import export_hf_checkpoint

    model = make_model("llama")
    exact = torch_logits(model, TOKENS, LAST)
    (tmp_path / "plain").mkdir()
    export_plain(model.half(), tmp_path / "plain")
    assert apart(onnx_logits(tmp_path / "plain", TOKENS, LAST), exact) < 5e-3
    model = make_model("llama")
    recipe = load_recipe("int8_sq")
    quantize_model(model, recipe, SAMPLES, 96)
    export_hf_checkpoint(model, export_dir=str(tmp_path / "export"))
    lower(tmp_path / "plain", tmp_path / "export", tmp_path / "qdq", recipe)
    graph = onnx.load(str(tmp_path / "qdq" / "model.onnx"), load_external_data=False)
    kinds = {tensor.name: tensor.data_type for tensor in graph.graph.initializer}
    scales = {kinds[name] for name in kinds if name.endswith("_scale")}
    assert scales == {onnx.TensorProto.FLOAT16}
    assert {kinds[name] for name in kinds if name.endswith("weight_q")} == {onnx.TensorProto.INT8}
    assert graph.opset_import[0].version == 21


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("bloom", "its graph does not read position_ids"),
        ("mixtral", "not supported"),
        ("cohere", "same rank"),
    ],
)
def test_what_does_not_export_is_refused_in_one_line(
    family: str, reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BuildError, match=reason) as caught:
        export_plain(make_model(family), tmp_path)
    assert "does not export to ONNX" in caught.value.message
    assert len(caught.value.message) < 500
    assert "docs/tensorrt.md" in caught.value.next_step
    assert "graph(" not in "".join(capfd.readouterr())
    assert list(tmp_path.iterdir()) == []
