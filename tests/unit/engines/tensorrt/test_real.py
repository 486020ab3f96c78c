"""TensorRT for RTX itself, without a GPU: it takes the graphs that we lower. What they compute is not seen here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnx
import pytest

from pipeline.engines.lowering.qdq import insert_qdq
from pipeline.engines.lowering.quantized import QuantizedCheckpoint
from pipeline.engines.lowering.verify import verify
from pipeline.engines.lowering.weights import WeightFile
from pipeline.engines.tensorrt.builder import Built, Settings, build_plan
from pipeline.engines.tensorrt.graph import export_decoder
from pipeline.engines.tensorrt.library import load_library
from pipeline.engines.tensorrt.plan import PLAN
from pipeline.errors import BuildError
from tests.families import make_model
from tests.unit.engines.lowering.exports import write_export

pytest.importorskip("tensorrt_rtx_bindings", reason="needs TensorRT for RTX: pip install 'enginegate[tensorrt-rtx]'")


def compiled(model: Any, weights: str | None, sm: str, folder: Path, *, cache: bool = False, size: int = 64) -> Built:
    """From torch to a plan for ``sm`` in ``folder``; ``weights``: int8, fp8 or None."""
    library = load_library("tensorrt_rtx")
    plain, graph = folder / "plain", folder / "graph"
    for path in (plain, graph):
        path.mkdir()
    if weights is not None:
        write_export(folder / "export", model, weights, cache=cache)
    shape = export_decoder(model.half(), plain, capacity=size, opset=library.opset)
    if weights is None:
        graph = plain
    else:
        lowered = onnx.load(str(plain / "model.onnx"), load_external_data=False)
        with QuantizedCheckpoint(folder / "export") as checkpoint, WeightFile(graph / "model.onnx") as file:
            insert_qdq(lowered, checkpoint, file.add)
            file.save(lowered, plain)
        verify(onnx.load(str(graph / "model.onnx"), load_external_data=False), graph, folder / "export", None)
    settings = Settings(max_batch=4, max_tokens=size, sm=(sm,), buckets=(1,), progress=False)
    return build_plan(library, graph / "model.onnx", folder, shape, settings)


@pytest.mark.parametrize(
    ("family", "weights", "cache", "sm"),
    [
        ("llama", "fp8", True, "89"),
        ("llama", "int8", False, "120"),
        ("phi3", "fp8", True, "120"),
        ("gemma2", "int8", False, "89"),
        ("gpt2", None, False, "86"),
    ],
)
def test_it_takes_the_graph(family: str, weights: str | None, cache: bool, sm: str, tmp_path: Path) -> None:
    found = compiled(make_model(family), weights, sm, tmp_path, cache=cache).description
    assert found.sm == [sm]
    assert (tmp_path / PLAN).stat().st_size > 100_000
    kinds = {binding.name: binding.dtype for binding in found.bindings}
    cached = {kind for name, kind in kinds.items() if name.startswith(("past_keys", "past_values", "new_"))}
    assert cached == {"float8_e4m3fn" if cache else "float16"}
    assert kinds["logits"] == "float16"


def test_fp8_on_a_gpu_without_it_is_refused_by_the_library_too(tmp_path: Path) -> None:
    """What preflight says, seen in the library itself."""
    with pytest.raises(BuildError, match="finds no engine for this graph: .*fp8"):
        compiled(make_model("llama"), "fp8", "86", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_real_model(tmp_path: Path) -> None:
    """SmolLM2-135M or any other checkpoint named by ENGINEGATE_TEST_CHECKPOINT."""
    from transformers import AutoModelForCausalLM

    if "ENGINEGATE_TEST_CHECKPOINT" not in os.environ:
        pytest.skip("set ENGINEGATE_TEST_CHECKPOINT to a checkpoint's folder")
    sizes = {}
    for weights, sm in ((None, "89"), ("int8", "89"), ("fp8", "89"), ("int8", "120")):
        model = AutoModelForCausalLM.from_pretrained(os.environ["ENGINEGATE_TEST_CHECKPOINT"]).float().eval()
        linear = sum(one.weight.numel() for name, one in model.named_modules() if name.endswith("_proj"))
        folder = tmp_path / f"{weights}-{sm}"
        folder.mkdir()
        built = compiled(model, weights, sm, folder, size=512)
        sizes[weights, sm] = (folder / PLAN).stat().st_size
        print(f"{weights} SM {sm}: {sizes[weights, sm] / 1e6:.0f} MB, {built.record}")
    for one in (("int8", "89"), ("fp8", "89"), ("int8", "120")):
        assert sizes[None, "89"] - sizes[one] > 0.8 * linear, "a quantised weight takes a byte less than float16"
