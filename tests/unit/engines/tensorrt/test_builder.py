"""What the builder is told, for each version of the library; and what it says when the library refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from pipeline.engines.lowering.qdq import insert_qdq
from pipeline.engines.lowering.quantized import QuantizedCheckpoint
from pipeline.engines.lowering.verify import verify
from pipeline.engines.lowering.weights import save_graph
from pipeline.engines.tensorrt.builder import Settings, build_plan
from pipeline.engines.tensorrt.graph import export_decoder
from pipeline.engines.tensorrt.library import load_library
from pipeline.engines.tensorrt.plan import PLAN
from pipeline.engines.tensorrt.profiles import make_profiles
from pipeline.errors import BuildError
from pipeline.files import digest_file
from tests.families import make_model
from tests.unit.engines.lowering.exports import write_export

SETTINGS = Settings(max_batch=4, max_tokens=64, sm=("90",), buckets=(1, 2, 4), progress=False)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The decoder graph in half precision."""
    folder = tmp_path_factory.mktemp("graph")
    export_decoder(make_model("llama").half(), folder, capacity=64)
    return folder / "model.onnx"


@pytest.fixture(scope="module")
def old_graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The decoder graph for a library without strong typing."""
    folder = tmp_path_factory.mktemp("old")
    export_decoder(make_model("llama"), folder, capacity=64, opset=17)
    return folder / "model.onnx"


@pytest.fixture(scope="module")
def old_int8(old_graph: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with Q/DQ, and the weights' values as float32."""
    folder, plain = tmp_path_factory.mktemp("int8"), old_graph.parent
    write_export(folder / "export", make_model("llama"), "int8")
    model = onnx.load(str(old_graph), load_external_data=False)
    with QuantizedCheckpoint(folder / "export") as checkpoint:
        insert_qdq(model, checkpoint, float_weights=True)
    assert verify(model, plain, folder / "export", None).quantized == 14
    assert model.opset_import[0].version == 17
    assert sum(node.op_type == "QuantizeLinear" for node in model.graph.node) == 2 * 4 + 14
    changed = next(tensor for tensor in model.graph.initializer if tensor.name.endswith("q_proj.weight_f"))
    original = onnx.numpy_helper.to_array(changed)
    changed.CopyFrom(onnx.numpy_helper.from_array(original * 1.1, changed.name))
    with pytest.raises(BuildError, match="q_proj: its weight is not that of the export"):
        verify(model, plain, folder / "export", None)
    changed.CopyFrom(onnx.numpy_helper.from_array(original, changed.name))
    save_graph(model, folder / "model.onnx", plain)
    return folder / "model.onnx"


def build(graph: Path, target: Path, **options: Any) -> Any:
    settings = Settings(**{**vars(SETTINGS), **options})
    return build_plan(load_library(), graph, target, {"layers": 2}, settings)


def test_strongly_typed(graph: Path, tmp_path: Path, install: Callable[..., Any]) -> None:
    trt = install("10.9.0")
    found = build(graph, tmp_path, workspace_gib=2, optimization_level=4)
    (config,) = trt.built
    assert config.network.flags == 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    assert config.flags == set()
    assert config.pools == {"WORKSPACE": 2 * 2**30}
    assert config.builder_optimization_level == 4
    assert config.profiling_verbosity.name == "DETAILED"
    assert config.capabilities == {}
    assert config.tactics is None
    assert (tmp_path / PLAN).stat().st_size > 0
    description = found.description
    assert (description.library, description.version, description.sm) == ("tensorrt", "10.9.0", ["90"])
    kinds = {binding.name: binding.dtype for binding in description.bindings}
    assert (kinds["input_ids"], kinds["past_keys.1"], kinds["logits"]) == ("int32", "float16", "float16")
    shapes = {binding.name: binding.shape for binding in description.bindings}
    assert shapes["new_values.0"] == ["batch", 2, "new", 16]


def test_the_profiles_are_set(graph: Path, tmp_path: Path, install: Callable[..., Any]) -> None:
    trt = install("10.9.0")
    found = build(graph, tmp_path)
    assert [profile["name"] for profile in found.description.profiles] == [
        "prefill",
        "decode_1",
        "decode_2",
        "decode_4",
    ]
    told = [profile.shapes for profile in trt.built[0].profiles]
    assert told[0]["input_ids"] == [[1, 1], [1, 64], [4, 64]]
    assert told[3]["input_ids"] == [[3, 1], [4, 1], [4, 1]]
    assert told[3]["past_keys.0"] == [[3, 2, 1, 16], [4, 2, 32, 16], [4, 2, 64, 16]]


def test_without_strong_types_flags_allow_them(
    old_graph: Path, old_int8: Path, tmp_path: Path, install: Callable[..., Any]
) -> None:
    trt = install("8.6.0")
    found = build(old_graph, tmp_path)
    build(old_int8, tmp_path, tactics=("EDGE_MASK_CONVOLUTIONS", "JIT_CONVOLUTIONS"))
    build(old_graph, tmp_path, half=False)
    plain, quantized, full = trt.built
    assert plain.flags == {"FP16", "PREFER_PRECISION_CONSTRAINTS"}
    assert quantized.flags == {"FP16", "PREFER_PRECISION_CONSTRAINTS", "INT8"}
    assert full.flags == set()
    assert plain.network.flags == 1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH)
    assert quantized.tactics == 0b11000
    kinds = {binding.name: binding.dtype for binding in found.description.bindings}
    assert (kinds["past_keys.0"], kinds["new_keys.0"], kinds["logits"]) == ("float16",) * 3
    held = {layer.name for layer in plain.network.layers if layer.precision is trt.DataType.FLOAT}
    # Two norms a layer and one at the end; of each the square, the mean, the root, ...
    assert len([name for name in held if name.endswith("/Pow")]) == 2 * 2 + 1
    assert all("norm" in name for name in held)
    assert not any(layer.precision for layer in full.network.layers)


def test_ahead_of_time(graph: Path, tmp_path: Path, install: Callable[..., Any]) -> None:
    trt = install("1.7.1", sms=[89, 120])
    assert build(graph, tmp_path, sm=("89", "120")).description.sm == ["89", "120"]
    assert trt.built[0].capabilities == {0: "SM89", 1: "SM120"}


def test_the_timing_cache_is_read_and_written(graph: Path, tmp_path: Path, install: Callable[..., Any]) -> None:
    install("10.9.0")
    path = tmp_path / "made" / "timing.cache"
    (first, second) = (build(graph, tmp_path, timing_cache=path).record["timing_cache"] for _ in range(2))
    assert first["before"] is None
    assert second["before"] == first["after"] != second["after"]
    assert second["after"] == digest_file(path)
    assert path.read_bytes() == b"++"
    path.write_bytes(b"foreign")
    with pytest.raises(BuildError, match=r"timing.cache: no timing cache of tensorrt 10.9.0"):
        build(graph, tmp_path, timing_cache=path)
    assert path.read_bytes() == b"foreign"


def test_progress_is_a_bar(
    graph: Path, tmp_path: Path, install: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    install("10.9.0")
    build(graph, tmp_path, progress=True)
    assert "Building engine:  50%" in capsys.readouterr().err
    install("8.6.0")  # it tells no progress
    build(graph, tmp_path, progress=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("refuse", "named"),
    [
        ("parse", r"tensorrt 10.9.0 does not take the graph: no importer for op FancyOp \(fancy_1\)"),
        ("build", "tensorrt 10.9.0 finds no engine for this graph: Error Code 10: could not find any implementation"),
    ],
)
def test_what_the_library_refuses(
    graph: Path, tmp_path: Path, install: Callable[..., Any], refuse: str, named: str
) -> None:
    install("10.9.0").refuse = refuse
    log = tmp_path / "logs" / "build.log"
    with pytest.raises(BuildError, match=named) as caught:
        build(graph, tmp_path, log=log)
    assert str(log) in caught.value.next_step
    assert log.exists()
    assert not (tmp_path / PLAN).exists()
    if refuse == "build":
        assert log.read_text().startswith("ERROR    Error Code 10")


def test_an_axis_without_a_range_is_refused() -> None:
    with pytest.raises(BuildError, match="x: the graph's axis 'window' has no range"):
        make_profiles({"x": ["batch", "window"]}, max_batch=1, max_tokens=16, buckets=())


@pytest.mark.parametrize("max_batch", [1, 3, 8, 100])
@pytest.mark.parametrize("buckets", [(), (1,), (1, 8), (8, 1, 500)])
def test_each_batch_has_one_decode_profile(max_batch: int, buckets: tuple[int, ...]) -> None:
    profiles = make_profiles({"x": ["batch", "new"]}, max_batch=max_batch, max_tokens=16, buckets=buckets)
    assert profiles[0].name == "prefill"
    taken = [size for one in profiles[1:] for size in range(one.batch[0], one.batch[2] + 1)]
    assert taken == list(range(1, max_batch + 1))
    assert all(one.shapes["x"] == ((one.batch[0], 1), (one.batch[1], 1), (one.batch[2], 1)) for one in profiles[1:])
